"""Goal: tokens that were found and computed again are told as computed, everywhere. Method: a service that
replays six of the ten tokens that it finds, asked with every call."""

import logging

import pytest

from tests.server.scripted import ScriptedService, talking
from tiercel.asks.ask import Usage
from tiercel.server.http.border import Visit
from tiercel.server.http.traces import _about

REPLAYED, PAGE = 6, 4


def ask(path, text="abcdefghijk", **more):
    """Eleven tokens, of which ten are found the second time."""
    body = {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/responses": {"input": text, "store": False},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 9},
        "/generate": {"text": text},
    }[path]
    with talking(ScriptedService(replayed_tokens=REPLAYED, page_tokens=PAGE)) as talk:
        for _ in range(2):
            answer = talk("POST", path, json={"model": "scripted", **body, **more})
            assert answer.status_code == 200, answer.text
        feed = talk("GET", "/metrics").text
    return answer, feed


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_of_chats_and_completions(path):
    answer, _ = ask(path, return_cached_tokens_details=True)
    told = answer.json()
    prompt = told["usage"]["prompt_tokens"]
    assert told["usage"]["prompt_tokens_details"] == {"cached_tokens": prompt - 1 - REPLAYED}
    assert told["sglext"]["replayed_tokens"] == REPLAYED
    assert sum(told["sglext"]["cached_tokens_details"].values()) == prompt - 1 - REPLAYED


def test_usage_of_responses():
    usage = ask("/v1/responses")[0].json()["usage"]
    prompt, details = usage["input_tokens"], usage["input_tokens_details"]
    assert details["cached_tokens"] == prompt - 1 - REPLAYED
    assert details["cache_write_tokens"] == max(prompt // PAGE * PAGE - (prompt - 1), 0), "not the replayed"


def test_usage_of_messages_adds_up_to_the_prompt():
    usage = ask("/v1/messages")[0].json()["usage"]
    read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    prompt = usage["input_tokens"] + read + written
    assert read == prompt - 1 - REPLAYED and written in (0, 1), "a replayed token is neither read nor written"


def test_meta_info_of_generate():
    meta = ask("/generate")[0].json()["meta_info"]
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["replayed_tokens"]) == (11, 4, REPLAYED)
    assert sum(meta["cached_tokens_details"].values()) == 4


def test_the_log_tells_replayed_tokens_if_there_are_some(caplog):
    caplog.set_level(logging.INFO, "tiercel.access")
    ask("/generate")
    lines = [line for line in caplog.messages if "/generate" in line]
    assert lines[0].endswith("11 tokens in, 0 cached, 3 out")
    assert lines[1].endswith("11 tokens in, 4 cached, 6 replayed, 3 out")


def test_spans_tell_cached_and_replayed_tokens():
    visit = Visit(set(), "a", status=200)
    visit.usage = Usage(11, 3, device_tokens=4, replayed_tokens=6)
    about = _about({"method": "POST"}, visit, "/generate", "scripted")
    assert (about["tiercel.tokens.cached"], about["tiercel.tokens.replayed"]) == (4, 6)
