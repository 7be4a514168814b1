"""The engine and the server on the embedded model: `python -m benchmarks.engine [--json] [--quick]`.

    ttft_ms                 a prompt of 4 K tokens until its first token: computed, from the device, the host
    no_hit_throughput       texts that never repeat, with both tiers against none: what the cache costs
    scheduler_us_per_step   64 running requests, everything but the model and the drawing of tokens
    requests_per_s          a real server process, 1, 8 and 64 clients, short answers

All figures of one run are of the same machine and moment; the ratios are what counts.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from tests.whole.process import running

from benchmarks.machine import describe, parser_of, tell
from tiercel.asks.ask import Ask, Sampling, TokenOut
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.engine import Engine
from tiercel.engine.loop import plain_steps
from tiercel.engine.step import Drawn
from tiercel.kernels.draw import greedy
from tiercel.verify import answer_one

MIB = 1024**2


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    long: int = 4096
    rounds: int = 9
    steps: int = 200
    running: int = 64
    seconds: float = 8.0
    clients: tuple[int, ...] = (1, 8, 64)


QUICK = Sizes(long=512, rounds=1, steps=3, running=4, seconds=0.2, clients=(1, 4))


def words(count: int, seed: int) -> tuple[int, ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple((torch.randint(200, 4096, (count,), generator=random)).tolist())


def make_engine(device_mib: int = 256, host_mib: int = 0, **cache: Any) -> Engine:
    settings = CacheConfig(device_pages=1, host_bytes=host_mib * MIB, **cache)
    return open_engine(Build(device_bytes=device_mib * MIB), EngineConfig(settings, speculate="off"))[0]


def first_token_ms(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int, int]:
    start = time.perf_counter()
    answer = answer_one(engine, prompt, 1)
    took = 1e3 * (time.perf_counter() - start)
    return took, answer.usage.device_tokens, answer.usage.host_tokens


def rest(engine: Engine) -> None:
    while engine.cache.busy:
        engine.cache.step()


def ttft(sizes: Sizes) -> dict[str, float]:
    """Alternately: cold, again from the device, and once the text has left the device, from the host."""
    engine = make_engine(device_mib=64, host_mib=256)
    times: dict[str, list[float]] = {"recompute": [], "device": [], "host": []}
    for i in range(sizes.rounds):
        prompt = words(sizes.long, i)
        took, _, _ = first_token_ms(engine, prompt)
        times["recompute"].append(took)
        rest(engine)
        took, device, host = first_token_ms(engine, prompt)
        assert (device, host) == (sizes.long - 128, 0), (device, host)
        times["device"].append(took)
        rest(engine)
        assert not engine.cache.leave_device(engine.cache.chain(prompt)), "all of it is on the host"
        took, device, host = first_token_ms(engine, prompt)
        assert (device, host) == (0, sizes.long - 128), (device, host)
        times["host"].append(took)
    return {name: statistics.median(each) for name, each in times.items()}


def throughput(engine: Engine, seed: int, *, quick: bool = False) -> float:
    """Tokens computed per second, eight texts at a time that nobody has seen."""
    texts, tokens, new = (2, 130, 2) if quick else (8, 600, 24)
    asks = [
        Ask(str(i), words(tokens + 37 * i, seed * 100 + i), Sampling(new, temperature=0, ignore_eos=True))
        for i in range(texts)
    ]
    before, start = engine.counters["tokens_computed"], time.perf_counter()
    left = len(asks)
    for ask in asks:
        engine.add(ask)
    for deltas in plain_steps(engine):
        left -= sum(delta.finish is not None for delta in deltas)
        if not left:
            break
    return (engine.counters["tokens_computed"] - before) / (time.perf_counter() - start)


def no_hit(sizes: Sizes) -> dict[str, float]:
    """Both tiers, full of other texts, so that everything that comes in pushes something out; and none."""
    tiers, none = make_engine(device_mib=8, host_mib=16), make_engine(device_mib=8, force_miss=True)
    quick = sizes is QUICK
    for engine in (tiers, none):
        throughput(engine, 999, quick=quick)
    pairs = [
        (throughput(tiers, i, quick=quick), throughput(none, i, quick=quick)) for i in range(sizes.rounds)
    ]
    return {
        "ratio": statistics.median(a / b for a, b in pairs),
        "tokens_per_s_tiers": statistics.median(a for a, _ in pairs),
        "tokens_per_s_none": statistics.median(b for _, b in pairs),
    }


def scheduler_us(steps: int, running: int) -> dict[str, float]:
    """The model answers at once, with the same logits for all."""
    engine = make_engine(device_mib=64)
    scheduler, logits = engine.scheduler, torch.zeros(running, engine.vocab_size)
    spent = {"plan": 0.0, "advance": 0.0, "emit": 0.0}

    def timed(what: str, call: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        answer = call(*arguments)
        spent[what] += time.perf_counter() - start
        return answer

    for i in range(running):  # of unlike lengths: a small device writes two tails in a step
        engine.add(Ask(str(i), words(36 + 2 * i, i), Sampling(10_000, temperature=0, ignore_eos=True)))
    prompts = plain_steps(engine)
    while not all(task.drawn for task in engine.tasks.values()):
        next(prompts)
    for _ in range(steps):
        step = timed("plan", lambda: scheduler.seal(scheduler.plan()))
        assert len(step.parts) == running
        outcomes = timed("advance", scheduler.advance, step, Drawn([(TokenOut(0),)] * running, {}, 0.0))
        timed("emit", engine.emit, outcomes)
    each = {what: 1e6 * seconds / steps for what, seconds in spent.items()}
    start = time.perf_counter()
    for _ in range(steps):
        greedy(logits)
    each["drawing"] = 1e6 * (time.perf_counter() - start) / steps
    each["total"] = each["plan"] + each["advance"] - each["drawing"]
    return each


# The whole server


async def _clients(url: str, clients: int, seconds: float) -> float:
    """Requests per second of so many clients that each wait for their answer."""
    done, until = 0, time.perf_counter() + seconds
    prompt = list(words(200, 5))

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal done
        turn = 0
        while time.perf_counter() < until:
            turn += 1
            tail = [200 + number, 200 + turn % 3000]
            body = {"model": "tiny-v4", "prompt": prompt + tail, "max_tokens": 8, "temperature": 0}
            (await client.post("/v1/completions", json=body)).raise_for_status()
            done += 1

    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await one_warm(client, prompt)
        start = time.perf_counter()
        until = start + seconds
        await asyncio.gather(*(one(client, i) for i in range(clients)))
        return done / (time.perf_counter() - start)


async def one_warm(client: httpx.AsyncClient, prompt: list[int]) -> None:
    body = {"model": "tiny-v4", "prompt": prompt, "max_tokens": 1}
    (await client.post("/v1/completions", json=body)).raise_for_status()


def requests_per_s(sizes: Sizes) -> dict[str, float]:
    with running() as server:
        return {str(n): asyncio.run(_clients(server.url, n, sizes.seconds)) for n in sizes.clients}


def measure(sizes: Sizes) -> dict[str, Any]:
    times, tiers, scheduler = ttft(sizes), no_hit(sizes), scheduler_us(sizes.steps, sizes.running)
    return {
        "ttft_ms": times,
        "ttft_host_over_device": times["host"] / times["device"],
        "no_hit_throughput_ratio": tiers["ratio"],
        "no_hit": tiers,
        "scheduler_us_per_step": scheduler["total"],
        "scheduler": scheduler,
        "requests_per_s": requests_per_s(sizes),
        "machine": describe(),
    }


def main() -> None:
    options = parser_of(__doc__).parse_args()
    tell(measure(QUICK if options.quick else Sizes()), as_json=options.json)


if __name__ == "__main__":
    main()
