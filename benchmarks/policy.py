"""Which share of prompt tokens each eviction policy saves: `python -m benchmarks.policy [--json] TRACES…`,
or `--quick` without traces.

A trace is a file, or a folder whose files are replayed together. Every policy is replayed with the shipping
code (`tiercel.replay`), half of the bytes on each tier; with `--device-only` all on the device; with
`--store` a store of four times the bytes is below them. DeepSeek V4 Flash, one request at a time. `shipping`
is what the default settings do; `new` is the policy `value`. A token that is computed again by an exact
replay counts as not saved. The bounds (`benchmarks.policy_models`) have one tier of the same bytes. Requests
that do not fit on the device are left out for all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.replay.traffic import conversations, write_tokens

from benchmarks import policy_models
from benchmarks.machine import describe, parser_of, tell
from tiercel.config import CacheConfig
from tiercel.engine.config import places_of
from tiercel.replay.formats import read_trace
from tiercel.replay.run import Serving, replay
from tiercel.replay.sizes import Sizes
from tiercel.replay.trace import Trace
from tiercel.spec.presets import load

GB = 10**9
GIGABYTES = (4, 16, 64, 256)
POLICIES = {"shipping": CacheConfig().evict, "lru": "lru", "slru": "slru", "lfu": "lfu", "new": "value"}
BOUNDS = ("oracle", "no_tails", "belady")
SPEC = load("deepseek-v4-flash")

Job = tuple[Path, int, str, Sizes]


@lru_cache
def trace_at(path: Path) -> Trace:
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    return read_trace(files, SPEC.page_tokens)


def fitting(trace: Trace, device_bytes: int) -> Trace:
    """Without the requests that a replay would refuse."""
    pages, _ = places_of(device_bytes, SPEC)
    room = (pages - 2 * SPEC.pages_per_window * SPEC.places_per_tail) * SPEC.page_tokens
    return replace(trace, requests=[r for r in trace.requests if r.prompt_tokens + r.output_tokens < room])


def hit_ratio(job: Job) -> float:
    path, gigabytes, name, sizes = job
    size = gigabytes * GB
    trace = fitting(trace_at(path), size // 2)
    capacity, tail_pages = size // SPEC.place_bytes, SPEC.places_per_tail
    if name == "belady":
        return policy_models.belady(trace, capacity)
    if name in BOUNDS:
        needed = policy_models.resumed_at(trace) if name == "oracle" else None
        return policy_models.lru(trace, capacity, tail_pages, needed)
    report = replay(trace, SPEC, sizes, policy=POLICIES[name], serving=Serving(one_at_a_time=True))
    assert not report.refused, "the bounds count other requests"
    return report.hit_ratio


def sizes_of(gigabytes: int, *, device_only: bool, store: bool) -> Sizes:
    size = gigabytes * GB
    return Sizes(size) if device_only else Sizes(size // 2, size - size // 2, 4 * size if store else 0)


def measure(paths: list[Path], sizes: dict[int, Sizes], processes: int) -> Iterator[tuple[str, float]]:
    """`sizes`: what each number of gigabytes is divided into."""
    names = [name for name in (*POLICIES, *BOUNDS) if name != "shipping"]
    jobs = [(path, size, name, sizes[size]) for path in paths for size in sizes for name in names]
    with ProcessPoolExecutor(processes) if processes > 1 else nullcontext() as pool:
        ratios = pool.map(hit_ratio, jobs) if pool is not None else map(hit_ratio, jobs)
        for (path, size, name, _), ratio in zip(jobs, ratios, strict=True):
            for told, policy in POLICIES.items():
                if policy == POLICIES.get(name):
                    yield f"hit.{path.stem}.{size}.{told}", ratio
            if name in BOUNDS:
                yield f"hit.{path.stem}.{size}.{name}", ratio


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--gigabytes", type=int, nargs="+", default=list(GIGABYTES))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    tiers = parser.add_mutually_exclusive_group()
    tiers.add_argument("--device-only", action="store_true")
    tiers.add_argument("--store", action="store_true")
    options = parser.parse_args()
    if not (options.traces or options.quick):
        parser.error("which traces? (--quick has some of its own)")
    with TemporaryDirectory() as folder:
        traces, gigabytes, processes = options.traces, options.gigabytes, options.processes
        if options.quick:
            asked = conversations(5, 40, shared=700, turn=900, most=20_000)
            traces, gigabytes, processes = [write_tokens(Path(folder) / "small.jsonl", asked)], [1], 1
        tiers_of = partial(sizes_of, device_only=options.device_only, store=options.store)
        figures = dict(measure(traces, {size: tiers_of(size) for size in gigabytes}, processes))
    tell({"machine": describe(), **figures}, as_json=options.json)


if __name__ == "__main__":
    main()
