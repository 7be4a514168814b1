"""Drafters guess what a text will go on with, before the model has computed it.

`NgramDrafter` looks the last tokens up in the text so far: it needs no model and no memory of the cache.
`ModelDrafter` asks the model's draft: layers or a head of its own, or a small model of another folder. A
guess changes no answer: the model draws as always, and goes on with a guess only where it draws the same
token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tiercel.errors import ConfigError
from tiercel.models.base import NO_GUESS, Draft, Model, Span

Ints = NDArray[np.int64]
Number = TypeVar("Number", int, Ints)

MATCH_LEAST, MATCH_MOST = 2, 4
"""The least number of equal tokens before a continuation is guessed, and the longest match that is sought.
One equal token is a guess that is mostly refused."""

LOOKED_AT = 8
"""How many places where the last two tokens stood before are compared, the latest first."""

AT_ONCE = 32
"""More new tokens than this are indexed by numpy: that takes 50 µs however few they are."""


class DraftText(NamedTuple):
    """A running text. Its last token has been drawn but not computed."""

    ring: int
    tokens: Ints
    pages: Tensor
    longest: int
    """The most tokens that the text may have."""


class Drafter(Protocol):
    """Guesses for running texts."""

    def begin(self, ring: int) -> None:
        """Another text takes this ring."""

    def guess(self, texts: Sequence[DraftText], counts: Sequence[int]) -> list[list[int]]:
        """For each text, tokens that may follow it: at most `counts[i]` of them."""


class ModelDrafter:
    """The model's draft."""

    def __init__(self, draft: Draft, page_tokens: int) -> None:
        self._draft, self._page_tokens = draft, page_tokens

    def begin(self, ring: int) -> None:
        """`Model.resume` has told the draft."""

    def guess(self, texts: Sequence[DraftText], counts: Sequence[int]) -> list[list[int]]:
        """Asks for all texts together, for the largest count. A text whose pages end before is asked for as
        many as they have room for: a draft may write entries of guesses to the pages."""
        most, reaches = max(counts), dict[int, list[int]]()
        spans = [Span(text.tokens[-1:], len(text.tokens) - 1, text.pages, text.ring) for text in texts]
        for i, span in enumerate(spans):
            reach = span.pages.shape[1] * self._page_tokens - span.start
            reaches.setdefault(min(most, reach), []).append(i)
        guesses: list[list[int]] = [[]] * len(spans)
        for reach, texts_there in reaches.items():
            made = self._draft.propose([spans[i] for i in texts_there], reach).tolist()
            for i, own in zip(texts_there, made, strict=True):
                guesses[i] = list(takewhile(lambda token: token != NO_GUESS, own[: counts[i]]))
        return guesses


class NgramDrafter:
    """Looks the last tokens of a text up in the text itself: what followed them may follow again."""

    def __init__(self) -> None:
        self._indexes: dict[int, PairIndex] = {}

    def begin(self, ring: int) -> None:
        self._indexes.pop(ring, None)

    def guess(self, texts: Sequence[DraftText], counts: Sequence[int]) -> list[list[int]]:
        guesses = []
        for text, count in zip(texts, counts, strict=True):
            index = self._indexes.get(text.ring)
            if index is None:
                index = self._indexes[text.ring] = PairIndex(text.longest)
            index.add(text.tokens)
            guesses.append(continued(text.tokens, index.find(text.tokens), count))
        return guesses


def continued(tokens: Ints, start: int | None, count: int) -> list[int]:
    """`count` tokens from `start` on. A text that repeats itself goes on repeating."""
    if start is None:
        return []
    found: list[int] = tokens[start : start + count].tolist()
    while len(found) < count:
        found += found[: count - len(found)]
    return found


class PairIndex:
    """Where pairs of tokens stood in a text. It grows with the text, and is never searched from end to end.

    heads     hash of a pair  ──► the last position where a pair of this hash ends, but for the text's end
    before    that position   ──► the one before it with the same hash ──► … ──► -1
    """

    def __init__(self, longest: int) -> None:
        self._bits = max(8, (2 * longest).bit_length())
        self._heads = np.full(1 << self._bits, -1, np.int32)
        self._before = np.full(longest + 1, -1, np.int32)
        self._known = 1
        """Pairs that end before this position are known."""

    def _hash(self, first: Number, second: Number) -> Number:
        return ((first * 0x9E3779B1 + second * 0x85EBCA77) & 0xFFFFFFFF) >> max(32 - self._bits, 0)

    def add(self, tokens: Ints) -> None:
        """Add all pairs but the last: that one is looked up."""
        start, end = self._known, len(tokens) - 1
        if end <= start:
            return
        if end - start <= AT_ONCE:
            new: list[int] = tokens[start - 1 : end].tolist()
            for i, position in enumerate(range(start, end)):
                at = self._hash(new[i], new[i + 1])
                self._before[position] = self._heads[at]
                self._heads[at] = position
        else:
            positions = np.arange(start, end)
            hashes = self._hash(tokens[start - 1 : end - 1], tokens[start:end])
            order = np.argsort(hashes, kind="stable")
            ranked, where = hashes[order], positions[order]
            first = np.r_[True, ranked[1:] != ranked[:-1]]
            self._before[where] = np.where(first, self._heads[ranked], np.r_[-1, where[:-1]])
            last = np.r_[ranked[1:] != ranked[:-1], True]
            self._heads[ranked[last]] = where[last]
        self._known = end

    def find(self, tokens: Ints) -> int | None:
        """Where the text goes on after the longest match of its last tokens; None: there is no match."""
        count = len(tokens)
        if count <= MATCH_LEAST:
            return None
        newest: list[int] = tokens[-MATCH_MOST:].tolist()
        at = int(self._heads[self._hash(newest[-2], newest[-1])])
        best, start = MATCH_LEAST - 1, None
        for _ in range(LOOKED_AT):
            if at < 0:
                break
            seen: list[int] = tokens[max(0, at + 1 - MATCH_MOST) : at + 1].tolist()
            same = 0
            while same < min(len(seen), len(newest)) and seen[-1 - same] == newest[-1 - same]:
                same += 1
            if same > best:
                best, start = same, at + 1
                if same == MATCH_MOST:
                    break
            at = int(self._before[at])
        return start


TEXT_DRAFTERS: Mapping[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
"""Drafters that need no more than the text, by their name in `engine.config.GUESSERS`."""


def make_drafter(kind: str, model: Model, page_tokens: int) -> Drafter | None:
    """The drafter for a value of `--speculate`; None: no guesses. `auto` has been decided before."""
    if kind in ("off", "auto"):
        return None
    if kind in TEXT_DRAFTERS:
        return TEXT_DRAFTERS[kind]()
    if model.draft is None:
        raise ConfigError("speculate", kind, "needs a model with a draft, and a cache that has room for it")
    return ModelDrafter(model.draft, page_tokens)
