"""Goal: one server computes a prompt and another goes on from its pages, pulled while they are computed.
Method: real server processes, asked as routers ask them; answers and logprobs are those of one server."""

import signal
import threading
import time
from contextlib import suppress

import httpx
import pytest

from tests.engine.drive import DRAFTED
from tests.servers import free_port
from tests.wait import until
from tests.whole.process import Server, running
from tests.whole.test_peers import KEY, forget, stats_of

MEMORY = ("--device-memory", "48MiB", "--host-memory", "128MiB")
PAGE = 128
WAIT_S = 2
DRAFT = ("--speculate", "mtp")


def words(count, seed=0):
    return [(i * i * 31 + i * 17 + seed * 101) % 3800 + 200 for i in range(count)]


def asked(server, tokens, count=12, **fields):
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = httpx.post(f"{server.url}/generate", json=body | fields, timeout=120)
    answer.raise_for_status()
    return answer.json()["meta_info"]


def said(meta):
    return meta["output_token_logprobs"]


class Pair:
    """A server that computes prompts, and one that goes on from them. Both have a draft, whose bytes travel
    too; answers are those of a server without one."""

    def __init__(self, *reading, offering=()):
        self.port = free_port()
        self._offer = (*MEMORY, *KEY, "--role", "prefill", "--share-pages", f"127.0.0.1:{self.port}")
        self._offer += (
            *DRAFT,
            "--layout",
            "layer_first",
            "--step-tokens",
            "256",
            "--evict",
            "lfu",
            *offering,
        )
        self.prefill = Server(*self._offer, "--share-mooncake", "tcp")
        peer = f"peer://127.0.0.1:{self.port}?timeout_s=1"
        self.decode = Server(
            *MEMORY,
            *KEY,
            *DRAFT,
            "--role",
            "decode",
            "--peer",
            peer,
            "--prefill-wait-s",
            str(WAIT_S),
            *reading,
        )

    def room(self, number=1):
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": number}

    def ask(self, tokens, **fields):
        """What both answer. A router asks both at the same time."""
        answers = {}

        def ask(name, server):
            answers[name] = asked(server, tokens, **self.room(), **fields)

        threads = [
            threading.Thread(target=ask, args=each)
            for each in (("decode", self.decode), ("prefill", self.prefill))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers["prefill"], answers["decode"]

    def restart(self):
        self.prefill = Server(*self._offer)

    def close(self):
        for server in (self.decode, self.prefill):
            code, rest = server.stop()
            assert "Traceback" not in rest, rest
            assert code == 0, rest


@pytest.fixture(scope="module")
def pair():
    made = Pair()
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone():
    with running(*MEMORY, "--speculate", "off") as server:
        yield server


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 1, 600, 3000])
def test_answers_are_those_of_one_server(pair, alone, length):
    """Every page of the prompt is pulled, but for the page that its last token is in."""
    tokens = words(length, length)
    prefill, decode = pair.ask(tokens)
    assert len(said(prefill)) == 1, "the other server goes on"
    assert said(decode) == said(asked(alone, tokens))
    assert decode["cached_tokens_details"]["storage"] == (length - 1) // PAGE * PAGE


def test_answers_are_those_of_one_server_over_mooncake(pair, alone):
    peer = f"peer://127.0.0.1:{pair.port}?transport=mooncake"
    with running(*MEMORY, *KEY, *DRAFT, "--role", "decode", "--peer", peer) as decode:
        for length in (600, 1500):
            tokens = words(length, length + 1)
            asking = threading.Thread(target=asked, args=(pair.prefill, tokens), kwargs=pair.room())
            asking.start()
            answer = asked(decode, tokens, **pair.room())
            asking.join()
            assert said(answer) == said(asked(alone, tokens))
            assert answer["cached_tokens_details"]["storage"] == (length - 1) // PAGE * PAGE


def test_only_what_is_missing_travels(pair, alone):
    """Two pages of five, and a tail."""
    tokens = words(5 * PAGE + 9, 7)
    first, then = [], []
    for length, moved in ((3 * PAGE + 1, first), (len(tokens), then)):
        before = stats_of(pair.decode)["store"]["read_bytes"]
        _, decode = pair.ask(tokens[:length])
        moved.append(stats_of(pair.decode)["store"]["read_bytes"] - before)
    assert said(decode) == said(asked(alone, tokens))
    assert first == [3 * DRAFTED.page_bytes + DRAFTED.tail_bytes]
    assert then == [2 * DRAFTED.page_bytes + DRAFTED.tail_bytes]


def test_tenants_get_their_own_pages(pair, alone):
    tokens = words(300, 8)
    for salt in ("a", "b"):
        _, decode = pair.ask(tokens, cache_salt=salt)
        assert decode["cached_tokens_details"]["storage"] == 2 * PAGE
        assert said(decode) == said(asked(alone, tokens))


def test_a_prompt_that_nobody_computes_is_computed_here(pair, alone):
    """The other server is never asked. The wait is bounded."""
    tokens = words(300, 9)
    began = time.monotonic()
    decode = asked(pair.decode, tokens, **pair.room())
    assert said(decode) == said(asked(alone, tokens))
    assert decode["cached_tokens_details"]["storage"] == 0
    assert time.monotonic() - began < WAIT_S + 10


def test_a_peer_that_was_not_named_at_the_start_is_refused(pair):
    fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
    body = {"input_ids": [1, 2, 3]} | fields
    answer = httpx.post(f"{pair.decode.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400 and "not a peer that this server was started with" in answer.text


@pytest.mark.parametrize("how", ["kill", "stop", "abort"])
def test_a_server_that_is_lost_while_it_computes_costs_no_answer(pair, alone, how):
    """After its first pages: killed and started again, stopped for a while, or its request aborted."""
    tokens = words(40 * PAGE, ["kill", "stop", "abort"].index(how) + 20)
    truth = said(asked(alone, tokens))
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(asked(pair.decode, tokens, **pair.room())))
    waiting.start()
    computing = stats_of(pair.prefill)["counters"].get("pages_saved", 0)
    body = {"input_ids": tokens, "stream": True, "sampling_params": {"max_new_tokens": 4}} | pair.room()
    with httpx.stream("POST", f"{pair.prefill.url}/generate", json=body, timeout=60) as stream:
        until(
            lambda: stats_of(pair.prefill)["counters"].get("pages_saved", 0) > computing + 1,
            "the first pages are saved",
        )
        if how == "abort":
            stream.close()
        else:
            number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
            pair.prefill.process.send_signal(number)
        waiting.join(timeout=60)
    assert [said(each) for each in answers] == [truth]
    if how == "stop":
        pair.prefill.process.send_signal(signal.SIGCONT)
    if how == "kill":
        pair.prefill.process.communicate(timeout=60)
        pair.restart()
    for server in (pair.decode, pair.prefill):
        forget(server)
    again = words(300, 40)

    def works():
        forget(pair.decode)
        _, decode = pair.ask(again)
        assert said(decode) == said(asked(alone, again))
        return decode["cached_tokens_details"]["storage"] == 2 * PAGE

    until(works, "the peer is used again", timeout_s=60)


def test_a_client_that_leaves_ends_the_request_on_both_servers(pair):
    """The prompt takes seconds. The server that computes it learns within a second that nobody waits."""
    tokens = words(60 * PAGE, 50)
    before = stats_of(pair.prefill)["engine"].get("finished_abort", 0)

    def compute():
        with suppress(httpx.HTTPStatusError):
            asked(pair.prefill, tokens, **pair.room())

    computing = threading.Thread(target=compute)
    computing.start()
    body = {"input_ids": tokens, "stream": True} | pair.room()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{pair.decode.url}/generate", json=body, timeout=0.7)
    computing.join()
    assert stats_of(pair.prefill)["engine"]["finished_abort"] == before + 1
    until(lambda: stats_of(pair.decode)["queue"]["waiting"] == 0, "nothing waits")
    for server in (pair.decode, pair.prefill):
        forget(server)


def test_logprobs_of_a_prompt_come_from_the_server_that_computes_it(pair, alone):
    """SGLang's router puts them before those of the other server, which therefore has none."""
    tokens = words(300, 61)
    prefill, decode = pair.ask(tokens, logprob_start_len=0)
    truth = asked(alone, tokens, logprob_start_len=0)
    assert prefill["input_token_logprobs"] == truth["input_token_logprobs"]
    assert decode["input_token_logprobs"] == [] and said(decode) == said(truth)


def test_vllms_proxies_ask_one_server_after_the_other(pair, alone):
    """What the first answers is put into the request for the second, as it is."""
    body = {"model": "tiny-v4", "prompt": words(300, 60), "max_tokens": 8, "temperature": 0}
    first = httpx.post(
        f"{pair.prefill.url}/v1/completions",
        json=body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
        timeout=60,
    ).json()
    assert first["usage"]["completion_tokens"] == 1
    body |= {"kv_transfer_params": first["kv_transfer_params"]}
    second = httpx.post(f"{pair.decode.url}/v1/completions", json=body, timeout=60).json()
    del body["kv_transfer_params"]
    direct = httpx.post(f"{alone.url}/v1/completions", json=body, timeout=60).json()
    assert second["choices"][0]["text"] == direct["choices"][0]["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * PAGE
