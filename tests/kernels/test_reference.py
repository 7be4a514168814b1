"""Goal: the plain kernels mean what they say. Method: against the dense, obvious computation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiercel.kernels import native, reference
from tiercel.kernels import reference as k


def test_attention_is_over_the_rows_a_query_names_with_a_sink():
    random = torch.Generator().manual_seed(0)
    q = torch.randn(300, 3, 8, generator=random)
    old, new, entries = (torch.randn(n, 8, generator=random) for n in (12, 8, 5))
    window, chosen = (torch.randint(-1, n, (300, m), generator=random) for n, m in ((20, 6), (5, 3)))
    sinks = torch.randn(3, generator=random)
    out = k.attention(q, (old, new), window, entries, chosen, sinks, 0.5)
    recent = torch.cat([old, new])
    for t in (0, 7, 255, 256, 299):
        seen = [recent[r] for r in window[t] if r >= 0] + [entries[r] for r in chosen[t] if r >= 0]
        seen = torch.stack(seen)
        logits = torch.cat([q[t] @ seen.T * 0.5, sinks[:, None]], dim=1)  # type: ignore[attr-defined]
        torch.testing.assert_close(out[t], logits.softmax(-1)[:, :-1] @ seen)


def test_a_query_without_rows_answers_nothing():
    none, rows = torch.full((1, 4), -1), torch.ones(3, 4)
    out = k.attention(torch.ones(1, 2, 4), (rows, rows), none, rows, none, torch.zeros(2), 1.0)
    assert torch.equal(out, torch.zeros(1, 2, 4))


@pytest.mark.parametrize("k", [reference, native])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_a_text_does_not_name_does_not_reach_it(k, bad):
    """Row 0 is somebody else's; no row is -1."""
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    spoiled = torch.cat([torch.full((1, 8), bad), rows[1:]])
    none = torch.tensor([[-1, 2, -1, 3]], dtype=torch.int32)
    for own, other in ((rows, spoiled), (spoiled, rows)):
        out = k.attention(torch.ones(1, 2, 8), (own, own), none, other, none, torch.zeros(2), 1.0)
        clean = k.attention(torch.ones(1, 2, 8), (rows, rows), none, rows, none, torch.zeros(2), 1.0)
        assert torch.equal(out, clean)
    entry = k.compress((spoiled, rows), none, torch.zeros(2, 4), 2)
    assert torch.equal(entry, k.compress((rows, rows), none, torch.zeros(2, 4), 2))
    assert entry.isfinite().all()


SCORES = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -3.5, 1e-20]), min_size=1, max_size=12)


@given(SCORES, st.integers(0, 12), st.integers(1, 12))
def test_the_best_are_chosen_with_ties_to_the_lower_and_given_in_order(scores, visible, count):
    visible = min(visible, len(scores))
    chosen = k.top_numbers(torch.tensor([scores]), torch.tensor([visible]), count)[0]
    best = sorted(range(visible), key=lambda i: (-scores[i], i))[:count]
    assert chosen[chosen >= 0].tolist() == sorted(best)


@given(SCORES, st.integers(1, 4), st.integers(0, 5))
def test_what_is_not_visible_does_not_change_the_choice(scores, count, more):
    visible = torch.tensor([len(scores)])
    short = k.top_numbers(torch.tensor([scores]), visible, count)[0]
    long = k.top_numbers(torch.tensor([scores + [9.0] * more]), visible, count)[0]
    assert short[short >= 0].tolist() == long[long >= 0].tolist()


def test_the_indexer_takes_the_best_weighted_sums_of_rectified_products():
    q, weights, keys = torch.randn(300, 2, 4), torch.randn(300, 2), torch.randn(60, 4)
    rows = torch.stack([torch.randperm(60)[:40] for _ in range(3)]).int()
    span, visible = torch.arange(300) // 100, torch.arange(300) % 41
    best = k.best_rows(q, weights, keys, rows, span, visible, 5)
    for t in (0, 3, 40, 77, 123, 299):
        own = rows[span[t], : visible[t]].long()
        scores = (torch.relu(torch.einsum("hc,nc->hn", q[t], keys[own])) * weights[t][:, None]).sum(0)
        order = scores.sort(descending=True, stable=True).indices  # ties to the lower
        expected = own[order[:5].sort().values]
        assert best[t][best[t] >= 0].tolist() == expected.tolist()


def test_compressing_weighs_the_rows_of_a_window_channel_by_channel():
    """Ratio 2, two channels: the first two rows count with channel 0, the others with channel 1."""
    old, new, bias = torch.randn(3, 4), torch.randn(4, 4), torch.randn(2, 2)
    entry = k.compress((old, new), torch.tensor([[2, 3, 5, 6]], dtype=torch.int32), bias, dim=1)
    rows = torch.cat([old, new])[[2, 3, 5, 6]]
    values = torch.stack([rows[0, 0], rows[1, 0], rows[2, 1], rows[3, 1]])
    gates = torch.stack([rows[0, 2], rows[1, 2], rows[2, 3], rows[3, 3]])
    gates = gates + torch.stack([bias[0, 0], bias[1, 0], bias[0, 1], bias[1, 1]])
    torch.testing.assert_close(entry[0, 0], (values * gates.softmax(0)).sum())


def test_a_row_that_is_not_there_does_not_count():
    rows, bias = torch.randn(6, 4), torch.zeros(2, 2)
    half = k.compress((rows[:3], rows[3:]), torch.tensor([[-1, -1, 4, 5]], dtype=torch.int32), bias, dim=1)
    gates, values = rows[[4, 5], 3], rows[[4, 5], 1]
    torch.testing.assert_close(half[0, 0], (values * gates.softmax(0)).sum())


def test_mixing_matrices_have_columns_and_nearly_rows_of_sum_one():
    mixed = k.sinkhorn(torch.rand(50, 4, 4) + 1e-6, 20, 1e-6)
    torch.testing.assert_close(mixed.sum(1), torch.ones(50, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(mixed.sum(2), torch.ones(50, 4), atol=1e-2, rtol=0)
