"""What a model stores, as one frozen value. Everything else is derived from it.

page    page_tokens tokens of every PREFIX stream, all layers
tail    what is needed besides the pages to continue at a page boundary: the WINDOW rows and the STATE
        snapshots. A window longer than a page needs the tails of `pages_per_window` boundaries in a row:
        each tail has the rows of one page.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from tiercel.errors import SpecError
from tiercel.spec.stream import State, Stream, Window, check_positive
from tiercel.spec.stream_dict import check_keys, check_list, stream_from_dict, stream_to_dict
from tiercel.types import Kind

FIRST_SHARES = 0.08, 0.2
"""The shares of a page's bytes in the first groups of layers (`CacheSpec.layer_groups`). While a model
computes the layers of a group, the next groups arrive: a small first group is there early. Each group costs a
load of 512 pages 0.3 ms of CPU."""
EVEN_SHARES = (1 / 12,) * 11 + (1 / 24,)
"""The same for large pages. These arrive more slowly than a model computes, and only the layers of the last
group are computed after the load: the last group is small."""
LARGE_PAGE_BYTES = 8 * 1024**2

DRAFT = "draft_"
"""The names of a draft's streams begin with it, for people: `Stream.draft` tells programs."""

GRAINS_MOST = 4
"""The most records that a page is cut into. Each record costs a header of 4 KiB in a file store."""
GRAIN_BYTES_LEAST = 128 * 1024
"""A page is cut into fewer records if they would be smaller than this: small records are slow everywhere."""

HOT_TIMES = 2
"""A text that reads pages on the host gets so many times the rows that a step needs, if there is room."""

UNIT_ALIGN = 64
"""Where a device has two pools, its units are multiples of this many bytes."""

FORM_BYTES = 16
FORMAT_VERSION = 3
"""Part of the form: raise it when the meaning of stored bytes changes."""


@dataclass(frozen=True)
class Grain:
    """The bytes of some consecutive layers of a page (or tail): what a store keeps as one record. They lie
    together in the page, behind those of the grains before it."""

    number: int
    of: int
    """How many grains all layers of the model are cut into. Some may have no bytes of this kind."""
    streams: tuple[Stream, ...]
    """The streams, with the layers of this grain only."""
    form: bytes
    bytes: int


@dataclass(frozen=True)
class CacheSpec:
    """The streams of one model (or of one pipeline stage of it) and the size of a page.

    It says how bytes lie, not whose numbers they are (`spec.identity`): `model` is a name for people.
    """

    model: str
    page_tokens: int
    streams: tuple[Stream, ...]
    shard: str = ""
    """The part of every entry, if ranks cut entries, such as `0/8`. Streams are equal, bytes differ."""
    second: tuple[str, ...] = ()
    """Names of page streams that the device keeps in a pool of their own: a page may be on the device without
    them, and is read on the host then. No stored byte depends on it."""
    whole: CacheSpec | None = field(default=None, compare=False, repr=False)
    """If this is a stage: the spec of the whole model. Some results depend on all layers."""

    def __post_init__(self) -> None:
        for name in ("model", "shard"):
            if not isinstance(getattr(self, name), str):
                raise SpecError(name, getattr(self, name), "must be a name")
        check_positive("page_tokens", self.page_tokens)
        if not self.streams:
            raise SpecError("streams", self.streams, "a cache needs at least one stream")
        names = set[str]()
        for stream in self.streams:
            if stream.name in names:
                raise SpecError("streams", stream.name, "two streams have the same name")
            names.add(stream.name)
            if stream.role and any(self.find(stream.role, layer) is not stream for layer in stream.layers):
                raise SpecError("streams", stream.name, f"a layer has two streams of the role {stream.role}")
            stream.row_bytes(self.page_tokens)  # refuses entries that do not divide a row
        first = [stream.name for stream in self.page_streams if stream.name not in self.second]
        if self.second and (not first or not {*self.second} <= {stream.name for stream in self.page_streams}):
            raise SpecError("second", self.second, "must name some streams of a page, not all of them")

    def streams_of(self, kind: Kind) -> tuple[Stream, ...]:
        return tuple(stream for stream in self.streams if stream.kind is kind)

    @cached_property
    def page_streams(self) -> tuple[Stream, ...]:
        return self.streams_of(Kind.PAGE)

    @cached_property
    def tail_streams(self) -> tuple[Stream, ...]:
        return self.streams_of(Kind.TAIL)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Every layer id that owns bytes, ascending."""
        return tuple(sorted({layer for stream in self.streams for layer in stream.layers}))

    def layer_groups(self, shares: Sequence[float] | None = None) -> list[range]:
        """Consecutive layers that are loaded and waited for together: each group has a share of a page's
        bytes, the last group has the rest. None: shares that suit the size of a page."""
        if shares is None:
            shares = EVEN_SHARES if self.page_bytes >= LARGE_PAGE_BYTES else FIRST_SHARES
        sizes = dict.fromkeys(self.layers, 0)
        for stream in self.page_streams or self.tail_streams:
            for layer in stream.layers:
                sizes[layer] += self.row_bytes(stream)
        groups, first, done = list[range](), self.layers[0], 0
        for layer, size in sizes.items():
            done += size
            if len(groups) < len(shares) and done >= sum(shares[: len(groups) + 1]) * sum(sizes.values()):
                groups.append(range(first, layer + 1))
                first = layer + 1
        return [*groups, range(first, self.layers[-1] + 1)] if first <= self.layers[-1] else groups

    @cached_property
    def cut(self) -> tuple[range, ...]:
        """The layers of each grain, with about the same bytes of a page in each. The cut is that of the whole
        model, for pages and tails: every stage and every process computes the same one."""
        if self.whole is not None:
            return self.whole.cut
        streams = self.page_streams or self.tail_streams
        sizes = {
            layer: sum(self.row_bytes(stream) for stream in streams if layer in stream.layers)
            for layer in self.layers
        }
        total, before, ends = sum(sizes.values()), 0, dict[int, int]()
        grains = min(max(1, total // GRAIN_BYTES_LEAST), GRAINS_MOST, len(sizes))
        for layer, size in sizes.items():
            middle = (2 * before + size) * grains // (2 * total)  # a layer is where its middle is
            ends[min(middle, grains - 1)] = layer + 1
            before += size
        return tuple(range(first, end) for first, end in pairwise([0, *ends.values()]))

    def grains(self, kind: Kind) -> tuple[Grain, ...]:
        """The grains that have bytes of this kind, in the order of their bytes. A grain's form names its own
        layers only: a stage that holds all layers of a grain has the same records as the whole model."""
        return self._grains[kind]

    @cached_property
    def _grains(self) -> dict[Kind, tuple[Grain, ...]]:
        return {kind: tuple(self._cut_streams(kind)) for kind in Kind}

    def _cut_streams(self, kind: Kind) -> Iterator[Grain]:
        if kind is Kind.PAGE and not self.page_streams:
            yield Grain(0, 1, (), self.form, 0)  # a page without bytes, of a stage that stores only tails
        for number, layers in enumerate(self.cut):
            streams = _with_layers(self.streams_of(kind), layers)
            if streams:
                own = replace(self, streams=streams, second=())
                yield Grain(number, len(self.cut), streams, own.form, own.item_bytes(kind))

    def stream(self, name: str) -> Stream:
        for stream in self.streams:
            if stream.name == name:
                return stream
        raise KeyError(name)

    def find(self, role: str, layer: int) -> Stream | None:
        """The stream that has this role in this layer. None: the layer has no such stream."""
        own = (stream for stream in self.streams if stream.role == role and layer in stream.layers)
        return next(own, None)

    def row_bytes(self, stream: Stream) -> int:
        return stream.row_bytes(self.page_tokens)

    def bytes_of(self, stream: Stream) -> int:
        """Bytes of all layers of one stream in one page (or one tail)."""
        return len(stream.layers) * self.row_bytes(stream)

    def item_bytes(self, kind: Kind) -> int:
        """Bytes of one page, or of one tail."""
        return self._item_bytes[kind]

    @cached_property
    def _item_bytes(self) -> dict[Kind, int]:
        return {kind: sum(map(self.bytes_of, self.streams_of(kind))) for kind in Kind}

    @cached_property
    def page_bytes(self) -> int:
        return self.item_bytes(Kind.PAGE)

    @cached_property
    def tail_bytes(self) -> int:
        return self.item_bytes(Kind.TAIL)

    @property
    def bytes_per_token(self) -> float:
        return self.page_bytes / self.page_tokens

    @property
    def place_bytes(self) -> int:
        """The unit of memory: one page. (A stage that owns no PREFIX stream has only tails.)"""
        return self.page_bytes or self.tail_bytes

    @property
    def places_per_tail(self) -> int:
        """Places of a tail. It takes whole ones, so that pages and tails share one pool in each tier."""
        return -(-self.tail_bytes // self.place_bytes)

    def places_of(self, kind: Kind) -> int:
        """How many places one page or tail takes."""
        return {Kind.PAGE: 1, Kind.TAIL: self.places_per_tail}[kind]

    @cached_property
    def pools(self) -> tuple[tuple[Stream, ...], ...]:
        """The streams of a page in each pool of the device."""
        own = tuple(stream for stream in self.page_streams if stream.name not in self.second)
        return (own, tuple(stream for stream in self.page_streams if stream.name in self.second))[
            : 1 + bool(self.second)
        ]

    @property
    def apart(self) -> CacheSpec:
        """The same declaration, with the stream that is read by selection in the second pool. Drafts stay in
        the first. Without such a stream, with several, or with nothing else in a page, it is this one."""
        second = tuple(stream.name for stream in self.page_streams if stream.selected and not stream.draft)
        whole = None if self.whole is None else self.whole.apart
        return (
            replace(self, second=second, whole=whole) if len(second) == 1 < len(self.page_streams) else self
        )

    @property
    def selective(self) -> bool:
        """Whether all of the second pool is read by selection: then pages may be without their place in it
        while texts read them."""
        return bool(self.second) and all(stream.selected for stream in self.pools[1])

    def hot_places(self, guesses: int = 0) -> tuple[int, int]:
        """Places of the second pool for the hot rows of a text: at least, and at most. The least hold what
        the tokens of a step read, with so many guesses."""
        (stream,) = self.pools[1]
        least = -(-(1 + guesses) * stream.selected // stream.entries_per_row(self.page_tokens))
        return least, HOT_TIMES * least

    def pool_of(self, stream: Stream) -> int:
        """The number of the device pool that a stream of a page lies in."""
        return int(stream.name in self.second)

    @cached_property
    def units(self) -> tuple[int, int]:
        """(bytes of a unit, units of a frame) of the device, whose memory is made of frames. With one pool,
        a frame is a unit, and a unit is a page. With two, the first pool's part of a page takes one unit, and
        the second pool's part takes all others of a frame:

            frame   │ unit │ unit   unit   unit │
                     first   second pool                   as many units as leave the least unused

        A page, and a tail, takes as many units of a stage as of the whole model: so a place has one number in
        all stages, and the unit of a stage is as large as that needs.
        """
        first, second = ([*(sum(map(self.bytes_of, streams)) for streams in self.pools), 0])[:2]
        if self.whole is not None:
            _, units = self.whole.units
            tail = -(-self.tail_bytes // max(1, self.whole.units_per_tail))
            return max(first, _aligned(max(-(-second // max(1, units - 1)), tail))), units
        if not self.second:
            return self.place_bytes, 1
        most = -(-second // first)
        sizes = ((_aligned(max(first, -(-second // wide))), 1 + wide) for wide in range(1, most + 1))
        return min(sizes, key=lambda each: (each[0] * each[1], each[1]))

    @property
    def unit_bytes(self) -> int:
        return self.units[0]

    @property
    def frame_units(self) -> int:
        return self.units[1]

    @property
    def frame_bytes(self) -> int:
        """What a whole page takes on the device."""
        return self.unit_bytes * self.frame_units

    @property
    def units_per_tail(self) -> int:
        """Units of a tail on the device: any of them, as on the host."""
        return -(-self.tail_bytes // self.unit_bytes)

    @cached_property
    def pages_per_window(self) -> int:
        """How many boundaries in a row must have a tail so that the last of them can be resumed; 0: none."""
        if not self.tail_streams:
            return 0
        windows = [s.keep.tokens for s in self.tail_streams if isinstance(s.keep, Window)]
        return max([1, *(-(-(window - 1) // self.page_tokens) for window in windows)])

    @cached_property
    def replay_tokens(self) -> int | None:
        """Tokens to compute again before a boundary so that a text goes on exactly there without a tail, and
        so that all tails which a resume there reads can be written.

        A layer's window rows are exact once those of the layers before it are, so the windows of all layers,
        also of other stages, add up. None when a state depends on the whole prefix.
        """
        if self.whole is not None:
            return self.whole.replay_tokens
        reach = replay = 0
        for layer in self.layers:
            own = [s.keep for s in self.tail_streams if layer in s.layers]
            windows = [keep.tokens for keep in own if isinstance(keep, Window)]
            spans = [keep.span for keep in own if isinstance(keep, State)]
            if None in spans:
                return None
            rows = [min(window, self.page_tokens) for window in windows] + [span for span in spans if span]
            replay = max([replay, *(reach + each for each in rows)])
            reach += max(windows, default=1) - 1
        return replay and replay + max(0, self.pages_per_window - 1) * self.page_tokens

    def stage(self, first: int, last: int) -> CacheSpec:
        """The declaration of layers first … last - 1. Layer ids stay global."""
        kept = _with_layers(self.streams, range(first, last))
        if not kept:
            raise SpecError("stage", (first, last), f"no stream has layers there; layers are {self.layers}")
        return replace(self, streams=kept, second=_second_of(self, kept), whole=self.whole or self)

    def only(self, names: Iterable[str]) -> CacheSpec:
        """The declaration of some of its streams: those that one pool holds."""
        names = set(names)
        for name in sorted(names - {stream.name for stream in self.streams}):
            raise SpecError("streams", name, "is not a stream of this declaration")
        kept = tuple(stream for stream in self.streams if stream.name in names)
        return replace(self, streams=kept, second=_second_of(self, kept), whole=self.whole or self)

    def with_draft(self, draft: CacheSpec) -> CacheSpec:
        """Target and draft in one page, so that they are never separated. Draft layers follow the target's.

        A draft's entry belongs to the newest token it has seen. A head that pairs the hidden state of token t
        with token t + 1 therefore writes entry t + 1, and a page never depends on a token outside it.
        """
        if self.whole is not None:
            raise SpecError("draft", draft.model, "is added to the whole model, before its stages are taken")
        if draft.page_tokens != self.page_tokens:
            raise SpecError("draft.page_tokens", draft.page_tokens, f"the target has {self.page_tokens}")
        base = self.layers[-1] + 1
        drafted = tuple(
            replace(s, name=DRAFT + s.name, layers=tuple(base + layer for layer in s.layers), draft=True)
            for s in draft.streams
        )
        return replace(self, model=f"{self.model}+{draft.model}", streams=self.streams + drafted)

    @cached_property
    def form(self) -> bytes:
        """16 bytes that change whenever the bytes lie differently. The model's name is not part of it, nor is
        how many entries a query reads."""
        # Keys are not sorted: the order of an entry's parts is the order of its bytes.
        bare = replace(self, model="", streams=tuple(replace(stream, selected=0) for stream in self.streams))
        text = json.dumps([FORMAT_VERSION, bare.to_dict()], separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()[:FORM_BYTES]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "page_tokens": self.page_tokens,
            **({"shard": self.shard} if self.shard else {}),
            "streams": [stream_to_dict(stream) for stream in self.streams],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CacheSpec:
        """The inverse of `to_dict`. Streams of any other shape are declared this way, in JSON."""
        check_keys("spec", data, {"model", "page_tokens", "streams"}, optional={"shard"})
        check_list("spec.streams", data["streams"])
        streams = [stream_from_dict(f"streams[{i}]", item) for i, item in enumerate(data["streams"])]
        return CacheSpec(**{**data, "streams": tuple(streams)})


def row_step(spec: CacheSpec, stream: Stream) -> int:
    """Every row of a page stream begins at a multiple of so many bytes, counted from the start of the
    device's memory, in every frame: units and rows of its pool are multiples of it."""
    rows = {spec.row_bytes(each) for each in spec.pools[spec.pool_of(stream)]}
    return math.gcd(spec.unit_bytes, *rows)


def _second_of(spec: CacheSpec, kept: Sequence[Stream]) -> tuple[str, ...]:
    """What stays in the second pool when only some streams are kept: nothing if one pool would be empty."""
    names = {stream.name for stream in kept if stream.kind is Kind.PAGE}
    second = tuple(name for name in spec.second if name in names)
    return second if len(second) < len(names) else ()


def _aligned(size: int) -> int:
    """Rows begin at the same multiples in every unit."""
    return -(-size // UNIT_ALIGN) * UNIT_ALIGN


def _with_layers(streams: Iterable[Stream], layers: range) -> tuple[Stream, ...]:
    """The same streams with some of their layers. Streams that have none of them are left out."""
    own = ((stream, tuple(layer for layer in stream.layers if layer in layers)) for stream in streams)
    return tuple(replace(stream, layers=some) for stream, some in own if some)
