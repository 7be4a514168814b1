"""A forward in pieces, so that the stages of a model compute at the same time.

    stage 0    A₁ B₁ A₂ B₂ A₃ B₃
    stage 1       A₁ B₁ A₂ B₂ A₃ B₃        A₂ begins with the tokens that A₁ has drawn

A text has the same bits however a forward is cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tiercel.models.base import Span

PIECE_TOKENS = 64
"""A span is cut only where both sides have at least half so many tokens."""


class Piece(NamedTuple):
    spans: list[Span]
    first: int
    """The number of its first span in the whole forward. A span that was cut has the same number in each
    piece."""
    rows: list[int]
    """Its flat tokens whose logits are wanted."""


def pieces_of(spans: Sequence[Span], rows: Sequence[int], count: int) -> list[Piece]:
    """A forward in `count` pieces of about as many tokens each, or fewer. Short spans are not cut."""
    total = sum(len(span.tokens) for span in spans)
    size, pieces, left = -(-total // max(1, count)), list[Piece](), deque(rows)
    current, first, held, begin = list[Span](), 0, 0, 0

    def close(following: int) -> None:
        nonlocal current, first, held, begin
        own, end = list[int](), begin + held
        while left and left[0] < end:
            own.append(left.popleft() - begin)
        pieces.append(Piece(current, first, own))
        current, first, held, begin = [], following, 0, end

    for number, each in enumerate(spans):
        span = each
        while min(size - held, held + len(span.tokens) - size) >= PIECE_TOKENS // 2:
            head, span = _cut(span, size - held)
            current.append(head)
            held = size
            close(number)
        current.append(span)
        held += len(span.tokens)
        if held >= size:
            close(number + 1)
    if current:
        close(len(spans))
    return pieces


def _cut(span: Span, tokens: int) -> tuple[Span, Span]:
    middle = span.start + tokens
    first = {boundary: place for boundary, place in span.tails.items() if boundary <= middle}
    rest = {boundary: place for boundary, place in span.tails.items() if boundary > middle}
    return (
        replace(span, tokens=span.tokens[:tokens], tails=first),
        replace(span, tokens=span.tokens[tokens:], start=middle, tails=rest),
    )
