"""A prefill server and a decode server beside one server, for `benchmarks.peers`: real processes, HTTP.

ttft                    seconds to the first token of a 4 K prompt, each server idle
ttft_loaded             the same while the server that computes prompts has another one of 1 K at any time
overlap                 share of the transfer that is hidden behind the prefill
decode_itl_p99_ratio    inter-token p99 of running answers while prompts arrive: with a prefill peer, over one
                        server that computes them itself
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
from tests.servers import free_port, redis_server
from tests.whole.process import Server

PAGE = 128
MEMORY = ("--device-memory", "128MiB", "--host-memory", "512MiB")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    prompt: int = 4096
    rounds: int = 5
    answers: int = 4
    arrivals: int = 6
    load: int = 1024
    settle_s: float = 1.0


QUICK = Sizes(400, 1, 1, 1, 64, 0.1)


def words(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(200, 4000) for _ in range(count)]


@contextmanager
def served(*options: str) -> Iterator[Server]:
    server = Server(*MEMORY, *options)
    try:
        yield server
    finally:
        server.stop()


def first_token_s(server: Server, tokens: list[int], **fields: Any) -> float:
    body = {"input_ids": tokens, "stream": True, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    began = time.perf_counter()
    with httpx.stream("POST", f"{server.url}/generate", json=body | fields, timeout=300) as answer:
        next(line for line in answer.iter_lines() if line.startswith("data:"))
        return time.perf_counter() - began


class Seeds:
    """Prompts that nobody has seen."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self._next = sizes, 0

    def prompt(self, count: int | None = None) -> list[int]:
        """By default of about 4 K tokens: what is left behind the last whole page differs."""
        self._next += 1
        own = self.sizes.prompt + Random(self._next).randrange(PAGE) - PAGE // 2
        return words(self._next, count or own)


def both(prefill: Server, decode: Server, tokens: list[int], room: dict[str, Any]) -> float:
    """The first token of the decode server. A router asks both at once."""
    asking = threading.Thread(target=first_token_s, args=(prefill, tokens), kwargs=room)
    asking.start()
    seconds = first_token_s(decode, tokens, **room)
    asking.join()
    return seconds


def overlap_of(prefill: Server, decode: Server, seeds: Seeds, room: dict[str, Any]) -> float:
    """Of the seconds that the decode server takes for a prompt whose pages are all there: how many it does
    not take after the prefill server's first token, if it pulls meanwhile."""
    tokens, told = seeds.prompt(), dict[str, float]()
    began = time.perf_counter()

    def compute() -> None:
        first_token_s(prefill, tokens, **room)
        told["prefill"] = time.perf_counter() - began

    asking = threading.Thread(target=compute)
    asking.start()
    behind_s = first_token_s(decode, tokens, **room)
    asking.join()
    behind_s -= told["prefill"]
    httpx.post(f"{decode.url}/flush_cache", params={"timeout": 10}).raise_for_status()
    after_s = first_token_s(decode, tokens, **room)
    httpx.post(f"{decode.url}/flush_cache", params={"timeout": 10}).raise_for_status()
    rest_s = first_token_s(decode, tokens[: len(tokens) % PAGE or PAGE])  # what no page has is computed
    return 1.0 - max(behind_s - rest_s, 0.0) / max(after_s - rest_s, 1e-9)


def stored_s(prefill: Server, decode: Server, tokens: list[int]) -> float:
    """Through a store: the decode server is asked when the prompt is computed, as it can not know earlier."""
    began = time.perf_counter()
    first_token_s(prefill, tokens)
    first_token_s(decode, tokens)
    return time.perf_counter() - began


@contextmanager
def loaded(server: Server, seeds: Seeds) -> Iterator[None]:
    """The server computes other prompts meanwhile, one after the other."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            first_token_s(server, seeds.prompt(seeds.sizes.load))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.2)
    try:
        yield
    finally:
        ended.set()
        asking.join()


def p99_ms(server: Server, seeds: Seeds, arrive: Callable[[list[int]], object]) -> float:
    """Gaps between tokens of running answers, while prompts arrive one after the other."""
    gaps, ended = list[float](), threading.Event()

    def answer() -> None:
        sampling = {"max_new_tokens": 3000, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": seeds.prompt(64), "stream": True, "sampling_params": sampling}
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=300) as stream:
            last = None
            for line in stream.iter_lines():
                if not line.startswith("data:"):
                    continue
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now
                if ended.is_set():
                    return

    threads = [threading.Thread(target=answer) for _ in range(seeds.sizes.answers)]
    for thread in threads:
        thread.start()
    time.sleep(seeds.sizes.settle_s)
    gaps.clear()
    for _ in range(seeds.sizes.arrivals):
        arrive(seeds.prompt())
    while len(gaps) < 2:
        time.sleep(0.01)
    ended.set()
    for thread in threads:
        thread.join()
    return statistics.quantiles(gaps, n=100)[98] * 1e3


def measure(sizes: Sizes) -> dict[str, float]:
    seeds, port, rounds = Seeds(sizes), free_port(), sizes.rounds
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1}
    with ExitStack() as stack:
        alone = stack.enter_context(served())
        prefill = stack.enter_context(served("--role", "prefill", "--share-pages", f"127.0.0.1:{port}"))
        decode = stack.enter_context(served("--role", "decode", "--peer", f"peer://127.0.0.1:{port}"))
        redis = stack.enter_context(redis_server(unix=True)).url
        writing = stack.enter_context(served("--store", redis))
        reading = stack.enter_context(served("--store", redis, "--fetch", "wait"))
        ways: dict[str, tuple[Server, Callable[[], float]]] = {
            "colocated": (alone, lambda: first_token_s(alone, seeds.prompt())),
            "pulled": (prefill, lambda: both(prefill, decode, seeds.prompt(), room)),
            "through_store": (writing, lambda: stored_s(writing, reading, seeds.prompt())),
            "recompute_on_decode": (prefill, lambda: first_token_s(decode, seeds.prompt())),
        }
        found: dict[str, list[float]] = defaultdict(list)
        for number in range(rounds + 1):
            for name, (server, ask) in ways.items():
                idle_s = ask()
                with loaded(server, seeds):
                    loaded_s = ask()
                if number:
                    found[f"ttft.{name}"].append(idle_s)
                    found[f"ttft_loaded.{name}"].append(loaded_s)
        ttft = {name: statistics.median(seconds) for name, seconds in found.items()}
        overlap = statistics.median(overlap_of(prefill, decode, seeds, room) for _ in range(rounds))
        beside = p99_ms(decode, seeds, lambda tokens: both(prefill, decode, tokens, room))
        itself = p99_ms(alone, seeds, lambda tokens: first_token_s(alone, tokens))
    ratios = {
        f"{how}.pulled_over_{other}": ttft[f"{how}.pulled"] / ttft[f"{how}.{other}"]
        for how in ("ttft", "ttft_loaded")
        for other in ("colocated", "through_store")
    }
    figures = {"overlap": overlap, "decode_itl_p99_ratio": beside / itself, "decode_itl_p99_ms": beside}
    return ttft | ratios | figures
