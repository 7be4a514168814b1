"""A trace: requests of recorded traffic as values. Their pages have names, their tokens are not known.

    file ── replay.formats ──► texts of named blocks ── here ──► requests with the names of their pages

    blocks      │  17  │  18  │  19  │  23 ┆         of 64, 512, … tokens, as the file has them
    pages       │     1     │     2     │            of the model; a page that is not full has no name

An equal name means an equal text from its first token to the page's end, as with the keys of `tree.keys`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiercel.progress import progress
from tiercel.types import PageKey

CONTINUES_TOKENS = 512
"""Many conversations may begin with a shorter prompt: it does not show which of them went on."""


TOLD_EVERY = 1000
"""After how many lines or requests the progress of reading is shown."""


class Recorded(NamedTuple):
    """What a server reused, as its own trace says."""

    device_tokens: int
    host_tokens: int
    store_tokens: int
    prefill_s: float | None = None
    decode_s: float | None = None
    """Between the first token and the last one."""


class Text(NamedTuple):
    """One request of a file: its prompt, and perhaps its answer, as named blocks."""

    time_s: float
    scope: Hashable
    """Equal names mean equal blocks only within one scope."""
    blocks: Sequence[Hashable]
    """The last one may be shorter than the others."""
    block_tokens: int
    prompt_tokens: int
    output_tokens: int
    whole: bool = False
    """The blocks are those of prompt and answer. False: those of the prompt only."""
    turn_ends: tuple[int, ...] = ()
    priority: int = 0
    recorded: Recorded | None = None


class TraceRequest(NamedTuple):
    """One request, ready to be replayed."""

    time_s: float
    keys: Sequence[PageKey]
    """The keys of all full pages of prompt and answer."""
    prompt_tokens: int
    output_tokens: int
    turn_ends: tuple[int, ...] = ()
    """Positions after which the text may go on differently, in tokens; empty: not known."""
    priority: int = 0
    recorded: Recorded | None = None


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival."""

    requests: Sequence[TraceRequest]
    page_tokens: int

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max((each.prompt_tokens + each.output_tokens for each in self.requests), default=1)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last one."""
        return self.requests[-1].time_s - self.requests[0].time_s if self.requests else 0.0


@dataclass
class _Names:
    """Names of pages: a number for each pair of a page and the page before it. The first page of a text comes
    after the name of its scope."""

    numbers: dict[Hashable, int] = field(default_factory=dict)
    keys: list[PageKey] = field(default_factory=list)

    def of(self, before: int, what: Hashable) -> int:
        number = self.numbers.setdefault((before, what), len(self.keys))
        if number == len(self.keys):
            self.keys.append(PageKey(number.to_bytes(32, "big")))
        return number


def make_trace(texts: Iterable[Text], page_tokens: int) -> Trace:
    """The requests of all texts, with pages of `page_tokens` tokens. Answers without names get those of the
    request that goes on from them (`_with_answers`)."""
    ordered = sorted(texts, key=lambda text: text.time_s)
    names, requests = _Names(), list[TraceRequest]()
    with progress("naming pages", len(ordered), counted="requests") as done:
        for text, blocks in zip(ordered, _with_answers(ordered), strict=True):
            keys = list(_page_keys(text, blocks, page_tokens, names))
            requests.append(
                TraceRequest(
                    text.time_s,
                    keys,
                    text.prompt_tokens,
                    text.output_tokens,
                    text.turn_ends,
                    text.priority,
                    text.recorded,
                )
            )
            if len(requests) % TOLD_EVERY == 0:
                done(TOLD_EVERY)
    return Trace(requests, page_tokens)


def _page_keys(text: Text, blocks: Sequence[Hashable], page_tokens: int, names: _Names) -> Iterator[PageKey]:
    """The keys of all full pages. A page is named after the page before it and the blocks that it touches."""
    size, before = text.block_tokens, names.of(-1, text.scope)
    for end in range(page_tokens, text.prompt_tokens + text.output_tokens + 1, page_tokens):
        first, last = (end - page_tokens) // size, (end - 1) // size
        what = blocks[last] if first == last else tuple(blocks[first : last + 1])
        before = names.of(before, what)
        yield names.keys[before]


def _with_answers(texts: Sequence[Text]) -> list[Sequence[Hashable]]:
    """The blocks of prompts and answers.

    A trace may name the blocks of prompts only, not those of answers. The next request that contains a
    prompt's last full block and is longer goes on from this prompt and its answer: so its blocks are those of
    the answer, as far as it has them. The other blocks get new names.

    The search goes backwards in time, so that for each block the nearest later request is known.
    """
    following: dict[Hashable, dict[Hashable, int]] = {}
    """For each scope and block: the nearest later text with this block."""
    longer: dict[int, int | None] = {}
    """For a text, the next one that goes on from it. A text that is not longer is passed over once, not again
    by every text before it."""
    answers: list[Sequence[Hashable]] = [()] * len(texts)
    fresh = 0
    for number in range(len(texts) - 1, -1, -1):
        text = texts[number]
        full = text.prompt_tokens // text.block_tokens
        blocks: list[Hashable] = list(text.blocks)
        if not text.whole:
            near = following.setdefault(text.scope, {})
            found = near.get(text.blocks[full - 1]) if full else None
            while found is not None and texts[found].prompt_tokens <= text.prompt_tokens:
                found = longer[found]
            longer[number] = found
            if found is not None and full >= max(2, CONTINUES_TOKENS // text.block_tokens):
                blocks = list(texts[found].blocks)
            near.update(dict.fromkeys(text.blocks, number))
        needed = -(-(text.prompt_tokens + text.output_tokens) // text.block_tokens)
        missing = range(fresh, fresh + needed - len(blocks))
        answers[number] = [*blocks[:needed], *(("fresh", each) for each in missing)]
        fresh += len(missing)
    return answers
