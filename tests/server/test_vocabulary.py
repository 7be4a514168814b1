"""Goal: a client may send every token that the model reads and draws, and no other, whatever the tokenizer
knows. Method: a model with more tokens than its tokenizer has."""

import pytest

from tests.server.scripted import EOS, ScriptedService, talking
from tests.text.test_text import TEXT

LAST = EOS + 10
"""The model's last token: the tokenizer's last is EOS."""


def service(**more):
    return ScriptedService(more_tokens=LAST - EOS, **more)


CALLS = [
    ("/generate", lambda token: {"input_ids": [97, token]}, "input_ids[1]"),
    ("/generate", lambda token: {"input_ids": [[97], [token]]}, "input_ids[1][0]"),
    ("/v1/completions", lambda token: {"prompt": [97, token], "echo": True}, "prompt[1]"),
    ("/v1/completions", lambda token: {"prompt": "a", "stop_token_ids": [token]}, "stop_token_ids"),
    (
        "/v1/completions",
        lambda token: {"prompt": "a", "logit_bias": {f"{token}": 1}},
        f"logit_bias.{LAST + 1}",
    ),
    (
        "/generate",
        lambda token: {"text": "a", "sampling_params": {"stop_token_ids": [token]}},
        "sampling_params.stop_token_ids",
    ),
    ("/detokenize", lambda token: {"tokens": [97, token]}, "tokens"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"), CALLS, ids=lambda each: each if isinstance(each, str) else ""
)
def test_what_the_model_draws_may_be_sent_and_nothing_else(path, body, param):
    with talking(service()) as talk:
        assert talk("POST", path, json=body(LAST)).status_code == 200
        refused = talk("POST", path, json=body(LAST + 1))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert f"{LAST + 1}" in refused.json()["error"]["message"]


def test_a_token_without_a_text_shows_nothing():
    text = TEXT
    beyond = text.token_ids + 5
    with talking(ScriptedService(text=text, more_tokens=10)) as talk:
        told = talk("POST", "/detokenize", json={"tokens": [*text.encode("a b"), beyond]}).json()
        assert told == {"text": "a b", "prompt": "a b"}
        body = {"prompt": [*text.encode("a b"), beyond], "echo": True, "logprobs": 0, "max_tokens": 1}
        choice = talk("POST", "/v1/completions", json=body).json()["choices"][0]
    assert choice["text"].startswith("a b") and "" in choice["logprobs"]["tokens"]


def test_the_schema_and_the_model_info_have_the_models_number():
    with talking(service()) as talk:
        ids = talk("GET", "/openapi.json").json()["components"]["schemas"]["DetokenizeRequest"]
        assert f'"maximum": {LAST}' in str(ids).replace("'", '"')
        assert f"{LAST + 1}" in talk("GET", "/get_model_info").text
