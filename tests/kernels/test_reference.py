"""Goal: the plain kernels mean what they say. Method: against the dense, obvious computation."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tiercel.kernels.reference import rows as k
from tiercel.kernels.reference.hyper import sinkhorn


def test_attention_is_over_the_rows_a_query_sees_with_a_sink():
    random = torch.Generator().manual_seed(0)
    q, rows = torch.randn(7, 3, 8, generator=random), torch.randn(7, 9, 8, generator=random)
    none, sinks = torch.rand(7, 9, generator=random) < 0.3, torch.randn(3, generator=random)
    rows[none] = float("nan")
    out = k.attend(q, rows, none, sinks, 0.5)
    for t in range(7):
        seen = rows[t][~none[t]]
        logits = torch.cat([q[t] @ seen.T * 0.5, sinks[:, None]], dim=1)
        torch.testing.assert_close(out[t], logits.softmax(-1)[:, :-1] @ seen)


def test_a_query_without_rows_answers_nothing():
    none = torch.ones(1, 4, dtype=torch.bool)
    out = k.attend(torch.ones(1, 2, 4), torch.ones(1, 4, 4), none, torch.zeros(2), 1.0)
    assert torch.equal(out, torch.zeros(1, 2, 4))


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


def test_compressing_weighs_the_rows_of_a_window_channel_by_channel():
    """Ratio 2, two channels: the first two rows count with channel 0, the others with channel 1."""
    rows, bias = torch.randn(4, 4), torch.randn(2, 2)
    entry = k.compress(rows[None], torch.zeros(1, 4, dtype=torch.bool), bias, dim=1)
    values = torch.stack([rows[0, 0], rows[1, 0], rows[2, 1], rows[3, 1]])
    gates = torch.stack([rows[0, 2], rows[1, 2], rows[2, 3], rows[3, 3]])
    gates = gates + torch.stack([bias[0, 0], bias[1, 0], bias[0, 1], bias[1, 1]])
    torch.testing.assert_close(entry[0, 0], (values * gates.softmax(0)).sum())


def test_a_row_that_is_not_there_does_not_count():
    rows, bias = torch.randn(4, 4), torch.zeros(2, 2)
    rows[:2] = float("nan")
    half = k.compress(rows[None], torch.tensor([[True, True, False, False]]), bias, dim=1)
    gates, values = rows[2:, 3], rows[2:, 1]
    torch.testing.assert_close(half[0, 0], (values * gates.softmax(0)).sum())


def test_mixing_matrices_have_columns_and_nearly_rows_of_sum_one():
    mixed = sinkhorn(torch.rand(50, 4, 4) + 1e-6, 20, 1e-6)
    torch.testing.assert_close(mixed.sum(1), torch.ones(50, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(mixed.sum(2), torch.ones(50, 4), atol=1e-2, rtol=0)
