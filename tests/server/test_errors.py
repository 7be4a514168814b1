"""Goal: whatever is wrong, the client learns it in one form, with a status that fits. Method: do it wrong."""

import asyncio
import json
import logging

import pytest

from tests.server.scripted import LOOPBACK, ScriptedService, call, client_of, events_of, post, talking
from tiercel.asks.ask import Finish
from tiercel.errors import QueueFull
from tiercel.server.http.errors import ApiError, shown
from tiercel.server.options import ServerOptions

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}
GOOD = {
    CHAT: {"model": "scripted", "messages": [USER]},
    "/v1/completions": {"model": "scripted", "prompt": "x"},
    "/generate": {"text": "x"},
}


def error_of(response):
    """The one form."""
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"model": "\xc3"}',
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN}',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"model": "x"} trailing',
    ],
    ids=lambda raw: str(raw[:20]),
)
def test_what_is_not_json_is_refused(raw):
    with talking(ScriptedService()) as talk:
        for path in GOOD:
            response = talk("POST", path, content=raw, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert error_of(response)["code"] == "invalid_json"


@pytest.mark.parametrize("raw", [b"5", b"null", b"[]", b'"x"', b"{}"], ids=str)
def test_json_that_is_no_request_is_refused(raw):
    with talking(ScriptedService()) as talk:
        for path in GOOD:
            response = talk("POST", path, content=raw, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_must_say_that_it_is_json(kind):
    response = call("POST", "/generate", content=b'{"text": "x"}', headers={"content-type": kind})
    assert response.status_code == 400
    assert error_of(response)["param"] == "content-type"


@pytest.mark.parametrize(
    ("wrong", "param", "code"),
    [
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 17}, "n", "invalid_value"),
        ({"n": 10**15}, "n", "invalid_value"),
        ({"n": True}, "n", "invalid_value"),
        ({"n": 1.5}, "n", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"stop": [1]}, "stop[0]", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"stop": "x" * 257}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
        ({"logit_bias": {"3": 101}}, "logit_bias.3", "invalid_value"),
        ({"logit_bias": {"265": 1}}, "logit_bias.265", "not_a_token"),
        ({"top_logprobs": 2}, "top_logprobs", "conflicting_values"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        ({"cache_salt": "x" * 257}, "cache_salt", "invalid_value"),
        ({"priority": 2**31}, "priority", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [USER, {"role": "king", "content": ""}]}, "messages[1].role", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            None,
        ),
        ({"messages": [{"role": "user", "content": "impossible"}]}, "messages[0].content", "invalid_value"),
        ({"rid": "a b"}, "rid", "invalid_value"),
        ({"stop_token_ids": [265]}, "stop_token_ids", "invalid_value"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "conflicting_values"),
        ({"skip_special_tokens": 1}, "skip_special_tokens", "invalid_value"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "conflicting_values",
        ),
        ({"messages": [USER | {"refusal": "no"}]}, "messages[0].refusal", "unsupported_parameter"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_a_wrong_field_is_named(wrong, param, code):
    service = ScriptedService()
    response = post(CHAT, service, **(GOOD[CHAT] | wrong))
    error = error_of(response)
    assert response.status_code == 400
    assert error["param"] == param
    assert param in error["message"]
    assert code is None or error["code"] == code
    assert service.asks == []


def test_a_number_too_large_for_a_float_is_refused():
    raw = b'{"model": "scripted", "prompt": "x", "temperature": 1e999}'
    response = call("POST", "/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["param"] == "temperature"


def test_a_whole_number_may_be_written_with_a_point():
    raw = b'{"text": "x", "sampling_params": {"max_new_tokens": 2.0}}'
    response = call("POST", "/generate", content=raw, headers={"content-type": "application/json"})
    assert response.json()["meta_info"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_model_that_is_not_served_is_not_found(path):
    response = post(path, **(GOOD[path] | {"model": "gpt"}))
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 50}]}, "messages"),
        (CHAT, {"max_completion_tokens": 40}, "max_completion_tokens"),
        (CHAT, {"max_tokens": 40}, "max_tokens"),
        ("/v1/completions", {"prompt": ["x", "x" * 51]}, "prompt[1]"),
        ("/v1/completions", {"max_tokens": 50}, "max_tokens"),
        ("/generate", {"text": "x" * 51}, "text"),
        ("/generate", {"sampling_params": {"max_new_tokens": 50}}, "sampling_params.max_new_tokens"),
    ],
)
def test_what_does_not_fit_into_the_context_is_refused(path, body, param):
    response = post(path, ScriptedService(context_tokens=50), **(GOOD[path] | body))
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert error_of(response)["param"] == param


def test_a_prompt_as_long_as_the_context_can_be_read_but_not_continued():
    service = ScriptedService(context_tokens=3)
    full = {"model": "scripted", "prompt": "xyz"}
    assert post("/v1/completions", service, **full).json()["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_more_prompts_than_allowed_are_refused(path):
    field = "prompt" if path == "/v1/completions" else "text"
    response = call(
        "POST",
        path,
        options=ServerOptions(loopback=True, batch_max=2),
        json=GOOD[path] | {field: ["x", "y", "z"]},
    )
    assert response.status_code == 400
    assert error_of(response)["param"] == field


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GOOD)
def test_a_full_queue_is_429_and_says_when_to_come_back(path, stream):
    service = ScriptedService(fail_first=QueueFull(waiting=9, waiting_max=9, retry_after_s=3))
    response = post(path, service, **GOOD[path], stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert error_of(response)["code"] == "queue_full"
    assert error_of(response)["type"] == "rate_limit_error"


@pytest.mark.parametrize("path", GOOD)
def test_before_the_model_is_loaded_requests_are_503(path):
    response = post(path, ScriptedService(ready=False), **GOOD[path])
    assert response.status_code == 503
    assert error_of(response)["code"] == "not_ready"


@pytest.mark.parametrize(("end", "status"), [(Finish.ERROR, 500), (Finish.ABORT, 503)])
@pytest.mark.parametrize("path", GOOD)
def test_an_answer_the_engine_gave_up_is_an_error_and_not_a_short_answer(path, end, status):
    response = post(path, ScriptedService(end=end), **GOOD[path])
    assert response.status_code == status
    assert error_of(response)["message"] == "the device is on fire"


@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_of_ours_is_500_told_nothing_about_and_logged_once(stream, caplog):
    service = ScriptedService(fail_first=RuntimeError("secret"))
    with caplog.at_level(logging.ERROR):
        response = post(CHAT, service, **GOOD[CHAT], stream=stream)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["type"] == "server_error"
    assert len(caplog.records) == 1
    assert "secret" in caplog.text


def test_an_engine_whose_answer_just_stops_is_a_mistake_of_ours(caplog):
    class Mute(ScriptedService):
        async def submit(self, ask, put):  # noqa: ARG002 (of the contract)
            self.asks.append(ask)

    assert post(CHAT, Mute(), **GOOD[CHAT], n=2).status_code == 500
    assert "has no end" in caplog.text


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    ("trouble", "code"),
    [(QueueFull(waiting=1, waiting_max=1), "queue_full"), (RuntimeError("secret"), "internal_error")],
    ids=str,
)
def test_an_error_in_the_middle_of_a_stream_is_its_last_event(path, trouble, code, caplog):
    service = ScriptedService(fail_after=(2, trouble))
    response = post(path, service, **GOOD[path], stream=True)
    assert response.status_code == 200
    *pieces, last = events_of(response)
    assert len(pieces) == 2
    assert json.loads(last)["error"]["code"] == code
    assert "secret" not in response.text
    assert len(caplog.records) == (code == "internal_error")


def test_one_failure_of_many_ends_all_of_them():
    class Second(ScriptedService):
        async def submit(self, ask, put):
            if ask.prompt[0] == ord("y"):
                self.asks.append(ask)
                raise QueueFull(waiting=1, waiting_max=1)
            await super().submit(ask, put)

    service = Second(hold_after=1)
    assert post("/generate", service, text=["x", "y"]).status_code == 429
    assert service.closed.is_set()


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/chat/completions/", "/v1/models/gpt"])
def test_a_route_that_is_not_there_is_404(path):
    response = call("GET", path)
    assert response.status_code == 404
    error_of(response)


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT), ("PUT", "/health"), ("GET", "/flush_cache")])
def test_a_method_that_is_not_there_is_405_and_says_which_are(method, path):
    response = call(method, path)
    assert response.status_code == 405
    assert response.headers["allow"]
    error_of(response)


def test_a_body_that_is_too_long_is_413_with_or_without_its_length_told():
    async def pieces():
        for _ in range(3):
            yield b"x" * 40

    options = ServerOptions(loopback=True, body_bytes_max=100)

    async def both():
        async with client_of(ScriptedService(), options) as client:
            headers = {"content-type": "application/json"}
            told = await client.post("/generate", content=b"x" * 101, headers=headers)
            untold = await client.post("/generate", content=pieces(), headers=headers)
            return told, untold

    for response in asyncio.run(both()):
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"


def test_a_body_may_be_as_long_as_the_limit():
    body = b'{"text": "x"}'
    options = ServerOptions(loopback=True, body_bytes_max=len(body))
    headers = {"content-type": "application/json"}
    assert call("POST", "/generate", options=options, content=body, headers=headers).status_code == 200


def test_a_message_shows_only_the_beginning_of_a_value():
    assert len(shown("x" * 10_000)) < 300
    assert len(shown({"x": "y" * 10_000})) < 300
    response = post(CHAT, **(GOOD[CHAT] | {"temperature": "x" * 10_000}))
    assert len(response.text) < 1000


def test_an_error_can_be_sent_whatever_is_in_it():
    assert ApiError(400, "\ud800").response().body.isascii()
    response = call("GET", "/v1/models/%ff%ed%a0%80")
    assert response.status_code == 404
    error_of(response)


def test_options_are_checked():
    for wrong in ({"n_max": 0}, {"body_bytes_max": "8MiB"}, {"admin_key": ""}, {"api_key": (" x",)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ServerOptions(**wrong)
    assert not ServerOptions().loopback
    assert LOOPBACK.loopback
