"""A command in a real terminal, with somebody who types."""

import os
import pty
import select
import subprocess
import sys
import time
from contextlib import suppress
from threading import Thread

WAIT_S = 30
AGAIN_S = 3
CONTROL_C = b"\x03"


def shown_by(command):
    """Run a command whose stderr is a terminal. Returns the finished process and what was shown there."""
    ours, theirs = pty.openpty()
    environment, shown = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}, []

    def read():
        with suppress(OSError):  # how the end of a terminal is told
            while data := os.read(ours, 2**16):
                shown.append(data)

    reading = Thread(target=read)
    reading.start()
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=theirs, text=True)
    finally:
        os.close(theirs)
        reading.join(WAIT_S)
        os.close(ours)
    return done, b"".join(shown).decode()


class Terminal:
    def __init__(self, *words, home):
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm", "COLUMNS": "200"}
        # The terminal controls the command: Ctrl-C is a signal, also where the tests themselves ignore it.
        controlled = ["env", "--default-signal=INT", "setsid", "--ctty"]
        command = [*controlled, sys.executable, "-m", "tiercel.cli", *words]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)

    def __enter__(self):
        self.read("> ")
        return self

    def __exit__(self, error, *_):
        try:
            self.code = None if error else self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._ours)

    def type(self, line, answer=""):
        """Type a line, and wait for an answer and the next prompt. Returns what was shown."""
        self.press(line.encode() + b"\r")
        return self.read(answer) + self.read("> ")

    def press(self, keys):
        os.write(self._ours, keys)

    def interrupt(self):
        """Press Ctrl-C until there is a new prompt. A line editor looks for signals only while it waits for a
        key: one that comes just before is seen with the next key."""
        deadline_s = time.monotonic() + WAIT_S
        self.press(CONTROL_C)
        while not self._ready(AGAIN_S):
            assert time.monotonic() < deadline_s, "Ctrl-C did nothing"
            self.press(CONTROL_C)
        self.read("> ")

    def read(self, until):
        shown, deadline_s = "", time.monotonic() + WAIT_S
        while until not in shown:
            ready = self._ready(max(0, deadline_s - time.monotonic()))
            assert ready, f"waited for {until!r}, and it showed {shown!r}"
            shown += os.read(self._ours, 1).decode(errors="replace")
        return shown

    def _ready(self, timeout_s):
        return bool(select.select([self._ours], [], [], timeout_s)[0])
