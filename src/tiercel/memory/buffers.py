"""Device and host memory of one cache, as flat bytes and as rows.

    DeviceMemory    flat_pages, flat_tails: layer first, as attention reads them; `view` is one layer's rows
    HostMemory      flat: one buffer of host pages; a page takes one, a tail takes `spec.host_pages_per_tail`

Both hold bytes only. Which place is whose is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor

from tiercel.errors import ConfigError
from tiercel.memory.host import HostMap
from tiercel.memory.layout import Layout, TailPour, make_layout
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.stream import Part, State, Stream
from tiercel.types import HostPageId, place


class DeviceMemory:
    """Pages and tails where attention reads them."""

    def __init__(self, spec: CacheSpec, pages: int, tails: int, device: str = "cpu") -> None:
        self.spec = spec
        self.device = torch.device(device)
        self.page_layout = make_layout("layer_first", spec.page_streams, spec.page_tokens, pages)
        self.tail_layout = make_layout("layer_first", spec.tail_streams, spec.page_tokens, tails)
        self.flat_pages = torch.zeros(self.page_layout.bytes_total, dtype=torch.uint8, device=self.device)
        self.flat_tails = torch.zeros(self.tail_layout.bytes_total, dtype=torch.uint8, device=self.device)

    def memory_of(self, stream: Stream) -> tuple[Tensor, Layout]:
        """The flat bytes a stream lives in, and where in them."""
        if stream in self.spec.page_streams:
            return self.flat_pages, self.page_layout
        return self.flat_tails, self.tail_layout

    def view(self, stream_name: str, layer: int) -> Tensor:
        """[places, row_bytes] of one layer, without a copy."""
        stream = self.spec.stream(stream_name)
        flat, layout = self.memory_of(stream)
        column = layout.column(stream, layer)
        return flat[column.offset :][: column.bytes].view(column.count, column.block_bytes)


class HostMemory:
    """One budget of host pages, shared by pages and tails."""

    def __init__(
        self, spec: CacheSpec, layout_name: str, bytes_budget: int, huge_pages: bool = False
    ) -> None:
        self.pages = bytes_budget // spec.host_page_bytes
        if self.pages < 1:
            raise ConfigError("host_bytes", bytes_budget, f"one host page takes {spec.host_page_bytes:,} B")
        self.layout = make_layout(layout_name, _host_streams(spec), spec.page_tokens, self.pages)
        self.tails = TailPour(self.layout, spec.tail_streams, spec.page_tokens)
        self._map = HostMap(self.layout.bytes_total, huge_pages)
        # Over a view, not over the map: the view is what keeps the bytes mapped as long as a tensor lives.
        self.flat: Tensor = torch.frombuffer(self._map.view, dtype=torch.uint8)

    @property
    def view(self) -> memoryview:
        """All of it."""
        return self._map.view

    def views(self, page_ids: Iterable[HostPageId], size: int) -> list[memoryview]:
        """The first `size` bytes of these host pages, in the order of their record, without a copy: one range
        a page where the layout keeps a page together, else as many as it has rows."""
        views, memory = [], self._map.view
        for page_id in page_ids:
            for offset, length in self.layout.place_ranges(place(page_id)):
                views.append(memory[offset : offset + min(length, size)])
                size -= len(views[-1])
                if not size:
                    return views
        assert not size, f"{size} bytes more than these host pages have"
        return views

    def close(self) -> None:
        """Give the memory back. May be called again. Nothing may be copying."""
        self.flat = torch.empty(0, dtype=torch.uint8)
        self._map.close()

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _host_streams(spec: CacheSpec) -> Sequence[Stream]:
    """What a host page is made of: of plain bytes to pour tails over, where a stage stores only tails."""
    bare = Stream("bytes", layers=(0,), parts=(Part("bytes", spec.host_page_bytes),), keep=State())
    return spec.page_streams or (bare,)
