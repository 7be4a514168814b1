"""How fast processes that share a store write and read it, beside one process that has the store alone.

    python -m benchmarks.shared [--json] [--quick] [--folder /some/disk]

Each process puts batches of 128 pages from aligned memory, one after the other, then gets other processes'
pages; nothing is verified here. GB/s of all together, medians of rounds in which the forms take turns:

    file_1      one process, `file://`: what the disk gives
    shared_N    N processes, `shared://`: pages are written by the owner, and read by each from the files
    socket      what a Unix socket carries, one stream: pages that went over it would be no faster
"""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, parser_of, tell
from tiercel.storage.base import Get, Put, Store
from tiercel.storage.file import FileStore
from tiercel.storage.record import Form
from tiercel.storage.shared import SharedStore
from tiercel.types import Kind

PAGE_BYTES, BATCH = 256 * 1024, 128
GIB = 1 << 30
FORM = Form(Kind.PAGE, bytes(16), (("kv", (0,), PAGE_BYTES),), PAGE_BYTES, FileStore.align)


def open_store(folder: str, *, shared: bool) -> Store:
    make = SharedStore if shared else FileStore
    return make(folder, 64 * GIB, free=0, **({"linger_s": 0.1} if shared else {}))


def names(process: int, batch: int) -> list[bytes]:
    return [hashlib.sha256(b"%d %d %d" % (process, batch, page)).digest() for page in range(BATCH)]


def work(folder: str, shared: bool, number: int, count: int, batches: int, turns: Any, told: Any) -> None:
    memory = memoryview(mmap.mmap(-1, BATCH * PAGE_BYTES))
    memory[:] = os.urandom(1 << 20) * (len(memory) >> 20)
    pages = [memory[n * PAGE_BYTES : (n + 1) * PAGE_BYTES] for n in range(BATCH)]
    heads = [memoryview(bytearray(FORM.header_bytes)) for _ in pages]
    headers = {
        key: FORM.header(key, [page])
        for batch in range(batches)
        for key, page in zip(names(number, batch), pages, strict=True)
    }
    with open_store(folder, shared=shared) as store:
        turns.wait()
        for batch in range(batches):
            keys = names(number, batch)
            values = [Put(FORM.key(key), [headers[key], page]) for key, page in zip(keys, pages, strict=True)]
            assert all(store.put(values))
        told.put(time.monotonic())
        turns.wait()
        for batch in range(batches):
            keys = names((number + 1) % count, batch)
            wanted = [
                Get(FORM.key(key), [head, page]) for key, head, page in zip(keys, heads, pages, strict=True)
            ]
            assert all(store.get(wanted))
        told.put(time.monotonic())
        turns.wait()


def rates(folder: Path, count: int, batches: int, *, shared: bool) -> tuple[float, float]:
    """GB/s of all processes together: of puts, of gets."""
    spawn = multiprocessing.get_context("spawn")
    turns, told = spawn.Barrier(count + 1), spawn.Queue()
    given = [(str(folder), shared, n, count, batches, turns, told) for n in range(count)]
    processes = [spawn.Process(target=work, args=each) for each in given]
    for process in processes:
        process.start()
    size, found = count * batches * BATCH * PAGE_BYTES, []
    for _ in range(2):
        turns.wait()
        began_s = time.monotonic()
        found.append(size / (max(told.get() for _ in processes) - began_s) / 1e9)
    turns.wait()
    for process in processes:
        process.join()
        assert not process.exitcode
    time.sleep(0.5 if shared else 0)  # the owner ends
    shutil.rmtree(folder)
    return found[0], found[1]


def socket_rate(size: int) -> float:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    data = memoryview(bytearray(1 << 20))

    def send() -> None:
        for _ in range(size >> 20):
            theirs.sendall(data)

    sender = threading.Thread(target=send)
    into, began_s = bytearray(1 << 20), time.monotonic()
    sender.start()
    left = size
    while left:
        left -= ours.recv_into(into)
    sender.join()
    for each in (ours, theirs):
        each.close()
    return size / (time.monotonic() - began_s) / 1e9


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", help="on the disk in question")
    options = parser.parse_args()
    batches, rounds, counts = (1, 1, (1, 2)) if options.quick else (12, 5, (1, 2, 8))
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(rounds):
            forms = [("file", 1), *(("shared", count) for count in counts)]
            for name, count in forms:
                each = batches if count < 8 else max(1, batches // 4)
                rate = rates(Path(folder, f"{name} {count} {number}"), count, each, shared=name == "shared")
                found[f"{name}_{count}_put"].append(rate[0])
                found[f"{name}_{count}_get"].append(rate[1])
            found["socket"].append(socket_rate(1 << (24 if options.quick else 30)))
    figures: dict[str, Any] = {"where": describe()}
    figures |= {f"{name} GB/s": statistics.median(each) for name, each in found.items()}
    for what in ("put", "get"):
        for count in counts:
            ratios = [
                one / alone
                for one, alone in zip(found[f"shared_{count}_{what}"], found[f"file_1_{what}"], strict=True)
            ]
            figures[f"shared_{count}_{what} / file_1_{what}"] = statistics.median(ratios)
    tell(figures, as_json=options.json)


if __name__ == "__main__":
    main()
