"""How long `/health` takes while somebody else asks for much.

    python -m benchmarks.neighbours [--json] [--quick]

A real server, one client that asks `/health` again and again, one that is in the way of it.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from tests.whole.process import running

from benchmarks.machine import describe, parser_of, tell

LOGGED = {"return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0}


@dataclass(frozen=True)
class Sizes:
    """How much somebody else asks for."""

    seconds: float = 3.0
    tokens: int = 2000
    sentences: int = 480_000
    messages: int = 500
    times: int = 5
    connections: int = 1500


QUICK = Sizes(0.2, 50, 4800, 20, 1, 50)


def nobody(url: str, sizes: Sizes) -> None:  # noqa: ARG001 (as the others)
    time.sleep(sizes.seconds)


def stream(url: str, sizes: Sizes) -> None:
    """A long answer with 20 logprobs for each token, streamed."""
    params = {"max_new_tokens": sizes.tokens, "ignore_eos": True}
    body = {"input_ids": [300, 301], "stream": True, "sampling_params": params, **LOGGED}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=600) as response:
        for _ in response.iter_raw():
            pass


def prompt_logprobs(url: str, sizes: Sizes) -> None:
    """20 logprobs for each token of a long prompt, at once."""
    body = {"input_ids": [300] * sizes.tokens, "sampling_params": {"max_new_tokens": 1}, **LOGGED}
    httpx.post(f"{url}/generate", json=body, timeout=600).raise_for_status()


def long_text(url: str, sizes: Sizes) -> None:
    """A prompt of 8 MB."""
    for _ in range(sizes.times):
        httpx.post(f"{url}/generate", json={"text": "The sea is blue. " * sizes.sentences}, timeout=600)


def long_chat(url: str, sizes: Sizes) -> None:
    """A conversation of 500 messages."""
    messages = [{"role": "user", "content": "Which record has sea? " * 4}] * sizes.messages
    for _ in range(sizes.times):
        body = {"model": "tiny-v4", "messages": messages, "max_tokens": 1}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)


def silent(url: str, sizes: Sizes) -> None:
    """1,500 connections that say nothing."""
    where = urlsplit(url)
    held = []
    for _ in range(sizes.connections):
        held.append(socket.create_connection((where.hostname, where.port)))
    time.sleep(sizes.seconds)
    for each in held:
        each.close()


def health_beside(url: str, other: Callable[[str, Sizes], None], sizes: Sizes) -> list[float]:
    """Milliseconds of every call, until the other is done."""
    thread = threading.Thread(target=other, args=[url, sizes])
    thread.start()
    waits = []
    # A connection each: whoever is in the way must not keep new ones out either.
    with httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        while thread.is_alive() or not waits:
            start = time.perf_counter()
            client.get("/health").raise_for_status()
            waits.append((time.perf_counter() - start) * 1000)
    thread.join()
    return waits


def measure(sizes: Sizes) -> dict[str, Any]:
    """By who is in the way."""
    figures: dict[str, Any] = {"machine": describe()}
    with running("--device-memory", "64MiB", "--host-memory", "64MiB") as server:
        for other in (nobody, stream, prompt_logprobs, long_text, long_chat, silent):
            start = time.perf_counter()
            waits = health_beside(server.url, other, sizes)
            figures[other.__name__] = {
                "seconds": round(time.perf_counter() - start, 1),
                "calls": len(waits),
                "median_ms": round(statistics.median(waits), 1),
                "most_ms": round(max(waits), 1),
            }
    return figures


def main() -> None:
    options = parser_of(__doc__).parse_args()
    tell(measure(QUICK if options.quick else Sizes()), as_json=options.json)


if __name__ == "__main__":
    main()
