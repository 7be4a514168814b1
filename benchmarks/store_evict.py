"""What does a full file store still have when it is asked? Hit rates beside exact LRU and FIFO.

    python -m benchmarks.store_evict [--json] [--quick]
    python -m benchmarks.store_evict --traces FOLDER   # mooncake_conversation.jsonl, agentic/trace_*.json.gz

Texts are replayed against a real store: what is there of a text from its first page on is read, the rest is
put. A page counts as a hit if all pages before it were hits too. `written` is what went to the disk for each
byte put. Real traces come twice: as they are, and with a host tier in front that has a quarter of the room,
since a store is asked only for what the host does not have. At the end a store is opened again in the middle
of a trace, with and without the uses it kept. Nothing here depends on the speed of the machine.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks.machine import describe, parser_of
from tiercel.storage.base import Get, Put
from tiercel.storage.file import FileStore, direct
from tiercel.storage.file.direct import ALIGN
from tiercel.storage.record import Form
from tiercel.types import Kind

FORM = Form(Kind.PAGE, b"f" * 16, (("kv", (0,), 1),), 1, FileStore.align)
RECORD_BYTES = 2 * ALIGN
SEGMENTS = 64
TEXTS = 1500
"""Of each real trace: enough to fill these stores a few times."""
Text = Sequence[int]
"""A page's name each, from the first page on."""


class Trace(NamedTuple):
    name: str
    texts: Sequence[Text]
    pages: int
    """What the store has room for."""
    host_pages: int = 0


class Cache(Protocol):
    def found(self, text: Text) -> int: ...
    def put(self, text: Text) -> None: ...


class Exact:
    """As if every record could be let go by itself, the least recently used, or the oldest."""

    def __init__(self, pages: int, *, lru: bool) -> None:
        self._pages, self._lru = pages, lru
        self._held: OrderedDict[int, None] = OrderedDict()

    def found(self, text: Text) -> int:
        count = next((i for i, page in enumerate(text) if page not in self._held), len(text))
        for page in reversed(text[:count] if self._lru else ()):
            self._held.move_to_end(page)
        return count

    def put(self, text: Text) -> None:
        for page in reversed(text):
            self._held[page] = None
            if len(self._held) > self._pages:
                self._held.popitem(last=False)


class Counting(direct.Calls):
    """The operating system, and how much it was given to write."""

    written = 0

    def pwritev(self, file: int, views: Sequence[memoryview | bytearray | bytes], offset: int) -> int:
        done = super().pwritev(file, views, offset)
        self.written += done
        return done


class Stored:
    """A file store."""

    def __init__(self, path: Path, pages: int, evict: str) -> None:
        size = pages * RECORD_BYTES
        segment_bytes = size // SEGMENTS // ALIGN * ALIGN
        self.store = FileStore(path, size, evict=evict, free=0, segment_bytes=segment_bytes)
        self.put_bytes = 0

    def found(self, text: Text) -> int:
        there = self.store.contains([_put(page).key for page in text])
        count = there.index(False) if False in there else len(text)
        if count:
            assert all(self.store.get([_get(page) for page in text[:count]]))
        return count

    def put(self, text: Text) -> None:
        there = self.store.contains([_put(page).key for page in text])
        new = [_put(page) for page, here in zip(text, there, strict=True) if not here]
        self.put_bytes += RECORD_BYTES * len(new)
        self.store.put(new)


@cache
def _put(page: int) -> Put:
    key = hashlib.sha256(b"%d" % page).digest()
    return Put(FORM.key(key), [FORM.header(key, [b"p"]), b"p"])


def _get(page: int) -> Get:
    return Get(_put(page).key, [memoryview(bytearray(FORM.header_bytes)), memoryview(bytearray(1))])


class Host:
    """What is before the store: asked first, and then for as much as it holds from the start."""

    def __init__(self, pages: int) -> None:
        self._held = Exact(pages, lru=True)

    def rest(self, text: Text) -> Text:
        rest = text[self._held.found(text) :]
        self._held.put(text)
        return rest


def replay(texts: Sequence[Text], cache: Cache, host: Host | None = None) -> float:
    """The part of all pages that were found."""
    found = asked = 0
    for text in texts:
        rest = host.rest(text) if host else text
        count = cache.found(rest)
        cache.put(rest[count:])
        found, asked = found + count, asked + len(rest)
    return found / max(1, asked)


def zipf(exponent: float, pages: int, count: int) -> list[Text]:
    """Texts of one page, some much more popular than others."""
    chance = np.random.default_rng(1)
    weights = 1 / np.arange(1, pages + 1) ** exponent
    return [[int(page)] for page in chance.choice(pages, count, p=weights / weights.sum())]


def conversation(folder: Path) -> list[Text]:
    lines = (folder / "mooncake_conversation.jsonl").read_text().splitlines()
    return [json.loads(line)["hash_ids"] for line in lines]


def sessions(folder: Path) -> list[Text]:
    """Coding agents that begin within an hour, side by side; eight blocks of 64 tokens are a page."""
    chance, asked = random.Random(3), []
    for number, path in enumerate(sorted((folder / "agentic").glob("*.json.gz"))):
        start = chance.uniform(0, 3600)
        with gzip.open(path) as file:
            for when, blocks in _requests(json.load(file)["requests"]):
                asked.append((start + when, [number << 32 | block for block in blocks[7::8]]))
    return [text for _, text in sorted(asked) if text]


def _requests(requests: list[dict]) -> Iterator[tuple[float, list[int]]]:
    for each in requests:
        if "hash_ids" in each:
            yield each["t"], each["hash_ids"]
        yield from _requests(each.get("requests", []))


Figures = dict[str, dict[str, float]]
"""By trace and policy: shares of pages that were found, and bytes written."""


def measure(trace: Trace, policies: Sequence[str]) -> Figures:
    figures: Figures = {}
    for name, lru in (("exact LRU", True), ("exact FIFO", False)):
        host = Host(trace.host_pages) if trace.host_pages else None
        figures[name] = {"hits": replay(trace.texts, Exact(trace.pages, lru=lru), host)}
    for policy in policies:
        with tempfile.TemporaryDirectory(dir=_memory()) as folder:
            before, direct.calls = direct.calls, Counting()
            calls = direct.calls
            try:
                stored = Stored(Path(folder) / "store", trace.pages, policy)
                host = Host(trace.host_pages) if trace.host_pages else None
                rate = replay(trace.texts, stored, host)
                stored.store.close()
            finally:
                direct.calls = before
            figures[policy] = {"hits": rate, "written": calls.written / max(1, stored.put_bytes)}
    return figures


def measure_restart(trace: Trace) -> Figures:
    """The next part of a trace (as long as the store has pages) without a restart, and with one."""
    half, figures = len(trace.texts) // 2, dict[str, dict[str, float]]()
    after = trace.texts[half : half + trace.pages]
    for name in ("not restarted", "restarted", "uses lost"):
        with tempfile.TemporaryDirectory(dir=_memory()) as folder:
            path = Path(folder) / "store"
            stored = Stored(path, trace.pages, "lru")
            replay(trace.texts[:half], stored)
            if name != "not restarted":
                stored.store.close()
                if name == "uses lost":
                    (path / "uses").unlink(missing_ok=True)
                stored = Stored(path, trace.pages, "lru")
            figures[name] = {"hits": replay(after, stored)}
            stored.store.close()
    return figures


def _memory() -> str | None:
    """Where files are in memory, if there is such a place: the disk is not what is measured."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a folder of its own in it


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--policies", nargs="*", default=["lru", "slru", "lfu"])
    options = parser.parse_args()
    texts, pages = (300, 128) if options.quick else (60_000, 2048)
    artificial = [
        Trace(f"Zipf {e}", zipf(e, texts // 3, texts), pages) for e in (0.8, 1.0)[int(options.quick) :]
    ]
    traces = list(artificial)
    if options.traces:
        for name, own, room in (
            ("conversation", conversation(options.traces)[:TEXTS], 8192),
            ("coding agents", sessions(options.traces)[:TEXTS], 4096),
        ):
            traces += [Trace(name, own, room), Trace(f"{name}, host", own, room, room // 4)]
    figures = {trace.name: measure(trace, options.policies) for trace in traces}
    for trace in artificial:
        figures[trace.name] |= measure_restart(trace)
    if options.json:
        print(json.dumps({"machine": describe(), **figures}, indent=1))
        return
    print(describe())
    for name, rows in figures.items():
        for what, row in rows.items():
            written = f"  written {row['written']:.2f}" if "written" in row else ""
            print(f"{name:24} {what:14} {row['hits']:.3f}{written}")


if __name__ == "__main__":
    main()
