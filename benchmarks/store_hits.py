"""Time to the first token of a prompt whose pages only a store has, beside computing it.

    python -m benchmarks.store_hits [--json] [--quick]

    recompute         no store, nothing cached
    store             a file store that has every page
    store_throttled   the same, read at 1 MB/s: computing is sooner
    store_turned_slow the first prompt after a store that was fast became that slow
    store_stuck       the first prompt after it stopped answering altogether
    begins_after_last_byte   from the last byte on the host to the request's beginning

The engine knows nothing of which is which. Rounds are interleaved; medians, except that the last two are
single events each round and their worst is told as well.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import first_token_ms, make_engine, rest, throughput, words
from benchmarks.machine import describe, parser_of, tell
from tiercel.engine.engine import Engine
from tiercel.storage.base import Get, Store
from tiercel.storage.file import FileStore

MIB = 1024**2

PROMPT_TOKENS = 4096
ROUNDS = 5
SLOW_BYTES_S = 1e6
GIB = 1024**3


class Throttled(FileStore):
    """A file store that reads slowly, or not at all, while it is told to."""

    bytes_s: float | None = None
    gate: threading.Event
    line = threading.Lock()

    def get(self, wanted: Sequence[Get]) -> list[bool]:
        self.gate.wait()
        if self.bytes_s is not None:
            with self.line:  # one after the other: so fast in all, however many read
                time.sleep(sum(each.bytes for each in wanted) / self.bytes_s)
        return super().get(wanted)


def attached(folder: Path, store_class: type[Store] = FileStore) -> tuple[Engine, Store]:
    engine = make_engine(host_mib=128)
    store = store_class(folder, GIB)  # type: ignore[call-arg]
    return engine, store


def ttft(folder: Path, rounds: int = ROUNDS, tokens: int = PROMPT_TOKENS) -> dict[str, float]:
    """Milliseconds."""
    prompt, times = words(tokens, 1), defaultdict[str, list[float]](list)
    filling, store = attached(folder / "store")
    filling.cache.attach(store)
    first_token_ms(filling, prompt)
    rest(filling)
    filling.cache.close()
    cold = make_engine(force_miss=True)
    for _ in range(rounds):
        times["recompute"].append(first_token_ms(cold, prompt)[0])
        for name in ("store", "store_throttled", "store_turned_slow", "store_stuck"):
            taken, begins_ms = _one(folder / "store", name, prompt)
            times[name].append(taken)
            if name == "store":
                times["begins_after_last_byte"].append(begins_ms)
    cold.cache.close()
    worst = {f"{name}_worst": max(times[name]) for name in ("store_turned_slow", "store_stuck")}
    return {name: statistics.median(taken) for name, taken in times.items()} | worst


def no_hit(folder: Path, rounds: int = ROUNDS) -> float:
    """Tokens/s of texts that never repeat with three tiers, each written to all the time, over none."""
    tiers, store = make_engine(device_mib=8, host_mib=16), FileStore(folder / "full", GIB)
    tiers.cache.attach(store)
    none = make_engine(device_mib=8, force_miss=True)
    quick = rounds < ROUNDS
    for engine in (tiers, none):
        throughput(engine, 999, quick=quick)
    ratios = [
        throughput(tiers, seed, quick=quick) / throughput(none, seed, quick=quick) for seed in range(rounds)
    ]
    for engine in (tiers, none):
        engine.cache.close()
    return statistics.median(ratios)


def _one(folder: Path, name: str, prompt: tuple[int, ...]) -> tuple[float, float]:
    """A new engine on the store, which has computed a little before and knows how fast that is."""
    Throttled.gate = threading.Event()
    Throttled.gate.set()
    engine, store = attached(folder, Throttled)
    assert isinstance(store, Throttled)
    store.bytes_s = SLOW_BYTES_S if name == "store_throttled" else None
    first_token_ms(engine, words(len(prompt) // 4, 7))
    rest(engine)
    engine.cache.attach(store)
    rest(engine)
    if name == "store_turned_slow":
        store.bytes_s = SLOW_BYTES_S
    if name == "store_stuck":
        Throttled.gate.clear()
    begun_s: list[float] = []
    begin = engine.cache.begin

    def timed(*args: Any, **options: Any) -> Any:
        outcome = begin(*args, **options)
        begun_s.append(time.monotonic())
        return outcome

    engine.cache.begin = timed  # type: ignore[method-assign]
    taken = first_token_ms(engine, prompt)[0]
    assert engine.cache.store is not None
    begins_ms = 1e3 * (begun_s[-1] - engine.cache.store.fetches.reading.ended_s)
    Throttled.gate.set()
    store.bytes_s = None
    engine.cache.close()
    return taken, begins_ms


def main() -> None:
    options = parser_of(__doc__).parse_args()
    rounds, tokens = (1, 512) if options.quick else (ROUNDS, PROMPT_TOKENS)
    with tempfile.TemporaryDirectory(prefix="tiercel-hits-") as temporary:
        folder = Path(temporary)
        figures = {"ttft_ms": ttft(folder, rounds, tokens), "no_hit": no_hit(folder, rounds)}
    tell({"machine": describe(), **figures}, as_json=options.json)


if __name__ == "__main__":
    main()
