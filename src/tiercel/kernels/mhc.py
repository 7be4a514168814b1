"""The doubly stochastic mixing matrices of hyper-connections, in plain numpy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def sinkhorn_reference(mix: Tensor, iterations: int, eps: float) -> Tensor:
    """Rows and columns of [tokens, n, n] brought towards a sum of one, columns last.

    The matrices are tiny and the steps many, so the price is that of a call: numpy's are a third of torch's.
    The tokens lie innermost and sums are written out, so a token's result does not depend on how many there
    are.
    """
    columns = np.ascontiguousarray(mix.permute(1, 2, 0).numpy())
    rows = columns.swapaxes(0, 1)
    _divide_by_sum(columns, eps)
    for _ in range(iterations - 1):
        _divide_by_sum(rows, eps)
        _divide_by_sum(columns, eps)
    return torch.from_numpy(columns).permute(2, 0, 1)


def _divide_by_sum(data: npt.NDArray[Any], eps: float) -> None:
    """In place: every data[i] by the sum over i. A reduction would add in an order that depends on the
    shape."""
    total = data[0] + np.float32(eps)
    for each in data[1:]:
        total += each
    data /= total
