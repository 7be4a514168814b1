"""Goal: two servers, one of which has the pages of the other. Method: real server processes as a user starts
them. (What is read page by page, and what goes wrong on the way, is in `tests/peers`.)"""

import re
import signal

import httpx

from tests.servers import free_port
from tests.wait import until
from tests.whole.process import Server, running
from tests.whole.test_store import MEMORY, generate
from tiercel.threads import start

KEY = ("--share-key", "a key for tests")
PROMPT = [(i * i * 31 + i * 17) % 3800 + 200 for i in range(700)]
FULL = {"device": 0, "host": 0, "storage": 640}


def stats_of(server):
    return httpx.get(f"{server.url}/v1/cache/stats", timeout=30).json()


def wait_until_saved(server):
    def is_saved():
        return stats_of(server)["counters"].get("pages_saved", 0) >= len(PROMPT) // 128

    until(is_saved, "every page is on the host", timeout_s=60)


def forget(server):
    """All that is cached. Afterwards every host page is free: none is lost."""
    httpx.post(f"{server.url}/flush_cache", params={"timeout": 10}).raise_for_status()
    pool = stats_of(server)["pools"]["host pages"]
    assert pool["capacity"] == pool["free"]


def test_a_server_answers_from_the_pages_of_another_that_is_killed_and_comes_back():
    address = f"127.0.0.1:{free_port()}"
    offer = (*MEMORY, *KEY, "--layout", "layer_first", "--share-pages", address, "--share-mooncake", "tcp")
    read = ("--fetch", "wait", "--peer", f"peer://{address}?transport=mooncake&timeout_s=2")
    starting = start(lambda: Server(*offer), "first")
    with running(*MEMORY, *KEY, *read) as second:
        first = starting.result()
        said, _ = generate(first, PROMPT)
        wait_until_saved(first)
        assert re.search(rf"peer://{address}", second.told)
        assert generate(second, PROMPT) == (said, FULL), "every logprob, bit for bit"
        for size in (1, 128, 129, 400):
            assert generate(second, PROMPT[:size])[0] == generate(first, PROMPT[:size])[0]
        forget(second)
        first.process.send_signal(signal.SIGKILL)
        first.process.communicate(timeout=60)
        answer, cached = generate(second, PROMPT)
        assert answer == said and cached["storage"] == 0
        with running(*offer) as again:
            assert generate(again, PROMPT)[0] == said
            wait_until_saved(again)

            def pulls():
                forget(second)
                return generate(second, PROMPT) == (said, FULL)

            until(pulls, "the peer is used again", timeout_s=60)
            until(lambda: stats_of(again)["shared"]["leases"] > 0, "it has given out leases")
            forget(again)
