"""Two machines, as far as the network goes: two network namespaces, and a link between them that is cut in
the middle of a transfer, or becomes very slow. No rights are needed where users may have namespaces.

unshare --map-root-user --net python -m tests.peers.two_hosts
"""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import closing
from pathlib import Path

from tests.engine.drive import PAGE, make_ask, make_engine, run, settle, words
from tests.peers.forks import Forks
from tests.peers.schedule import TEXTS, ended_once
from tests.peers.test_engines import asked, pulling, same, saved, serving
from tests.wait import until
from tiercel.asks.ask import Answer
from tiercel.engine.engine import Engine
from tiercel.storage.open import open_stores

OURS, THEIRS = "10.77.0.1", "10.77.0.2"
ADDRESS = f"{THEIRS}:9001"
IN_ANOTHER = ("unshare", "--net", "sh", "-c", 'echo "\\"apart\\""; read go; exec "$@"', "sh")
TEXT = TEXTS[1]
OTHER = words(3 * PAGE + 2, seed=33)


def do(*command: str) -> None:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where `ip` and `tc` are
    subprocess.run(command, check=True, env=os.environ | {"PATH": path})


def link(state: str) -> None:
    do("ip", "link", "set", "ours", state)


def bytes_received() -> int:
    [line] = [line for line in Path("/proc/net/dev").read_text().splitlines() if "ours:" in line]
    return int(line.split()[1])


def join(pid: int) -> None:
    """A link between this namespace and that of the process."""
    there = ("nsenter", "--target", str(pid), "--net")
    do("ip", "link", "set", "lo", "up")
    do("ip", "link", "add", "ours", "type", "veth", "peer", "name", "theirs")
    do("ip", "link", "set", "theirs", "netns", str(pid))
    do("ip", "addr", "add", f"{OURS}/24", "dev", "ours")
    link("up")
    do(*there, "ip", "link", "set", "lo", "up")
    do(*there, "ip", "addr", "add", f"{THEIRS}/24", "dev", "theirs")
    do(*there, "ip", "link", "set", "theirs", "up")


def limit(pid: int, rate: str) -> None:
    """Limit what the process sends on the link."""
    shaped = ("dev", "theirs", "root", "tbf", "rate", rate, "burst", "32kb", "latency", "100ms")
    do("nsenter", "--target", str(pid), "--net", "tc", "qdisc", "replace", *shaped)


def cut_after(size: int) -> threading.Thread:
    """Cuts the link when `size` bytes have arrived on it."""
    since = bytes_received()

    def cut() -> None:
        until(lambda: bytes_received() - since > size, "a part has arrived")
        link("down")

    thread = threading.Thread(target=cut)
    thread.start()
    return thread


def main() -> None:
    with closing(Forks(*IN_ANOTHER, texts=[TEXT], address=ADDRESS, mooncake="tcp")) as forks:
        assert forks.told() == "apart"
        join(forks.popen.pid)
        limit(forks.popen.pid, "8mbit")
        forks.tell("go")
        cold = make_engine(cache={"force_miss": True})
        [truth] = run(cold, make_ask("cold", TEXT))
        forks.wait()
        forks.start()
        drips(forks, truth, run(cold, make_ask("other", OTHER))[0])
        for transport in ("tcp", "mooncake"):
            is_cut(forks, truth, transport)


def is_cut(forks: Forks, truth: Answer, transport: str) -> None:
    """The link is cut in the middle of a transfer."""
    engine = pulling(f"peer://{ADDRESS}?timeout_s=1&hold_s=3&transport={transport}")
    pages = (len(TEXT) - 1) // PAGE
    cutting = cut_after(pages * engine.cache.spec.page_bytes // 2)
    answer = ended_once(engine, make_ask("while the link is cut", TEXT))
    cutting.join()
    assert same(answer, truth) and answer.usage.store_tokens == 0
    settle(engine)
    link("up")
    until(lambda: pulls(engine, TEXT, truth), "the peer is used again", timeout_s=60)
    settle(engine)
    until(lambda: forks.ask("check") == {"leases": 0}, "no lease is left")
    engine.cache.close()


def drips(forks: Forks, truth: Answer, other: Answer) -> None:
    """A peer sends on and on, slowly, over Mooncake: its request computes, other requests and other peers go
    on, and the host pages of its reads are nobody else's until the last byte has come."""
    with serving() as (service, url):
        asked(service, make_ask("other", OTHER))
        saved(service)
        # Mooncake has one time-out for all stores of a process: it is in the environment.
        os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = "4"
        slow = f"peer://{ADDRESS}?timeout_s=0.5&transport=mooncake"
        engine = make_engine(host_pages=200, cache={"fetch": "wait", "store_timeout_s": 1.0})
        engine.cache.compute.observe = lambda *_: None  # what can be pulled is
        engine.cache.attach(open_stores(None, [slow, url]))
        limit(forks.popen.pid, "512kbit")
        cache, mover = engine.cache, engine.cache.store.mover
        answer = ended_once(engine, make_ask("while the peer drips", TEXT))
        assert same(answer, truth) and answer.usage.store_tokens == 0
        dripping = set(mover.under_way)
        held = {page for read in dripping for piece in read.pieces for page in piece.host}
        assert held and all(read.late for read in dripping)
        cache.check()
        assert pulls(engine, OTHER, other), "from another peer"
        cache.flush()
        assert cache.host_pages.free == cache.host_pages.capacity - len(held)
        assert mover.under_way == dripping, "its bytes still come"
        limit(forks.popen.pid, "8mbit")

        def has_ended() -> bool:
            cache.step()
            return not mover.under_way

        until(has_ended, "the last byte has come")
        cache.check()
        assert cache.host_pages.free == cache.host_pages.capacity
        until(lambda: pulls(engine, TEXT, truth), "the peer is used again")
        settle(engine)
        cache.close()
    until(lambda: forks.ask("check") == {"leases": 0}, "no lease is left")


def pulls(engine: Engine, text: list[int], truth: Answer) -> bool:
    """Whether all pages of a text come from a peer. The answer is right in any case."""
    engine.cache.flush()
    answer = ended_once(engine, make_ask("again", text))
    assert same(answer, truth)
    return answer.usage.store_tokens == (len(text) - 1) // PAGE * PAGE


if __name__ == "__main__":
    main()
