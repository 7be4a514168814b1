"""Goal: the pieces of a forward are the forward, and a step that was sent is the same step. Method: random
spans and numbers of pieces."""

from itertools import accumulate

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiercel.asks.ask import Sampling
from tiercel.engine.pieces import PIECE_TOKENS, pieces_of
from tiercel.engine.stage_messages import StepOrder
from tiercel.engine.step import Begin, PageTable, Step, StepPart
from tiercel.models.base import Span

PAGE = 16


def span_of(ring, start, tokens):
    tails = {boundary: boundary for boundary in range(start + 1, start + tokens + 1) if boundary % PAGE == 0}
    return Span(np.arange(start, start + tokens), start, torch.empty(1, 0), ring, tails)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 4, 70, 512])), min_size=1, max_size=12),
    st.integers(1, 4),
    st.data(),
)
def test_pieces_together_are_the_forward(shapes, count, data):
    spans = [span_of(ring, start, tokens) for ring, (start, tokens) in enumerate(shapes)]
    total = sum(tokens for _, tokens in shapes)
    rows = sorted(data.draw(st.sets(st.integers(0, total - 1), max_size=20)))
    pieces = pieces_of(spans, rows, count)
    assert 1 <= len(pieces) <= count
    sizes = [sum(len(span.tokens) for span in piece.spans) for piece in pieces]
    begins = [0, *accumulate(sizes)]
    assert [begin + row for begin, piece in zip(begins, pieces, strict=False) for row in piece.rows] == rows
    joined = dict[int, list[Span]]()
    for piece in pieces:
        for number, span in enumerate(piece.spans, piece.first):
            assert span.ring == number
            joined.setdefault(number, []).append(span)
    for whole, parts in zip(spans, joined.values(), strict=True):
        assert np.concatenate([part.tokens for part in parts]).tolist() == whole.tokens.tolist()
        assert [part.start for part in parts] == [part.tokens[0] for part in parts]
        assert {b: p for part in parts for b, p in part.tails.items()} == whole.tails
        for part in parts:
            assert all(part.start < b <= part.start + len(part.tokens) for b in part.tails)
            assert len(parts) == 1 or len(part.tokens) >= PIECE_TOKENS // 2
        assert all(np.shares_memory(part.tokens, whole.tokens) for part in parts), "tokens may come later"


def test_pieces_are_about_equally_large():
    texts = pieces_of([span_of(ring, 9, 1) for ring in range(16)], range(16), 2)
    assert [len(piece.spans) for piece in texts] == [8, 8]
    prompt = pieces_of([span_of(0, 0, 512)], [511], 4)
    assert [len(piece.spans[0].tokens) for piece in prompt] == [128] * 4
    assert [piece.rows for piece in prompt] == [[], [], [], [127]]


def test_a_step_that_is_sent_is_the_same_step():
    sampling = Sampling(3, temperature=0.0)
    changes = (Begin(1, (1, 2, 3), 3, sampling, ((1, (4, 5)),), 2), PageTable(1, 0, ((7, 8),)))
    parts = (StepPart(1, 0, 3, True, 1, ((2, (6,)),), 2), StepPart(0, 5, 6, draws=True))
    for step in (Step(changes, parts, (4,)), Step(changes), Step((), parts), Step()):
        assert StepOrder.of(3, step).step == step
