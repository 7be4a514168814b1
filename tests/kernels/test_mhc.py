"""Goal: the mixing matrices are those of the specification, for any number of tokens."""

import pytest
import torch

from tiercel.kernels.mhc import sinkhorn_reference


@pytest.mark.parametrize("tokens", [1, 3, 100])
def test_columns_then_rows_are_normalised_again_and_again(tokens):
    mix = torch.rand(tokens, 4, 4) + 1e-6
    expected = mix / (mix.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        expected = expected / (expected.sum(2, keepdim=True) + 1e-6)
        expected = expected / (expected.sum(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(sinkhorn_reference(mix, 20, 1e-6), expected)


def test_a_token_does_not_depend_on_its_company():
    mix = torch.rand(50, 4, 4)
    together = sinkhorn_reference(mix, 20, 1e-6)
    assert torch.equal(together[7:8], sinkhorn_reference(mix[7:8], 20, 1e-6))
