"""Matrices, norms and experts in C.

Each function checks the dtype, shape and strides of its tensors and passes pointers to C.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.kernels.native.library import call, dense, step_of
from tiercel.kernels.reference.layers import CosSin

PANEL = 16


class PackedMatrix(NamedTuple):
    """A weight [n, k] in panels of 16 rows."""

    panels: Tensor
    n: int
    k: int


def panels_of(weight: PackedMatrix, n: int, k: int, many: int | None = None) -> Tensor:
    """The memory of a packed matrix. Refuses a matrix that is not [n, k], or not one of `many`."""
    if (weight.n, weight.k) != (n, k) or (many is not None and weight.panels.shape[0] != many):
        given = f"{len(weight.panels)} panels of matrices {[weight.n, weight.k]}"
        raise ValueError(f"a native kernel was given {given}, it wants {[n, k]} and {many or 'one'} of them")
    return weight.panels


def pack(weight: Tensor) -> PackedMatrix:
    n, k = weight.shape
    padded = torch.zeros(-(-n // PANEL) * PANEL, k)
    padded[:n] = weight
    return PackedMatrix(padded.view(-1, PANEL, k).transpose(1, 2).contiguous(), n, k)


def pack_all(weights: Tensor) -> PackedMatrix:
    """Packs m matrices [m, n, k] into one tensor. The result's n and k are those of one matrix."""
    panels = torch.stack([pack(each).panels for each in weights])
    return PackedMatrix(panels, weights.shape[1], weights.shape[2])


# Sizes are `shape[0]`: on a tensor `len` takes 2.6 us and `shape[0]` 0.3, a hundred times per decode step.


def linear(x: Tensor, weight: PackedMatrix, *, wide: bool = False) -> Tensor:  # noqa: ARG001
    (panels, n, k), rows = weight, x.shape[0]
    y = torch.empty(rows, n)
    call("linear", rows, x, step_of(x, (rows, k)), panels, y, n, rows, k, n)
    return y


def linear_groups(x: Tensor, weights: PackedMatrix) -> Tensor:
    (panels, n, k), rows, groups = weights, x.shape[0], weights.panels.shape[0]
    y = torch.empty(rows, groups * n)
    call("linear_groups", rows, x, step_of(x, (rows, groups * k)), panels, y, rows, groups, k, n)
    return y


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, d = x.shape
    dense(weight, (d,))
    y = torch.empty(rows, d)
    call("norm_rotate", rows, x, step_of(x, (rows, d)), y, None, None, weight, rows, 1, d, 0, eps, 1.0)
    return y


def norm_rotate(
    x: Tensor,
    rotation: CosSin,
    *,
    eps: float | None = None,
    weight: Tensor | None = None,
    back: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`out`: where the result goes."""
    (rows, heads, d), (cos, sin) = x.shape, rotation
    pairs = min(cos.shape[1], d // 2)
    step = step_of(x, (rows, heads, d))
    dense(cos, (rows, pairs))
    dense(sin, (rows, pairs))
    if weight is not None:
        dense(weight, (d,))
    y = torch.empty(rows, heads, d) if out is None else out
    dense(y, (rows, heads, d))
    eps, direction = -1.0 if eps is None else eps, -1.0 if back else 1.0
    call("norm_rotate", rows, x, step, y, cos, sin, weight, rows, heads, d, 2 * pairs, eps, direction)
    return y


# Experts


def route(  # noqa: PLR0913
    logits: Tensor,
    chosen: Tensor | None,
    bias: Tensor | None,
    k: int,
    factor: float,
    position: Tensor | None = None,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    rows, count = logits.shape
    if chosen is None:
        assert bias is not None
        dense(bias, (count,))
        chosen = torch.empty(rows, k, dtype=torch.int64)
    else:
        bias = None  # a bias only chooses
        dense(chosen, (rows, k), torch.int64)
    weights, step = torch.empty(rows, k), step_of(logits, (rows, count))
    call("route", rows, logits, step, bias, chosen, weights, rows, count, k, factor)
    return chosen, weights


def experts(  # noqa: PLR0913
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    matrices: tuple[PackedMatrix, PackedMatrix],
    limit: float,
    *,
    shared: bool = True,
) -> Tensor:
    gate_up, down = matrices
    (rows, d), k, inner, count = x.shape, chosen.shape[1], down.k, down.panels.shape[0]
    dense(x, (rows, d))
    dense(chosen, (rows, k), torch.int64)
    dense(weights, (rows, k))
    panels = panels_of(gate_up, 2 * inner, d, many=count), panels_of(down, d, inner)
    y = torch.empty(rows, d)
    call("experts", rows, x, chosen, weights, *panels, y, rows, count - shared, k, d, inner, limit, shared)
    return y
