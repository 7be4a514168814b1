"""A real server in a process of its own."""

import atexit
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock, Thread


class Server:
    """`as_user`: started by `command`. The others are forked from a process that has loaded everything, which
    saves seconds each."""

    def __init__(self, *options, as_user=False, command=(sys.executable, "-m", "tiercel.cli")):
        options = ["--port", "0", *options]
        if as_user:
            self.process = subprocess.Popen([*command, "serve", *options], stderr=subprocess.PIPE, text=True)
        else:
            self.process = Forked(options)
        self.told = self.rest = ""
        while (found := re.search(r"listening on (https?://\S+)", self.told)) is None:
            if not (line := self.process.stderr.readline()):
                self.stop()  # closes its pipe, which else fails a later test
                raise AssertionError(f"the server ended: {self.told}")
            self.told += line
        self.url = found[1]

    def stop(self, how=signal.SIGTERM, timeout_s=60):
        """Returns the exit code and all output since the start."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        _, self.rest = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, self.rest


@contextmanager
def running(*options, as_user=False):
    server = Server(*options, as_user=as_user)
    try:
        yield server
    finally:
        code, rest = server.stop()
        assert code == 0, rest
        assert "Traceback" not in rest, rest


class Nursery:
    """See `tests.whole.nursery`."""

    def __init__(self):
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.whole.nursery", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._turn = Lock()

    def close(self):
        self._link.close()
        self._process.wait()

    def ask(self, what, *files):
        """May be called from any thread: each gets the answer to its own question."""
        with self._turn:
            socket.send_fds(self._link, [json.dumps(what).encode()], files)
            answer = self._link.recv(2**10)
        assert answer, "the nursery has ended"
        return json.loads(answer)


ONE_NURSERY = Lock()


def nursery():
    with ONE_NURSERY:  # `cache` alone may make two
        return _nursery()


@cache
def _nursery():
    made = Nursery()
    atexit.register(made.close)
    return made


class Forked:
    """A server of the nursery, used as a `Popen`."""

    def __init__(self, options):
        told, writes = os.pipe()
        where = {"environment": dict(os.environ), "folder": str(Path.cwd())}
        self.pid = nursery().ask({"start": [str(each) for each in options], **where}, writes)
        os.close(writes)
        self.stderr, self.returncode = os.fdopen(told), None
        self._ends = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._ends)
        self._turn = Lock()

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout=None):
        if not select.select([self._ends], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"server {self.pid}", timeout)
        with self._turn:
            if self.returncode is None:
                self.returncode = nursery().ask({"wait": self.pid})
        return self.returncode

    def send_signal(self, number):
        with self._turn:
            if self.returncode is None:
                signal.pidfd_send_signal(self._ends, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        said = []
        reading = Thread(target=lambda: said.append(self.stderr.read()), daemon=True)
        reading.start()
        reading.join(timeout)
        if reading.is_alive():
            raise subprocess.TimeoutExpired(f"server {self.pid}", timeout)
        self.wait(timeout)
        self.stderr.close()
        return None, said[0]
