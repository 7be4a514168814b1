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

from dataclasses import dataclass, field

from tiercel.errors import SpecError
from tiercel.types import Kind

ENCODINGS = ("opaque", "fp32", "bf16", "fp16", "fp8_groups", "fp8_row")
"""How numbers are written as an entry's bytes. opaque: only the writer knows. fp8_groups: e4m3 with a
power-of-two scale for each group of channels, the last channels bf16; `Stream.group` and `Stream.rope` say
how many. fp8_row: e4m3 with one fp32 scale."""


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
    rope: int = 0
    """Only `fp8_groups`: the number of channels, at the end of an entry, that are bf16. These channels are
    rotated by the position."""
    group: int = 0
    """Only `fp8_groups`: the number of other channels that share a scale."""
    weights: str = ""
    """A name for the weights that made this stream, where they are not the model's: those of a draft that has
    a file of its own. Empty: the identity names them. Another head's entries have another form."""
    role: str = field(default="", compare=False)
    """What its model keeps in it. The model finds a stream by role and layer (`CacheSpec.find`), not by name.
    Bytes lie the same whatever the role is, so it is not part of a declaration as JSON."""
    selected: int = field(default=0, compare=False)
    """A query reads the best so many entries of it, which an indexer chooses. 0: it reads all. The page of
    such a stream may stay on the host (`CacheSpec.apart`). Bytes lie the same whatever the number is."""
    draft: bool = field(default=False, compare=False)
    """Whether `CacheSpec.with_draft` added it to a target's streams."""

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
        for name, size in sizes.items():
            check_positive(f"{self.name}.{name}", size)
        if self.selected:
            check_positive(f"{self.name}.selected", self.selected)
        self._check_groups()

    def _check_groups(self) -> None:
        """The two parts of `fp8_groups` have room for exactly the declared numbers."""
        if self.encoding != "fp8_groups":
            for name in ("rope", "group"):
                if value := getattr(self, name):
                    raise SpecError(f"{self.name}.{name}", value, f"{self.encoding} has no such number")
            return
        check_positive(f"{self.name}.group", self.group)
        if len(self.parts) != 2:
            raise SpecError(f"{self.name}.parts", self.parts, "fp8_groups has two parts: values and scales")
        values, scales = (part.bytes for part in self.parts)
        if not isinstance(self.rope, int) or not 0 <= 2 * self.rope < values:
            raise SpecError(f"{self.name}.rope", self.rope, f"does not leave any of {values} B for others")
        groups, rest = divmod(values - 2 * self.rope, self.group)
        if rest or groups > scales:
            why = f"does not divide {values - 2 * self.rope} channels into at most {scales} groups"
            raise SpecError(f"{self.name}.group", self.group, why)

    @property
    def kind(self) -> Kind:
        """Whether it lives in pages or in tails."""
        return Kind.PAGE if isinstance(self.keep, Prefix) else Kind.TAIL

    @property
    def bytes_per_entry(self) -> int:
        return sum(part.bytes for part in self.parts)

    def entries_per_row(self, page_tokens: int) -> int:
        """A window longer than a page has one row per page; a shorter window is one short row."""
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
