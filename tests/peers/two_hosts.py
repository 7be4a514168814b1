"""Two machines, as far as the network goes: two network namespaces, and a link between them that is cut in
the middle of a transfer. No rights are needed where users may have namespaces.

unshare --map-root-user --net python -m tests.peers.two_hosts
"""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import closing
from pathlib import Path

from tests.engine.drive import make_ask, make_engine, run, settle
from tests.peers.forks import Forks
from tests.peers.schedule import TEXTS, ended_once
from tests.peers.test_engines import pulling, same
from tests.wait import until

OURS, THEIRS = "10.77.0.1", "10.77.0.2"
ADDRESS = f"{THEIRS}:9001"
IN_ANOTHER = ("unshare", "--net", "sh", "-c", 'echo "\\"apart\\""; read go; exec "$@"', "sh")
TEXT = TEXTS[1]
SLOW = ("tbf", "rate", "8mbit", "burst", "32kb", "latency", "100ms")


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


def cut_after(size: int) -> threading.Thread:
    """Cuts the link when so many bytes have arrived on it."""
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
        do(
            "nsenter",
            "--target",
            str(forks.popen.pid),
            "--net",
            "tc",
            "qdisc",
            "add",
            "dev",
            "theirs",
            "root",
            *SLOW,
        )
        forks.tell("go")
        cold = make_engine(cache={"force_miss": True})
        [truth] = run(cold, make_ask("cold", TEXT))
        forks.wait()
        forks.start()
        for transport in ("tcp", "mooncake"):
            engine = pulling(f"peer://{ADDRESS}?timeout_s=1&hold_s=3&transport={transport}")
            pages = (len(TEXT) - 1) // engine.cache.spec.page_tokens
            cutting = cut_after(pages * engine.cache.spec.page_bytes // 2)
            answer = ended_once(engine, make_ask("while the link is cut", TEXT))
            cutting.join()
            assert same(answer, truth) and answer.usage.store_tokens == 0
            settle(engine)
            link("up")

            def pulls(engine=engine, pages=pages) -> bool:
                engine.cache.flush()
                again = ended_once(engine, make_ask("again", TEXT))
                assert same(again, truth)
                return again.usage.store_tokens == pages * engine.cache.spec.page_tokens

            until(pulls, "the peer is used again", timeout_s=60)
            settle(engine)
            until(lambda: forks.ask("check") == {"leases": 0}, "no lease is left")
            engine.cache.close()


if __name__ == "__main__":
    main()
