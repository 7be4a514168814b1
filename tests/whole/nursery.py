"""A process that has loaded all that a server loads, and forks servers: loading takes seconds for each.

python -m tests.whole.nursery NUMBER     (of a socket)
← {"start": ["--port", "0"], "environment": {…}, "folder": "…"}, with a file for stderr
→ 4711                                   the server's process
← {"wait": 4711}
→ 0                                      its exit code
"""

import json
import os
import signal
import socket
import sys
from importlib import import_module

LOADED = (
    "tiercel.cli.commands",
    "tiercel.cli.serve",
    "tiercel.engine.build",
    "tiercel.engine.service",
    "tiercel.models.families",
    "tiercel.server.app",
    "tiercel.server.listen",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
)


def main(link: socket.socket) -> None:
    for name in LOADED:
        import_module(name)
    while True:
        data, files, _, _ = socket.recv_fds(link, 2**20, 1)
        if not data:
            return
        asked = json.loads(data)
        if "wait" in asked:
            answer = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                link.close()
                serve(asked, *files)
                return
            os.close(files[0])
        link.send(json.dumps(answer).encode())


def serve(asked: dict, stderr: int) -> None:
    """As `python -m tiercel.cli serve` does."""
    from tiercel.cli import main as command

    os.dup2(stderr, 2)
    os.close(stderr)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv = ["tiercel", "serve", *asked["start"]]
    command()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(socket.socket(fileno=int(sys.argv[1])))
