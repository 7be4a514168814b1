"""How fast records go to a store and come back, beside what the disk itself can do.

    python -m benchmarks.store [--json] [--quick]

Pages lie in one aligned host buffer. As in the mover, a few threads take batches of about 8 MiB; writing
includes the header with its checksum, reading includes verifying every byte. Pages are read back in random
order. Beside it, on the same disk and in the same rounds:

- the limit: the same bytes in large direct writes, one after the other, one fdatasync at the end; in large
  direct reads. The best piece size counts. Two at a time are told too, they are a little faster
- one plain file per page: written beside its place and renamed, no fsync; read back with cold caches

`flash_page` and `flash_tail` are pages and tails of DeepSeek-V4-Flash through the mover, as a server writes
and reads them: each as several records, from host pages that are not aligned for the disk.

A machine is never quiet, so the measurements are interleaved in rounds, and ratios are of medians.
The index is asked in a store of a million records that are not there: files with holes for records, and
whole tables. Asking and opening read the tables only.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, parser_of
from tiercel.memory.buffers import HostMemory
from tiercel.spec import CacheSpec, load
from tiercel.storage.base import Get, Put, Store
from tiercel.storage.file import FileStore
from tiercel.storage.file.direct import ALIGN
from tiercel.storage.file.room import segment_bytes_for
from tiercel.storage.file.segment import Segment, Table, packed_bytes
from tiercel.storage.record import Form, RecordKey, record_key
from tiercel.transfer.mover import ItemPlace, Presence, StoreMover, Work
from tiercel.types import HostPageId, Kind, PageKey

KIB, MIB, GIB = 1024, 1024**2, 1024**3
PAGE_SIZES = {"64k": 64 * KIB, "256k": 256 * KIB, "1m": MIB}
BATCH_BYTES = 8 * MIB
THREADS = 4
FLASH = {"flash_page": Kind.PAGE, "flash_tail": Kind.TAIL}


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    bytes: int = 512 * MIB
    """Of pages in each measurement; about as much of the disk is used at a time."""
    others_bytes: int = 96 * MIB
    rounds: int = 5
    others_rounds: int = 3
    records: int = 1_000_000


QUICK = Sizes(8 * MIB, 4 * MIB, 1, 1, 5000)


@dataclass
class Figures:
    """Every measurement of every round, by name; told as medians."""

    sizes: Sizes
    taken: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, value: float) -> None:
        self.taken[name].append(value)

    def rate(self, name: str, work: Callable[[], object], size: int) -> None:
        """GB/s of one piece of work. What was deleted before is not paid for by who comes next."""
        os.sync()
        start = time.perf_counter()
        work()
        self.add(name, size / (time.perf_counter() - start) / 1e9)

    def median(self, name: str) -> float:
        return statistics.median(self.taken[name])

    def best(self, start: str) -> float:
        """The best median of those whose names start so."""
        return max(self.median(name) for name in self.taken if name.startswith(start))


@dataclass(frozen=True)
class Pages:
    """Pages of one size in the host buffer, with their keys and the form of their records."""

    memory: memoryview
    size: int
    keys: list[bytes]
    form: Form

    @staticmethod
    def of(memory: memoryview, size: int, align: int) -> Pages:
        keys = [random.randbytes(32) for _ in range(len(memory) // size)]
        return Pages(memory, size, keys, Form(Kind.PAGE, bytes(16), (("kv", (0,), size),), size, align))

    def page(self, number: int) -> memoryview:
        return self.memory[number * self.size : (number + 1) * self.size]

    def key(self, number: int) -> RecordKey:
        return self.form.key(self.keys[number])

    def batches(self, order: Sequence[int]) -> list[Sequence[int]]:
        step = BATCH_BYTES // self.size
        return [order[start : start + step] for start in range(0, len(order), step)]


def main() -> None:
    options = parser_of(__doc__).parse_args()
    from benchmarks.store_hits import no_hit, ttft
    from benchmarks.store_others import measure_others  # it uses this module

    random.seed(0)
    figures = Figures(QUICK if options.quick else Sizes())
    with tempfile.TemporaryDirectory(prefix="tiercel-store-") as folder:
        memory = noise(figures.sizes.bytes)
        measure_rounds(Path(folder), memory, figures)
        measure_index(Path(folder), figures)
        measure_others(memory, figures)
        del memory
        hits: dict[str, Any] = {}
        if not options.quick:  # `benchmarks.store_hits` has a quick form of its own
            hits = {"ttft_ms": ttft(Path(folder)), "no_hit": no_hit(Path(folder))}
    told = to_json(figures) | hits
    print(json.dumps(told, indent=1) if options.json else to_table(figures.sizes, told))


# Writing and reading


def measure_rounds(folder: Path, memory: memoryview, figures: Figures) -> None:
    spec = load("deepseek-v4-flash")
    for _ in range(figures.sizes.rounds):
        for name, kind in FLASH.items():
            measure_limit(folder, memory, figures)
            measure_items(folder / "flash", spec, kind, f"file.{name}", figures)
        for name, size in PAGE_SIZES.items():
            measure_limit(folder, memory, figures)
            with FileStore(folder / "store", 2 * GIB) as store:
                measure_store(store, f"file.{name}", Pages.of(memory, size, store.align), figures)
            shutil.rmtree(folder / "store")
        measure_file_per_page(
            folder, Pages.of(memory[: len(memory) // 2], PAGE_SIZES["256k"], ALIGN), figures
        )


def measure_store(store: Store, name: str, pages: Pages, figures: Figures) -> None:
    """Any store: put all pages, then get them in random order."""
    order = list(range(len(pages.keys)))
    figures.rate(
        f"write_gb_s.{name}",
        lambda: in_threads(lambda b: put(store, pages, b), pages.batches(order)),
        len(pages.memory),
    )
    random.shuffle(order)
    figures.rate(
        f"read_gb_s.{name}",
        lambda: in_threads(lambda b: get(store, pages, b), pages.batches(order)),
        len(pages.memory),
    )


def measure_items(folder: Path, spec: CacheSpec, kind: Kind, name: str, figures: Figures) -> None:
    """Pages or tails of a model, through the mover and its threads."""
    landed, count = threading.Condition(), spec.places_of(kind)
    with HostMemory(spec, "page_first_direct", figures.sizes.bytes) as host:
        host.mapped[:] = random.randbytes(MIB) * (len(host.mapped) // MIB) + bytes(len(host.mapped) % MIB)
        store = FileStore(folder, 2 * GIB)
        mover = StoreMover(store, spec, host, landed=landed)
        ids = [HostPageId(place) for place in range(host.pages)]
        places = [tuple(ids[at : at + count]) for at in range(0, len(ids) - count + 1, count)]
        items = [ItemPlace(kind, PageKey(random.randbytes(32)), own) for own in places]
        step = max(1, BATCH_BYTES // spec.item_bytes(kind))

        def do(work: Work) -> None:
            for start in range(0, len(items), step):
                mover.submit(work, items[start : start + step])
            while mover.under_way:
                with landed:
                    landed.wait_for(lambda: mover.landed)
                for operation in mover.poll():
                    assert set(operation.answers) == {Presence.HERE}, operation

        size = len(items) * spec.item_bytes(kind)
        figures.rate(f"write_gb_s.{name}", lambda: do(Work.WRITE), size)
        figures.add(f"bytes_per_item.{name}", store.stats()["bytes"] / len(items))
        random.shuffle(items)
        figures.rate(f"read_gb_s.{name}", lambda: do(Work.READ), size)
        mover.close()
    shutil.rmtree(folder)


def put(store: Store, pages: Pages, batch: Sequence[int]) -> None:
    values = []
    for number in batch:
        header = pages.form.header(pages.keys[number], [pages.page(number)])
        values.append(Put(pages.key(number), [header, pages.page(number)]))
    assert all(store.put(values)), "the store is large enough"


def get(store: Store, pages: Pages, batch: Sequence[int]) -> None:
    size = pages.form.header_bytes
    memory = memoryview(bytearray(size * len(batch)))
    headers = [memory[start : start + size] for start in range(0, len(memory), size)]
    wanted = [Get(pages.key(n), [header, pages.page(n)]) for n, header in zip(batch, headers, strict=True)]
    assert all(store.get(wanted)), "everything was put"
    for number, header in zip(batch, headers, strict=True):
        assert pages.form.flaw(header, pages.keys[number], [pages.page(number)]) is None


def measure_limit(folder: Path, memory: memoryview, figures: Figures) -> None:
    """The same bytes through one file, in pieces of several sizes: the best of them is the limit."""
    size = len(memory)
    for piece, threads in ((size // 8, 1), (size // 64, 1), (size // 64, 2)):
        starts = range(0, size, piece)
        limit = "limit" if threads == 1 else "two_at_a_time"
        with new_file(folder / "limit") as file:
            os.posix_fallocate(file, 0, size)

            def write(at: int, file: int = file, piece: int = piece) -> None:
                assert os.pwrite(file, memory[at : at + piece], at) == piece

            def read(at: int, file: int = file, piece: int = piece) -> None:
                assert os.preadv(file, [memory[at : at + piece]], at) == piece

            def write_all(file: int = file) -> None:
                in_threads(write, starts, threads)  # noqa: B023 - called in this turn of the loop
                os.fdatasync(file)

            told = f"{piece // MIB}m" if piece >= MIB else f"{piece // KIB}k"
            figures.rate(f"{limit}_write_gb_s.{told}", write_all, size)
            reads = f"{limit}_read_gb_s.{told}"
            figures.rate(reads, lambda: in_threads(read, starts, threads), size)  # noqa: B023


def measure_file_per_page(folder: Path, pages: Pages, figures: Figures) -> None:
    """What is commonly done. Nothing is verified here, and nothing is durable."""
    (folder / "pages").mkdir()
    order = list(range(len(pages.keys)))

    def write(batch: Sequence[int]) -> None:
        for number in batch:
            path = folder / "pages" / pages.keys[number].hex()
            with open(path.with_suffix(".tmp"), "wb", buffering=0) as file:  # noqa: PTH123
                file.write(pages.page(number))
            path.with_suffix(".tmp").rename(path)

    def read(batch: Sequence[int]) -> None:
        for number in batch:
            with open(folder / "pages" / pages.keys[number].hex(), "rb", buffering=0) as file:  # noqa: PTH123
                assert file.readinto(pages.page(number)) == pages.size

    size = len(pages.memory)
    figures.rate("write_gb_s.file_per_page", lambda: in_threads(write, pages.batches(order)), size)
    drop_caches(folder / "pages")
    random.shuffle(order)
    figures.rate("read_gb_s.file_per_page", lambda: in_threads(read, pages.batches(order)), size)
    shutil.rmtree(folder / "pages")


# The index


def measure_index(folder: Path, figures: Figures) -> None:
    """Opening a store of a million records, and asking it for 128 of them at once."""
    page = 256 * KIB + ALIGN
    records = figures.sizes.records
    size = records * page * 5 // 4
    keys = [record_key(Kind.PAGE, bytes(16), random.randbytes(32)) for _ in range(records)]
    make_sealed(folder / "million", keys, page, segment_bytes_for(size))
    for _ in range(figures.sizes.rounds):
        start = time.perf_counter()
        store = FileStore(folder / "million", size)
        figures.add("open_1m_s", time.perf_counter() - start)
        assert store.stats()["records"] == records
        for _ in range(20):
            some = random.sample(keys, 128)
            start = time.perf_counter()
            found = store.contains(some)
            figures.add("contains_128_of_1m_us", (time.perf_counter() - start) * 1e6)
            assert all(found)
        store.close()


def make_sealed(folder: Path, keys: Sequence[RecordKey], page: int, segment_bytes: int) -> None:
    """Sealed segments whose records are holes."""
    folder.mkdir()
    rows = (segment_bytes - packed_bytes(segment_bytes // page)) // page
    for number, start in enumerate(range(0, len(keys), rows), 1):
        table = Table()
        table.add(
            keys[start : start + rows], note=0, offset=0, sizes=[page] * len(keys[start : start + rows])
        )
        path = folder / f"segment-{number:010}.tcs"
        with new_file(path, keep=True) as file:
            Segment(number, path, file, segment_bytes, table).seal()


# Around it


def in_threads(work: Callable[..., None], items: Iterable[object], threads: int = THREADS) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, items))


def noise(size: int) -> memoryview:
    memory, some = aligned(size), random.randbytes(MIB)
    for start in range(0, size, MIB):
        memory[start : start + MIB] = some
    return memory


def aligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@contextmanager
def new_file(path: Path, *, keep: bool = False) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    try:
        yield file
    finally:
        os.close(file)
        if not keep:
            path.unlink()


def drop_caches(folder: Path) -> None:
    """All of them where we may; otherwise those of the files."""
    os.sync()
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


# Telling


def to_json(figures: Figures) -> dict[str, Any]:
    told: dict[str, Any] = {"machine": describe()}
    for what in ("write", "read"):
        limit = figures.best(f"limit_{what}_gb_s")
        for name in (*PAGE_SIZES, *FLASH):
            told[f"{what}_ratio_{name}"] = figures.median(f"{what}_gb_s.file.{name}") / limit
        per_page = figures.median(f"{what}_gb_s.file_per_page")
        told[f"vs_file_per_page_{what}"] = figures.median(f"{what}_gb_s.file.256k") / per_page
    told |= {name: figures.median(name) for name in figures.taken}
    for name, size in PAGE_SIZES.items():
        for what in ("write", "read"):
            told[f"{what}_records_s.file.{name}"] = figures.median(f"{what}_gb_s.file.{name}") * 1e9 / size
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in told.items()}


def to_table(sizes: Sizes, told: dict[str, Any]) -> str:
    lines = [f"{told['machine']}\n{sizes.bytes // MIB} MiB in each measurement, medians of {sizes.rounds}\n"]
    flat = told | {f"ttft_ms.{name}": value for name, value in told.get("ttft_ms", {}).items()}
    lines += [f"{name:40}{value:12,.2f}" for name, value in flat.items() if isinstance(value, float)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
