"""Up to which rate `tiercel bench` is a good clock: `python -m benchmarks.client`.

Its client asks a trivial server on loopback, in a process of its own, which computes nothing.

    flood_N     N streams without pauses: events/s, and CPU time of the client for one event
    paced_N     N streams with an event every 20 ms, each begun at another time: what the client measures
                between events (20 ms are right) and to the first event (0 is right), and how late it was
                itself. The server's own lateness is in it
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from benchmarks.machine import describe, parser_of, tell
from tiercel.bench.client import connected
from tiercel.bench.load import Shape, Span, make_conversations
from tiercel.bench.report import Report
from tiercel.bench.run import run
from tiercel.bench.sending import Form

PACE_S = 0.02
EVENT = (
    b'data: {"id":"req-36b1caea421c4192baeb585f97a653e8","object":"text_completion","created":1795099565,'
    b'"model":"m","choices":[{"index":0,"text":"un","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = b'{"data": [{"id": "m"}]}'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def answer(writer: asyncio.StreamWriter, head: bytes, events: int, pace_s: float) -> None:
    if not head.startswith(b"POST"):
        body = MODELS if b"/v1/models" in head else b""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        return
    clock = asyncio.get_running_loop().time
    begin_s = clock()
    writer.write(HEAD)
    for number in range(events):
        writer.write(chunk(EVENT))
        if pace_s:
            await asyncio.sleep(max(0.0, begin_s + (number + 1) * pace_s - clock()))
        elif number % 8 == 0:
            await writer.drain()
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n' % events
    writer.write(chunk(usage + b"data: [DONE]\n\n") + b"0\r\n\r\n")


def serve(pipe: Any, events: int, pace_s: float) -> None:
    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if found := [
                    line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
                ]:
                    await reader.readexactly(int(found[0].split(b":")[1]))
                await answer(writer, head, events, pace_s)
        writer.close()

    async def forever() -> None:
        server = await asyncio.start_server(connection, "127.0.0.1", 0, backlog=1000)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    with suppress(KeyboardInterrupt):
        asyncio.run(forever())


@contextmanager
def serving(events: int, pace_s: float):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, events, pace_s), daemon=True
    )
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


async def measure(url: str, streams: int, asks: int, events: int, stagger_s: float) -> tuple[Report, float]:
    """What was measured, and the CPU time of this process meanwhile."""
    shape = Shape(asks, 1, Span(64, 64), Span(events, events), 0, seed=0)
    asked = make_conversations(shape)
    async with connected(url, {}, model=None, plain=False) as client:
        # The first call of a connection is another cost: it is not measured.
        await run(client, asked[:streams], Form.IDS, concurrency=streams, timed=False, done=lambda _: None)
        if stagger_s:
            asked = [replace(each, begins_s=n * stagger_s) for n, each in enumerate(asked[:streams])]
        busy_s = time.process_time()
        measured = await run(
            client, asked, Form.IDS, concurrency=streams, timed=bool(stagger_s), done=lambda _: None
        )
        busy_s = time.process_time() - busy_s
    report = Report.of(measured, [[events]] * len(asked))
    assert report.answered == report.requests, report.errors
    return report, busy_s


def main() -> None:
    options = parser_of(__doc__).parse_args()
    figures: dict[str, Any] = {"where": describe()}
    events = 20 if options.quick else 200
    for streams in (1, 8) if options.quick else (1, 16, 64):
        with serving(events, 0) as url:
            told, busy_s = asyncio.run(measure(url, streams, streams if options.quick else 256, events, 0))
        cpu_us = 1e6 * busy_s / told.answer_tokens
        figures[f"flood_{streams}"] = {"events_s": told.answer_tokens_s, "cpu_us": cpu_us}
    for streams in (8,) if options.quick else (16, 64, 128, 256):
        with serving(events, PACE_S) as url:
            told, _ = asyncio.run(measure(url, streams, streams, events, PACE_S / streams))
        assert told.itl and told.ttft and told.client_late
        figures[f"paced_{streams}"] = {
            "events_s": streams / PACE_S,
            "between_p50_ms": 1e3 * told.itl.p50_s,
            "between_p99_ms": 1e3 * told.itl.p99_s,
            "first_p50_ms": 1e3 * told.ttft.p50_s,
            "first_p99_ms": 1e3 * told.ttft.p99_s,
            "late_p50_ms": 1e3 * told.client_late.p50_s,
            "late_p99_ms": 1e3 * told.client_late.p99_s,
        }
    tell(figures, as_json=options.json)


if __name__ == "__main__":
    main()
