"""Goal: tokens are drawn on CUDA as on the CPU, and a row's token depends on nothing else. Method: rows with
many equal logits, every filter alone and together, the ends of the uniform numbers, frequencies."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.kernels.devices import every_device, rand
from tiercel.kernels import draw as plain
from tiercel.kernels.cuda.draw import greedy, masked, sample
from tiercel.kernels.draw import Draw


def logits_of(rows: int, vocab: int, device: str, *, seed: int = 0, steps: int | None = None) -> torch.Tensor:
    """`steps`: values are rounded to this many steps per unit, so that many are equal, also to 0 and -0."""
    found = rand(rows, vocab, seed=seed) * 3
    return (found if steps is None else (found * steps).round() / steps).to(device)


def drawn(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    told = torch.tensor(draws, dtype=torch.float64, device=logits.device)
    found = sample(logits, told, greedy(logits)).tolist()
    assert found == plain.sample(logits, told, plain.greedy(logits)).tolist()
    return found


@every_device
def test_the_best_token_is_the_lowest_of_the_best(device: str) -> None:
    for vocab in (5, 4096, 9000, *([129280] if device == "cuda" else [])):
        logits = logits_of(8, vocab, device)
        logits[0, [1, vocab - 1]] = 50.0
        logits[1] = -3.0
        logits[2, vocab - 1] = 9.0
        assert greedy(logits).tolist() == plain.greedy(logits).tolist(), vocab
        assert greedy(logits[:0]).tolist() == []


@every_device
def test_a_row_whose_best_is_no_number_has_no_token(device: str) -> None:
    logits = logits_of(6, 5000, device)
    logits[0, 4999] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3, :4999] = float("-inf")
    logits[4, 0], logits[4, 4998] = float("nan"), float("inf")
    found = greedy(logits).tolist()
    assert found == plain.greedy(logits).tolist() and found[:5] == [-1, -1, -1, 4999, -1]
    assert drawn(logits, [Draw(1.0, uniform=0.5)] * 6)[:5] == [-1, -1, -1, 4999, -1]


FILTERS = list(product((0, 1, 7, 300, 5000), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.02, 1.0)))
"""top_k, top_p, min_p."""


@every_device
@pytest.mark.parametrize("steps", [None, 2], ids=["all differ", "many equal"])
def test_every_filter_draws_what_the_cpu_draws(device: str, steps: int | None) -> None:
    vocab = 20_000 if device == "cuda" else 700
    filters = FILTERS if device == "cuda" else FILTERS[::7]
    logits = logits_of(len(filters), vocab, device, steps=steps)
    for number, sharpness in ((0.0, 1.0), (0.37, 1.0), (0.81, 2.5), (1 - 2.0**-53, 0.3)):
        drawn(logits, [Draw(sharpness, *each, number) for each in filters])


@every_device
def test_a_token_does_not_depend_on_its_company_and_greedy_rows_stay_greedy(device: str) -> None:
    logits = logits_of(5, 1000, device)
    draws = [Draw(1.0, 50, 0.9, 0.0, number / 5) for number in range(5)]
    draws[3] = Draw(0.0)
    found = drawn(logits, draws)
    assert found[3] == int(logits[3].argmax())
    assert [drawn(logits[i : i + 1], draws[i : i + 1])[0] for i in range(5)] == found


@every_device
def test_tokens_are_as_frequent_as_they_are_likely(device: str) -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4], device=device).log().expand(20, 4).contiguous()
    found = drawn(logits, [Draw(1.0, uniform=(i + 0.5) / 20) for i in range(20)])
    assert [found.count(token) for token in range(4)] == [2, 4, 6, 8]
    kept = drawn(logits, [Draw(1.0, 3, 0.7, 0.0, (i + 0.5) / 20) for i in range(20)])
    assert sorted(set(kept)) == [2, 3], "of the three best, 4 + 3 of 9 parts make up 0.7"


@every_device
def test_a_token_that_can_not_be_is_never_drawn(device: str) -> None:
    logits = torch.full((4, 600), float("-inf"), device=device)
    logits[:, [17, 400]] = 0.0
    ends = [0.0, 0.4999, 0.5, 1 - 2.0**-53]
    assert drawn(logits, [Draw(1.0, uniform=number) for number in ends]) == [17, 17, 400, 400]


@every_device
def test_a_mask_leaves_the_tokens_of_its_bits(device: str) -> None:
    for vocab in (5, 64, 4100):
        logits = logits_of(3, vocab, device)
        logits[2, 3] = float("nan")
        words = -(-vocab // 32)
        masks = torch.randint(-(2**31), 2**31, (3, words), generator=torch.Generator().manual_seed(vocab))
        masks[0], masks[2, 0] = -1, 1
        masks = masks.to(torch.int32).to(device)
        found = masked(logits, masks)
        assert torch.equal(found, plain.masked(logits, masks)), vocab
        assert torch.equal(found[0], logits[0])
        assert found[2, :5].isfinite().tolist() == [True, False, False, False, False]
        assert drawn(found, [Draw(1.0, 4, 0.9, uniform=0.99)] * 3)[2] != 3
