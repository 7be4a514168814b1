"""Hostile connections: attacks for `benchmarks.hostile`, whatever is said on them.

ATTACKS     by name: functions that get a client and go on until they are cancelled
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx

MANY, SOME, FEW = 1500, 64, 4
ELSEWHERE = "127.0.0.2"
"""A hostile client has an address of its own. (Linux has all of 127.0.0.0/8.)"""
Attack = Callable[[httpx.AsyncClient], Awaitable[object]]


def post(*headers: str) -> bytes:
    lines = ["POST /generate HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


def connecting(said: bytes, count: int, *, again: bool = True, address: str = ELSEWHERE) -> Attack:
    """Open connections and say this, once or again and again, whether it is answered or not. Where one is
    closed, open another."""

    async def one(client: httpx.AsyncClient) -> None:
        where = client.base_url.host, client.base_url.port
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(*where, local_addr=(address, 0))
                reading = asyncio.create_task(read(reader))
                try:
                    writer.write(said)
                    while again and not reading.done():
                        await writer.drain()
                        writer.write(said)
                    await reading
                finally:
                    reading.cancel()
                    writer.close()

    return lambda client: asyncio.gather(*(one(client) for _ in range(count)))


async def read(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(1 << 20):
            pass


HALF = post("content-length: 100000") + b'{"text": "' + b"x" * 50_000
CHUNKS = b"1\r\n \r\n" * 1_000_000 + b"2\r\n{}\r\n0\r\n\r\n"

ATTACKS: dict[str, Attack] = {
    "half_sent": connecting(HALF, MANY, again=False),
    "half_sent_here": connecting(HALF, MANY, again=False, address="127.0.0.1"),
    "silent": connecting(b"", MANY, again=False),
    "wrong_key": connecting(post("content-length: 2") + b"{}", SOME),
    "right_key": connecting(get("/v1/models", "authorization: bearer right_key"), SOME),
    "pipelined": connecting(get("/") * 8000, FEW),
    "many_headers": connecting(get("/health", *["a: b"] * 9000), FEW),
    "many_chunks": connecting(
        post("transfer-encoding: chunked", "authorization: bearer many_chunks") + CHUNKS, FEW
    ),
}
"""A name is also the API key of the attack."""
