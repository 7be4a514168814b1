"""A process that computes texts with the embedded model once, and forks servers that offer their pages: to
start one again after it was killed takes milliseconds. Lines tell it what to do.

python -m tests.peers.forks '{"texts": [[5, 6, 7]], "address": "127.0.0.1:9001", "mooncake": "tcp"}'
→ "ready"
← start         forks a server
→ 4711          its process
← check         asks it
→ {"leases": 0}
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

from tests.engine.drive import make_ask, make_engine, run, settle
from tests.wait import until
from tiercel.engine.engine import Engine
from tiercel.engine.service import EngineService
from tiercel.peers.offering import open_listener


def main() -> None:
    options = json.loads(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that were killed
    engine = make_engine(host_pages=200)
    run(engine, *(make_ask(str(number), text, 1) for number, text in enumerate(options["texts"])))
    settle(engine)
    # The only other thread copies pages to the host. It sleeps, and no server computes: none will miss it.
    _tell(sys.stdout, "ready")
    child: tuple[TextIO, TextIO] | None = None
    for line in sys.stdin:
        if line.strip() == "start":
            pid, *child = _fork(engine, options)
            _tell(sys.stdout, pid)
        else:
            questions, answers = child
            print(line.strip(), file=questions, flush=True)  # noqa: T201
            _tell(sys.stdout, json.loads(answers.readline()))


def _fork(engine: Engine, options: dict[str, Any]) -> tuple[int, TextIO, TextIO]:
    """The process, the file for questions to it, and the file with its answers."""
    (asked, questions), (answers, told) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(asked)
        os.close(told)
        own = os.fdopen(questions, "w"), os.fdopen(answers)
        assert own[1].readline(), "the server has ended"
        return pid, *own
    try:
        os.close(questions)
        os.close(answers)
        _serve(engine, options, os.fdopen(asked), os.fdopen(told, "w"))
    except Exception:  # noqa: BLE001 - the forked process must not go on as its parent
        traceback.print_exc()
    finally:
        os._exit(1)


def _serve(engine: Engine, options: dict[str, Any], questions: Iterable[str], answers: TextIO) -> None:
    service = EngineService(engine, "tiny-v4")
    service.offer_pages(open_listener(options["address"]), mooncake=options.get("mooncake"))
    _tell(answers, "listens")
    cache = engine.cache
    for line in questions:
        if line.strip() == "flush":
            _tell(answers, service._ask(cache.flush).result())
        else:
            _tell(answers, service._ask(lambda: cache.check() or {"leases": len(cache.leases)}).result())


def _tell(where: TextIO, what: Any) -> None:
    print(json.dumps(what), file=where, flush=True)  # noqa: T201


class Forks:
    """The process, and its server of the moment."""

    def __init__(self, *before: str, **options: Any) -> None:
        """`before`: a command that starts it."""
        command = [*before, sys.executable, "-m", "tests.peers.forks", json.dumps(options)]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.alive = False

    def told(self) -> Any:
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline())

    def tell(self, what: str) -> None:
        assert self.popen.stdin is not None
        print(what, file=self.popen.stdin, flush=True)  # noqa: T201

    def ask(self, what: str) -> Any:
        self.tell(what)
        return self.told()

    def wait(self) -> None:
        """Wait until the texts are computed."""
        assert self.told() == "ready"

    def start(self) -> None:
        self.pid, self.alive = self.ask("start"), True

    def kill(self) -> None:
        self.alive = False
        self.signal(signal.SIGKILL)
        with suppress(ProcessLookupError):
            until(lambda: self.signal(0), "it is gone")

    def restart(self) -> None:
        self.kill()
        self.start()

    def signal(self, which: int) -> None:
        os.kill(self.pid, which)

    def close(self) -> None:
        if self.alive:
            self.kill()
        self.popen.kill()
        self.popen.communicate()


if __name__ == "__main__":
    main()
