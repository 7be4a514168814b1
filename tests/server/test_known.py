"""Goal: clients of OpenAI's, SGLang's and vLLM's servers need no change. Method: every field of their request
types at its default, recorded requests of real clients, and values that ask for something."""

import json
import logging
import typing

import httpx
import openai.types.chat as openai_chat
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.responses as openai_responses
import openai.types.responses.response_create_params as response_params
import openai.types.shared_params as openai_shared
import pytest
from openai.types.responses.response_input_item_param import FunctionCallOutput

from tests.server import recorded
from tests.server.recorded import CHAT, CLIENTS, COMPLETIONS, GENERATE, USER
from tests.server.scripted import ScriptedService, call, events_of, post, talking
from tiercel.server.calls.anthropic import (
    AnthropicTool,
    CountRequest,
    MessagesRequest,
    TextBlock,
    ThinkingConfig,
    ToolResult,
    ToolUse,
)
from tiercel.server.calls.native import GenerateRequest, SamplingParams
from tiercel.server.calls.protocol import (
    AssistantMessage,
    CacheControl,
    ChatRequest,
    CompletionRequest,
    Message,
    StreamOptions,
    TextPart,
)
from tiercel.server.calls.responses import (
    CallItem,
    CallOutputItem,
    FunctionTool,
    InputMessage,
    Part,
    Reasoning,
    ReasoningItem,
    ResponsesRequest,
    TextFields,
)
from tiercel.server.calls.tokens import TokenizeRequest
from tiercel.server.http import known
from tiercel.server.operations.aborts import AbortRequest
from tiercel.server.options import ServerOptions

BODIES = (
    AbortRequest,
    AnthropicTool,
    CallItem,
    CallOutputItem,
    CountRequest,
    FunctionTool,
    InputMessage,
    MessagesRequest,
    Part,
    Reasoning,
    ReasoningItem,
    ResponsesRequest,
    TextBlock,
    TextFields,
    ThinkingConfig,
    TokenizeRequest,
    ToolResult,
    ToolUse,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    SamplingParams,
    StreamOptions,
    Message,
    AssistantMessage,
    TextPart,
    CacheControl,
)
RESPONSES, MESSAGES, TOKENIZE = "/v1/responses", "/v1/messages", "/tokenize"
GOOD = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "Hello world again"},
    GENERATE: {"text": "Hello"},
    RESPONSES: {"input": "Hello"},
    MESSAGES: {"messages": [USER], "max_tokens": 8},
    TOKENIZE: {"prompt": "Hello"},
}
DEFAULTS = {
    "SGLang, chat": (CHAT, recorded.SGLANG_CHAT),
    "SGLang, completions": (COMPLETIONS, recorded.SGLANG_COMPLETION),
    "SGLang, generate": (GENERATE, recorded.SGLANG_GENERATE),
    "SGLang's router, chat": (CHAT, recorded.ROUTER_CHAT),
    "SGLang's router, completions": (COMPLETIONS, recorded.ROUTER_COMPLETION),
    "vLLM, chat": (CHAT, recorded.VLLM_CHAT),
    "vLLM, completions": (COMPLETIONS, recorded.VLLM_COMPLETION),
}
NAMED = ServerOptions(loopback=True, model_names=("alias", "other"), model_path="/models/scripted")


def understood(body) -> set[str]:
    return set(body.model_fields) | set(body.known)


@pytest.mark.parametrize(
    ("body", "theirs"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_params.CompletionCreateParamsStreaming),
        (StreamOptions, openai_chat.ChatCompletionStreamOptionsParam),
        (Message, openai_chat.ChatCompletionSystemMessageParam),
        (Message, openai_chat.ChatCompletionDeveloperMessageParam),
        (Message, openai_chat.ChatCompletionUserMessageParam),
        (AssistantMessage, openai_chat.ChatCompletionAssistantMessageParam),
        (Message, openai_chat.ChatCompletionToolMessageParam),
        (ResponsesRequest, response_params.ResponseCreateParamsStreaming),
        (InputMessage, openai_responses.EasyInputMessageParam),
        (InputMessage, openai_responses.ResponseOutputMessageParam),
        (Part, openai_responses.ResponseInputTextParam),
        (Part, openai_responses.ResponseOutputTextParam),
        (CallItem, openai_responses.ResponseFunctionToolCallParam),
        (CallOutputItem, FunctionCallOutput),
        (ReasoningItem, openai_responses.ResponseReasoningItemParam),
        (FunctionTool, openai_responses.FunctionToolParam),
        (TextFields, openai_responses.ResponseTextConfigParam),
        (Reasoning, openai_shared.Reasoning),
    ],
    ids=lambda each: each.__name__,
)
def test_every_field_of_the_official_client_is_known(body, theirs):
    assert set(typing.get_type_hints(theirs)) <= understood(body)


@pytest.mark.parametrize(
    ("body", "theirs"),
    [
        (MessagesRequest, recorded.ANTHROPIC_MESSAGES),
        (CountRequest, recorded.ANTHROPIC_COUNT),
        (TextBlock, "type text cache_control citations"),
        (ToolUse, "type id name input cache_control caller toolset_name"),
        (ToolResult, "type tool_use_id content cache_control is_error toolset_name"),
        (ThinkingConfig, "type budget_tokens display"),
        (AnthropicTool, recorded.ANTHROPIC_TOOL),
    ],
    ids=lambda each: getattr(each, "__name__", "fields"),
)
def test_every_field_of_anthropics_client_is_known(body, theirs):
    assert set(theirs.split()) <= understood(body)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_field_is_either_served_or_in_a_table(body):
    assert not set(body.model_fields) & set(body.known)


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_field_of_other_servers_is_accepted_at_its_default(name):
    path, body = DEFAULTS[name]
    with talking(ScriptedService(), ServerOptions(loopback=True, strict=True)) as talk:
        response = talk("POST", path, json=GOOD[path] | body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_field_of_other_servers_may_be_null(name):
    path, body = DEFAULTS[name]
    with talking(ScriptedService(), ServerOptions(loopback=True, strict=True)) as talk:
        response = talk("POST", path, json=dict.fromkeys(body) | GOOD[path])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", CLIENTS)
def test_clients_are_answered(name):
    path, body = CLIENTS[name]
    with talking(ScriptedService(), NAMED) as talk:
        response = talk("POST", path, json=body)
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *recorded.ROUTER_CALLS,
        *(("GET", path) for path in ("/health_generate", "/get_server_info", "/v1/loads")),
    ],
)
def test_routers_other_calls_are_answered(method, path):
    assert call(method, path).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "least"),
    [
        (CHAT, ChatRequest, 20),
        (COMPLETIONS, CompletionRequest, 20),
        (GENERATE, GenerateRequest, 20),
        (RESPONSES, ResponsesRequest, 5),
        (MESSAGES, MessagesRequest, 6),
        (TOKENIZE, TokenizeRequest, 2),
    ],
)
def test_what_a_known_field_asks_for_is_refused_by_name(path, body, least):
    checked = 0
    with talking(ScriptedService()) as talk:
        for name, neutral in body.known.items():
            if neutral == known.ANY:
                continue
            response = talk("POST", path, json=GOOD[path] | {name: "something"})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name)
            assert error["code"] == "unsupported_parameter"
            assert error["message"].startswith(f"{name} = 'something': this server supports only null")
            checked += 1
    assert checked > least


def test_one_is_not_true_and_zero_is_not_false():
    for field, value in (("skip_special_tokens", 1), ("return_hidden_states", 0), ("min_tokens", False)):
        response = post(COMPLETIONS, prompt="x", **{field: value})
        assert response.json()["error"]["param"] == field
    assert post(COMPLETIONS, prompt="x", length_penalty=1, min_tokens=0).status_code == 200


# --- fields that nobody knows ---


def test_an_unknown_field_is_ignored_and_named_in_a_header(caplog):
    with talking(ScriptedService()) as talk:
        for _ in range(2):
            response = talk(
                "POST",
                CHAT,
                json={"messages": [USER | {"mood": 1}], "best": 1, "stream_options": {"more": 1}},
            )
            assert response.status_code == 200
            assert response.headers["x-ignored-fields"] == "best, mood, more"
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
    assert [record.args for record in caplog.records] == [("best",), ("mood",), ("more",)]


def test_an_unknown_field_is_named_for_streams_and_errors_too():
    stream = post(GENERATE, text="x", stream=True, sampling_params={"best": 1})
    assert stream.headers["x-ignored-fields"] == "best"
    wrong = post(CHAT, messages=[USER], model="gpt", best=1)
    assert (wrong.status_code, wrong.headers["x-ignored-fields"]) == (404, "best")


def test_unknown_names_are_made_harmless_and_counted(caplog):
    with talking(ScriptedService()) as talk:
        response = talk("POST", GENERATE, json={"text": "x", "a\r\nset-cookie: b": 1, "é" * 99: 1})
        assert response.headers["x-ignored-fields"] == f"a??set-cookie??b, {'?' * 64}"
        for batch in range(20):
            many = {f"field{batch}_{index}": 1 for index in range(100)}
            response = talk("POST", GENERATE, json={"text": "x"} | many)
            assert len(response.headers["x-ignored-fields"].split(", ")) == 32
    assert len(caplog.records) == 256


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"best": 1}, "best"),
        ({"best": None}, "best"),
        ({"stream_options": {"more": 1}}, "stream_options.more"),
        ({"messages": [USER, USER | {"mood": 1}]}, "messages[1].mood"),
    ],
    ids=str,
)
def test_a_strict_server_refuses_an_unknown_field(body, param):
    service = ScriptedService()
    with talking(service, ServerOptions(loopback=True, strict=True)) as talk:
        response = talk("POST", CHAT, json={"messages": [USER]} | body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["code"] == "unknown_parameter"
    assert service.asks == []


@pytest.mark.parametrize("strict", [False, True])
def test_the_schema_says_whether_unknown_fields_are_taken(strict):
    with talking(ScriptedService(), ServerOptions(loopback=True, strict=strict)) as talk:
        schemas = talk("GET", "/openapi.json").json()["components"]["schemas"]
    for body in BODIES:
        assert schemas[body.__name__]["additionalProperties"] is not strict
    assert schemas["ChatRequest"]["properties"]["modalities"] == {"enum": [None, ["text"]]}


# --- what is served beyond OpenAI ---


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("model", ["scripted", "alias", "other", "/models/scripted", "default", None])
def test_a_model_is_served_under_each_of_its_names(path, model):
    with talking(ScriptedService(), NAMED) as talk:
        response = talk("POST", path, json=GOOD[path] | {"model": model})
    assert response.json()["model"] == (model or "scripted")


def test_another_models_name_is_not_found_and_the_names_are_told():
    with talking(ScriptedService(), NAMED) as talk:
        response = talk("POST", CHAT, json=GOOD[CHAT] | {"model": "gpt"})
        assert response.status_code == 404
        assert "has the names 'scripted', 'alias', 'other'" in response.json()["error"]["message"]
        listed = talk("GET", "/v1/models").json()["data"]
        assert [(card["id"], card["root"]) for card in listed] == [
            (name, "/models/scripted") for name in ("scripted", "alias", "other")
        ]
        assert talk("GET", "/v1/models/alias").json()["id"] == "alias"


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info", "/server_info", "/get_server_info"])
def test_clients_are_told_where_to_load_the_tokenizer(path):
    with talking(ScriptedService(), NAMED) as talk:
        info = talk("GET", path).json()
    assert info["model_path"] == info["tokenizer_path"] == "/models/scripted"


def chunks_of(response: httpx.Response) -> list[dict]:
    *events, done = events_of(response)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_is_told_with_every_piece_if_it_is_asked_for(path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = chunks_of(post(path, stream=True, stream_options=options, **GOOD[path]))
    told = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert told == sorted(told)
    assert told[0] >= 1
    assert told[-1] == last["usage"]["completion_tokens"] == 3
    assert last["choices"] == []
    for piece in (*pieces, last):
        usage = piece["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_was_cached_is_told_by_tier_if_it_is_asked_for(path):
    ask = GOOD[path] | {"return_cached_tokens_details": True}
    with talking(ScriptedService(store_tokens=1)) as talk:
        cold = talk("POST", path, json=ask).json()
        warm = talk("POST", path, json=ask).json()
        streamed = chunks_of(talk("POST", path, json=ask | {"stream": True}))
        both = chunks_of(
            talk("POST", path, json=ask | {"stream": True, "stream_options": {"include_usage": True}})
        )
    details = {"device": 0, "host": 0, "storage": 0}
    assert cold["sglext"] == {"cached_tokens_details": details, "replayed_tokens": 0}
    details = warm["sglext"]["cached_tokens_details"]
    assert details["storage"] == 1
    assert sum(details.values()) == warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert streamed[-1]["sglext"] == both[-1]["sglext"] == warm["sglext"]
    assert streamed[-1]["choices"] == []
    assert both[-1]["usage"]["completion_tokens"] == 3
    assert not any("sglext" in piece for piece in (*streamed[:-1], *both[:-1]))
    assert "sglext" not in post(path, **GOOD[path]).json()


@pytest.mark.parametrize("field", ["no_stop_trim", "include_stop_str_in_output"])
def test_stop_tokens_and_kept_stop_strings_reach_the_engine(field):
    service = ScriptedService()
    post(CHAT, service, stop_token_ids=[7], **{field: True}, **GOOD[CHAT])
    assert service.ask.sampling.stop_tokens == {7}
    assert service.ask.sampling.keep_stop is True


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_has_an_engines_name_reaches_the_engine(path):
    service = ScriptedService()
    post(path, service, min_tokens=2, skip_special_tokens=False, sampling_seed=5, **GOOD[path])
    sampling = service.ask.sampling
    assert (sampling.min_tokens, sampling.skip_special_tokens, sampling.seed) == (2, False, 5)


@pytest.mark.parametrize("field", ["rid", "request_id"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_client_may_name_its_request(path, field):
    service = ScriptedService()
    response = post(path, service, **{field: "mine"}, **GOOD[path])
    assert response.json()["id"] == response.headers["x-request-id"] == service.ask.request_id == "mine"


def test_generate_takes_any_models_name():
    assert call("POST", GENERATE, json={"text": "x", "model": "unknown"}).status_code == 200
