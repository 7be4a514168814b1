"""How fast pages come from another server's host memory, beside one large read with the same transport.

    python -m benchmarks.peers [--json] [--quick]
    unshare --map-root-user --net python -m benchmarks.peers --two-networks [--json]

The other server is a process of its own on this machine, with pages of DeepSeek V4 Flash in its host memory;
with `--two-networks` in a network namespace of its own, behind a link, and only this part is measured.
As in the mover, a few threads take batches of about 8 MiB, and what they read lands in host pages. Beside it,
in the same rounds: all these bytes as one piece, in one call, on one connection; nothing is asked, held or
verified.

    read_share.{tcp,mooncake}      pages without verifying them, of one large read
    verified_share.{…}             with every byte verified, as a cache does it
    asked_us                       one question for a hundred pages, of an engine that sleeps

Then servers with the embedded model: one has computed a prompt of 4096 tokens, and it is answered with one
token, in milliseconds, by

    resumed_ms.colocated              the same server
    resumed_ms.pulled                 another one, with the pages of the first (also over mooncake)
    resumed_ms.through_store          another one, from a redis store that the first has written them to
    resumed_ms.recompute_on_decode    another one that has neither

And `benchmarks.peers_roles`: a prefill server and a decode server.

A machine is never quiet, so the measurements are interleaved in rounds. A share is the median over the rounds
of what was measured in one round; rates are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from tests.engine.drive import words
from tests.peers.inline import Inline
from tests.peers.two_hosts import IN_ANOTHER, OURS, THEIRS, join
from tests.servers import redis_server
from tests.transfer.borrowed import make_borrowed
from tests.whole.process import running
from tests.whole.test_store import generate, wait_until_written

from benchmarks import peers_roles
from benchmarks.machine import describe, parser_of
from tiercel.cache import HostCache
from tiercel.cache.memories import make_memories
from tiercel.config import CacheConfig
from tiercel.memory.buffers import HostMemory
from tiercel.peers.offering import Offering, open_listener, where
from tiercel.spec.presets import load
from tiercel.storage.base import Get
from tiercel.storage.mooncake import address_of
from tiercel.storage.peer import PeerStore
from tiercel.storage.peer.link import Link
from tiercel.storage.peer.mooncake import MooncakeTransport
from tiercel.storage.record import ALIGN_LEAST
from tiercel.transfer.mover import forms_of
from tiercel.types import HostPageId, Kind

MIB = 1024**2
SPEC = load("deepseek-v4-flash")
BATCH_BYTES = 8 * MIB
THREADS = 4
ROUNDS = 11
TRANSPORTS = ("tcp", "mooncake")


# The other server


def offer(pages: int, layout: str, host: str) -> None:
    """Until its parent closes its input."""
    config = CacheConfig(host_bytes=pages * SPEC.place_bytes, layout=layout)
    memories = make_memories(SPEC, config, make_borrowed(SPEC.stage(2, 3), 1, 1))
    cache = HostCache(SPEC, config, memories)
    assert cache.host is not None
    cache.host.flat.random_(0, 256)
    chain = cache.chain(range(pages * SPEC.page_tokens))
    cache.landed(cache.land(chain, 0, pages))
    offering = Offering(cache, Inline(), open_listener(f"{host}:0"), mooncake="tcp")
    whole = socket.create_server((host, 0))
    threading.Thread(target=_send_all, args=(whole, cache.host.mapped), daemon=True).start()
    told = offering._offer.transports["mooncake"]
    keys = [key.hex() for key in chain.keys]
    _tell(peer=where(offering._listener), whole=where(whole), keys=keys, mooncake=told)
    sys.stdin.read()


def _send_all(listener: socket.socket, memory: memoryview) -> None:
    """Whoever connects gets all the memory, once for each byte that it sends."""
    while True:
        connection, _ = listener.accept()
        with connection:
            link = Link(connection)
            while connection.recv(1):
                link.within(60)
                link.send_all([memory])


def _tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# This one


class Pages:
    """Host pages to read into, and the records that go there."""

    def __init__(self, keys: list[bytes], layout: str) -> None:
        self.host = HostMemory(SPEC, layout, len(keys) * SPEC.place_bytes)
        self.forms = forms_of(SPEC, ALIGN_LEAST)[Kind.PAGE]
        self._keys = keys
        each = BATCH_BYTES // SPEC.page_bytes
        self.batches = [range(at, min(at + each, len(keys))) for at in range(0, len(keys), each)]

    def read(self, store: PeerStore, *, verify: bool) -> None:
        def one(batch: range) -> None:
            gets, sizes = list[Get](), [form.payload_bytes for form in self.forms]
            for number in batch:
                parts = self.host.views([HostPageId(number)], sizes)
                for form, views in zip(self.forms, parts, strict=True):
                    header = memoryview(bytearray(form.header_bytes))
                    gets.append(Get(form.key(self._keys[number]), [header, *views]))
            assert all(store.get(gets))
            records = [(form, self._keys[number]) for number in batch for form in self.forms]
            for (form, key), get in zip(records, gets, strict=True) if verify else ():
                flaw = form.flaw(get.parts[0], key, get.parts[1:])
                assert flaw is None, flaw

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(one, self.batches))


def seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def measure(pages: int, layout: str, rounds: int, two_networks: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.peers", "--offer", str(pages), "--layout", layout]
    ours = theirs = "127.0.0.1"
    if two_networks:
        ours, theirs = OURS, THEIRS
        command = [*IN_ANOTHER, *command]
    command += ["--host", theirs]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        try:
            if two_networks:
                other.stdout.readline()
                join(other.pid)
                print("go", file=other.stdin, flush=True)
            return _measure(json.loads(other.stdout.readline()), ours, layout, rounds)
        finally:
            other.stdin.close()


def _measure(told: dict[str, Any], ours: str, layout: str, rounds: int) -> dict[str, Any]:
    keys = [bytes.fromhex(key) for key in told["keys"]]
    own, size, taken = Pages(keys, layout), len(keys) * SPEC.page_bytes, defaultdict(list)
    stores = {name: PeerStore(told["peer"], transport=name, timeout_s=30) for name in TRANSPORTS}
    for store in stores.values():
        store.register(own.host.mapped)
    host, _, port = told["whole"].rpartition(":")
    connection = socket.create_connection((host, int(port)))
    link, engine = Link(connection), MooncakeTransport(ours, "tcp", "", 30.0)
    engine.register(own.host.mapped)
    theirs, memory = told["mooncake"], own.host.mapped[:size]

    def whole_tcp() -> None:
        link.within(60)
        connection.sendall(b"?")
        link.receive_into([own.host.mapped])

    def whole_mooncake() -> None:
        reads = [address_of(memory)], [theirs["base"]], [size]
        assert engine._engine._engine.batch_transfer_sync_read(theirs["session"], *reads) == 0

    wholes = {"tcp": whole_tcp, "mooncake": whole_mooncake}
    some = [*keys[:50], *(os.urandom(32) for _ in range(50))]
    asked = [form.key(key) for key in some for form in own.forms]
    for number in range(rounds + 1):
        for name, store in stores.items():
            figures = {
                f"whole.{name}": seconds(wholes[name]),
                f"pages.{name}": seconds(lambda store=store: own.read(store, verify=False)),
                f"verified.{name}": seconds(lambda store=store: own.read(store, verify=True)),
            }
            for figure, spent_s in figures.items() if number else ():  # the first round touches and connects
                taken[figure].append(spent_s)
        taken["asked"].append(seconds(lambda: stores["tcp"].contains(asked)))
    for store in stores.values():
        store.close()
    connection.close()
    engine.close()

    def share(how: str, name: str) -> float:
        pairs = zip(taken[f"whole.{name}"], taken[f"{how}.{name}"], strict=True)
        return round(statistics.median(whole / pages for whole, pages in pairs), 3)

    median = {name: statistics.median(values) for name, values in taken.items()}
    rates = {f"{name}_mb_s": round(size / spent_s / 1e6) for name, spent_s in median.items() if "." in name}
    return {
        "read_share": {name: share("pages", name) for name in TRANSPORTS},
        "verified_share": {name: share("verified", name) for name in TRANSPORTS},
        "asked_us": round(median["asked"] * 1e6),
        **rates,
    }


# Servers


MEMORY = ("--device-memory", "24MiB", "--host-memory", "128MiB")
PROMPT_TOKENS = {False: 4096, True: 300}
"""By whether it is quick."""


def measure_first_tokens(rounds: int, prompt_tokens: int) -> dict[str, float]:
    """Milliseconds until the first token of a prompt that the first server has computed."""
    taken = defaultdict(list)
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server()).url
        share = ("--share-pages", "127.0.0.1:0", "--share-mooncake", "tcp")
        first = stack.enter_context(running(*MEMORY, *share, "--store", redis))
        peer = "peer://" + first.told.partition("offering host pages at ")[2].split()[0]
        wait = (*MEMORY, "--fetch", "wait")
        servers = {
            "colocated": first,
            "pulled": stack.enter_context(running(*wait, "--peer", peer)),
            "pulled_mooncake": stack.enter_context(running(*wait, "--peer", f"{peer}?transport=mooncake")),
            "through_store": stack.enter_context(running(*wait, "--store", redis)),
            "recompute_on_decode": stack.enter_context(running(*MEMORY)),
        }
        for number in range(rounds + 1):
            prompt = words(prompt_tokens, seed=1000 + number)
            generate(first, prompt, 1)
            wait_until_written(first)
            for name, server in servers.items():
                spent_s = seconds(partial(generate, server, prompt, 1))
                if number:  # the first round connects and measures
                    taken[name].append(spent_s * 1000)
    return {name: round(statistics.median(values), 1) for name, values in taken.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--offer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--two-networks", action="store_true")
    parser.add_argument("--layout", default="page_first_direct")
    parser.add_argument("--pages", type=int)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    if options.offer:
        offer(options.offer, options.layout, options.host)
        return
    pages, rounds = options.pages or (8 if options.quick else 128), options.rounds
    rounds = rounds or (1 if options.quick else ROUNDS)
    figures = {"machine": describe(), "page_bytes": SPEC.page_bytes, "layout": options.layout}
    figures |= measure(pages, options.layout, rounds, options.two_networks)
    if not options.two_networks:
        figures["resumed_ms"] = measure_first_tokens(rounds, PROMPT_TOKENS[options.quick])
        figures |= peers_roles.measure(peers_roles.QUICK if options.quick else peers_roles.Sizes())
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
