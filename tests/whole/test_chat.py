"""Goal: chat works on a folder as DeepSeek publishes V4: no template, control tokens of its own. Method: a
real server on the embedded weights, with control tokens named as DeepSeek does; the official client."""

import json
import shutil
from pathlib import Path

import openai
import pytest

import tiercel.models
from tests.terminal import Terminal
from tests.text.test_deepseek_v4 import CLOCK, WEATHER
from tests.whole.process import running
from tiercel.text.text import Text

TINY = Path(tiercel.models.__file__).parent / "tiny_v4"
NAMES = {
    "<|bos|>": "<｜begin▁of▁sentence｜>",
    "<|end|>": "<｜end▁of▁sentence｜>",
    "<|user|>": "<｜User｜>",
    "<|assistant|>": "<｜Assistant｜>",
    "<|pad|>": "｜DSML｜",
    "<|system|>": "</think>",
}
CHAT = [{"role": "system", "content": "You look things up. " * 60}, {"role": "user", "content": "Which?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The six control tokens under other names, and no template."""
    path = tmp_path_factory.mktemp("published") / "v4"
    shutil.copytree(TINY, path, ignore=shutil.ignore_patterns("chat_template.jinja"))
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["content"] = NAMES[token["content"]]
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {NAMES.get(name, name): token for name, token in vocabulary.items()}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    begin, end = NAMES["<|bos|>"], NAMES["<|end|>"]
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": begin, "eos_token": end}))
    return path


@pytest.fixture(scope="module")
def server(folder):
    with running(str(folder), "--device-memory", "24MiB", "--host-memory", "64MiB") as own:
        yield own


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as own:
        yield own


def test_chat_is_answered_in_deepseeks_format_and_its_second_turn_from_the_cache(client, folder):
    model, text = client.models.list().data[0].id, Text(folder)
    off = {"thinking": {"type": "disabled"}}
    asked = {"model": model, "max_tokens": 8, "temperature": 0, "extra_body": off}
    first = client.chat.completions.create(messages=CHAT, **asked)
    expected = text.chat(CHAT, kwargs={"thinking": False})
    assert first.usage.prompt_tokens == len(expected.tokens)
    said = first.choices[0].message
    turn = [*CHAT, said, {"role": "user", "content": "And now?"}]
    second = client.chat.completions.create(messages=turn, **asked)
    assert second.usage.prompt_tokens_details.cached_tokens >= expected.turn_ends[0] // 256 * 256 > 0


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_tools_go_through_a_real_engine(client, folder, stream):
    model, tools = client.models.list().data[0].id, [WEATHER, CLOCK]
    answer = client.chat.completions.create(
        model=model,
        messages=CHAT,
        tools=tools,
        max_tokens=6,
        stream=stream,
        temperature=0,
        extra_body={"ignore_eos": True},
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    if stream:
        *chunks, last = answer
        thought = "".join(getattr(each.choices[0].delta, "reasoning_content", "") for each in chunks)
        finish, usage = chunks[-1].choices[0].finish_reason, last.usage
    else:
        (choice,) = answer.choices
        thought, finish, usage = choice.message.reasoning_content, choice.finish_reason, answer.usage
        assert choice.message.content == ""
    assert usage.prompt_tokens == len(Text(folder).chat(CHAT, tools=tools).tokens)
    assert thought and finish == "length"


def test_a_conversation_in_a_terminal_is_explained_and_saved(server, tmp_path):
    words = ["chat", "--url", f"{server.url}/v1", "--max-tokens", "4", "--system", CHAT[0]["content"]]
    with Terminal(*words, home=tmp_path) as terminal:
        terminal.type("Which?", "tokens cached")
        terminal.type("And now?", "tokens cached")
        assert "decode" in terminal.type("/explain", " ms")
        terminal.type(f"/save {tmp_path}/said.json", "5 messages are in")
        terminal.press(b"/exit\r")
    with Terminal("chat", "--url", server.url, "--max-tokens", "4", home=tmp_path) as terminal:
        terminal.type("Which?", "whole pages of 256 tokens are cached, and this is less than one")
        terminal.press(b"/exit\r")
    said = json.loads((tmp_path / "said.json").read_text())["messages"]
    assert [message["role"] for message in said] == ["system", *["user", "assistant"] * 2]
    assert said[3]["content"] == "And now?"
