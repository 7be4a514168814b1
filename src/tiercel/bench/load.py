"""What is asked: conversations, or the requests of a trace, as values. A seed decides every token.

    conversation   shared ┆ message 1 ┆ answer 1 ┆ message 2 ┆ answer 2 ┆ message 3     the prompt of turn 3
    trace          block 17 ┆ block 18 ┆ block 23 ┆ rest          one request; an equal name is an equal text

Only names and lengths are kept. Tokens are drawn when they are sent, so a trace of many long prompts fits
into memory.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh64_intdigest

from tiercel.errors import ConfigError, TraceError
from tiercel.replay.formats import TOKENS_MOST, read_texts
from tiercel.replay.trace import Text

TOKEN_IDS = 1000, 4000
"""Ids of ordinary tokens in the tokenizers of the field: control tokens are below or above."""


class Piece(NamedTuple):
    """A run of tokens. Pieces with one name have the same tokens."""

    name: str
    tokens: int
    given: Sequence[int] = ()
    """The tokens, where a trace has them. Empty: they are drawn from the name."""

    @property
    def ids(self) -> list[int]:
        if self.given:
            return list(self.given)
        chance = np.random.default_rng(xxh64_intdigest(self.name.encode()))
        drawn: list[int] = chance.integers(*TOKEN_IDS, size=self.tokens).tolist()
        return drawn


def ids_of(pieces: Sequence[Piece]) -> list[int]:
    return list(chain.from_iterable(piece.ids for piece in pieces))


class Turn(NamedTuple):
    """A message of the user, and how long the answer shall be."""

    message: Sequence[Piece]
    answer: Piece
    """What stands for the answer in later prompts, where the server's own words are not sent back."""


@dataclass(frozen=True)
class Conversation:
    """Turns that are asked one after the other. A request of a trace is a conversation with one turn."""

    turns: Sequence[Turn]
    shared: Sequence[Piece] = ()
    """What all conversations begin with."""
    begins_s: float = 0.0
    """When its first turn is asked, in seconds since the run began."""


class Span(NamedTuple):
    """Lengths between two bounds, both included."""

    least: int
    most: int

    @staticmethod
    def parse(option: str, text: str) -> Span:
        """`512`, or `200-800`."""
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most <= TOKENS_MOST:
            why = f"must be a number of tokens from 1 to {TOKENS_MOST:,}, or two such as 200-800"
            raise ConfigError(option, text, why)
        return Span(least, most)


@dataclass(frozen=True)
class Shape:
    """Conversations as `tiercel bench` makes them."""

    conversations: int
    turns: int
    prompt_tokens: Span
    """Of the message of one turn."""
    answer_tokens: Span
    shared_tokens: int
    seed: int


def make_conversations(shape: Shape) -> list[Conversation]:
    chance = np.random.default_rng(shape.seed)
    size = shape.conversations, shape.turns
    messages = chance.integers(shape.prompt_tokens.least, shape.prompt_tokens.most + 1, size=size).tolist()
    answers = chance.integers(shape.answer_tokens.least, shape.answer_tokens.most + 1, size=size).tolist()
    shared = [Piece(f"{shape.seed}/shared", shape.shared_tokens)] if shape.shared_tokens else []
    return [
        Conversation(
            [
                Turn(
                    [Piece(f"{shape.seed}/message/{number}/{turn}", messages[number][turn])],
                    Piece(f"{shape.seed}/answer/{number}/{turn}", answers[number][turn]),
                )
                for turn in range(shape.turns)
            ],
            shared,
        )
        for number in range(shape.conversations)
    ]


def read_conversations(
    files: Sequence[str], *, seed: int, speed: float, requests: int | None
) -> list[Conversation]:
    """The requests of traces, in the order of their times. `speed`: how many times as fast as recorded."""
    texts = sorted((text for file in files for text in read_texts(Path(file))), key=lambda text: text.time_s)
    if not texts:
        raise TraceError(files[0], "holds no request")
    scopes = dict[Hashable, int]()
    """By their order: names of files would make other tokens of the same file in another folder."""
    return [
        Conversation(
            [_turn_of(text, scopes.setdefault(text.scope, len(scopes)), number, seed)],
            begins_s=(text.time_s - texts[0].time_s) / speed,
        )
        for number, text in enumerate(texts[:requests])
    ]


def _turn_of(text: Text, scope: int, number: int, seed: int) -> Turn:
    """A last block that is not full may have no name: then nobody else has its tokens."""
    answer = Piece(f"{seed}/answer/{number}", max(1, text.output_tokens))
    size, left = text.block_tokens, text.prompt_tokens
    if size == 1:
        return Turn([Piece("", left, [int(str(each)) for each in text.blocks[:left]])], answer)
    pieces = list[Piece]()
    for block in text.blocks:
        pieces.append(Piece(f"{seed}/block/{scope}/{block}", min(size, left)))
        left -= pieces[-1].tokens
        if not left:
            return Turn(pieces, answer)
    return Turn([*pieces, Piece(f"{seed}/rest/{number}", left)], answer)
