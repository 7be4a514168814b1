"""The model, the engine and its tiers on one device: `python -m benchmarks.gpu [--json] [--only ttft,…]`.

    prefill_tokens_s    one long prompt, beside `transformers` on the same weights and the device's arithmetic
    decode_tokens_s     1, 16 and 64 texts, beside `transformers` and the bandwidth of the device's memory
    step_cpu_us         what the host does for a step of 64 texts while the device computes
    itl_p99_ratio       time between tokens beside loads and saves of other texts, over quiet
    ttft_ms             first token behind a prefix on the device, the host, in the store, or to be computed
    no_hit_ratio        prompts that never repeat: all tiers on over all tiers off
    multi_turn          conversations that do not fit on the device, with the host tier over without it

Ratios are of one run: both sides are measured alternately where that is possible. `--quick` makes everything
small; with `--device cpu --model tiny-v4` it runs anywhere and shows that the benchmark works, nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_compare import SOURCES, Limits, plot, table, theirs
from benchmarks.gpu_engines import QUICK, QUICK_CPU, HostClock, OneModel, RunningEngine, Sizes, Traffic
from benchmarks.machine import describe, parser_of
from tiercel.asks.ask import Usage

PLOT = Path(__file__).parents[1] / "docs" / "figures" / "ttft.svg"

Figures = dict[str, Any]

WARM_STEPS = 8
"""The first steps of a batch do not count."""


@dataclass
class Bench:
    """One run: the model that everything is measured on, how much, and what is known so far."""

    model: OneModel
    sizes: Sizes
    folder: Path
    figures: Figures = field(default_factory=dict)

    @property
    def limits(self) -> Limits:
        own = self.model.model
        return Limits(own.layers.config, self.model.spec, own.kernels.dtype)

    def share(self, rate: float, limit: float) -> float | None:
        """Of the device's limit. There is none for a CPU."""
        return rate / limit if self.model.device.type == "cuda" else None


def warm_up(bench: Bench) -> Figures:
    """Kernels are compiled and memory is taken before anything is measured."""
    start, model, sizes = time.perf_counter(), bench.model, bench.sizes
    with model.engine(host_pages=4 * model.host_pages_of(sizes.prefill, 4)) as running:
        for tokens in (sizes.prefill, sizes.prefill_beside, sizes.new_tokens):
            prompt = model.words(tokens, seed=tokens)
            running.first_token(prompt)
            running.empty_device()
            running.first_token(prompt)
        for batch in sizes.batches:
            running.decode(batch, lambda i: model.words(64, seed=100 + i), 8)
            running.end_all()
    return {"warm_up_s": time.perf_counter() - start}


# One function for each key


def prefill_tokens_s(bench: Bench) -> Figures:
    """Tokens of one prompt over the time until its first token, one prompt at a time; and its share of what
    the device's arithmetic allows. The shorter length is there to be compared with `transformers`."""
    model, sizes = bench.model, bench.sizes
    rates = {}
    with model.engine() as running:
        for tokens in (sizes.prefill, sizes.prefill_beside):
            times = []
            for i in range(4):
                took, usage = running.first_token(model.words(tokens, seed=10 * tokens + i))
                _expect(running, usage, "recompute", tokens)
                times.append(took)
            rates[tokens] = 1e3 * tokens / statistics.median(times[1:])
    long, short = rates[sizes.prefill], rates[sizes.prefill_beside]
    share = bench.share(long, bench.limits.prefill_tokens_s(sizes.prefill))
    beside = {"tokens": sizes.prefill_beside, "ours_tokens_s": short}
    return {"prefill_tokens_s": long, "prefill_share_of_arithmetic": share, "prefill_beside": beside}


def decode_tokens_s(bench: Bench) -> Figures:
    """Tokens of 1, 16 and 64 texts that decode together, each with a context of its own; and their share of
    what the bandwidth of the device's memory allows. Once more 64 texts, with sampled tokens."""
    model, sizes = bench.model, bench.sizes
    rates, shares = {}, {}
    longest = (
        2 * (sizes.decode_steps + WARM_STEPS + sizes.running) + sizes.decode_context // 16
    )  # the first waits for the last
    with model.engine() as running:
        for batch, sampled in (*((batch, False) for batch in sizes.batches), (sizes.running, True)):
            running.sampled = sampled
            running.decode(batch, lambda i: model.words(sizes.decode_context, seed=500 + i), longest)
            for _ in range(WARM_STEPS):
                running.step()
            start, drawn = time.perf_counter(), 0
            for _ in range(sizes.decode_steps):
                drawn += sum(len(delta.tokens) for delta in running.step())
            rate = drawn / (time.perf_counter() - start)
            assert drawn == batch * sizes.decode_steps, f"{drawn} tokens of {batch} texts"
            running.end_all()
            running.empty_device_and_host()
            if sampled:
                ratio = rate / rates[str(batch)]
                continue
            rates[str(batch)] = rate
            shares[str(batch)] = bench.share(rate, bench.limits.decode_tokens_s(batch, sizes.decode_context))
    return {
        "decode_tokens_s": rates,
        "decode_share_of_bandwidth": shares,
        "decode_sampled_over_greedy": ratio,
        "decode_context": sizes.decode_context,
    }


def transformers_ratio(bench: Bench) -> Figures:
    """Our rates over those of `transformers` on the same weights and device. Its texts are shorter than ours
    while decoding, which favours it."""
    sizes, ours = bench.sizes, bench.figures
    found = theirs(
        bench.model.name,
        str(bench.model.device),
        prefill=sizes.prefill_beside,
        batches=sizes.batches,
        context=sizes.their_context,
        steps=sizes.their_steps,
    )
    prefill = ours.get("prefill_beside", {}).get("ours_tokens_s")
    decode = ours.get("decode_tokens_s", {})
    return {
        "transformers_tokens_s": found,
        "transformers_ratio": {
            "prefill": _over(prefill, found["prefill"]),
            "decode": {each: _over(decode.get(each), rate) for each, rate in found["decode"].items()},
        },
    }


def step_cpu_us(bench: Bench) -> Figures:
    """Time of one decode step of 64 texts less the time that the loop waits for the device: plan, seal,
    start, advance, emit. On a CPU device the loop is the plain one, and the forward counts as waiting."""
    model, sizes = bench.model, bench.sizes
    with model.engine(overlap=model.device.type == "cuda") as running:
        clock = HostClock(running)
        tokens = 2 * (sizes.decode_steps + WARM_STEPS + sizes.running) + sizes.step_context
        running.decode(sizes.running, lambda i: model.words(sizes.step_context, seed=600 + i), tokens)
        for _ in range(WARM_STEPS):
            running.step()
        clock.waited_s, start = 0.0, time.perf_counter()
        for _ in range(sizes.decode_steps):
            running.step()
        took = time.perf_counter() - start
    each = 1e6 / sizes.decode_steps
    return {
        "step_cpu_us": {str(sizes.running): each * (took - clock.waited_s)},
        "step_us": {str(sizes.running): each * took},
    }


def itl_p99_ratio(bench: Bench) -> Figures:
    """The 99th percentile of the time between two tokens of running texts: while in every step another text
    of 8 K tokens is loaded from the host and as much is saved to it, over quiet. Nothing is computed for the
    other texts: this is what the copies cost. Rounds of both alternate."""
    model, sizes = bench.model, bench.sizes
    steps, rounds = sizes.itl_steps, sizes.itl_rounds
    tokens = 3 * rounds * (steps + WARM_STEPS) + sizes.decode_context // 8 + sizes.running
    own = model.pages_of(sizes.decode_context + sizes.decode_context // 8 + tokens)
    other = 2 * model.pages_of(sizes.itl_prefix)
    pages = sizes.itl_running * own + sizes.itl_others // 2 * other
    host = 4 * sizes.itl_others * model.host_pages_of(2 * sizes.itl_prefix, 6)
    gaps: dict[bool, list[float]] = {True: [], False: []}
    with model.engine(pages=pages, host_pages=host) as running:
        traffic = Traffic(model, running, texts=sizes.itl_others, tokens=sizes.itl_prefix)
        apart = sizes.decode_context // 64  # so that texts end their pages in different steps
        prompts = [
            model.words(sizes.decode_context + i % 8 * apart, 800 + i) for i in range(sizes.itl_running)
        ]
        running.decode(sizes.itl_running, prompts.__getitem__, tokens)
        for _ in range(rounds):
            for loud in (False, True):
                if loud:
                    traffic.prepare(steps + WARM_STEPS)
                gaps[loud] += _gaps(running, steps, traffic if loud else None)
        still = len(running.engine.scheduler.running)
        assert still == sizes.itl_running and not running.engine.counters["preemptions"], still
    quiet_s, loud_s = (statistics.quantiles(gaps[each], n=100)[98] for each in (False, True))
    return {
        "itl_p99_ratio": loud_s / quiet_s,
        "itl_ms": {
            "quiet_p50": 1e3 * statistics.median(gaps[False]),
            "quiet_p99": 1e3 * quiet_s,
            "loud_p50": 1e3 * statistics.median(gaps[True]),
            "loud_p99": 1e3 * loud_s,
            "texts_loaded": traffic.loaded,
        },
    }


def _gaps(running: RunningEngine, steps: int, traffic: Traffic | None) -> list[float]:
    """Seconds between two tokens of each text. The first steps of a round do not count."""
    last: dict[str, float] = {}
    gaps: list[float] = []
    for number in range(steps + WARM_STEPS):
        if traffic is not None:
            traffic.step()
        deltas, now = running.step(), time.perf_counter()
        for delta in deltas:
            if number >= WARM_STEPS and delta.request_id in last:
                gaps.append(now - last[delta.request_id])
            last[delta.request_id] = now
    if traffic is not None:
        traffic.finish()
        while running.cache.busy:
            running.step()
    return gaps


def ttft_ms(bench: Bench) -> Figures:
    """Milliseconds to the first token of a prompt: a prefix that one tier has and a few new tokens behind it.
    Device, host and store alternate; computing the whole prompt comes first, since it takes long. Every
    prompt is checked to have come from where it is said to come from."""
    model, sizes = bench.model, bench.sizes
    longest = max(sizes.prefixes.values()) + sizes.new_tokens
    tails = longest // model.page_tokens // 16 + 4 + 3 * sizes.ttft_rounds
    found: dict[str, dict[str, float]] = {}
    url = f"file://{bench.folder}/ttft?size=24GiB"
    with model.engine(host_pages=4 * model.host_pages_of(longest, tails), store=url) as running:
        for name, tokens in sizes.prefixes.items():
            found[name] = _ttft(bench, running, tokens)
    return {
        "ttft_ms": found,
        "ttft_host_over_device": {name: each["host"] / each["device"] for name, each in found.items()},
        "ttft_store_over_recompute": {
            name: each["store"] / each["recompute"] for name, each in found.items()
        },
    }


def _ttft(bench: Bench, running: RunningEngine, tokens: int) -> dict[str, float]:
    model, sizes, seed = bench.model, bench.sizes, 10 * tokens
    times: dict[str, list[float]] = {source: [] for source in SOURCES}
    prefix: tuple[int, ...] = ()

    def ask(source: str, *, counts: bool = True) -> None:
        nonlocal seed
        seed += 1
        prompt = prefix + model.words(sizes.new_tokens, seed)
        took, usage = running.first_token(prompt, turn_ends=(tokens,))
        _expect(running, usage, source, tokens)
        if counts:
            times[source].append(took)
        running.rest()

    for _ in range(sizes.recomputed):
        running.empty_device_and_host()
        seed += 1
        prefix = model.words(tokens, seed)
        ask("recompute")
    for number in range(sizes.ttft_rounds + 1):  # the first round warms up
        ask("device", counts=number > 0)
        running.empty_device()
        ask("host", counts=number > 0)
        running.empty_device_and_host()
        ask("store", counts=number > 0)
    return {source: statistics.median_low(each) for source, each in times.items()}


def no_hit_ratio(bench: Bench) -> Figures:
    """Tokens/s of random prompts with tiers over the same without: the cache finds and keeps nothing then.
    Device and host have room for two or three of the prompts, so everything that comes in pushes something
    out. First with the host tier, then with a store too. Rounds with and without alternate."""
    model, sizes = bench.model, bench.sizes
    tokens, seed = sizes.no_hit_prompt, 0
    pages, tails = model.pages_of(tokens) + 1, model.pages_of(tokens) // 16 + 2

    def rate(off: bool) -> float:
        nonlocal seed
        running.rest()
        running.engine.flush()
        running.miss_always(off)
        prompts = [model.words(tokens, seed := seed + 1) for _ in range(sizes.no_hit_prompts)]
        start = time.perf_counter()
        left = {running.add(prompt, 1) for prompt in prompts}
        while left:
            for delta in running.step():
                assert delta.usage.cached_tokens == 0, "a random prompt was found"
                left.discard(delta.request_id if delta.finish else "")
        return tokens * sizes.no_hit_prompts / (time.perf_counter() - start)

    figures: Figures = {}
    host = 3 * model.host_pages_of(tokens, tails)
    with model.engine(pages=5 * pages // 2, tails=4 * tails, host_pages=host) as running:
        for name, store in (("", None), ("_store", f"file://{bench.folder}/no_hit?size=8GiB")):
            if store is not None:
                running.attach(store)
            rate(False)  # does not count
            pairs = [(rate(True), rate(False)) for _ in range(sizes.no_hit_rounds)]
            off_rate, on_rate = (statistics.median(each) for each in zip(*pairs, strict=True))
            figures[f"no_hit_ratio{name}"] = statistics.median(on / off for off, on in pairs)
            figures[f"no_hit_tokens_s{name}"] = {"on": on_rate, "off": off_rate}
    return figures


def multi_turn(bench: Bench) -> Figures:
    """Conversations that go on as soon as they are answered, on a device tier that holds a fifth of them:
    with the host tier over without it. Every turn sends all of the text so far.

    Without the host tier every turn is computed from its first token. Two turns are measured, and each later
    one counts as the second, though its texts are longer.
    """
    model, sizes = bench.model, bench.sizes
    longest = sizes.shared + sizes.turns * (sizes.turn_tokens + sizes.answer)
    tails = longest // model.page_tokens // 16 + 2 * sizes.turns
    pages = sizes.conversations * model.pages_of(longest) // 5
    kept = max(2 * sizes.running, sizes.conversations * tails // 5)  # no request waits for a place for a tail
    host = sizes.conversations * model.host_pages_of(longest, tails)
    runs = {}
    for name, host_pages, turns in (("host", host, sizes.turns), ("without", 0, 2)):
        with model.engine(pages=pages, tails=kept, host_pages=host_pages) as running:
            runs[name] = _converse(bench, running, turns)
    on, off = runs["host"], runs["without"]
    return {
        "multi_turn": {
            "requests_s_ratio": on["requests_s"] / off["requests_s"],
            "ttft_ratio": on["ttft_ms_mean"] / off["ttft_ms_mean"],
            **runs,
        }
    }


def _converse(bench: Bench, running: RunningEngine, turns: int) -> dict[str, float]:
    """So many turns of all conversations. The last of them counts for those that are not measured."""
    model, sizes = bench.model, bench.sizes
    texts = [list(model.words(sizes.shared, seed=20_000 + i)) for i in range(sizes.conversations)]
    more = [model.words(turns * sizes.turn_tokens, seed=30_000 + i) for i in range(sizes.conversations)]
    turn = [0] * sizes.conversations
    asked: dict[str, tuple[int, float]] = {}
    first: list[dict[str, float]] = [{} for _ in range(turns)]
    ends, cached = list[float](), 0
    start = time.perf_counter()

    def go_on(who: int) -> None:
        begin = turn[who] * sizes.turn_tokens
        texts[who] += more[who][begin : begin + sizes.turn_tokens]
        turn[who] += 1
        asked[running.add(texts[who], sizes.answer)] = who, time.perf_counter()

    for who in range(sizes.conversations):
        go_on(who)
    while len(ends) < sizes.conversations * turns:
        for delta in running.step():
            who, asked_s = asked[delta.request_id]
            first[turn[who] - 1].setdefault(delta.request_id, time.perf_counter() - asked_s)
            texts[who] += [out.token for out in delta.tokens]
            if delta.finish is not None:
                ends.append(time.perf_counter() - start)
                cached += delta.usage.cached_tokens
                if turn[who] < turns:
                    go_on(who)
    before, left = ends[sizes.conversations * (turns - 1) - 1], sizes.turns - turns
    seconds = ends[-1] + left * (ends[-1] - before)
    waits = [statistics.mean(each.values()) for each in first]
    return {
        "turns": turns,
        "seconds": seconds,
        "requests_s": sizes.conversations * sizes.turns / seconds,
        "ttft_ms_mean": 1e3 * statistics.mean([*waits, *[waits[-1]] * left]),
        "cached_tokens_mean": cached / len(ends),
    }


# Checks and ratios


def _expect(running: RunningEngine, usage: Usage, source: str, tokens: int) -> None:
    """The prefix came from this source and no other, or the measurement is of something else."""
    found = usage.device_tokens, usage.host_tokens, usage.store_tokens
    expected = tuple(tokens * (source == each) for each in ("device", "host", "store"))
    if found != expected:
        raise RuntimeError(f"{tokens} tokens should have come from {source}: {running.why()}")


def _over(ours: float | None, their: float | None) -> float | None:
    return ours / their if ours and their else None


# Telling

SECTIONS: dict[str, Callable[[Bench], Figures]] = {
    "prefill": prefill_tokens_s,
    "decode": decode_tokens_s,
    "step_cpu": step_cpu_us,
    "itl": itl_p99_ratio,
    "no_hit": no_hit_ratio,
    "ttft": ttft_ms,
    "transformers": transformers_ratio,
    "multi_turn": multi_turn,
}
"""In the order of a run: what is short comes first."""


def measure(options: argparse.Namespace) -> Figures:
    """All sections that are asked for. A section that fails is told, and the others go on."""
    start, sizes = time.perf_counter(), Sizes()
    if options.quick:
        sizes = QUICK_CPU if options.device == "cpu" else QUICK
    told = sys.stderr if options.json else sys.stdout
    with tempfile.TemporaryDirectory(prefix="tiercel-gpu-", dir=options.folder) as folder:
        model = OneModel(options.model, options.device, sizes.device_bytes)
        bench = Bench(model, sizes, Path(folder))
        bench.figures |= {"machine": describe(), "model": options.model, "device": _device(options.device)}
        for name in ("warm_up", *options.only):
            section = SECTIONS.get(name, warm_up)
            began = time.perf_counter()
            try:
                found = section(bench)
            except Exception as error:  # noqa: BLE001 - the other sections are measured all the same
                found = {"failed": {**bench.figures.get("failed", {}), name: repr(error)}}
            bench.figures |= found
            gc.collect()
            took = time.perf_counter() - began
            print("\n".join([f"# {name}: {took:.1f} s", *table(found)]), file=told, flush=True)
    return {**bench.figures, "seconds": time.perf_counter() - start}


def _device(name: str) -> str:
    return torch.cuda.get_device_name(name) if torch.device(name).type == "cuda" else name


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="v4-flash-8e")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--only", default=",".join(SECTIONS), help="sections in this order, separated by commas"
    )
    parser.add_argument("--folder", help="where stores are made; default: the system's temporary folder")
    parser.add_argument("--plot", nargs="?", const=PLOT, type=Path, help=f"draw the TTFT ({PLOT.name})")
    parser.add_argument("--draw", type=Path, help="measure nothing: draw the JSON of an earlier run")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(SECTIONS):
        parser.error(f"--only: no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    figures = json.loads(options.draw.read_text()) if options.draw else measure(options)
    if options.json and not options.draw:
        print(json.dumps(figures, indent=2))
    if (options.plot or options.draw) and "ttft_ms" in figures:
        try:
            plot(figures["ttft_ms"], options.plot or PLOT)
        except ImportError:
            print("no plot: matplotlib is not installed; --draw makes it from the JSON", file=sys.stderr)
    sys.exit(1 if figures.get("failed") else 0)


if __name__ == "__main__":
    main()
