"""Pages and tails in host memory as records: their headers, their bytes, where these lie."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from tiercel.memory.buffers import HostMemory
from tiercel.memory.layout import Range
from tiercel.spec.cache_spec import CacheSpec
from tiercel.storage.record import ALIGN_LEAST, RecordKey, checksum, form_of, page_key_of
from tiercel.transfer.mover import forms_of
from tiercel.tree.node import Item
from tiercel.types import HostPageId

CHECKSUMS_MOST = 1 << 16
"""Checksums that are remembered: making one reads the whole page."""


class Described(NamedTuple):
    payload_bytes: int
    header: bytes
    pieces: Sequence[Range]


class Records:
    """Any thread may use it that has a lease on the items."""

    def __init__(self, host: HostMemory, spec: CacheSpec) -> None:
        self._host, self._spec = host, spec
        self._forms = {ALIGN_LEAST: forms_of(spec, ALIGN_LEAST)}
        """The forms, by the alignment that readers ask for."""
        self._checksums: OrderedDict[tuple[HostPageId, bytes], bytes] = OrderedDict()
        """Checksums by first host page and form: an id is never used again for other bytes."""
        self._lock = threading.Lock()

    def describe(
        self, key: RecordKey, item: Item, places: tuple[HostPageId, ...], *, align: int, pieces: bool
    ) -> Described:
        """The record's description. `pieces`: with the places of its bytes."""
        if align not in self._forms:
            self._forms[align] = forms_of(self._spec, align)
        number, sizes = self._part(key, item)
        form = self._forms[align][item.kind][number]
        ranges = self._host.ranges(places, sizes, item.kind)[number] if pieces else ()
        header = form.header_of(page_key_of(key), self._sum(key, item, places))
        return Described(form.payload_bytes, header, ranges)

    def views(self, key: RecordKey, item: Item, places: tuple[HostPageId, ...]) -> list[memoryview]:
        """The record's bytes, in order."""
        number, sizes = self._part(key, item)
        return self._host.views(places, sizes, item.kind)[number]

    def _part(self, key: RecordKey, item: Item) -> tuple[int, list[int]]:
        """The record's number among those of the item, and the sizes of these records up to it."""
        forms = self._forms[ALIGN_LEAST][item.kind]
        number = next(i for i, form in enumerate(forms) if form.digest == form_of(key))
        return number, [form.payload_bytes for form in forms[: number + 1]]

    def _sum(self, key: RecordKey, item: Item, places: tuple[HostPageId, ...]) -> bytes:
        name = places[0], form_of(key)
        with self._lock:
            known = self._checksums.get(name)
        if known is not None:
            return known
        made = checksum(self.views(key, item, places))
        with self._lock:
            self._checksums[name] = made
            if len(self._checksums) > CHECKSUMS_MOST:
                self._checksums.popitem(last=False)
        return made
