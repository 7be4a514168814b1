"""Goal: thoughts, words and calls are told apart, however an answer is cut into pieces. Method: answers as
DeepSeek V4 writes them, whole and in pieces; conversations written and read again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.text.answer import AnswerReader, CallFormat, CallPart
from tiercel.text.conversation import Conversation
from tiercel.text.deepseek_v4 import EOS, RELEASE, DeepSeekV4Format

CALL = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris "Ü"\n</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="clock">\n\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>"
)
CALLS = [("weather", '{"city": "Paris \\"Ü\\"\\n", "days": 3}'), ("clock", "{}")]
BROKEN = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'


def read(
    *pieces: str, thinks: bool = False, calls: CallFormat | None = CallFormat.DSML
) -> tuple[str, str, list[tuple[str, str]], bool]:
    """Thoughts, words, calls, and whether it is a call."""
    reader = AnswerReader(thinks=thinks, calls=calls)
    reasoning = content = ""
    names: list[str] = []
    arguments: list[str] = []
    said = [reader.push(piece) for piece in pieces] + [reader.push("", final=True)]
    for each in said:
        reasoning, content = reasoning + each.reasoning, content + each.content
        assert len({part.number for part in each.calls}) == len(each.calls), "one part of each call at a time"
        for part in each.calls:
            if part.name is not None:
                assert part.number == len(names)
                names.append(part.name)
                arguments.append("")
            arguments[part.number] += part.arguments
    return reasoning, content, list(zip(names, arguments, strict=True)), reader.called


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in zip(places, places[1:], strict=False)]


def test_an_answer_without_thoughts_and_tools_is_words() -> None:
    assert read("a </think> <｜DSML｜tool_calls>", calls=None) == (
        "",
        "a </think> <｜DSML｜tool_calls>",
        [],
        False,
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000)))
def test_thoughts_words_and_calls_are_told_apart_however_they_come(cuts: list[int]) -> None:
    answer = f"Let me see.\n</think>I ask.{CALL}"
    assert read(*pieces_of(answer, cuts), thinks=True) == ("Let me see.\n", "I ask.", CALLS, True)


def test_every_character_is_said_as_soon_as_it_can_be_no_tag() -> None:
    reader = AnswerReader(thinks=True, calls=CallFormat.DSML)
    said = [reader.push(char) for char in "a</b</think>c\n\n<｜D"]
    assert [each.reasoning for each in said][:5] == ["a", "", "", "</b", ""]
    assert "".join(each.content for each in said) == "c"
    assert reader.push("oc").content == "\n\n<｜Doc"


def test_a_string_is_streamed_and_other_json_is_not() -> None:
    reader = AnswerReader(thinks=False, calls=CallFormat.DSML)
    reader.push(BROKEN + '<｜DSML｜parameter name="s" string="true">')
    assert reader.push('a "').calls[0].arguments == 'a \\"'
    assert reader.push("<").calls == ()
    assert reader.push("b").calls[0].arguments == "<b"
    assert reader.push('</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">[1,').calls[0] == (
        0,
        None,
        '", "n": ',
    )
    assert reader.push(" 2").calls == ()  # nothing new is no part
    assert reader.push("]</｜DSML｜parameter>").calls[0].arguments == "[1, 2]"


def test_arguments_that_are_one_json_object_are_taken() -> None:
    answer = BROKEN + '{"a": [1, "}"]}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    assert read(answer) == ("", "", [("f", '{"a": [1, "}"]}')], True)


@pytest.mark.parametrize("value", ["Paris", "NaN", "{", "1 2", "", "[" * 100_000])
def test_what_is_called_json_and_is_none_is_a_string(value: str) -> None:
    parameter = f'<｜DSML｜parameter name="a" string="false">{value}</｜DSML｜parameter>'
    _, _, [(_, arguments)], called = read(f"{BROKEN}{parameter}</｜DSML｜invoke></｜DSML｜tool_calls>")
    assert json.loads(arguments) == {"a": value}
    assert called


@pytest.mark.parametrize(
    "rest",
    [
        "Sorry, no.",
        '<｜DSML｜invoke name="g">\n',
        '<｜DSML｜parameter name="a">b',
        '<｜DSML｜parameter name="a" string="maybe">b',
        "</｜DSML｜tool_calls>",
        "</｜DSML｜other>",
        "<｜User｜>",
        '<｜DSML｜invoke name="' + "x" * 2000,
    ],
)
@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 1000)))
def test_a_call_that_is_broken_is_no_call_and_nothing_is_lost(rest: str, cuts: list[int]) -> None:
    reasoning, content, calls, called = read(*pieces_of(BROKEN + rest + "\nBye.", cuts))
    assert (reasoning, calls, called) == ("", [("f", "")], False)
    assert content.strip() == (rest + "\nBye.").strip()


@settings(deadline=None)
@given(st.integers(0, len(CALL) - 1))
def test_an_answer_that_is_cut_off_shows_no_tags_and_no_whole_call(end: int) -> None:
    _, content, calls, called = read(CALL[:end])
    assert "<｜DSML｜tool_calls>" not in content and "invoke" not in content
    for (name, arguments), (whole_name, whole) in zip(calls, CALLS, strict=False):
        assert name == whole_name and whole.startswith(arguments)
    assert called <= all(each in CALLS for each in calls)


def test_a_thought_that_never_ends_is_a_thought() -> None:
    assert read(f"Hm </thin{CALL}", thinks=True) == (f"Hm </thin{CALL}", "", [], False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters='"\n'), max_size=8)


@settings(deadline=None)
@given(
    st.lists(st.tuples(NAMES, st.dictionaries(NAMES, JSON, max_size=4)), min_size=1, max_size=3),
    st.text(),
    st.text(),
    st.lists(st.integers(0, 5000), max_size=20),
)
def test_what_was_written_is_read(
    calls: list[tuple[str, dict[str, Any]]], thought: str, words: str, cuts: list[int]
) -> None:
    if any("<｜DSML｜" in text or "</" in text for text in (thought, words, json.dumps(calls))):
        return
    tool_calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    said = {"role": "assistant", "content": words, "reasoning_content": thought, "tool_calls": tool_calls}
    question = {"role": "user", "content": "?"}
    tools = [{"function": {}}]
    low = {"reasoning_effort": "low"}
    format_ = DeepSeekV4Format(RELEASE)
    before = format_.render(Conversation([question], tools, low, True))
    whole = format_.render(Conversation([question, said], tools, low, False))
    answer = whole.removeprefix(before).removesuffix(EOS)
    reasoning, content, found, called = read(*pieces_of(answer, cuts), thinks=True)
    assert (reasoning, content, called) == (thought, words, True)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


ARGUMENTS = '{"a": "<tool_call> }\\" \\\\", "b": [{}, "\\\\\\""]}'
JSON_CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
TURNED = f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "f"}}</tool_call>'


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 1000)))
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (JSON_CALL, "", 1),
        (f"So.\n{JSON_CALL}\n{TURNED} Bye", "So. Bye", 2),
        ("<tool_call>x</tool_call> a", "<tool_call>x</tool_call> a", 0),
        (JSON_CALL[:30], JSON_CALL[:30], 0),
    ],
)
def test_calls_as_json_are_read_however_they_come(
    text: str, content: str, calls: int, cuts: list[int]
) -> None:
    found = read(*pieces_of(text, cuts), calls=CallFormat.JSON)
    assert found == ("", content, [("f", ARGUMENTS)] * calls, calls > 0)


def test_arguments_of_a_call_as_json_are_sent_while_they_are_written_but_for_their_last_bracket() -> None:
    reader = AnswerReader(thinks=False, calls=CallFormat.JSON)
    assert reader.push('<tool_call>\n{"name": "f", "arguments": ').calls == ()
    assert reader.push('{"a"').calls == (CallPart(0, "f", '{"a"'),)
    assert reader.push(': {"b": 1').calls == (CallPart(0, None, ': {"b": 1'),)
    assert reader.push("}}").calls == (CallPart(0, None, "}"),)
    assert reader.push("}\n</tool_call").calls == () and not reader.called
    assert reader.push(">").calls == (CallPart(0, None, "}"),) and reader.called


@pytest.mark.parametrize("end", range(len(JSON_CALL)))
def test_a_call_as_json_that_is_cut_off_is_no_whole_call(end: int) -> None:
    begun = end > JSON_CALL.index(ARGUMENTS)
    _, content, calls, called = read(JSON_CALL[:end], calls=CallFormat.JSON)
    assert not called
    assert content == ("" if begun else JSON_CALL[:end])
    assert [name for name, _ in calls] == ["f"] * begun
    assert all(ARGUMENTS[:-1].startswith(arguments) for _, arguments in calls)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 1000)))
@pytest.mark.parametrize("rest", ["} No.", "}, }\n</tool_call>", ", no]}}</tool_call>", "} {}}</tool_call>"])
def test_a_call_as_json_that_is_broken_is_no_call_and_nothing_is_lost(rest: str, cuts: list[int]) -> None:
    pieces = pieces_of(f'<tool_call>{{"name": "f", "arguments": {{"a": 1{rest} Bye.', cuts)
    _, content, [(name, arguments)], called = read(*pieces, calls=CallFormat.JSON)
    assert (name, called) == ("f", False)
    assert arguments + content == f'{{"a": 1{rest} Bye.'
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(arguments)
