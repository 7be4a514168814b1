"""Goal: what was cached is still there after the server is stopped, or killed, and nothing else changes.
Method: real server processes on one folder, on a real Redis and on a real Mooncake; the admin calls under
load; a real subscriber for events."""

import asyncio
import json
import re
import signal

import httpx
import msgspec
import pytest
import zmq

from tests.servers import free_port, mooncake_master, redis_server
from tests.wait import until
from tests.whole.process import Server, running

MEMORY = ("--device-memory", "24MiB", "--host-memory", "128MiB")
PROMPT = [(i * i * 31 + i * 17) % 3800 + 200 for i in range(2048)]


def generate(server, tokens, count=16):
    """Answer with logprobs, and where the prompt came from."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    answer.raise_for_status()
    meta = answer.json()["meta_info"]
    return meta["output_token_logprobs"], meta["cached_tokens_details"]


def store_of(server):
    return httpx.get(f"{server.url}/v1/cache/store", timeout=30).json()


def wait_until_written(server):
    """Whatever is cached is in the store."""

    def is_written():
        status = store_of(server)
        stats = httpx.get(f"{server.url}/v1/cache/stats", timeout=30).json()
        written = stats["store"]["counters"].get("pages_written", 0)
        return status["queued_bytes"] == 0 and written and written == stats["counters"]["pages_saved"]

    until(is_written, "everything is written", timeout_s=120)


def test_a_conversation_goes_on_after_a_restart(tmp_path):
    store = ("--store", f"file://{tmp_path}/store?size=1GiB", "--fetch", "wait")
    with running(*MEMORY) as plain:
        said, _ = generate(plain, PROMPT)
        turn = [*PROMPT, *(token for _, token, _ in said), *range(300, 330)]
        truth, _ = generate(plain, turn)
    with running(*MEMORY, *store) as first:
        assert "store tier" in first.told
        assert generate(first, PROMPT)[0] == said
    with running(*MEMORY, *store) as second:
        answer, cached = generate(second, turn)
        assert cached["storage"] >= 0.95 * len(turn) and cached["device"] == cached["host"] == 0
        assert answer == truth, "every logprob, bit for bit"
        page = httpx.get(f"{second.url}/metrics").text
        assert 'tier="store"' in page


def test_a_killed_server_loses_nothing_that_was_written(tmp_path):
    store = ("--store", f"file://{tmp_path}/store?size=1GiB", "--fetch", "wait")
    first = Server(*MEMORY, *store)
    said, _ = generate(first, PROMPT)
    wait_until_written(first)
    first.process.send_signal(signal.SIGKILL)
    first.process.communicate(timeout=60)
    with running(*MEMORY, *store) as second:
        answer, cached = generate(second, PROMPT)
        assert cached["storage"] >= 0.9 * len(PROMPT) and answer == said


@pytest.fixture(params=["redis", "mooncake"])
def store_url(request):
    if request.param == "redis":
        with redis_server() as redis:
            yield redis.url
    else:
        with mooncake_master() as master:
            yield f"{master.url}&local_segment=256MiB"


def test_stores_come_and_go_under_load(store_url):
    """Attach, hit, clear, detach while other requests run; each answer is what it is without a store."""
    with running(*MEMORY, "--fetch", "wait", "--store-allow", store_url) as server:
        said, _ = generate(server, PROMPT)

        async def main():
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                load = asyncio.create_task(keep_asking(client))
                attached = await client.put("/v1/cache/store", json={"url": store_url})
                assert attached.status_code == 200 and attached.json()["attached"], attached.text
                await asyncio.to_thread(wait_until_written, server)
                await client.post("/flush_cache", params={"timeout": 0})
                answer, cached = await asyncio.to_thread(generate, server, PROMPT)
                assert cached["storage"] + cached["device"] + cached["host"] >= 0.9 * len(PROMPT)
                assert cached["storage"] > 0 and answer == said
                assert (await client.post("/v1/cache/store/clear")).status_code == 200
                assert (await client.delete("/v1/cache/store")).json() == {"attached": False}
                answer, _ = await asyncio.to_thread(generate, server, PROMPT)
                assert answer == said
                load.cancel()

        asyncio.run(main())


async def keep_asking(client):
    number = 0
    while True:
        number += 1
        body = {"input_ids": PROMPT[number % 700 :][:150], "sampling_params": {"max_new_tokens": 4}}
        answer = await client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text


def test_routers_hear_of_every_tier(tmp_path):
    port = free_port()
    options = ("--store", f"file://{tmp_path}/store?size=1GiB", "--kv-events", f"tcp://127.0.0.1:{port}")
    with running(*MEMORY, *options) as server, zmq.Context() as context, context.socket(zmq.SUB) as socket:
        assert re.search(rf"KV events .* bound tcp://127\.0\.0\.1:{port}", server.told), "the start table"
        socket.subscribe(b"")
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.rcvtimeo = 1000
        heard, asked = {}, 0
        while set(heard) != {"GPU", "CPU_PINNED", "DISK"}:
            asked += 1
            assert asked < 30, heard
            generate(server, [asked + 300, *PROMPT[:300]], 1)  # a subscriber joins late: until it hears
            try:
                _, _, payload = socket.recv_multipart()
            except zmq.Again:
                continue
            _, events, _ = msgspec.msgpack.decode(payload)
            for event in events:
                if event[0] == "BlockStored":
                    heard.setdefault(event[6], []).append(event)
        assert len(heard["GPU"][0][3]) == 128 * len(heard["GPU"][0][1]), json.dumps(heard)[:1000]
        page = httpx.get(f"{server.url}/metrics", timeout=30).text
        counted = dict(re.findall(r"^tiercel_events_(\w+)_total (\S+)$", page, re.MULTILINE))
        assert counted.keys() == {"batches", "unheard", "dropped", "errors"}
        assert re.search(r"^tiercel_events_subscribers 1\.0$", page, re.MULTILINE)
        assert float(counted["batches"]) >= 3 and float(counted["dropped"]) == float(counted["errors"]) == 0
