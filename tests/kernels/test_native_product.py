"""Goal: a row of a matrix product has the same bits in every tile of the C kernel. Method: sizes around each
border of its tiles, compared with the same rows taken one by one."""

import pytest
import torch

from tests.kernels.devices import rand
from tiercel.kernels import native

pytestmark = pytest.mark.skipif(not native.AVAILABLE, reason="the C library was not built")

DEEP = 1024
"""From this many columns on, a sum waits in the result and goes on."""


@pytest.mark.parametrize("columns", [1, 16, 17, 32, 300])
@pytest.mark.parametrize("k", [5, DEEP, DEEP + 1, 2 * DEEP + 7])
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_rows(k, columns):
    x, weight = rand(301, k + 3)[:, :k], native.pack(rand(columns, k, seed=1))
    alone = torch.cat([native.linear(x[i : i + 1], weight) for i in range(301)])
    torch.testing.assert_close(alone, x @ rand(columns, k, seed=1).T, atol=2e-3, rtol=1e-4)
    for rows in (2, 4, 6, 11, 12, 13, 30, 144, 145, 301):
        assert torch.equal(native.linear(x[:rows], weight), alone[:rows]), rows
