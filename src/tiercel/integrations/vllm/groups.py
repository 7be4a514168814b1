"""What a model keeps in vLLM's KV cache, as a `CacheSpec`; and where the pages and tails of a text lie there.

vLLM keeps a table of blocks for each text and group of layers. A block holds some tokens of all layers of its
group, and all groups take their blocks from one pool: a block id belongs to one group at a time.

    page 64 tokens      full, blocks of 32       page:  blocks 7, 3 of table 0
                        window, blocks of 16     tail:  blocks 5, 9 of table 1, the window before a boundary
                        state, blocks of 64      tail:  block 4 of table 2, which ends at the boundary

So a page has a place for each of its blocks of each full group, and a tail one for each of its blocks of each
other group. Blocks that vLLM does not keep, or has already, have no place: nothing is copied there.

Here is neither vLLM nor torch: `integrations.vllm.connector` makes the groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tiercel.errors import ConfigError
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.stream import PREFIX, Keep, Part, State, Stream, Window
from tiercel.transfer.plan import NO_PLACE
from tiercel.types import Kind

NULL_BLOCK = 0
"""What stands in a table where vLLM keeps no block."""

Table = Sequence[int]
"""The block ids of one text and one group, in the order of its tokens."""


@dataclass(frozen=True)
class Group:
    """Layers that share a table of blocks, and whose blocks are of one size. A table whose layers have blocks
    of several sizes is several groups."""

    table: int
    """Which of a text's tables it is."""
    keep: Keep
    block_tokens: int
    block_bytes: int
    """Bytes of a block of one layer."""
    names: tuple[str, ...]
    """The layers, as vLLM names them."""

    @property
    def kind(self) -> Kind:
        return Kind.PAGE if self.keep == PREFIX else Kind.TAIL

    def blocks(self, page_tokens: int) -> int:
        """How many blocks a page, or tail, has."""
        match self.keep:
            case State():
                return 1
            case Window(tokens) if tokens - 1 <= page_tokens:
                return max(1, -(-(tokens - 1) // self.block_tokens))
        return page_tokens // self.block_tokens


@dataclass(frozen=True)
class Groups:
    """All groups of a model."""

    model: str
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not any(group.kind is Kind.PAGE for group in self.groups):
            raise ConfigError("model", self.model, "has no layer that reads its whole text")
        for table in {group.table for group in self.groups}:
            alike = {(each.keep, each.block_tokens) for each in self.groups if each.table == table}
            if len(alike) > 1:
                raise ConfigError("model", self.model, f"has unlike groups in table {table}")

    @cached_property
    def page_tokens(self) -> int:
        """A page has whole blocks of each group."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @cached_property
    def layers(self) -> dict[tuple[str, int], str]:
        """vLLM's name of the layer of each (stream, layer)."""
        found = dict[tuple[str, int], str]()
        for at, group in enumerate(self.groups):
            for name in group.names:
                layer, more = layer_of(name), 0
                while (f"{at}.{more}", layer) in found:  # a layer may keep several things of one kind
                    more += 1
                found[f"{at}.{more}", layer] = name
        return found

    @cached_property
    def spec(self) -> CacheSpec:
        """What vLLM keeps: the streams of a page, and those of a tail."""
        layers = dict[str, list[int]]()
        for name, layer in self.layers:
            layers.setdefault(name, []).append(layer)
        streams = (self._stream(name, tuple(sorted(own))) for name, own in sorted(layers.items()))
        return CacheSpec(self.model, self.page_tokens, tuple(streams))

    def _group_of(self, stream: str) -> Group:
        return self.groups[int(stream.split(".")[0])]

    def _stream(self, name: str, layers: tuple[int, ...]) -> Stream:
        """A block is an entry: what is in it is vLLM's matter."""
        group = self._group_of(name)
        block = Part("block", group.block_bytes)
        if isinstance(group.keep, State):
            return Stream(name, layers, (block,), group.keep)
        keep = group.keep
        if isinstance(keep, Window) and keep.tokens - 1 <= self.page_tokens:
            keep = Window(group.blocks(self.page_tokens) * group.block_tokens)  # whole blocks
        return Stream(name, layers, (block,), keep, tokens_per_entry=group.block_tokens)

    # Places

    @cached_property
    def _tables(self) -> dict[Kind, list[Group]]:
        """A group for each table that pages, or tails, lie in, in the order of their places."""
        first = {group.table: group for group in reversed(self.groups)}
        return {kind: [first[at] for at in sorted(first) if first[at].kind is kind] for kind in Kind}

    @cached_property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """For each stream: which places of a page, or tail, its rows lie in (`BorrowedMemory`)."""
        of_table = dict[int, tuple[int, ...]]()
        for groups in self._tables.values():
            begin = 0
            for group in groups:
                end = begin + group.blocks(self.page_tokens)
                of_table[group.table] = tuple(range(begin, end))
                begin = end
        return {stream.name: of_table[self._group_of(stream.name).table] for stream in self.spec.streams}

    def page(self, tables: Sequence[Table], number: int, *, after: int = 0) -> tuple[int, ...]:
        """The places of a page. Blocks of the first `after` tokens are left out."""
        begin = number * self.page_tokens
        return self._places(Kind.PAGE, tables, begin + self.page_tokens, after)

    def tail(self, tables: Sequence[Table], boundary: int, *, after: int = 0) -> tuple[int, ...]:
        """The places of the tail at a boundary, in pages. Windows over the first `after` tokens are left
        out; a state is not, because a later one replaces it."""
        return self._places(Kind.TAIL, tables, boundary * self.page_tokens, after)

    def _places(self, kind: Kind, tables: Sequence[Table], end: int, after: int) -> tuple[int, ...]:
        places = list[int]()
        for group in self._tables[kind]:
            last = end // group.block_tokens
            for at in range(last - group.blocks(self.page_tokens), last):
                kept = isinstance(group.keep, State) or at * group.block_tokens >= after
                table = tables[group.table]
                block = table[at] if kept and 0 <= at < len(table) else NULL_BLOCK
                places.append(NO_PLACE if block == NULL_BLOCK else block)
        return tuple(places)


def layer_of(name: str) -> int:
    """The number of a layer in its name, such as 3 in `model.layers.3.self_attn.attn`."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    if found is None:
        raise ConfigError("layer", name, "has no number in its name")
    return int(found[1])
