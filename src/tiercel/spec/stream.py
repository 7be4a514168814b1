"""One kind of cached bytes: which layers own it, what an entry is, how long it is needed.

A row is one layer's entries of one page (or tail). Inside a row the parts follow each other, each part
for all entries, and the row is padded to an alignment:

    stream c4 of DeepSeek V4, 64 entries      part value: 576 B, part scale: 8 B, row_align 576
    ┌───────┬───────┬─────┬────────┬─────┬─────┬─────┬──────┬─────────┐
    │ value0│ value1│  …  │ value63│scal0│scal1│  …  │scal63│ padding │  = 37,440 B
    └───────┴───────┴─────┴────────┴─────┴─────┴─────┴──────┴─────────┘
    0                              36,864                   37,376
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.errors import SpecError

ENCODINGS = ("opaque", "fp32", "bf16", "fp16", "fp8_groups", "fp8_row")
"""How numbers are written as an entry's bytes. opaque: only the writer knows. fp8_groups: e4m3 with a
power-of-two scale for each group of channels, rotary channels bf16. fp8_row: e4m3 with one fp32 scale."""


@dataclass(frozen=True)
class Part:
    """Bytes of one entry that lie together."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Prefix:
    """Needed for every page of the prefix: the stream lives in pages."""


@dataclass(frozen=True)
class Window:
    """Needed for the last `tokens` tokens only: the stream lives in tails."""

    tokens: int


@dataclass(frozen=True)
class State:
    """A snapshot at the boundary: the stream lives in tails.

    `span` is the number of last tokens the snapshot depends on (a compressor's open window), or None
    when it depends on the whole prefix (a recurrent state), which no replay can rebuild.
    """

    entries: int = 1
    span: int | None = None


Keep = Prefix | Window | State
PREFIX = Prefix()


@dataclass(frozen=True)
class Stream:
    """One kind of cached bytes for a set of layers. Layer ids are global, never stage-local."""

    name: str
    layers: tuple[int, ...]
    parts: tuple[Part, ...]
    keep: Keep = PREFIX
    tokens_per_entry: int = 1
    row_align: int = 1
    encoding: str = "opaque"
    weights: str = ""
    """A name for the weights that made this stream, where they are not the model's: those of a draft that has
    a file of its own. Empty: the identity names them. Another head's entries have another form."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise SpecError("stream.name", self.name, "a stream needs a name")
        if self.encoding not in ENCODINGS:
            raise SpecError(f"{self.name}.encoding", self.encoding, f"is none of {', '.join(ENCODINGS)}")
        whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in self.layers)
        if not self.layers or not whole or min(self.layers) < 0:
            why = "must be one or more layer ids, whole numbers from 0 on"
            raise SpecError(f"{self.name}.layers", self.layers, why)
        if list(self.layers) != sorted(set(self.layers)):
            raise SpecError(f"{self.name}.layers", self.layers, "layer ids ascend without repeats")
        if not self.parts:
            raise SpecError(f"{self.name}.parts", self.parts, "an entry needs at least one part")
        if len({part.name for part in self.parts}) < len(self.parts):
            raise SpecError(f"{self.name}.parts", self.parts, "two parts have the same name")
        sizes = {f"{part.name}.bytes": part.bytes for part in self.parts}
        sizes |= {"tokens_per_entry": self.tokens_per_entry, "row_align": self.row_align}
        if isinstance(self.keep, Window):
            sizes["window"] = self.keep.tokens
        if isinstance(self.keep, State):
            sizes["entries"] = self.keep.entries
            sizes["span"] = 1 if self.keep.span is None else self.keep.span
        for field, size in sizes.items():
            check_positive(f"{self.name}.{field}", size)

    @property
    def bytes_per_entry(self) -> int:
        return sum(part.bytes for part in self.parts)

    def entries_per_row(self, page_tokens: int) -> int:
        """A window longer than a page is kept as one row per page; a shorter one is one short row."""
        match self.keep:
            case Prefix():
                tokens = page_tokens
            case Window(window):
                tokens = min(window, page_tokens)
            case State(entries):
                return entries
        if tokens % self.tokens_per_entry:
            why = f"entries do not divide a row of {tokens} tokens (page_tokens = {page_tokens})"
            raise SpecError(f"{self.name}.tokens_per_entry", self.tokens_per_entry, why)
        return tokens // self.tokens_per_entry

    def row_bytes(self, page_tokens: int) -> int:
        used = self.entries_per_row(page_tokens) * self.bytes_per_entry
        return -(-used // self.row_align) * self.row_align


def check_positive(field: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise SpecError(field, value, "must be a positive whole number")
