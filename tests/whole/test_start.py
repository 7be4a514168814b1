"""Goal: a start fails at once for what can be known at once, goes on without a store that is away, and ends
when it is told to. Method: real processes; a real Redis and a real Mooncake that start after the server; for
what is known at once, a torch that can not be imported."""

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import free_port, mooncake_master, redis_server
from tests.wait import until
from tests.whole.process import Forked, running
from tests.whole.test_store import MEMORY, PROMPT, generate, store_of

EARLY = {
    "--store s3://bucket": "is none of file:, shared:, redis:",
    "--store file:///var/cache?sise=3GiB": "has no option sise",
    "--store file:///var/cache?size=much": "size: is not a size",
    "--store file:///proc/nobody": "can not be used",
    "--store redis://127.0.0.1:99999": "out of range",
    "--store no.module:Class": "No module named 'no'",
    "--store memory: --host-memory 0": "needs a host tier",
    "--store redis://127.0.0.1:{free}/0 --store-required": "refused",
    "--store mooncake://127.0.0.1:{free} --store-required": "no master at",
    "--peer redis://host": "write it as peer://host:port",
    "--evict no.module:Class": "No module named 'no'",
    "--fetch no.module:Class": "No module named 'no'",
    "--kv-events foo://127.0.0.1:1": "Protocol not supported",
    "--share-pages 127.0.0.1:0 --share-mooncake udp": "write it as tcp, rdma",
    "--share-pages 127.0.0.1:0 --host-memory 0": "needs a host tier",
    "--host-memory 900TiB": "host memory of",
    "--model /no/such/folder": "is no folder",
    "--tls-cert /no/file --tls-key /no/file": "can not be used",
}
EACH = """
import sys
sys.modules["torch"] = None
from tiercel.cli import main
for line in sys.stdin:
    sys.argv = ["tiercel", "serve", "--port", "0", *line.split()]
    try:
        main()
    except SystemExit as end:
        print("exit", end.code, file=sys.stderr)
"""


def test_what_can_be_known_without_a_model_is_known_before_torch_is_loaded():
    lines = "\n".join(EARLY).format(free=free_port())
    command = [sys.executable, "-c", EACH]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, timeout=120)
    told = done.stderr.splitlines()
    assert told[1::2] == ["exit 2"] * len(EARLY), done.stderr
    for (options, why), line in zip(EARLY.items(), told[::2], strict=True):
        assert line.startswith("tiercel: ") and why in line, (options, line)


@pytest.mark.parametrize("kind", ["redis", "mooncake"])
def test_a_server_starts_without_its_store_and_uses_it_as_soon_as_it_is_there(kind):
    with redis_server() if kind == "redis" else mooncake_master() as other:
        other.kill()
        with running(*MEMORY, "--store", other.url) as server:
            told = " ".join(re.sub("[^ -~]", " ", server.told).split())
            assert re.search(r"store tier \S+ it is away, and is tried again: ", told), server.told
            assert server.told.count("WARNING") <= 2, server.told
            assert store_of(server)["state"] in ("off", "trying")
            other.start()
            said, _ = generate(server, PROMPT[:600])
            until(lambda: store_of(server)["state"] == "working", "the store is used")
            assert generate(server, PROMPT[:600])[0] == said
            if kind == "redis":
                until(lambda: store_of(server)["counters"]["pages_written"] >= 4, "pages are written")
            else:  # nobody gives this Mooncake memory
                until(lambda: store_of(server)["refused"], "what is written is refused")
        code, rest = server.process.returncode, server.rest
        assert code == 0 and rest.count("the store works\n") == 1
        assert ("it keeps nothing: no process gives this Mooncake memory" in rest) == (kind == "mooncake")
        assert rest.count("does not keep what is written") == (kind == "mooncake")


def children(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(each) for path in tasks for each in path.read_text().split()}


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, of this test alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_a_start_ends_at_once_with_the_processes_of_its_stages(name, temporary):
    """They are loading torch, or a little later reading weights."""
    number, process = signal.Signals[name], Forked(["--port", "0", "--stages", "2"])
    stages = until(lambda: len(found := children(process.pid)) == 2 and found, "the stages begin")
    handles = [os.pidfd_open(each) for each in stages]
    assert any(temporary.iterdir())
    try:
        process.send_signal(number)
        _, said = process.communicate(timeout=10)
        for each in handles:
            assert select.select([each], [], [], 10)[0], "a stage goes on"
    finally:
        for each in handles:
            os.close(each)
    assert process.returncode == (-number if name == "SIGKILL" else 128 + number)
    assert not said, "neither a traceback nor anything else"
    assert not any(temporary.iterdir())


def test_verify_ends_at_once_and_leaves_nothing(temporary):
    command = [sys.executable, "-m", "tiercel.cli", "verify"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: any(temporary.glob("tiercel-verify-*")), "it begins")
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=10)[1]
    assert (process.returncode, said) == (128 + signal.SIGTERM, "")
    assert not any(temporary.iterdir())


EARLIEST_AND_LATEST = """
import os, signal, sys
from tiercel.cli.ending import ends_at_once

def then(function, when):
    def call(*args, **options):
        answer = function(*args, **options)
        if when(*args):
            os.kill(os.getpid(), signal.SIGTERM)
        return answer
    return call

began = []
if sys.argv[1] == "earliest":
    signal.signal = then(signal.signal, lambda number, _: number == signal.SIGTERM and not began)
else:
    signal.set_wakeup_fd = then(signal.set_wakeup_fd, lambda file: file == -1)
with ends_at_once():
    began.append(True)
    if sys.argv[1] == "earliest":
        signal.pause()
print("went on")
"""


@pytest.mark.parametrize(("when", "status"), [("earliest", 143), ("latest", -15)])
def test_no_signal_is_lost_when_a_start_begins_and_ends(when, status):
    """The signal comes as soon as it is handled, and when it is handled no more."""
    command = [sys.executable, "-c", EARLIEST_AND_LATEST, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")
