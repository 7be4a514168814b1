"""What one hostile client costs the others: `python -m benchmarks.hostile [--json] [--quick] [--only NAME]`.

For each attack, in turns on one real server: another client alone, and beside the attack. Every attack and
the other client have API keys of their own.

    NAME.health_more_ms     the longest /health beside it, less the longest alone; aim: below 50
    NAME.health_p50_ms      the median beside it
    NAME.token_ratio        median time between two tokens of a stream beside it, over alone; aim: below 2
    NAME.token_max_ms       the longest time between two tokens beside it
    NAME.first_token_ratio  the same for the time to the first token
    NAME.server_mb          what the server's memory has grown by

The attacks run in a process of their own, on one core where there are several. Add one to `ATTACKS`: a
function that gets an `httpx.AsyncClient` with the server's address and makes requests, again and again,
until it is cancelled.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import string
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

from benchmarks.hostile_bodies import ATTACKS as BODY_ATTACKS
from benchmarks.hostile_connections import ATTACKS as CONNECTION_ATTACKS
from benchmarks.machine import describe, parser_of, tell

TURNS, TURN_S = 3, 4.0
HEALTH_EVERY_S = 0.02
TOKENS = 64
OPTIONS = ("--speculate", "off", "--host-memory", "256MiB", "--device-memory", "256MiB")
ENDS_S = 30.0
"""A server that has not ended after so long is killed."""
ATTACK_S = 60.0
"""An attack ends after this time at the latest, whatever becomes of the process that started it."""
Attack = Callable[[httpx.AsyncClient], Awaitable[object]]


# Attacks with grammars


def beginnings(count: int) -> dict[str, Any]:
    """A schema whose automaton has 2 ** count states."""
    letters = itertools.cycle(string.ascii_letters)
    patterns = [f".*{letter}.{{{i}}}" for i, letter in zip(range(count), letters, strict=False)]
    return {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}


def chain(count: int) -> str:
    rules = [f'r{i} ::= "a" r{i + 1} | "b" r{i + 1}' for i in range(count)]
    return "\n".join(["root ::= r0", *rules, f'r{count} ::= "c"'])


def pairs(count: int) -> dict[str, Any]:
    """References that are followed twice at each of so many levels."""
    defs: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": dict.fromkeys("ab", {"$ref": f"#/$defs/d{i + 1}"})}
        for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{count}": {"type": "string"}}}


GRAMMARS: Mapping[str, dict[str, Any]] = {
    "beginnings": {"json_schema": json.dumps(beginnings(60))},
    "chain_1000": {"ebnf": chain(1000)},
    "chain_3000": {"ebnf": chain(3000)},
    "pairs": {"json_schema": json.dumps(pairs(1000))},
    "repeated": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "ambiguous": {"ebnf": 'start: s\ns: s s s | s s | /[a-z ]/ | ""'},
    "late": {"ebnf": 'start: /[0-9]{40}/ s\ns: s s s | s s | /[a-z ]/ | ""'},
    "choices": {"guided_choice": [f"value {i}" for i in range(8000)]},
    "long_regex": {"regex": ".*".join(itertools.islice(itertools.cycle(string.ascii_letters), 40_000))},
}


def with_grammar(grammar: Mapping[str, Any], at_once: int = 4) -> Attack:
    """Requests with this grammar, made new each time: what is remembered of it does not help."""
    numbers = itertools.count(time.time_ns())

    async def one(client: httpx.AsyncClient) -> None:
        while True:
            body = {"model": "tiny-v4", "prompt": "go", "max_tokens": 200, "temperature": 1.0}
            with suppress(httpx.HTTPError):
                await client.post("/v1/completions", json=body | renewed(grammar, next(numbers)))

    return lambda client: asyncio.gather(*(one(client) for _ in range(at_once)))


def renewed(grammar: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The same grammar in other words."""
    ((name, value),) = grammar.items()
    match name:
        case "ebnf":
            rule = f'unused{number} ::= "x"' if "::=" in value else f'unused{number}: "x"'
            return {name: f"{value}\n{rule}"}
        case "regex":
            return {name: f"{value}|x{number}"}
        case "guided_choice":
            return {name: [*value, f"x{number}"]}
        case _:
            return {name: json.dumps(json.loads(value) | {"title": str(number)})}


async def leave(client: httpx.AsyncClient) -> None:
    """Ask for a slow grammar, and leave at once."""
    for number in itertools.count(time.time_ns()):
        body = {"prompt": "go", **renewed(GRAMMARS["beginnings"], number)}
        with suppress(httpx.HTTPError):
            await client.post("/v1/completions", json=body, timeout=0.05)


ATTACKS: dict[str, Attack] = {
    **{name: with_grammar(grammar) for name, grammar in GRAMMARS.items()},
    "leaving": leave,
    **BODY_ATTACKS,
    **CONNECTION_ATTACKS,
}
QUICK = "beginnings", "wrong_messages", "pipelined"


def client_with(key: str, url: str) -> httpx.AsyncClient:
    headers, limits = {"authorization": f"Bearer {key}"}, httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=ATTACK_S, headers=headers, limits=limits)


# The other client


@dataclass
class Seen:
    """What the other client saw."""

    health_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        self.health_s += other.health_s
        self.gaps_s += other.gaps_s
        self.first_s += other.first_s


async def ask_health(client: httpx.AsyncClient, seen: Seen) -> None:
    while True:
        start = time.perf_counter()
        (await client.get("/health")).raise_for_status()
        seen.health_s.append(time.perf_counter() - start)
        await asyncio.sleep(HEALTH_EVERY_S)


async def read_streams(client: httpx.AsyncClient, seen: Seen) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    while True:
        last = start = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    (seen.first_s if last == start else seen.gaps_s).append(now - last)
                    last = now


async def look(url: str, seconds: float) -> Seen:
    """Be the other client for a while, and at least until each of its calls was answered once."""
    seen = Seen()
    async with client_with("other", url) as client:
        tasks = [asyncio.create_task(each(client, seen)) for each in (ask_health, read_streams)]
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or not (seen.health_s and seen.gaps_s):
            done, _ = await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return seen


# Both


async def attack(name: str, url: str) -> None:
    """In a process of its own."""
    print("begun", flush=True)
    async with client_with(name, url) as client:
        with suppress(TimeoutError):
            async with asyncio.timeout(ATTACK_S):
                await ATTACKS[name](client)


def beside(name: str, url: str, seconds: float) -> Seen:
    command = [sys.executable, "-m", "benchmarks.hostile", "--attack", name, "--url", url]
    hostile = subprocess.Popen(command, stdout=subprocess.PIPE)
    os.sched_setaffinity(hostile.pid, sorted(os.sched_getaffinity(0))[:1])
    try:
        assert hostile.stdout is not None and hostile.stdout.readline(), "the attack did not begin"
        time.sleep(0.5)
        return asyncio.run(look(url, seconds))
    finally:
        hostile.kill()
        hostile.communicate()


def memory_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def compared(name: str, url: str, pid: int, turns: int, seconds: float) -> dict[str, float]:
    alone, attacked, before = Seen(), Seen(), memory_bytes(pid)
    for _ in range(turns):
        alone.add(asyncio.run(look(url, seconds)))
        attacked.add(beside(name, url, seconds))
    median = statistics.median
    return {
        f"{name}.health_more_ms": 1e3 * (max(attacked.health_s) - max(alone.health_s)),
        f"{name}.health_p50_ms": 1e3 * median(attacked.health_s),
        f"{name}.token_ratio": median(attacked.gaps_s) / median(alone.gaps_s),
        f"{name}.token_max_ms": 1e3 * max(attacked.gaps_s),
        f"{name}.first_token_ratio": median(attacked.first_s) / median(alone.first_s),
        f"{name}.server_mb": (memory_bytes(pid) - before) / 1e6,
    }


@contextmanager
def serving(*more: str) -> Iterator[tuple[str, int]]:
    """A server process: its URL and its number. Its log is read and thrown away. `more`: options."""
    command = [sys.executable, "-m", "tiercel.cli", "serve", "--port", "0", *OPTIONS, *more]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    reader = Thread(target=server.stderr.read, daemon=True)
    try:
        found = None
        while found is None:
            line = server.stderr.readline()
            assert line, "the server did not start"
            found = re.search(r"listening on (http://\S+)", line)
        reader.start()
        yield found[1], server.pid
    finally:
        server.terminate()
        try:
            server.wait(ENDS_S)
        finally:
            server.kill()
            server.wait()
            reader.join()
            server.stderr.close()


def measure(names: Sequence[str], turns: int, seconds: float) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    keys = [word for key in ("other", *names) for word in ("--api-key", key)]
    with serving(*keys) as (url, pid):
        asyncio.run(look(url, 1.0))
        for name in names:
            figures |= compared(name, url, pid, turns, seconds)
    return {**figures, "machine": describe()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", action="append", choices=ATTACKS, help="this attack; may be repeated")
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        asyncio.run(attack(options.attack, options.url))
        return
    turns, seconds = (1, 1.0) if options.quick else (TURNS, TURN_S)
    names = options.only or (QUICK if options.quick else list(ATTACKS))
    tell(measure(names, turns, seconds), as_json=options.json)


if __name__ == "__main__":
    main()
