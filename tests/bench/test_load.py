"""Goal: a load is the same for the same seed, and a trace keeps its lengths and what its prompts share.
Method: the tokens that are sent, compared."""

import json
from dataclasses import replace

import pytest

from tiercel.bench.load import TOKEN_IDS, Shape, Span, ids_of, make_conversations, read_conversations
from tiercel.bench.sending import Form, Said
from tiercel.errors import ConfigError, TraceError

SHAPE = Shape(3, 2, Span(40, 90), Span(5, 9), 64, seed=7)


def prompts(conversations, form=Form.IDS):
    """Of all turns, answered without words."""
    asked = []
    for each in conversations:
        said = Said(each, form)
        for turn in each.turns:
            asked.append(json.dumps(said.ask(turn)))
            said.answered(turn, "")
    return asked


def recorded(file, rows, **more):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_conversations([str(file)], **{"seed": 0, "speed": 1.0, "requests": None, **more})


def asked_tokens(conversations):
    return [ids_of(each.turns[0].message) for each in conversations]


def shared(one, other):
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@pytest.mark.parametrize("form", list(Form))
def test_one_seed_is_one_load_and_another_seed_another(form):
    assert prompts(make_conversations(SHAPE), form) == prompts(make_conversations(SHAPE), form)
    other = make_conversations(replace(SHAPE, seed=8))
    assert not set(prompts(make_conversations(SHAPE), form)) & set(prompts(other, form))


def test_a_turn_is_asked_with_all_that_was_said_before():
    asked = [json.loads(each)["prompt"] for each in prompts(make_conversations(SHAPE))]
    firsts, seconds = asked[::2], asked[1::2]
    assert [shared(*pair) for pair in zip(firsts, seconds, strict=True)] == [len(each) for each in firsts]
    assert {shared(firsts[0], each) for each in firsts[1:]} == {64}
    assert all(64 + 40 <= len(each) <= 64 + 90 for each in firsts)
    assert all(45 <= len(b) - len(a) <= 99 for a, b in zip(firsts, seconds, strict=True))
    assert all(TOKEN_IDS[0] <= token < TOKEN_IDS[1] for each in asked for token in each)


def test_a_chat_has_the_shared_beginning_as_its_system_message_and_the_servers_own_words():
    (conversation, *_) = make_conversations(SHAPE)
    said = Said(conversation, Form.CHAT)
    said.ask(conversation.turns[0])
    said.answered(conversation.turns[0], "its words")
    messages = said.ask(conversation.turns[1])["messages"]
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "its words"
    assert len(messages[0]["content"].split()) == 64


MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 3]},
    {"timestamp": 3000, "input_length": 1500, "output_length": 0, "hash_ids": [1, 2, 4]},
    {"timestamp": 2000, "input_length": 600, "output_length": 9, "hash_ids": [1]},
    {"timestamp": 4000, "input_length": 1030, "output_length": 9, "hash_ids": [1, 2]},
]


def test_prompts_of_a_trace_share_the_blocks_with_equal_names(tmp_path):
    asked = recorded(tmp_path / "trace.jsonl", MOONCAKE, speed=2.0)
    tokens = asked_tokens(asked)
    assert [len(each) for each in tokens] == [1100, 600, 1500, 1030]
    assert [each.begins_s for each in asked] == [0, 0.5, 1.0, 1.5]
    assert [each.turns[0].answer.tokens for each in asked] == [3, 9, 1, 9]
    first, short, other, last = tokens
    assert (shared(first, other), shared(first, short), shared(first, last)) == (1024, 512, 1024)
    assert asked_tokens(recorded(tmp_path / "elsewhere" / "trace.jsonl", MOONCAKE)) == tokens
    assert len(recorded(tmp_path / "trace.jsonl", MOONCAKE, requests=2)) == 2
    assert recorded(tmp_path / "trace.jsonl", MOONCAKE, speed=float("inf"))[-1].begins_s == 0


def test_names_are_those_of_one_session_only(tmp_path):
    session = {"block_size": 64, "requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [1]}]}
    for name in ("a", "b"):
        (tmp_path / name).write_text(json.dumps(session))
    files = [str(tmp_path / name) for name in ("a", "b")]
    one, other = asked_tokens(read_conversations(files, seed=0, speed=1.0, requests=None))
    assert shared(one, other) < 8


def test_tokens_of_a_trace_are_sent_as_they_are(tmp_path):
    rows = [{"prompt_token_ids": [5, 6, 7], "output_ids": [8, 9]}]
    (only,) = recorded(tmp_path / "trace.jsonl", rows)
    assert (ids_of(only.turns[0].message), only.turns[0].answer.tokens) == ([5, 6, 7], 2)


def test_pages_of_our_own_trace_hold_prompt_and_answer(tmp_path):
    head = {"tiercel_trace": 1, "model": "m", "page_tokens": 64, "began_s": 0.0}
    counts = {"device": 0, "host": 0, "store": 0}
    rows = [
        {"time_s": 0.0, "pages": ["a", "b"], "prompt_tokens": 70, "output_tokens": 60, **counts},
        {"time_s": 1.0, "pages": ["a", "b", "c"], "prompt_tokens": 150, "output_tokens": 60, **counts},
    ]
    first, then = asked_tokens(recorded(tmp_path / "trace.jsonl", [head, *rows]))
    assert (len(first), len(then), shared(first, then)) == (70, 150, 70)


def test_an_empty_trace_is_an_error(tmp_path):
    head = {"tiercel_trace": 1, "model": "m", "page_tokens": 64, "began_s": 0.0}
    with pytest.raises(TraceError, match="holds no request"):
        recorded(tmp_path / "trace.jsonl", [head])


@pytest.mark.parametrize("text", ["", "0", "9-5", "x", "1-2-3", "-4", str(2**25)])
def test_a_length_that_is_none_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="--prompt-tokens"):
        Span.parse("--prompt-tokens", text)
    assert Span.parse("--prompt-tokens", "200-800") == Span(200, 800)
