"""LMCache's server with our store behind it, killed and started again: what it had is found.
Run, where LMCache and tiercel are installed: python examples/lmcache/restart.py

Nothing here needs a GPU or an engine. A client does what an engine does: it fetches what is there, and stores
what it computed.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

CHUNK, LAYERS, WIDTH = 16, 2, 64
SERVER = (
    *(sys.executable, "-m", "lmcache.v1.multiprocess.http_server"),  # `lmcache server` runs the same
    *("--host", "127.0.0.1", "--http-host", "127.0.0.1", "--disable-observability"),
    *("--chunk-size", str(CHUNK), "--supported-transfer-mode", "engine_driven"),
    *("--l1-size-gb", "0.01", "--no-l1-use-lazy", "--eviction-policy", "LRU"),
)


class Server:
    """A process of LMCache's server, and a client of it."""

    def __init__(self, adapter: dict[str, Any], log: int | IO[bytes] = subprocess.DEVNULL) -> None:
        self.port, self.http = free_port(), free_port()
        ports = ("--port", str(self.port), "--http-port", str(self.http))
        command = (*SERVER, *ports, "--l2-adapter", json.dumps(adapter))
        quiet = {"DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1"}
        self.process = subprocess.Popen(command, env=os.environ | quiet, stdout=log, stderr=log)
        self.client = RequestClientFactory.create(f"tcp://127.0.0.1:{self.port}")
        self.engines: dict[str, int] = {}
        self.asked = 0

    def ready(self) -> Server:
        self.client.noop().result(timeout=120)
        return self

    def register(self, model: str, dtype: str = "float32") -> None:
        """As an engine does when it starts: the shape of its KV cache."""
        engine = self.engines[model] = len(self.engines)
        payload = RegisterEngineDrivenContextPayload(
            engine, model, 1, CHUNK, LAYERS, WIDTH, dtype, use_mla=False, num_physical_slots=CHUNK
        )
        self.client.register_kv_cache_engine_driven_context(payload).result(timeout=60)

    def store(self, model: str, tokens: Sequence[int], chunks: list[torch.Tensor]) -> None:
        key, engine = self.key(model, tokens, worker=0), self.engines[model]
        self.client.prepare_store(key, engine).result(timeout=60)
        assert self.client.commit_store(key, engine, pickle.dumps(chunks)).result(timeout=60)
        self.client.end_session(key.request_id).result(timeout=60)

    def fetch(self, model: str, tokens: Sequence[int]) -> list[torch.Tensor]:
        """The chunks that are there, from the first one on."""
        key = self.key(model, tokens)
        self.client.lookup(key, 1).result(timeout=60)
        found = self.client.wait_prefetch_status(key.request_id, 60.0).result(timeout=120)
        chunks = list[torch.Tensor]()
        if found:
            part, engine = replace(key, worker_id=0, end=found * CHUNK), self.engines[model]
            answer = self.client.prepare_retrieve(part, engine).result(timeout=60)
            chunks = pickle.loads(answer.data) if answer.success else []
            self.client.commit_retrieve(part, engine).result(timeout=60)
        self.client.end_session(key.request_id).result(timeout=60)
        return chunks

    def key(self, model: str, tokens: Sequence[int], worker: int | None = None) -> Any:
        self.asked += 1
        name = f"request {self.asked}"
        return IPCCacheServerKey(model, 1, worker, tuple(tokens), 0, len(tokens), name, num_kv_readers=1)

    def l2(self) -> dict[str, Any]:
        """What LMCache tells of its L2."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/status", timeout=60) as answer:
            return dict(json.load(answer)["storage_manager"]["l2_adapters"][0])

    def wait_for(self, kept: int) -> None:
        """Until this many chunks are in the store: LMCache writes them later."""
        until_s = time.monotonic() + 60
        while self.l2()["kept"] < kept:
            assert time.monotonic() < until_s, self.l2()
            time.sleep(0.01)

    def kill(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    adapter = json.loads((Path(__file__).parent / "adapter.json").read_text())
    tokens = list(range(10 * CHUNK))
    chunks = [torch.randn(2, LAYERS, CHUNK, WIDTH) for _ in range(10)]
    with tempfile.TemporaryDirectory() as folder:
        adapter["adapter_params"]["store"] = f"shared://{folder}/store?size=64MiB"
        first = Server(adapter).ready()
        first.register("a/model")
        print(f"at first {len(first.fetch('a/model', tokens))} of 10 chunks are there")
        first.store("a/model", tokens, chunks)
        first.wait_for(kept=10)
        first.kill()
        second = Server(adapter).ready()
        second.register("a/model")
        found = second.fetch("a/model", tokens)
        same = sum(torch.equal(*pair) for pair in zip(found, chunks, strict=False))
        print(f"after a restart {len(found)} of 10 chunks are there, {same} with the same bytes")
        print(f"tiercel counted {second.l2()['hits']} hits")
        second.kill()


if __name__ == "__main__":
    main()
