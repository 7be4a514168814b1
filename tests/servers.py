"""Real servers for tests and benchmarks, on loopback, without anything on the disk, gone afterwards.

    with redis_server() as server:
        store = open_store(server.url)

A server that can not be started is an error, never a reason to skip: `tests/install-servers.sh` has them.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

START_S = 30
TRIES = 5
"""A port that was free may be taken when the server comes to it."""


class Server:
    """A process that can be killed and started again with the same command."""

    def __init__(self, command: Sequence[str], *, is_ready: Callable[[], bool], log: Path) -> None:
        # With its parent it goes too: a killed test leaves nothing behind.
        prefix = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self._command = [*prefix, *command]
        self._is_ready = is_ready
        self._log = log
        self.process: subprocess.Popen[Any] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self._command} did not start:\n{self._log.read_text(errors='replace')}")
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the process, as kill -9 does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class RedisServer(Server):
    def __init__(self, folder: Path, *, unix: bool, maxmemory: str | None) -> None:
        self.port = 0 if unix else free_port()
        self.socket = folder / "redis.sock"
        where = ["--unixsocket", str(self.socket)] if unix else ["--bind", "127.0.0.1"]
        full = ["--maxmemory", maxmemory, "--maxmemory-policy", "noeviction"] if maxmemory else []
        command = ["redis-server", "--port", str(self.port), *where, "--dir", str(folder)]
        command += ["--save", "", "--appendonly", "no", *full]
        super().__init__(command, is_ready=self._answers, log=folder / "redis.log")
        self.client_url = f"unix://{self.socket}" if unix else f"redis://127.0.0.1:{self.port}/0"
        """As the client reads it: `RedisStore(server.client_url)`."""
        self.url = f"redis+unix://{self.socket}" if unix else self.client_url
        """As `open_store` reads it."""

    def _answers(self) -> bool:
        family = socket.AF_INET if self.port else socket.AF_UNIX
        address: Any = ("127.0.0.1", self.port) if self.port else str(self.socket)
        try:
            with socket.socket(family) as connection:
                connection.settimeout(1)
                connection.connect(address)
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False


class MooncakeMaster(Server):
    def __init__(self, folder: Path, *, flags: Sequence[str]) -> None:
        self.port = free_port()
        self.metrics_port = free_port()
        command = [str(Path(sys.executable).parent / "mooncake_master")]
        command += ["--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--rpc_thread_num=2"]
        command += ["--metrics_host=127.0.0.1", f"--metrics_port={self.metrics_port}", *flags]
        super().__init__(command, is_ready=self._answers, log=folder / "master.log")
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"mooncake://{self.address}?metrics_port={self.metrics_port}"

    def _answers(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.metrics_port}/health"
            with build_opener(ProxyHandler({})).open(url, timeout=1) as answer:
                ready = b'"service_ready":true' in answer.read()
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return ready


def prometheus_program(name: str) -> str:
    """`prometheus` or `promtool`: of the system, or from `tests/install-servers.sh`."""
    own = Path(sys.prefix) / "prometheus" / "usr" / "bin" / name
    return shutil.which(name) or str(own)


class Prometheus(Server):
    def __init__(self, folder: Path, *, config: Path, flags: Sequence[str]) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [prometheus_program("prometheus"), f"--config.file={config}", *flags]
        command += [f"--web.listen-address={self.url.removeprefix('http://')}"]
        command += [f"--storage.tsdb.path={folder}/data", "--log.level=warn"]
        super().__init__(command, is_ready=self._answers, log=folder / "prometheus.log")

    def _answers(self) -> bool:
        try:
            with build_opener(ProxyHandler({})).open(f"{self.url}/-/ready", timeout=1):
                return True
        except OSError:
            return False


@contextmanager
def prometheus(config: Path, *flags: str) -> Iterator[Prometheus]:
    """`prometheus` with this configuration, on a free port."""
    with _running(lambda folder: Prometheus(folder, config=config, flags=flags)) as server:
        yield server


@contextmanager
def redis_server(*, unix: bool = False, maxmemory: str | None = None) -> Iterator[RedisServer]:
    """`redis-server` on a free port, or on a unix socket; with `maxmemory` it evicts nothing."""
    with _running(lambda folder: RedisServer(folder, unix=unix, maxmemory=maxmemory)) as server:
        yield server


@contextmanager
def mooncake_master(*flags: str) -> Iterator[MooncakeMaster]:
    """`mooncake_master` on a free port. It needs memory from a `mooncake_holder`, or from a store with a
    `local_segment`."""
    with _running(lambda folder: MooncakeMaster(folder, flags=flags)) as master:
        yield master


HOLD = """
import sys
from tiercel.storage.mooncake import MooncakeStore
store = MooncakeStore(sys.argv[1], local_segment=int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def mooncake_holder(master: MooncakeMaster, size: int) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that gives the cluster memory."""
    command = [sys.executable, "-c", HOLD, master.address, str(size)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    with process:
        try:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{command} did not start")
            yield process
        finally:
            process.kill()


@contextmanager
def _running(make: Callable[[Path], Any]) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="tiercel-") as name:
        for tried in range(1, TRIES + 1):
            server = make(Path(name))
            try:
                server.start()
                break
            except RuntimeError:
                if tried == TRIES:
                    raise
        try:
            yield server
        finally:
            server.kill()


def free_port() -> int:
    with socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
        return int(connection.getsockname()[1])
