"""A real server in a process of its own, as a user starts it."""

import re
import signal
import subprocess
import sys
from contextlib import contextmanager


class Server:
    def __init__(self, *options):
        command = [sys.executable, "-m", "tiercel.cli", "serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.told = ""
        while (found := re.search(r"listening on (https?://\S+)", self.told)) is None:
            line = self.process.stderr.readline()
            assert line, f"the server ended: {self.told}"
            self.told += line
        self.url = found[1]

    def stop(self, how=signal.SIGTERM, timeout_s=60):
        """Exit code and what it said since it started."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        _, rest = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, rest


@contextmanager
def running(*options):
    server = Server(*options)
    try:
        yield server
    finally:
        code, rest = server.stop()
        assert code == 0, rest
        assert "Traceback" not in rest, rest
