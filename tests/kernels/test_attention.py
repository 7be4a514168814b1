"""Goal: the plain kernels mean what they say. Method: against the dense, obvious computation."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tiercel.kernels.attention import (
    best_rows_reference,
    compress_reference,
    index_scores_reference,
    sparse_attention_reference,
    top_rows_reference,
)


def test_attention_over_rows_is_attention_over_those_rows_with_a_sink():
    random = torch.Generator().manual_seed(0)
    q, pools = (
        torch.randn(300, 3, 8, generator=random),
        [torch.randn(n, 8, generator=random) for n in (20, 5)],
    )
    rows = [torch.randint(-1, n, (300, k), generator=random) for n, k in ((20, 6), (5, 3))]
    sinks = torch.randn(3, generator=random)
    out = sparse_attention_reference(q, pools, rows, sinks, 0.5)
    for t in (0, 7, 255, 256, 299):
        entries = torch.stack(
            [pool[r] for pool, each in zip(pools, rows, strict=True) for r in each[t] if r >= 0]
        )
        logits = torch.cat([q[t] @ entries.T * 0.5, sinks[:, None]], dim=1)
        expected = logits.softmax(-1)[:, :-1] @ entries
        torch.testing.assert_close(out[t], expected)


def test_a_query_without_rows_answers_nothing():
    rows = torch.full((1, 4), -1)
    out = sparse_attention_reference(torch.ones(1, 2, 4), [torch.ones(3, 4)], [rows], torch.zeros(2), 1.0)
    assert torch.equal(out, torch.zeros(1, 2, 4))


SCORES = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -3.5, 1e-20]), min_size=1, max_size=12)


@given(SCORES, st.integers(0, 12), st.integers(1, 12))
def test_the_best_rows_are_chosen_with_ties_to_the_lower_and_given_in_order(scores, visible, k):
    visible = min(visible, len(scores))
    chosen = top_rows_reference(torch.tensor([scores]), torch.tensor([visible]), k)[0]
    best = sorted(range(visible), key=lambda i: (-scores[i], i))[:k]
    assert chosen[chosen >= 0].tolist() == sorted(best)


@given(SCORES, st.integers(1, 4), st.integers(0, 5))
def test_rows_that_are_not_visible_do_not_change_the_choice(scores, k, more):
    visible = torch.tensor([len(scores)])
    short = top_rows_reference(torch.tensor([scores]), visible, k)[0]
    long = top_rows_reference(torch.tensor([scores + [9.0] * more]), visible, k)[0]
    assert short[short >= 0].tolist() == long[long >= 0].tolist()


def test_index_scores_are_a_weighted_sum_of_rectified_products():
    q, keys, weights = torch.randn(4, 3, 5), torch.randn(6, 5), torch.randn(4, 3)
    expected = (torch.relu(torch.einsum("thc,nc->thn", q, keys)) * weights[..., None]).sum(1)
    torch.testing.assert_close(index_scores_reference(q, keys, weights), expected)


def test_a_row_with_gate_minus_infinity_does_not_count():
    kv, gate = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    gate[:, :2] = float("-inf")
    torch.testing.assert_close(compress_reference(kv, gate), compress_reference(kv[:, 2:], gate[:, 2:]))


def test_the_best_rows_do_not_depend_on_how_many_queries_are_scored_at_once():
    q, weights, keys = torch.randn(300, 2, 4), torch.randn(300, 2), torch.randn(40, 4)
    visible = torch.arange(300) % 41
    whole = top_rows_reference(index_scores_reference(q, keys, weights), visible, 5)
    assert torch.equal(best_rows_reference(q, weights, keys, visible, 5), whole)
