"""Our stores as an L2 of LMCache's server, behind its host memory.

    lmcache server … --l2-adapter '{"type": "plugin", "module_path": "tiercel.integrations.lmcache",
        "class_name": "Adapter", "adapter_params": {"store": "shared:///var/cache/kv?size=200GiB"}}'

LMCache names an object by a hash of its whole prefix, model, rank, group of layers and salt. It does not name
the type and shape of the tensors, nor the length: they are part of our record, so an object of another layout
is another object. Objects are read into LMCache's memory and written from it.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from threading import Lock
from time import monotonic
from typing import Any, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from tiercel.errors import ConfigError
from tiercel.integrations.hooks import check_hooks
from tiercel.integrations.named_pages import NamedPages, Pool
from tiercel.threads import Crew

log = logging.getLogger(__name__)

TESTED = ("0.5.5", "0.5.6")
LEFT = ("register_listener", "set_backend_identity", "list_l2_keys")
"""Calls that LMCache answers itself. Our stores have digests of keys, and can not list LMCache's."""
STORES, LOOKUPS, LOADS = 2, 1, 4
"""Tasks at the same time, by kind, so that a lookup waits for no copy. A store reads or writes the batch of a
task at once."""
STALE_S = 60.0
"""A task that waited so long for its store is given up. LMCache gives the memory of objects to others 300 s
after it submitted a store and 600 s after a load, and tells nobody."""
NOTE_BYTES = 4096
"""Enough for dozens of layouts of a group."""

Result = TypeVar("Result")


class Adapter(L2AdapterInterface):  # type: ignore[misc]
    """A store of ours behind LMCache's interface. LMCache's threads call the methods; of those that it calls
    for a request, none blocks."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:  # noqa: ARG002
        check_hooks("lmcache", L2AdapterInterface, CALLS, tested=TESTED, left=LEFT)
        super().__init__()
        if others := sorted(set(params) - {"store"}):
            raise ConfigError(
                "adapter_params", ", ".join(others), "are no options of this adapter: store is one"
            )
        if not isinstance(params.get("store"), str):
            why = 'name one, such as "store": "shared:///var/cache/kv?size=200GiB"'
            raise ConfigError("store", params.get("store"), why)
        self._pages = NamedPages(params["store"], {"engine": "lmcache"})
        self._layouts = _Layouts(self._pages)
        self._lock = Lock()
        self._locked = Counter[ObjectKey]()
        numbers = count()
        self._stores = _Tasks[L2StoreResult]("store", STORES, numbers)
        self._lookups = _Tasks[Bitmap]("lookup", LOOKUPS, numbers)
        self._loads = _Tasks[Bitmap]("load", LOADS, numbers)

    def get_store_event_fd(self) -> int:
        return int(self._stores.event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookups.event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loads.event.fileno())

    # Store

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        until_s = monotonic() + STALE_S
        return self._stores.submit(lambda: self._store(keys, objects, until_s), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return {number: self._stores.results.pop(number) for number in list(self._stores.results)}

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj], until_s: float) -> L2StoreResult:
        """It succeeds if every object is kept. Told are those that were not there before."""
        kept, new, sizes = 0, list[ObjectKey](), list[int]()
        for part in self._layouts.parts(keys, objects):
            self._layouts.note(part.keys, part.layout)
            names = [_name(key) for key in part.keys]
            here = part.pool.holds(names)
            if monotonic() >= until_s:
                break
            # Its checksums come first: should the memory be given away from now on, it would be seen.
            done = part.pool.put(names, part.memory)
            kept += sum(done)
            new += [key for key, old, each in zip(part.keys, here, done, strict=True) if each and not old]
            sizes += [part.pool.page_bytes] * (len(new) - len(sizes))
        if new:
            self._notify_keys_stored(new, sizes)
        return L2StoreResult(kept == len(keys), sum(sizes))

    # Lookup and lock

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        return self._lookups.submit(lambda: self._look_up(keys, group_layout_descs), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.results.pop(task_id, None)

    def _look_up(self, keys: list[ObjectKey], layouts: Mapping[int, MemoryLayoutDesc]) -> Bitmap:
        there = set[int]()
        for pool, numbers in self._layouts.places(keys, layouts).items():
            here = pool.holds([_name(keys[number]) for number in numbers])
            there.update(number for number, each in zip(numbers, here, strict=True) if each)
        with self._lock:
            self._locked.update(keys[number] for number in there)
        found = Bitmap(len(keys))
        for number in there:
            found.set(number)
        return found

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        with self._lock:
            for key in keys:
                self._locked[key] -= 1
                if self._locked[key] <= 0:
                    del self._locked[key]

    # Load

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        until_s = monotonic() + STALE_S
        return self._loads.submit(lambda: self._load(keys, objects, until_s), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.results.pop(task_id, None)

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj], until_s: float) -> Bitmap:
        loaded = Bitmap(len(keys))
        for part in self._layouts.parts(keys, objects):
            if monotonic() >= until_s:
                break
            done = part.pool.get([_name(key) for key in part.keys], part.memory)
            for number, each in zip(part.numbers, done, strict=True):
                if each:
                    loaded.set(number)
        if used := [keys[number] for number in loaded.get_indices_list()]:
            self._notify_keys_accessed(used)
        return loaded

    # The rest

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete those that are not locked. LMCache is told also of those that the store evicted itself."""
        with self._lock:
            free = [key for key in keys if key not in self._locked]
        gone = dict[ObjectKey, int]()
        for pool, numbers in self._layouts.places(free).items():
            pool.delete([_name(free[number]) for number in numbers])
            gone |= {free[number]: pool.page_bytes for number in numbers}
        if gone:
            self._notify_keys_deleted(list(gone), list(gone.values()))

    def get_usage(self) -> AdapterUsage:
        """What the whole store holds, as far as it tells. It evicts by itself: LMCache need not."""
        told: dict[str, Any] = self._pages.call(self._pages.store.stats, {})
        most, used = told.get("bytes_most") or 0, told.get("bytes") or 0
        return replace(super().get_usage(), total_bytes_used=used, total_capacity_bytes=most)

    def report_status(self) -> dict[str, Any]:
        """It is healthy even if its store fails, because the server then works without it."""
        return {"is_healthy": True, "type": "tiercel", **self._pages.stats(), "locked": len(self._locked)}

    def close(self) -> None:
        """LMCache's memory is not used any more when this returns."""
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self._pages.close()


CALLS = [name for name, value in vars(Adapter).items() if callable(value) and not name.startswith("_")]


class _Tasks(Generic[Result]):
    """Tasks of one kind: threads that do them, what they returned, and the event that tells LMCache so."""

    def __init__(self, kind: str, threads: int, numbers: Iterator[int]) -> None:
        self.event = create_event_notifier()
        self.results: dict[int, Result] = {}
        self._crew = Crew(threads, f"tiercel-lmcache-{kind}")
        self._numbers = numbers
        self._closed = False

    def submit(self, do: Callable[[], Result], failed: Result) -> int:
        """`failed`: the result if it raises, or is not begun before `close`."""
        number = next(self._numbers)
        self._crew.submit(self._run, number, do, failed)
        return number

    def _run(self, number: int, do: Callable[[], Result], failed: Result) -> None:
        result = failed
        try:
            if not self._closed:
                result = do()
        except Exception:
            log.exception("a task of LMCache's failed")
        finally:
            self.results[number] = result
            self.event.notify()

    def close(self) -> None:
        self._closed = True
        self._crew.shutdown()
        self.event.close()


@dataclass
class _Part:
    """The objects of a batch that have one layout."""

    layout: str
    pool: Pool
    numbers: list[int] = field(default_factory=list)
    keys: list[ObjectKey] = field(default_factory=list)
    memory: list[memoryview] = field(default_factory=list)


class _Layouts:
    """A pool for each layout, and where the object of a key may be.

    A lookup tells the layout of tensors, but not the one in which LMCache serializes them (`"serde"`). A call
    to delete tells keys alone. So the store has a note for each group of the layouts that it holds."""

    def __init__(self, pages: NamedPages) -> None:
        # Counted apart: notes are no objects.
        self._notes = NamedPages(pages.store, {"engine": "lmcache"}).pool("layouts of a group", NOTE_BYTES)
        self._pages = pages
        self._pools: dict[str, Pool] = {}
        self._noted: dict[str, list[str]] = {}
        self._lock = Lock()

    def parts(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Iterable[_Part]:
        """The objects by their layouts, without those that are shorter than their layout."""
        parts = dict[str, _Part]()
        for number, (key, item) in enumerate(zip(keys, objects, strict=True)):
            about, memory = item.metadata, item.byte_array
            layout = _text(tuple(about.shapes or [about.shape]), tuple(about.dtypes or [about.dtype]))
            pool = self._pool(layout)
            if len(memory) == pool.page_bytes:
                part = parts.setdefault(layout, _Part(layout, pool))
                part.numbers.append(number)
                part.keys.append(key)
                part.memory.append(memory)
        return parts.values()

    def places(
        self, keys: list[ObjectKey], told: Mapping[int, MemoryLayoutDesc] | None = None
    ) -> dict[Pool, list[int]]:
        """Pools, and the numbers of the keys that may be in them. `told`: by group, the layout of tensors for
        which objects are wanted. LMCache calls it a hint: a group may be missing or empty."""
        hints = [(group, each) for group, each in (told or {}).items() if each.shapes]
        tensors = {group: _text(tuple(each.shapes), tuple(each.dtypes)) for group, each in hints}
        places = defaultdict[Pool, list[int]](list)
        with self._lock:
            noted = {group: self._noted_for(group) for group in {_group(key) for key in keys}}
        for number, key in enumerate(keys):
            layouts = noted[_group(key)]
            if (wanted := tensors.get(key.object_group_id)) is not None:
                layouts = [wanted, *(each for each in layouts if each != wanted and _serialized(each))]
            for layout in layouts:
                places[self._pool(layout)].append(number)
        return places

    def note(self, keys: list[ObjectKey], layout: str) -> None:
        """From now on objects of the groups of these keys have this layout too."""
        for group in {_group(key) for key in keys}:
            with self._lock:
                noted = self._noted_for(group)
                if layout in noted:
                    continue
                noted.append(layout)
                text = json.dumps(noted).encode().ljust(NOTE_BYTES)
                if len(text) == NOTE_BYTES:
                    self._notes.delete([group])
                    self._notes.put([group], [text])

    def _noted_for(self, group: str) -> list[str]:
        """Read until there is one: another process may write it."""
        if not self._noted.get(group):
            note = bytearray(NOTE_BYTES)
            self._noted[group] = json.loads(note) if self._notes.get([group], [note])[0] else []
        return self._noted[group]

    def _pool(self, layout: str) -> Pool:
        if layout not in self._pools:
            tensors, size = json.loads(layout)
            self._pools[layout] = self._pages.pool("object", size, {"tensors": tensors})
        return self._pools[layout]


@cache
def _text(shapes: tuple[Any, ...], types: tuple[Any, ...]) -> str:
    """A layout: the shape and type of each tensor, and the bytes of all."""
    tensors = list(zip(shapes, types, strict=True))
    size = sum(shape.numel() * kind.itemsize for shape, kind in tensors)
    return json.dumps([[[list(shape), str(kind)] for shape, kind in tensors], size])


@cache
def _serialized(layout: str) -> bool:
    """LMCache serializes an object into one row of bytes."""
    tensors, size = json.loads(layout)
    return bool(tensors == [[[size], "torch.uint8"]])


def _name(key: ObjectKey) -> str:
    """Every field of it, also those that a later version may add."""
    return repr(key)


def _group(key: ObjectKey) -> str:
    return repr((key.model_name, key.kv_rank, key.object_group_id))
