"""Entries that attention selects on the host: `python -m benchmarks.sparse [--json] [--only room,…]`.

    room               nothing is sparse: decode and first tokens with `--sparse auto` over `--sparse off`
    forced             every text sparse over every text whole, for 1, 16 and 64 texts and several hit rates
    capacity           how many long texts run at once in the same device memory, over without
    at_capacity        decode tokens/s of as many as fit, over without
    first_token        a long prefix that the host has: bytes and time to the first token, over whole
    prefill            a prompt longer than the second pool, over one that fits
    hit_rate           choices of tiny-v4 on its own texts (on a CPU): hits for several numbers of hot rows

Long contexts are landed: their host pages are made readable, as if a peer had sent them. Keys of the indexer
are random, all else is zeros. Where it says so, choices are made up to give a hit rate (`sparse_choices`).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_engines import GIB, OneModel, RunningEngine
from benchmarks.machine import describe, parser_of, tell
from tiercel.asks.ask import Ask, Sampling
from tiercel.cache import TieredCache, Wait
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig, places_of, staged_bytes, staged_pages_of
from tiercel.engine.offline import answer_all
from tiercel.kernels.entries import encode, parts_of
from tiercel.models.rows import entries_in
from tiercel.replay.null import Clock, null_cache
from tiercel.spec import CacheSpec
from tiercel.spec.deepseek_v4 import INDEX
from tiercel.spec.presets import load
from tiercel.types import Kind, place
from tiercel.verify import exams_of

Figures = dict[str, Any]
WARM_STEPS = 16
KEYS = 16
"""Random keys of so many pages are written again and again, with other scales."""
LINK_BYTES_S = 50e9
"""What a kernel reads from pinned memory on an H200, entries and rows alike (docs/log.md)."""


@dataclass(frozen=True)
class Sizes:
    device_bytes: int = 10 * 10**9
    host_bytes: int = 40 * 10**9
    context: int = 32_768
    long: int = 131_072
    short: int = 2048
    batches: tuple[int, ...] = (1, 16, 64)
    periods: tuple[int, ...] = (10, 2, 5, 20)
    steps: int = 48
    rounds: int = 3
    beside: int = 16


QUICK = Sizes(2 * GIB, 2 * GIB, 4096, 8192, 1024, (1, 4), (10, 2), 8, 1, 2)
QUICK_CPU = Sizes(GIB // 16, GIB // 4, 1024, 2048, 256, (1, 2), (10,), 4, 1, 2)


class NoChoices:
    """On a CPU the indexer chooses."""

    def every(self, period: int) -> None:
        pass


@dataclass
class Bench:
    sizes: Sizes
    device: str
    model: str
    off: Any
    """The model with all pages whole, opened when it is needed; and its engine."""
    on: Any
    choices: Any

    def engine(self, on: bool) -> RunningEngine:
        return self.on if on else self.off


def open_both(options: argparse.Namespace, sizes: Sizes) -> Bench:
    choices: Any = NoChoices()
    if options.device != "cpu":
        from benchmarks.sparse_choices import Choices  # here: a CPU needs no Triton

        choices = Choices(options.device)
    made = []
    for sparse in ("off", "always"):  # `fresh` says whether pages are sparse always or where there is no room
        own = {"host_bytes": sizes.host_bytes // (1 if sparse == "always" else 4), "sparse": sparse}
        began = time.perf_counter()
        model = OneModel(options.model, options.device, sizes.device_bytes, context=sizes.long + 8192, **own)
        print(f"# opened, {sparse}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        made.append(RunningEngine(model.first))
        made[-1].words = model.words  # type: ignore[attr-defined]
    return Bench(sizes, options.device, options.model, made[0], made[1], choices)


# Texts


def landed(running: RunningEngine, tokens: int, seed: int, more: int = 1) -> tuple[int, ...]:
    """A prompt whose first pages the host has, and a tail behind them; and so many tokens behind."""
    cache = running.cache
    prompt: tuple[int, ...] = running.words(tokens + more, seed)  # type: ignore[attr-defined]
    pages = tokens // cache.spec.page_tokens
    chain = cache.chain(prompt)
    transfer = cache.land(chain, 0, pages, tails=[pages])
    assert len(transfer.moves) in (0, pages + 1), f"{len(transfer.moves)} of {pages} pages have room"
    for _, _, host in transfer.moves:  # what lay there before may be no numbers
        for part in cache.host.views(host, [len(host) * cache.spec.place_bytes])[0]:
            np.frombuffer(part, np.uint8)[:] = 0
    _write_keys(cache, [place(host[0]) for page, _, host in transfer.moves if page.kind is Kind.PAGE], seed)
    cache.landed(transfer)
    return prompt


def _write_keys(cache: TieredCache, pages: Sequence[int], seed: int) -> None:
    """Keys that differ, as those of a text do: to choose among equal ones takes another time."""
    random = torch.Generator().manual_seed(seed)
    for stream in cache.spec.page_streams if pages else ():
        if stream.role != INDEX:
            continue
        for layer in stream.layers:
            rows = cache.host.view(stream.name, layer)
            entries = entries_in(rows, stream, cache.spec.page_tokens)
            keys = encode(torch.randn(KEYS * entries.per_row, entries.dim, generator=random), entries)
            some = torch.randint(KEYS, (len(pages),), generator=random)
            for part, data in zip(parts_of(entries), keys, strict=True):
                part[torch.tensor(pages)] = data.unflatten(0, (KEYS, entries.per_row))[some]
            if entries.encoding == "fp8_row":
                scales = 0.5 + torch.rand(len(pages), entries.per_row, 1, generator=random)
                parts_of(entries)[1][torch.tensor(pages)] = scales.view(torch.uint8)


def fresh(running: RunningEngine, always: bool) -> None:
    """Nothing is cached on the device. What has landed stays on the host."""
    running.end_all()
    running.empty_device()
    if running.cache.residency is not None:
        running.cache.residency.always = always


def decode(running: RunningEngine, prompts: Sequence[Sequence[int]], steps: int) -> float:
    """Seconds of a step of these texts."""
    longest = 4 * (steps + WARM_STEPS) + 4 * len(prompts)
    running.decode(len(prompts), prompts.__getitem__, longest)
    for _ in range(WARM_STEPS):
        running.step()
    start, drawn = time.perf_counter(), 0
    for _ in range(steps):
        drawn += sum(len(delta.tokens) for delta in running.step())
    took = time.perf_counter() - start
    assert drawn == steps * len(prompts), f"{drawn} tokens of {len(prompts)} texts"
    return took / steps


def sparse_pages(running: RunningEngine) -> int:
    return sum(len(request.sparse) for request in running.cache.requests)


# One function for each section


def room(bench: Bench) -> Figures:
    """Rounds of both alternate. The contexts of decode are short, those of first tokens long."""
    sizes, rates, firsts = bench.sizes, {True: [], False: []}, {}
    bench.choices.every(0)
    for batch in (1, sizes.batches[-1]):
        rates = {True: [], False: []}
        for number in range(sizes.rounds + 1):
            for on in (False, True):
                running = bench.engine(on)
                fresh(running, False)
                prompts = [landed(running, sizes.short, 100 + i) for i in range(batch)]
                rates[on].append(batch / decode(running, prompts, sizes.steps))
                assert not on or not sparse_pages(running)
            if number == 0:
                rates = {True: [], False: []}
        firsts[f"room_ratio.{batch}"] = _ratio(rates)
        firsts[f"room_tokens_s.{batch}"] = statistics.median(rates[True])
    for tokens in (sizes.context, sizes.long):
        times = {True: list[float](), False: list[float]()}
        for number in range(2 * sizes.rounds + 1):
            for on in (False, True):
                took = _first(bench.engine(on), tokens, 200, always=False)
                if number:
                    times[on].append(took["ms"])
        firsts[f"room_first_token_ratio.{tokens}"] = 1 / _ratio(times)
        firsts[f"room_first_token_ms.{tokens}"] = statistics.median(times[True])
    return firsts


def _ratio(found: dict[bool, list[float]]) -> float:
    return statistics.median(found[True]) / statistics.median(found[False])


def forced(bench: Bench) -> Figures:
    """The same engine and the same made-up choices: every text sparse, over every text whole."""
    sizes, running, found = bench.sizes, bench.on, Figures()
    selected = running.cache.spec.pools[1][0].selected
    for batch in sizes.batches:
        for period in sizes.periods if batch == sizes.batches[-1] else sizes.periods[:1]:
            bench.choices.every(period)
            took = {True: list[float](), False: list[float]()}
            for _ in range(max(1, sizes.rounds - 1)):
                for always in (False, True):
                    fresh(running, always)
                    prompts = [landed(running, sizes.context, 300 + i) for i in range(batch)]
                    took[always].append(decode(running, prompts, sizes.steps))
                    assert always == (sparse_pages(running) > 0)
            whole_s, sparse_s = (min(took[each]) for each in (False, True))
            misses = batch * selected / period
            size = sum(part.bytes for part in running.cache.spec.pools[1][0].parts)
            gather_s = misses * size * len(running.cache.spec.pools[1][0].layers) / LINK_BYTES_S
            name = f"{batch}.hits_{1 - 1 / period:.2f}"
            found[f"forced_ratio.{name}"] = whole_s / sparse_s
            found[f"forced_allowed.{name}"] = whole_s / (whole_s + gather_s)
            found[f"forced_ms.{name}"] = [1e3 * whole_s, 1e3 * sparse_s, 1e3 * gather_s]
    bench.choices.every(0)
    return found


def capacity(_: Bench | None) -> Figures:
    """Places only, with the shipping cache: texts of 128 K tokens whose host pages have landed, in 8 GB of
    device cache; and in 40 GB."""
    found, spec = Figures(), load("deepseek-v4-flash")
    for device in (8 * 10**9, 40 * 10**9):
        whole, sparse = (texts_fitting(each, device) for each in (spec, spec.apart))
        name = f"{device // 10**9}_gb"
        found |= {f"capacity.{name}": sparse / whole, f"capacity_texts.{name}": [whole, sparse]}
    return found


def texts_fitting(spec: CacheSpec, device_bytes: int, tokens: int = 131_072) -> int:
    staged = staged_pages_of(device_bytes, spec, tokens + 4096)
    frames, tails = places_of(device_bytes - staged_bytes(staged, spec), spec)
    pages = tokens // spec.page_tokens
    host = 700 * (pages + 8) * spec.place_bytes
    config = CacheConfig(frames, tails, host_bytes=host, staged_pages=staged)
    clock, count = Clock(), 0
    cache = null_cache(spec, config, clock, LINK_BYTES_S)
    while True:
        first = count * 1_000_000
        chain = cache.chain(np.arange(first, first + tokens + 1))
        cache.landed(cache.land(chain, 0, pages, tails=[pages] if spec.tail_streams else []))
        for _ in range(100):
            begun = cache.begin(chain, room_for=tokens + 256)
            clock.now_s += 10
            cache.step()
            if not isinstance(begun, Wait):
                break
        else:
            return count
        assert not isinstance(cache.extend(begun, tokens + 2), Wait)
        count += 1


def at_capacity(bench: Bench) -> Figures:
    """As many long texts as fit. Whole ones are counted by what fits, sparse ones are at most the rings."""
    sizes, running, found = bench.sizes, bench.on, Figures()
    bench.choices.every(10)
    rates = dict[bool, float]()
    frames = running.cache.config.device_pages
    whole = min(sizes.batches[-1], frames // (sizes.long // running.engine.page_tokens + 8))
    for always, count in ((False, whole), (True, sizes.batches[-1])):
        fresh(running, always)
        prompts = [landed(running, sizes.long, 700 + i) for i in range(count)]
        rates[always] = count / decode(running, prompts, sizes.steps // 2)
        found[f"at_capacity_texts.{'sparse' if always else 'whole'}"] = count
        found[f"at_capacity_tokens_s.{'sparse' if always else 'whole'}"] = rates[always]
    bench.choices.every(0)
    return found | {"throughput_at_capacity": rates[True] / rates[False]}


def first_token(bench: Bench) -> Figures:
    """A prefix of 128 K tokens on the host, and 1 or 200 tokens behind it. Whole and sparse alternate."""
    sizes, found = bench.sizes, Figures()
    for more in (1, 200):
        times = {True: list[Figures](), False: list[Figures]()}
        for number in range(2 * sizes.rounds + 1):
            for always in (False, True):
                took = _first(bench.on, sizes.long, more, always=always)
                if number:
                    times[always].append(took)
        for what in ("ms", "link_bytes", "device_bytes"):
            both = {each: [took[what] for took in times[each]] for each in times}
            found[f"first_token_ratio.{more}.{what}"] = _ratio(both)
            found[f"first_token.{more}.{what}"] = [statistics.median(both[each]) for each in (False, True)]
    return found


def _first(running: RunningEngine, tokens: int, more: int, *, always: bool) -> Figures:
    """A landed prefix, and the time until the first token. Bytes over the link are those of loaded pages and
    tails and of staged rows; entries of hot rows are not counted."""
    fresh(running, always)
    prompt = landed(running, tokens, 17 * more + tokens, more)
    cache, spec = running.cache, running.cache.spec
    free = cache.pages.free
    start = time.perf_counter()
    name = running.add(prompt, 2)
    taken = sparse = 0
    while True:
        deltas = running.step()
        taken = max(taken, free - cache.pages.free)
        sparse = max([sparse, *(len(request.sparse) for request in cache.requests)])
        if any(delta.request_id == name and delta.tokens for delta in deltas):
            break
    took = time.perf_counter() - start
    part = sum(map(spec.bytes_of, spec.pools[1])) if spec.second else 0
    staged = sparse * part if more > 1 else 0
    pages = tokens // spec.page_tokens
    link = pages * spec.page_bytes - sparse * part + spec.tail_bytes + staged
    running.end_all()
    return {"ms": 1e3 * took, "link_bytes": link, "device_bytes": taken * spec.unit_bytes}


def prefill(bench: Bench) -> Figures:
    """A prompt of 128 K tokens that is computed: with a second pool of an eighth of it, over all of it; and
    the time between two tokens of 16 texts beside it."""
    sizes, running, found = bench.sizes, bench.on, Figures()
    pages = sizes.long // running.engine.page_tokens
    took = dict[bool, float]()
    for small in (False, True):
        fresh(running, False)
        held = list[Any]()
        gaps, last = list[float](), dict[str, float]()
        short = [landed(running, sizes.short, 900 + i) for i in range(sizes.beside)]
        running.decode(len(short), short.__getitem__, sizes.long // 32)
        if small:  # others hold all of the second pool but an eighth of the prompt
            free = -running.cache.pages.lack(0, 0)
            held = running.cache.pages.take(0, max(0, free - pages // 8 - 2 * sizes.beside))
        start = time.perf_counter()
        name = running.add(running.words(sizes.long, 4321 + small), 1)  # type: ignore[attr-defined]
        done = False
        while not done:
            now = time.perf_counter()
            for delta in running.step():
                done = done or (delta.request_id == name and delta.finish is not None)
                if delta.request_id in last:
                    gaps.append(now - last[delta.request_id])
                last[delta.request_id] = now
        took[small] = time.perf_counter() - start
        found[f"prefill_s.{'small' if small else 'whole'}"] = took[small]
        found[f"prefill_gap_ms.{'small' if small else 'whole'}"] = [
            1e3 * statistics.median(gaps), 1e3 * statistics.quantiles(gaps, n=100)[98]
        ]  # fmt: skip
        found[f"prefill_sparse.{'small' if small else 'whole'}"] = running.cache.counters["pages_sparse"]
        running.end_all()
        running.cache.pages.release(held)
    return found | {"prefill_ratio": took[False] / took[True]}


def hit_rate(_: Bench | None) -> Figures:
    """The choices of tiny-v4 while it answers questions about texts of 6 K tokens, with the shipping kernels
    on a CPU: hits of hot rows of 1, 2 and 4 times the chosen entries, and misses of a step and layer."""
    from tiercel.kernels import native

    seen = dict[int, list[list[int]]]()
    resolve = native.resolve

    def watch(chosen: Any, flat: Any, end: Any, hot: Any, layer: int, *rest: Any) -> None:
        if len(chosen) == 1:
            seen.setdefault(layer, []).append([-2 - code for code in chosen[0].tolist() if code <= -2])
        resolve(chosen, flat, end, hot, layer, *rest)

    native.resolve = watch  # type: ignore[assignment]
    config = EngineConfig(
        cache=CacheConfig(host_bytes=GIB // 2, sparse="always"), speculate="off", context_tokens=8_192
    )
    engine, _ = open_engine(Build("tiny-v4", device_bytes=GIB // 8), config)
    most, found = engine.cache.spec.pools[1][0].selected, Figures()
    rates, missed = {times: list[float]() for times in (1, 2, 4)}, list[int]()
    for number, (context, question, _) in enumerate(islice(exams_of(engine, "tiny-v4"), 3)):
        text = (context * (6_000 // len(context) + 1))[:6_000] + question
        seen.clear()
        ask = Ask(str(number), tuple(text), Sampling(48, temperature=0, ignore_eos=True))
        answer_all(engine, [ask])
        for times in rates:
            for lists in seen.values():
                hits, misses = _least_recent(lists, times * most)
                rates[times].append(sum(hits) / max(1, sum(hits) + sum(misses)))
                missed += misses if times == 2 else []
    engine.cache.close(0.0)
    native.resolve = resolve
    found |= {f"hit_rate.{times}_times": statistics.mean(each) for times, each in rates.items()}
    return found | {"hit_rate_misses_of_a_step_and_layer": statistics.mean(missed), "hit_rate_chosen": most}


def _least_recent(lists: Sequence[Sequence[int]], cells: int) -> tuple[list[int], list[int]]:
    """Hits and misses of each step but the first, which finds nothing."""
    held, hits, misses = dict[int, None](), list[int](), list[int]()
    for chosen in lists:
        known = [e for e in chosen if e in held]
        hits.append(len(known))
        misses.append(len(chosen) - len(known))
        for e in [*(e for e in chosen if e not in held), *known]:
            held.pop(e, None)
            held[e] = None
        while len(held) > cells:
            del held[next(iter(held))]
    return hits[1:], misses[1:]


SECTIONS: dict[str, Callable[[Any], Figures]] = {
    "hit_rate": hit_rate,
    "capacity": capacity,
    "room": room,
    "forced": forced,
    "first_token": first_token,
    "at_capacity": at_capacity,
    "prefill": prefill,
}
FOR_CPU = ("capacity", "hit_rate")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="v4-flash-8e")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    options = parser.parse_args()
    asked = options.only.split(",")
    figures: Figures = {"machine": describe()}
    sizes = Sizes()
    if options.quick:
        sizes = QUICK_CPU if options.device == "cpu" else QUICK
    needs_model = any(each not in FOR_CPU for each in asked)
    bench = open_both(options, sizes) if needs_model else None
    for name in asked:
        began = time.perf_counter()
        try:
            for running in (bench.off, bench.on) if bench else ():
                running.end_all()
                running.empty_device_and_host()
            found = SECTIONS[name](bench)
        except Exception as error:  # noqa: BLE001 - the other sections are measured all the same
            found = {"failed": {**figures.get("failed", {}), name: repr(error)}}
        figures |= found
        gc.collect()
        print(f"# {name}: {time.perf_counter() - began:.1f} s {found}", file=sys.stderr, flush=True)
    tell(figures, as_json=options.json)
    sys.exit(1 if figures.get("failed") else 0)


if __name__ == "__main__":
    main()
