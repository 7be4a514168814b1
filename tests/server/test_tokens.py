"""Goal: `/tokenize` and `/detokenize` as vLLM's and SGLang's clients know them. Method: a model's own
tokenizer."""

from typing import Any

import pytest

from tests.server.scripted import EOS, ScriptedService, post
from tests.text.test_deepseek_v4 import v4_folder
from tiercel.text.text import Text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return Text(v4_folder(tmp_path_factory.mktemp("v4") / "model"))


def test_a_prompt_as_tokens_and_back(text):
    service = ScriptedService(text=text)
    told = post("/tokenize", service, model="scripted", prompt="Hello world", return_token_strs=True).json()
    tokens = text.encode("Hello world")
    assert told["tokens"] == tokens
    assert (told["count"], told["max_model_len"]) == (len(tokens), 4096)
    assert "".join(told["token_strs"]).endswith("Hello world")
    bare = post("/v1/tokenize", service, prompt="Hello world", add_special_tokens=False).json()
    assert bare["tokens"] == tokens[-bare["count"] :]
    back = post("/detokenize", service, tokens=bare["tokens"]).json()
    assert back == {"text": "Hello world", "prompt": "Hello world"}
    assert service.asks == []


def test_special_tokens_are_shown_to_vllms_clients_and_to_others_if_they_want(text):
    end = next(iter(text.eos))
    for asked, shown in (({}, False), ({"skip_special_tokens": False}, True)):
        back = post(
            "/detokenize", ScriptedService(text=text), tokens=[*text.encode("a"), end], **asked
        ).json()
        assert "end▁of▁sentence" in back["prompt"]
        assert ("end▁of▁sentence" in back["text"]) is shown


def test_several_prompts_are_several_lists():
    told = post("/tokenize", prompt=["Hello world", ""]).json()
    assert told == {"tokens": [[256, 257], []], "count": [2, 0], "max_model_len": 4096}
    assert post("/detokenize", tokens=told["tokens"]).json()["text"] == ["Hello world", ""]
    assert post("/detokenize", tokens=[]).json()["text"] == ""


def test_a_conversation_is_tokenized_as_a_chat_reads_it():
    messages = [{"role": "user", "content": "Hello"}]
    service = ScriptedService()
    post("/v1/chat/completions", service, messages=messages)
    assert tuple(post("/tokenize", service, messages=messages).json()["tokens"]) == service.ask.prompt
    messages += [{"role": "assistant", "content": "one"}]
    begun = post(
        "/tokenize", messages=messages, continue_final_message=True, add_generation_prompt=False
    ).json()
    assert service.text.decode(begun["tokens"]).endswith("assistant:one")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/tokenize", {"prompt": ["x"] * 65}, "prompt"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/detokenize", {"tokens": [EOS + 1]}, "tokens"),
        ("/detokenize", {"tokens": [[1]] * 65}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_what_can_not_be_done_is_named(path: str, body: dict[str, Any], param: str):
    response = post(path, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_another_models_tokens_are_not_found():
    assert post("/tokenize", model="other", prompt="a").status_code == 404
