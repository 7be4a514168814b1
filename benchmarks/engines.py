"""What it costs to keep another engine's pages in our store by the engine's own interface.

    python -m benchmarks.engines [--json] [--quick] [--folder /some/disk]

Batches of 128 pages of 256 KiB are put, and read back, by each way in turns; GB/s, medians of rounds, and
their ratio to `plain` in the same round. Each engine runs in an environment of its own: `make engines`
installs them, and those that are missing are left out. All ways of one engine use the same memory.

    plain               a file store, as each of its users works: header and checksum are made, and verified
    pages               `NamedPages` over it
    sglang              SGLang's HiCache, in place;  sglang_tensors: as SGLang calls it by default
    sglang_own          SGLang's own file back end
    vllm, vllm_own      a secondary tier of vLLM's offloading; its own file tier
    lmcache, lmcache_own    an L2 of LMCache's server; its own file adapter

The own back ends do not sync and do not verify: what they put may be lost, or wrong. Before they are read,
their files are synced and leave the page cache, which our store never uses.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, parser_of, tell
from tiercel.integrations.named_pages import NamedPages
from tiercel.storage.base import Get, Put
from tiercel.storage.file import FileStore
from tiercel.storage.record import Form
from tiercel.types import Kind

PAGE_BYTES, BATCH = 256 * 1024, 128
TOKENS, LAYERS, HEADS, DIM = 64, 8, 2, 64  # 2 x 2 bytes x TOKENS x LAYERS x HEADS x DIM is a page
ROOT = Path(__file__).parent.parent
URL = "file://{}?size=8GiB&free=0"

Pages = Sequence[Sequence[memoryview]]
"""The memory of each page of a batch, in pieces."""


@dataclass(frozen=True)
class Way:
    put: Callable[[list[str]], None]
    get: Callable[[list[str]], None]
    close: Callable[[], None]
    folder: Path | None = None
    """Where files lie that are read through the page cache."""


def plain(folder: Path, pages: Pages) -> Way:
    store = FileStore(folder, 8 << 30, free=0)
    form = Form(Kind.PAGE, bytes(16), (("kv", (0,), PAGE_BYTES),), PAGE_BYTES, store.align)

    def put(keys: list[str]) -> None:
        named = [sha256(key.encode()).digest() for key in keys]
        values = [
            Put(form.key(key), [form.header(key, page), *page])
            for key, page in zip(named, pages, strict=True)
        ]
        assert all(store.put(values))

    def get(keys: list[str]) -> None:
        named = [sha256(key.encode()).digest() for key in keys]
        heads = [memoryview(bytearray(form.header_bytes)) for _ in keys]
        wanted = [
            Get(form.key(key), [head, *page]) for key, head, page in zip(named, heads, pages, strict=True)
        ]
        assert all(store.get(wanted))
        assert all(
            form.flaw(head, key, page) is None for head, key, page in zip(heads, named, pages, strict=True)
        )

    return Way(put, get, store.close)


def named(folder: Path, pages: Pages) -> Way:
    ours = NamedPages(URL.format(folder), {"engine": "benchmark"})
    pool = ours.pool("kv", PAGE_BYTES)

    def put(keys: list[str]) -> None:
        assert all(pool.put(keys, pages))

    def get(keys: list[str]) -> None:
        assert all(pool.get(keys, pages))

    return Way(put, get, ours.close)


def in_memory(_folder: Path) -> tuple[Pages, dict[str, Way]]:
    memory = memoryview(mmap.mmap(-1, BATCH * PAGE_BYTES))
    return [[memory[n * PAGE_BYTES : (n + 1) * PAGE_BYTES]] for n in range(BATCH)], {}


def in_sglang(folder: Path) -> tuple[Pages, dict[str, Way]]:
    import tests.engines.conftest  # noqa: F401 - what SGLang's torchvision lacks on a CPU
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName, PoolTransfer
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.runtime_context import get_context
    from tests.engines.sglang_cpu import host_pool_of
    from tests.engines.test_sglang import close, config_of, registered

    from tiercel.integrations.sglang import HiCache

    configuration = get_context().override_server_args(device="cpu")
    configuration.__enter__()  # for as long as this process
    device = MHATokenToKVPool(BATCH * TOKENS, TOKENS, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False)
    pool = host_pool_of(device, "page_first_direct")
    indices = torch.arange(BATCH * TOKENS)
    starts, sizes = pool.get_page_buffer_meta(indices)
    pieces = [
        memoryview((ctypes.c_char * size).from_address(start)).cast("B")
        for start, size in zip(starts, sizes, strict=True)
    ]
    each = len(pieces) // BATCH
    tensors = [pool.get_dummy_flat_data_page() for _ in range(BATCH)]
    ways = dict[str, Way]()

    def of_pool(name: str, storage: Any, own: Path | None) -> None:
        def put(keys: list[str]) -> None:
            transfer = PoolTransfer(PoolName.KV, host_indices=indices, keys=keys)
            assert all(storage.batch_set_v2([transfer])[PoolName.KV])

        def get(keys: list[str]) -> None:
            transfer = PoolTransfer(PoolName.KV, host_indices=indices, keys=keys)
            assert all(storage.batch_get_v2([transfer])[PoolName.KV])

        ways[name] = Way(put, get, (lambda: None) if own else partial(close, storage), own)

    def config(name: str, *, v1: bool) -> Any:
        made = config_of(folder, v1=v1)
        made.extra_config["store"] = URL.format(folder / name)
        return made

    pools = {PoolName.KV: pool}
    of_pool("sglang", registered(HiCache(config("sglang", v1=True), {}), pools), None)
    (folder / "own").mkdir()
    of_pool(
        "sglang_own",
        registered(HiCacheFile(config("", v1=False), str(folder / "own")), pools),
        folder / "own",
    )
    by_tensors = registered(HiCache(config("tensors", v1=False), {}), pools)

    def put(keys: list[str]) -> None:
        flat = [pool.get_data_page(n * TOKENS) for n in range(BATCH)]
        assert by_tensors.batch_set(keys, flat)

    def get(keys: list[str]) -> None:
        for number, page in enumerate(by_tensors.batch_get(keys, tensors)):
            pool.set_from_flat_data_page(number * TOKENS, page)

    ways["sglang_tensors"] = Way(put, get, by_tensors.close)
    return [pieces[first : first + each] for first in range(0, len(pieces), each)], ways


def in_vllm(folder: Path) -> tuple[Pages, dict[str, Way]]:
    import numpy as np
    from tests.engines import test_vllm
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob

    test_vllm.CHUNK = PAGE_BYTES
    spec = test_vllm.spec_of(URL.format(folder / "vllm"), chunks=BATCH)
    spec.config.extra_config["secondary_tiers"].append({"type": "fs", "root_dir": str(folder / "own")})
    manager = spec.get_manager()
    rows = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)
    context = ReqContext("benchmark")
    jobs = 0

    def job(tier: Any, keys: list[str], *, load: bool) -> None:
        nonlocal jobs
        jobs += 1
        names = [make_offload_key(sha256(key.encode()).digest(), 0) for key in keys]
        asked = TransferJob(jobs, names, np.arange(BATCH), load, context)
        (tier.submit_load if load else tier.submit_store)(asked)
        while not (done := list(tier.get_finished_jobs())):
            time.sleep(0.0002)
        assert all(each.success for each in done)

    def of_tier(tier: Any, close: Callable[[], None], own: Path | None) -> Way:
        return Way(partial(job, tier, load=False), partial(job, tier, load=True), close, own)

    ours, theirs = manager.secondary_tiers
    ways = {
        "vllm": of_tier(ours, lambda: None, None),
        "vllm_own": of_tier(theirs, manager.shutdown, folder / "own"),
    }
    return [[memoryview(row)] for row in rows], ways


def in_lmcache(folder: Path) -> tuple[Pages, dict[str, Way]]:
    from lmcache.v1.distributed.api import ObjectKey
    from tests.engines import lmcache_adapter as made

    shape = made.layout(LAYERS, 2, TOKENS, HEADS * DIM)
    objects = [made.memory(shape) for _ in range(BATCH)]

    def names(keys: list[str]) -> list[Any]:
        return [ObjectKey(sha256(key.encode()).digest(), "a/model", 0x01000100, 0, "") for key in keys]

    def of_adapter(spec: dict[str, Any], own: Path | None) -> Way:
        driver = made.Driver(made.make(spec))
        adapter = driver.adapter

        def put(keys: list[str]) -> None:
            assert driver.stored(adapter.submit_store_task(names(keys), objects)).is_successful()

        def get(keys: list[str]) -> None:
            number = adapter.submit_load_task(names(keys), objects)
            query = partial(adapter.query_load_result, number)
            assert driver.wait(adapter.get_load_event_fd(), query).popcount() == BATCH

        return Way(put, get, adapter.close, own)

    own = {"type": "fs", "base_path": str(folder / "own")}
    ways = {
        "lmcache": of_adapter(made.ours(URL.format(folder / "lmcache")), None),
        "lmcache_own": of_adapter(own, folder / "own"),
    }
    return [[memoryview(item.byte_array).cast("B")] for item in objects], ways


ENGINES = {"memory": in_memory, "sglang": in_sglang, "vllm": in_vllm, "lmcache": in_lmcache}


def forget(folder: Path) -> None:
    """Let all files of a folder leave the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(engine: str, folder: Path, rounds: int, batches: int) -> dict[str, list[tuple[float, float]]]:
    """GB/s of puts and of gets by each way, for each round."""
    pages, more = ENGINES[engine](folder)
    ways = {"plain": plain(folder / "plain", pages), "pages": named(folder / "pages", pages), **more}
    right = os.urandom(PAGE_BYTES + BATCH)
    size, found = batches * BATCH * PAGE_BYTES, defaultdict[str, list[tuple[float, float]]](list)
    for number in range(rounds):
        turn = list(ways.items())
        for name, way in turn[number % len(turn) :] + turn[: number % len(turn)]:
            keys_of = [[f"{number} {batch} {page}" for page in range(BATCH)] for batch in range(batches)]
            write(pages, right)
            began_s = time.monotonic()
            for keys in keys_of:
                way.put(keys)
            put_s = time.monotonic() - began_s
            write(pages, bytes(len(right)))
            if way.folder is not None:
                forget(way.folder)
            began_s = time.monotonic()
            for keys in keys_of:
                way.get(keys)
            get_s = time.monotonic() - began_s
            assert all(b"".join(page) == right[n : n + PAGE_BYTES] for n, page in enumerate(pages)), (
                f"{name} read other bytes"
            )
            found[name].append((size / put_s / 1e9, size / get_s / 1e9))
    for way in ways.values():
        way.close()
    return found


def write(pages: Pages, data: bytes) -> None:
    for number, page in enumerate(pages):
        at = number
        for piece in page:
            piece[:] = data[at : at + len(piece)]
            at += len(piece)


def newest() -> dict[str, Path]:
    """The Python of each engine that is installed, of its newest version."""
    pythons = {"memory": Path(sys.executable)}
    for path in sorted(
        (ROOT / ".venv" / "engines").glob("*-*/installed"),
        key=lambda path: [int(each) for each in path.parent.name.partition("-")[2].split(".")],
    ):
        pythons[path.parent.name.partition("-")[0]] = path.parent / "bin" / "python"
    return pythons


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", help="on the disk in question")
    parser.add_argument("--inside", choices=ENGINES, help="measure this one here, in its environment")
    options = parser.parse_args()
    rounds, batches = (1, 1) if options.quick else (7, 4)
    if options.inside:
        told = measure(options.inside, Path(options.folder), rounds, batches)
        print("\n" + json.dumps(told))
        return
    figures: dict[str, Any] = {"where": describe()}
    for engine, python in newest().items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            command = [str(python), "-m", "benchmarks.engines", "--inside", engine, "--folder", folder]
            environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
            done = subprocess.run(
                [*command, *(["--quick"] if options.quick else [])],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        rates: dict[str, list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
        for name, found in rates.items():
            for number, what in enumerate(("put", "get")):
                mine = [each[number] for each in found]
                base = [each[number] for each in rates["plain"]]
                label = name if name not in ("plain", "pages") or engine == "memory" else f"{engine} {name}"
                figures[f"{label} {what} GB/s"] = statistics.median(mine)
                if name != "plain":
                    ratios = [a / b for a, b in zip(mine, base, strict=True)]
                    figures[f"{label} {what} / plain"] = statistics.median(ratios)
    tell(figures, as_json=options.json)


if __name__ == "__main__":
    main()
