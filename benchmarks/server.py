"""What HTTP costs on the embedded model: `python -m benchmarks.server [--json] [--quick]`.

    requests_per_s    64 clients that read streams, over the same engine driven without a server
    cpu_s_per_request  the same in CPU seconds of the process, which others on the machine disturb less
    token_gap_p99_ms  time between two events of a stream, and between two Deltas of the engine
    feed              CPU seconds per second of the server with one listener of the page, less without

Rounds of both kinds take turns in one run, so that others on the machine disturb both. The clients are raw
sockets in this process: where there are two cores, they take a part of what the model computes with, and
`clients_cpu_share` says how much.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.whole.process import running

from benchmarks.engine import MIB, words
from benchmarks.machine import describe, parser_of, tell
from tiercel.asks.ask import Ask, Sampling
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.engine import Engine
from tiercel.engine.loop import steps_of

CLIENTS = 64
PROMPT_TOKENS, ANSWER_TOKENS = 200, 64
ROUNDS, FEED_S = 7, 10.0
ENDS_S = 20.0
"""A server that was told to end has ended after this time."""
OPTIONS = ("--speculate", "off", "--host-memory", "256MiB", "--device-memory", "256MiB")


@dataclass
class Round:
    """What so many clients got, each of them one answer after the other."""

    requests: int
    seconds: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    """Of the process that computed."""
    clients_cpu_s: float = 0.0

    @property
    def per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def gap_p99_ms(self) -> float:
        return 1e3 * statistics.quantiles(self.gaps_s, n=100)[98]


def prompt_of(number: int) -> list[int]:
    """A shared page of 128 tokens, then tokens that are different for every request."""
    return [*words(PROMPT_TOKENS - 2, 5), 200 + number % 3800, 200 + number // 3800 % 3800]


# Without a server


def engine_round(engine: Engine, requests: int, first: int) -> Round:
    done, sent, round_ = 0, 0, Round(requests)
    last: dict[str, float] = {}

    def add() -> None:
        nonlocal sent
        sampling = Sampling(ANSWER_TOKENS, temperature=0, ignore_eos=True)
        engine.add(Ask(str(first + sent), tuple(prompt_of(first + sent)), sampling))
        sent += 1

    start, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(1) as executor:
        steps = steps_of(engine, executor)
        for _ in range(min(CLIENTS, requests)):
            add()
        while done < requests:
            for delta in next(steps):
                now = time.perf_counter()
                if delta.request_id in last:
                    round_.gaps_s.append(now - last[delta.request_id])
                last[delta.request_id] = now
                if delta.finish is not None:
                    done += 1
                    if sent < requests:
                        add()
        round_.seconds, round_.cpu_s = time.perf_counter() - start, time.process_time() - cpu
        steps.close()  # type: ignore[attr-defined]
    return round_


# With a server


class Stream(asyncio.Protocol):
    """One client: sends a request, notes when events come, sends the next."""

    def __init__(self, work: Iterator[bytes], round_: Round) -> None:
        self.work, self.round = work, round_
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._next()

    def _next(self) -> None:
        self.last_s: float | None = None
        self.tail = b""
        if (request := next(self.work, None)) is None:
            self.transport.close()
        else:
            self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if b"data: {" in data:
            if self.last_s is not None:
                self.round.gaps_s.append(now - self.last_s)
            self.last_s = now
        self.tail = (self.tail + data)[-64:]
        if self.tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(exc)


def request_bytes(number: int) -> bytes:
    body = {
        "model": "tiny-v4",
        "prompt": prompt_of(number),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + content


async def http_round(url: str, pid: int, requests: int, first: int) -> Round:
    made = [request_bytes(first + i) for i in range(requests)]
    work, round_ = iter(made), Round(requests)
    address = httpx.URL(url)
    loop = asyncio.get_running_loop()
    own, cpu, start = time.process_time(), cpu_s(pid), time.perf_counter()
    streams = await asyncio.gather(
        *(
            loop.create_connection(lambda: Stream(work, round_), address.host, address.port)
            for _ in range(min(CLIENTS, requests))
        )
    )
    for _, stream in streams:
        assert await stream.ended is None
    round_.seconds, round_.cpu_s = time.perf_counter() - start, cpu_s(pid) - cpu
    round_.clients_cpu_s = time.process_time() - own
    expected = requests * (ANSWER_TOKENS - 1)
    assert len(round_.gaps_s) > expected // 2, "answers were shorter than asked for"
    return round_


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def feed_cost(url: str, pid: int, seconds: float) -> dict[str, float]:
    """A request every half second or more, so that numbers change; with a listener and without, in turns."""
    used: dict[bool, list[float]] = {True: [], False: []}
    received = 0
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def listen() -> None:
            nonlocal received
            async with client.stream("GET", "/feed") as answer:
                async for data in answer.aiter_bytes():
                    received += len(data)

        for turn in range(6):
            listens = turn % 2 == 1
            listener = asyncio.create_task(listen()) if listens else None
            begun, start = cpu_s(pid), time.perf_counter()
            while time.perf_counter() - start < seconds:
                body = {"prompt": prompt_of(turn), "max_tokens": 1, "temperature": 0}
                (await client.post("/v1/completions", json=body)).raise_for_status()
                await asyncio.sleep(min(0.5, seconds / 4))
            used[listens].append((cpu_s(pid) - begun) / (time.perf_counter() - start))
            if listener is not None:
                listener.cancel()
    without, with_one = statistics.median(used[False]), statistics.median(used[True])
    return {
        "cpu_share": with_one - without,
        "cpu_share_without": without,
        "bytes_per_s": received / (3 * seconds),
    }


def measure(rounds: int, feed_s: float, requests: int = 2 * CLIENTS) -> dict[str, Any]:
    settings = CacheConfig(device_pages=1, host_bytes=256 * MIB)
    engine, _ = open_engine(Build(device_bytes=256 * MIB), EngineConfig(settings, speculate="off"))
    pairs: list[tuple[Round, Round]] = []
    with running(*OPTIONS) as server:
        url, pid = server.url, server.process.pid
        for number in range(rounds + 1):
            first = number * requests
            both = asyncio.run(http_round(url, pid, requests, first)), engine_round(engine, requests, first)
            if number:  # the first round warms both up
                pairs.append(both)
        feed = asyncio.run(feed_cost(url, pid, feed_s))
    median = statistics.median
    return {
        "requests_per_s": median(http.per_s for http, _ in pairs),
        "requests_per_s_engine": median(plain.per_s for _, plain in pairs),
        "requests_per_s_ratio": median(http.per_s / plain.per_s for http, plain in pairs),
        "ratios": [round(http.per_s / plain.per_s, 3) for http, plain in pairs],
        "cpu_s_per_request": median(http.cpu_s / requests for http, _ in pairs),
        "cpu_s_per_request_engine": median(plain.cpu_s / requests for _, plain in pairs),
        "token_gap_p99_ms": median(http.gap_p99_ms for http, _ in pairs),
        "token_gap_p99_ms_engine": median(plain.gap_p99_ms for _, plain in pairs),
        "clients_cpu_share": median(http.clients_cpu_s / http.seconds for http, _ in pairs),
        "feed": feed,
        "machine": describe(),
    }


def main() -> None:
    options = parser_of(__doc__).parse_args()
    figures = measure(1, 0.2, 8) if options.quick else measure(ROUNDS, FEED_S)
    tell(figures, as_json=options.json)


if __name__ == "__main__":
    main()
