"""Goal: a server that is killed while it pulls leaves nothing behind on the server that it pulled from.
Method: a real server is killed between two bytes of a page; what the other holds is counted again."""

import asyncio
import threading
from contextlib import closing

import httpx
import pytest

from tests.engine.drive import make_ask, tokens_of, words
from tests.peers.proxy import Proxy
from tests.peers.roles import answered, settle
from tests.whole.process import Server
from tiercel.asks.ask import Prefiller
from tiercel.config import CacheConfig, parse_address
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.service import EngineService
from tiercel.peers.offering import open_listener, where

MIB = 1 << 20
PAGE = 128


class Prefill:
    """A server that computes prompts, behind a proxy, in this process."""

    def __init__(self):
        config = EngineConfig(cache=CacheConfig(host_bytes=64 * MIB), step_tokens=PAGE, speculate="off")
        self.engine, _ = open_engine(Build(device_bytes=32 * MIB), config)
        self.service = EngineService(self.engine, "tiny-v4")
        listener = open_listener("127.0.0.1:0")
        self.proxy = Proxy(where(listener))
        self._at = parse_address("share_pages", self.proxy.address)
        self.service.offer_pages(listener, at=self._at, mooncake="tcp")

    def start(self, name, tokens):
        """As a router asks it, by a thread of its own."""
        ask = make_ask(name, tokens, prefiller=Prefiller(*self._at, name))
        thread = threading.Thread(target=lambda: asyncio.run(answered(self.service, ask)))
        thread.start()
        return thread

    def fields(self):
        host, port = self._at
        return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": 1}

    def close(self):
        self.proxy.close()
        self.service.close()


@pytest.fixture(scope="module")
def prefill():
    with closing(Prefill()) as own:
        yield own


def generate(server, prefill, tokens):
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling} | prefill.fields()
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


def test_a_server_that_is_killed_while_it_pulls_leaves_nothing_behind(prefill):
    """In the bytes of a page; then another server takes its place, and pulls the same pages."""
    tokens = words(12 * PAGE + 5, seed=3)
    options = ("--device-memory", "24MiB", "--host-memory", "64MiB", "--speculate", "off", "--role", "decode")
    options += ("--peer", f"peer://{prefill.proxy.address}")
    first = Server(*options)
    page_bytes = prefill.engine.cache.spec.page_bytes
    held = []

    def kill():
        held.append(len(prefill.engine.cache.leases))
        first.process.kill()
        first.process.wait()

    prefill.proxy.hurt("call", page_bytes // 2, once=True, do=kill)
    computing = prefill.start("first", tokens)
    with pytest.raises(httpx.HTTPError):
        generate(first, prefill, tokens)
    first.process.communicate()
    assert held[0] > 0, "it was killed while a lease held pages for it"
    computing.join()
    settle(prefill.service)
    assert not prefill.service._offering.questions.watched
    assert prefill.service._ask(prefill.engine.cache.flush).result(30) == 0
    assert prefill.engine.cache.host_pages.free == prefill.engine.cache.host_pages.capacity

    second = Server(*options)
    computing = prefill.start("second", tokens)
    answer = generate(second, prefill, tokens)
    computing.join()
    truth = asyncio.run(answered(prefill.service, make_ask("truth", tokens)))
    assert answer["output_ids"] == tokens_of(truth)
    assert answer["meta_info"]["cached_tokens_details"]["storage"] == 12 * PAGE
    code, told = second.stop()
    assert code == 0 and "Traceback" not in told
    settle(prefill.service)
