"""Goal: experts on CUDA are those of the reference, and a token's bits do not depend on its company. Method:
few and many choices per expert, experts nobody asks, choices that are none; on a GPU also V4-Flash's sizes.
In the interpreter bits are compared where sums are exact in every order (see test_cuda_matrix.py)."""

import pytest
import torch

from tests.kernels.devices import every_device, on_gpu
from tests.kernels.test_cuda_matrix import BF16, FP8, FP32, packed, rand, whole
from tiercel.kernels import reference
from tiercel.kernels.cuda.draw import greedy
from tiercel.kernels.cuda.experts import FEW_MOST, SOME_MOST, experts, route
from tiercel.kernels.cuda.experts import _ordered as ordered
from tiercel.kernels.cuda.experts import _tile_for as tile_for
from tiercel.kernels.cuda.matrix import linear, pack

LIMIT = 2.0


def sizes(device):
    """(tokens, experts, topk, d, inner): tiles of 16, 64 and 128 choices, partial ones; then V4-Flash's."""
    small = [(3, 6, 2, 70, 40), (40, 5, 2, 70, 70), (110, 3, 2, 140, 40)]
    flash = [(1, 64, 6, 4096, 2048), (64, 8, 6, 4096, 2048), (700, 64, 6, 4096, 2048)]
    return small + (flash if device == "cuda" else [])


def test_the_sizes_take_every_tile():
    per_expert = [tokens * topk / count for tokens, count, topk, *_ in sizes("cpu")]
    assert per_expert[0] <= FEW_MOST < per_expert[1] <= SOME_MOST < per_expert[2]


def make(size, device, dtype, stored, *, exact=False):
    """(x, chosen, weights, the packed matrices, the same as fp32 numbers).

    `exact`: no sum is rounded. Those of the first product are whole, those of the second have one term.
    """
    tokens, count, topk, d, inner = size
    some = [torch.randperm(count, generator=torch.Generator().manual_seed(i))[:topk] for i in range(tokens)]
    numbers = whole if exact else rand
    gate_up, down = (numbers(count + 1, *s, device=device) for s in ((2 * inner, d), (d, inner)))
    if exact:
        down *= torch.arange(d, device=device)[:, None] % inner == torch.arange(inner, device=device)
    else:
        gate_up, down = gate_up * d**-0.5, down * inner**-0.5
    pairs = [packed(each, stored) for each in (gate_up, down)]
    x, weights = numbers(tokens, d, device=device).to(dtype), rand(tokens, topk, device=device).abs()
    return x, torch.stack(some).to(device), weights, *(tuple(each) for each in zip(*pairs, strict=True))


@every_device
@pytest.mark.parametrize(("dtype", "stored"), [(FP32, FP32), (BF16, BF16), (BF16, FP8)])
def test_experts_are_those_of_the_reference(device, dtype, stored):
    for size in sizes(device):
        x, chosen, weights, matrices, plain = make(size, device, dtype, stored)
        y = experts(x, chosen.int(), weights, matrices, LIMIT)
        expected = reference.experts(
            x.float(), chosen, weights, tuple(each.to(dtype).float() for each in plain), LIMIT
        )
        loose = 2e-5 if dtype == FP32 else 2e-2
        torch.testing.assert_close(y.float(), expected, atol=loose * float(expected.abs().max()), rtol=loose)
        assert y.dtype == dtype


@every_device
@pytest.mark.parametrize(("dtype", "stored"), [(FP32, FP32), (BF16, BF16), (BF16, FP8)])
def test_a_token_does_not_depend_on_its_company(device, dtype, stored):
    """Alone its choices are in other tiles."""
    for size in sizes(device)[2:3] + sizes(device)[5:]:
        x, chosen, weights, matrices, _ = make(size, device, dtype, stored, exact=device == "cpu")
        many = experts(x, chosen, weights, matrices, LIMIT)
        takes = [[7], list(range(24, 4, -1)), [0], [109], list(range(100))]
        for take in takes if device == "cuda" else takes[:2]:
            alone = experts(x[take], chosen[take], weights[take], matrices, LIMIT)
            assert torch.equal(alone, many[take]), (size, take)


@every_device
@pytest.mark.parametrize("given", [False, True])
def test_padding_asks_no_expert(device, given):
    logits, bias = rand(5, 9, device=device), rand(9, device=device)
    position = torch.tensor([4, -1, 0, -1, 7], dtype=torch.int32, device=device)
    table = torch.arange(15, device=device).view(5, 3) % 9 if given else None
    expected, its_weights = route(logits, None if table is None else table.clone(), bias, 3, 1.5)
    chosen, weights = route(logits, table, bias, 3, 1.5, position)
    real = position >= 0
    assert torch.equal(chosen[real], expected[real]) and torch.equal(weights[real], its_weights[real])
    assert (chosen[~real] == -1).all() and (weights[~real] == 0).all()


@every_device
def test_a_choice_that_is_none_adds_nothing(device):
    x, chosen, weights, matrices, plain = make((20, 5, 2, 70, 40), device, FP32, FP32)
    chosen[3, 1], chosen[7], weights[7] = -1, -1, float("nan")
    y = experts(x, chosen, weights, matrices, LIMIT)
    expected = reference.experts(x, chosen.clamp(min=0), weights.masked_fill(chosen < 0, 0), plain, LIMIT)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


@every_device
def test_choices_are_sorted_by_expert_and_cut_into_tiles(device):
    """An expert has exactly the choices that name it, ascending, in as few tiles as hold them."""
    for tokens, count, topk in ((1, 5, 2), (9, 3, 1), (150, 5, 3), (1400, 7, 2)):
        source = torch.Generator().manual_seed(tokens)
        chosen = torch.randint(-1, count - 1, (tokens, topk), generator=source)  # nobody asks the last one
        tile = tile_for(tokens, tokens * topk / count, BF16, BF16)
        order = ordered(chosen.to(device), count + 1, tile, shared=True)
        everyone = torch.cat([chosen, torch.full((tokens, 1), count)], dim=1).flatten()
        expected, tiles = [], []
        for expert in range(count + 1):
            own = torch.where(everyone == expert)[0].tolist()
            tiles += [
                (expert, len(expected) + i, len(expected) + len(own)) for i in range(0, len(own), tile.t)
            ]
            expected += own
        assert order.numbers[: len(expected)].tolist() == expected
        found = order.tiles.T.tolist()
        assert [tuple(each) for each in found[: len(tiles)]] == tiles
        assert all(expert == -1 for expert, *_ in found[len(tiles) :])


@every_device
def test_the_best_experts_are_chosen_the_best_first(device):
    for tokens, count, k in ((40, 6, 2), (9, 256, 6), (3, 384, 8), (2, 512, 8)):
        logits, bias = 8 * rand(tokens, count, device=device), rand(count, device=device)
        chosen, weights = route(logits, None, bias, k, 1.5)
        scores = torch.nn.functional.softplus(logits).sqrt()
        assert chosen.tolist() == (scores + bias).sort(descending=True, stable=True).indices[:, :k].tolist()
        _, expected = reference.route(logits, chosen.long(), None, k, 1.5)
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=0)


@every_device
def test_of_equal_experts_the_lower_numbers_are_chosen(device):
    logits = torch.zeros(2, 40, device=device)
    logits[1, 30] = 1.0
    chosen, weights = route(logits, None, torch.zeros(40, device=device), 3, 3.0)
    assert chosen.tolist() == [[0, 1, 2], [30, 0, 1]]
    torch.testing.assert_close(weights[0], torch.ones(3, device=device))


@every_device
def test_given_experts_are_weighted_in_their_order(device):
    logits = 10 * rand(30, 6, device=device) - 20  # scores far below 1 too
    given = torch.stack(
        [torch.randperm(6, generator=torch.Generator().manual_seed(i))[:2] for i in range(30)]
    )
    given = given.to(device)
    chosen, weights = route(logits.to(BF16), given, None, 2, 1.5)
    assert chosen is given
    _, expected = reference.route(logits.to(BF16).float(), given, None, 2, 1.5)
    torch.testing.assert_close(weights, expected, rtol=2e-5, atol=0)
    given[4, 1] = -1
    assert route(logits, given, None, 2, 1.5)[1][4].tolist() == [1.5, 0.0]


@every_device
def test_scores_that_are_no_numbers_still_choose_each_expert_once(device):
    logits, bias = rand(4, 6, device=device), rand(6, device=device)
    logits[0] = float("nan")
    logits[1, 2] = float("nan")
    bias[3] = float("-inf")
    chosen, weights = route(logits, None, bias, 6, 1.0)
    assert all(sorted(row) == list(range(6)) for row in chosen.tolist())
    assert bool(weights[:2].isnan().all()) and bool(weights[2:].isfinite().all())


@pytest.mark.parametrize("device", [on_gpu])
def test_calls_are_recorded_in_a_graph(device):
    x, _, _, matrices, _ = make((40, 8, 2, 512, 256), device, BF16, FP8)
    gate, bias = pack(rand(8, 512, device=device).to(BF16)), rand(8, device=device)

    def call():
        chosen, weights = route(linear(x, gate, FP32), None, bias, 2, 1.5)
        y = experts(x, chosen, weights, matrices, LIMIT)
        return y, greedy(linear(y, gate, FP32))

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = call()
    x.copy_(rand(40, 512, device=device, seed=1))
    graph.replay()
    assert all(map(torch.equal, recorded, call()))
