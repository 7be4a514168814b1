"""An answer as blocks: thoughts, texts and tool calls, one after the other.

A chat's answer is one message with three fields. `/v1/responses` and `/v1/messages` answer with a list of
blocks, and their streams tell where each block begins and ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from tiercel.asks.ask import TokenOut, Usage
from tiercel.text.answer import END_THINK, AnswerDelta
from tiercel.text.text import Text


class Kind(Enum):
    THOUGHTS = "thoughts"
    TEXT = "text"
    CALL = "call"


@dataclass
class Block:
    kind: Kind
    index: int
    name: str = ""
    """The name of the tool that is called."""
    written: str = ""
    """The text so far, or the JSON of the arguments."""
    complete: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))


class Step(NamedTuple):
    """What happened to a block; `part` is what it grew by."""

    what: Literal["begun", "grown", "ended"]
    block: Block
    part: str = ""


class Blocks:
    """The blocks of one answer, while it arrives. At most one of them, the last, is open."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    @property
    def open_kind(self) -> Kind | None:
        return self._open.kind if self._open else None

    def add(self, said: AnswerDelta, *, called: bool) -> Iterator[Step]:
        """Add new parts. `called`: whether every call up to here is complete."""
        yield from self._grown(Kind.THOUGHTS, said.reasoning, called)
        going_on = [part for part in said.calls if part.name is None]
        for part in going_on:
            yield from self._grown(Kind.CALL, part.arguments, called)
        yield from self._grown(Kind.TEXT, said.content, called)
        for part in said.calls[len(going_on) :]:
            yield from self.end(complete=True)
            yield self._begun(Kind.CALL, part.name or "")
            yield from self._grown(Kind.CALL, part.arguments, called)

    def end(self, *, complete: bool) -> Iterator[Step]:
        """Ends the open block, if there is one."""
        block, self._open = self._open, None
        if block is not None:
            block.complete = complete
            yield Step("ended", block)

    def _grown(self, kind: Kind, part: str, called: bool) -> Iterator[Step]:
        if not part:
            return
        if self._open is None or self._open.kind is not kind:
            yield from self.end(complete=called or self.open_kind is not Kind.CALL)
            yield self._begun(kind)
        assert self._open is not None
        self._open.written += part
        yield Step("grown", self._open, part)

    def _begun(self, kind: Kind, name: str = "") -> Step:
        self._open = Block(kind, len(self.all), name)
        self.all.append(self._open)
        return Step("begun", self._open)


def thought_tokens(text: Text, tokens: Sequence[TokenOut], blocks: Iterable[Block]) -> int:
    """How many of an answer's tokens are thoughts, with the one that ends them."""
    thoughts = "".join(block.written for block in blocks if block.kind is Kind.THOUGHTS)
    return tokens_of(text, tokens, thoughts + END_THINK) if thoughts else 0


def tokens_of(text: Text, tokens: Sequence[TokenOut], written: str) -> int:
    """How many of the first tokens write the text `written`."""
    left, count = len(written.encode()), 0
    for out in tokens:
        if left <= 0:
            break
        left -= len(text.piece_bytes(out.token))
        count += 1
    return count


def kept_tokens(usage: Usage, page_tokens: int) -> int:
    """How many tokens of the prompt are new in the cache: those in whole pages that were not found there."""
    found = usage.cached_tokens + usage.replayed_tokens
    return max(usage.prompt_tokens // page_tokens * page_tokens - found, 0)
