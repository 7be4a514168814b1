"""Goal: what docs/vllm.md and examples/vllm say is so. Method: the examples and `vllm serve`, with a tiny
model on the CPU (`vllm_cpu` has the only stand-in), stopped and killed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from tests.engines.vllm_cpu import SETTINGS, save_model, write_plugin

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "vllm"
DOCS = (ROOT / "docs" / "vllm.md").read_text()
OPTIONS = (
    "--dtype float32 --enforce-eager --block-size 32 --num-gpu-blocks-override 24 --max-model-len 512 "
    "--max-num-batched-tokens 128 --max-num-seqs 4 --host 127.0.0.1"
)
HOST_MEMORY = "vllm_offload_*.mmap"


@contextmanager
def served(tmp_path, end=signal.SIGTERM):
    """The server of the example. At the end it gets this signal, and no process of it is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = [str(ROOT / "src"), str(ROOT), str(tmp_path / "plugin")]
    environment = os.environ | SETTINGS | {
        "HOST_BYTES": str(2**22),
        "STORE": f"shared://{tmp_path}/store?size=64MiB&linger_s=0.5",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(paths),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }  # fmt: skip
    command = [EXAMPLES / "serve.sh", str(tmp_path / "model"), *OPTIONS.split(), "--port", port]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        until_s = time.monotonic() + 240
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None and time.monotonic() < until_s, (tmp_path / "log").read_text()[
                -5000:
            ]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        os.killpg(server.pid, end) if end == signal.SIGKILL else server.send_signal(end)
        server.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(url):
    try:
        return urlopen(url, timeout=5).status == 200
    except (URLError, ConnectionError, TimeoutError):
        return False


def asked(server):
    """What the example prints: the texts, the tokens found, the counters of the tiers."""
    told = subprocess.run(
        [sys.executable, EXAMPLES / "ask.py", server], capture_output=True, text=True, timeout=240
    )
    assert told.returncode == 0, told.stderr
    texts = re.findall(r"wrote (.*)", told.stdout)
    found = [int(count) for count in re.findall(r"found (\d+) of 300", told.stdout)]
    counters = dict(re.findall(r"^(1:Tier \w+) (\d+)$", told.stdout, re.MULTILINE))
    return texts, found, counters


def until_kept(server, chunks):
    """Until the store has these chunks: they are written after the answer."""
    until_s = time.monotonic() + 60
    name = r'vllm:kv_offload_tiering_write_bytes_total\{.*tier="1:Tier".*\} (\S+)'
    while not (said := re.search(name, urlopen(f"{server}/metrics").read().decode())) or (
        float(said[1]) < chunks * 32 * 1024
    ):
        assert time.monotonic() < until_s, "they are not written"
        asked(server)


def test_a_server_that_was_stopped_or_killed_finds_its_tokens(tmp_path):
    save_model("qwen3", tmp_path / "model")
    write_plugin(tmp_path / "plugin")
    before = set(Path("/dev/shm").glob(HOST_MEMORY))
    with served(tmp_path) as server:
        texts, found, _ = asked(server)
        assert found == [0, 288, 288] and len(set(texts)) == 1
        until_kept(server, 9)
    assert set(Path("/dev/shm").glob(HOST_MEMORY)) == before
    with served(tmp_path, end=signal.SIGKILL) as server:
        again, found, counters = asked(server)
        assert found == [288, 288, 288] and again == texts
        assert counters["1:Tier chunk_hits"] == "9"
        there = re.findall(r"^# TYPE (\S+)", urlopen(f"{server}/metrics").read().decode(), re.MULTILINE)
        told = set(re.findall(r"`(vllm:\w+)", DOCS))
        new = {"vllm:prompt_tokens_cached_by_source_total"} if version("vllm-cpu") < "0.32" else set()
        assert len(told) > 4 and told - set(there) == new
    left = set(Path("/dev/shm").glob(HOST_MEMORY)) - before
    for file in left:
        file.unlink()
    assert len(left) == 1, "docs/vllm.md says that a killed server leaves one"
    with served(tmp_path) as server:
        again, found, _ = asked(server)
        assert found == [288, 288, 288] and again == texts


def test_the_command_of_the_docs_is_the_one_of_the_example():
    script = (EXAMPLES / "serve.sh").read_text()
    for name, value in re.findall(r": \"\$\{(\w+):=(.*?)\}", script):
        script = script.replace(f"'\"${name}\"'", value)

    def config(text):
        return json.loads(text[text.index("'{") + 1 : text.index("}'") + 1])

    assert config(script) == config(DOCS)
    assert config(script)["kv_connector_extra_config"]["secondary_tiers"][0]["store"].startswith("shared://")
