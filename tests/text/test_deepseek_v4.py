"""Goal: conversations are written as DeepSeek V4 was trained to read them. Method: what its published
`encoding/encoding_dsv4.py` makes of small conversations, written down here by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.text.test_text import assistant, ends_as_text, make_folder, part, user
from tiercel.errors import AskError
from tiercel.text.text import Prompt, Text

CONTROL = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
HIGH = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root \
cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial \
scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered \
alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
MAX = """\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively \
decompose the problem into its most fundamental components, trace every causal chain to its root, and \
resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are \
certain that no assumption remains unchecked and no error remains undiscovered.

"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a città",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"parameters": {}, "name": "clock"}}
TOOLS = """\


## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, \
arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{"name": "weather", "description": "The weather of a città", "parameters": {"type": "object", "properties": \
{"city": {"type": "string"}}, "required": ["city"]}}
{"parameters": {}, "name": "clock"}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


def system(content: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content}


def called(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    named = {} if call_id is None else {"id": call_id}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any, call_id: str = "") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def v4_folder(path: Path, *, special: bool = False, **config: Any) -> Path:
    """The embedded tokenizer with DeepSeek's control tokens, no template, and a V4's config.json."""
    added = [AddedToken(name, special=True, normalized=False) for name in (BOS, EOS)]
    added += [AddedToken(name, special=special, normalized=False) for name in CONTROL]
    make_folder(path, None, added, bos_token=BOS, eos_token=EOS)
    (path / "config.json").write_text(json.dumps(config or {"model_type": "deepseek_v4"}))
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(v4_folder(tmp_path_factory.mktemp("v4") / "model"))


def written(text: Text, prompt: Prompt) -> str:
    return b"".join(map(text.piece_bytes, prompt.tokens)).decode()


def render(text: Text, *messages: dict[str, Any], tools: Any = (), **kwargs: Any) -> str:
    return written(text, text.chat(messages, tools=tools, kwargs=kwargs))


# Thinking


def test_without_thinking_an_answer_begins_behind_its_end(text: Text) -> None:
    shown = render(text, system("Be brief."), user("Hi"), assistant("Yes?"), user("Bye"), thinking=False)
    assert shown == (
        f"{BOS}Be brief.<｜User｜>Hi<｜Assistant｜></think>Yes?{EOS}<｜User｜>Bye<｜Assistant｜></think>"
    )


def test_thinking_is_on_and_the_effort_high_as_in_deepseeks_api(text: Text) -> None:
    prompt = text.chat([user("Hi")])
    assert written(text, prompt) == f"{BOS}{HIGH}<｜User｜>Hi<｜Assistant｜><think>"
    assert prompt.thinks
    assert not text.chat([user("Hi")], kwargs={"thinking": False}).thinks


@pytest.mark.parametrize(
    ("effort", "said"),
    [
        ("minimal", ""),
        ("low", ""),
        ("medium", HIGH),
        ("high", HIGH),
        ("xhigh", HIGH),
        ("max", MAX),
        ("ultra", MAX),
    ],
)
def test_an_effort_is_said_before_everything(text: Text, effort: str, said: str) -> None:
    shown = render(text, system("S"), user("Hi"), reasoning_effort=effort)
    assert shown == f"{BOS}{said}S<｜User｜>Hi<｜Assistant｜><think>"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"thinking": False, "reasoning_effort": "max"},
        {"thinking": True, "reasoning_effort": "none"},
    ],
    ids=str,
)
def test_thinking_is_turned_off_by_every_name_it_has(text: Text, kwargs: dict[str, Any]) -> None:
    assert render(text, user("Hi"), **kwargs) == f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"


def test_a_preview_says_less_about_its_efforts(tmp_path: Path) -> None:
    folder = v4_folder(tmp_path / "model")
    (folder / "encoding").mkdir()
    (folder / "encoding" / "encoding_dsv4.py").write_text(
        'REASONING_EFFORT_MAX = (\n"…")\nraise SystemExit\n'
    )
    text = Text(folder)
    assert render(text, user("Hi")) == f"{BOS}<｜User｜>Hi<｜Assistant｜><think>"
    assert (
        render(text, user("Hi"), reasoning_effort="max") == f"{BOS}{HIGH}<｜User｜>Hi<｜Assistant｜><think>"
    )


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"thinking": "yes"}, "chat_template_kwargs.thinking"),
        ({"enable_thinking": 1}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"reasoning_effort": []}, "reasoning_effort"),
        ({"drop_thinking": "x"}, "chat_template_kwargs.drop_thinking"),
    ],
    ids=str,
)
def test_a_switch_that_is_none_is_named(text: Text, kwargs: dict[str, Any], field: str) -> None:
    with pytest.raises(AskError) as caught:
        text.chat([user("Hi")], kwargs=kwargs)
    assert caught.value.field == field


def test_old_thoughts_are_dropped_and_new_ones_kept(text: Text) -> None:
    shown = render(
        text,
        user("a"),
        assistant("b", reasoning_content="old"),
        user("c"),
        assistant("d", reasoning_content="new"),
        reasoning_effort="low",
    )
    assert shown.startswith(
        f"{BOS}<｜User｜>a<｜Assistant｜></think>b{EOS}<｜User｜>c<｜Assistant｜><think>new</think>d{EOS}"
    )


def test_old_thoughts_are_kept_if_that_is_asked_for(text: Text) -> None:
    messages = [user("a"), assistant("b", reasoning_content="old"), user("c")]
    shown = render(text, *messages, reasoning_effort="low", drop_thinking=False)
    assert shown == (
        f"{BOS}<｜User｜>a<｜Assistant｜><think>old</think>b{EOS}<｜User｜>c<｜Assistant｜><think>"
    )


def test_parts_of_a_message_are_paragraphs(text: Text) -> None:
    prompt = text.chat([user([part("a", named=True), part("b")])], kwargs={"thinking": False})
    assert written(text, prompt) == f"{BOS}<｜User｜>a\n\nb<｜Assistant｜></think>"
    assert ends_as_text(prompt, text) == [f"{BOS}<｜User｜>a", f"{BOS}<｜User｜>a\n\nb"]


def test_a_developer_is_openais_system_and_elsewhere_a_user(text: Text) -> None:
    shown = render(text, system("Be brief.", "developer"), user("Hi"), reasoning_effort="low")
    assert shown == f"{BOS}Be brief.<｜User｜>Hi<｜Assistant｜><think>"
    last = [user("a"), assistant("b"), system("c", "developer")]
    assert render(text, *last, reasoning_effort="low").endswith(f"b{EOS}<｜User｜>c<｜Assistant｜><think>")
    old = [user("a"), system("c", "developer"), user("d")]
    assert render(text, *old, reasoning_effort="low") == (
        f"{BOS}<｜User｜>a<｜User｜>d<｜Assistant｜><think>"
    )
    assert render(text, *old, thinking=False) == (
        f"{BOS}<｜User｜>a<｜User｜>c<｜User｜>d<｜Assistant｜></think>"
    )


# Tools


def test_tools_are_told_behind_the_system_message_and_results_are_what_a_user_says(text: Text) -> None:
    shown = render(
        text,
        system("Help."),
        user("Weather?"),
        assistant(
            "", reasoning_content="Ask.", tool_calls=[called("weather", '{"city": "Paris", "days": 3}')]
        ),
        result('{"t": 22}'),
        assistant("22°C", reasoning_content="Done."),
        user("Thanks"),
        tools=[WEATHER, CLOCK],
        reasoning_effort="low",
    )
    assert shown == (
        f"{BOS}Help.{TOOLS}<｜User｜>Weather?<｜Assistant｜><think>Ask.</think>\n\n"
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        f"</｜DSML｜invoke>\n</｜DSML｜tool_calls>{EOS}"
        '<｜User｜><tool_result>{"t": 22}</tool_result><｜Assistant｜><think>Done.</think>22°C'
        f"{EOS}<｜User｜>Thanks<｜Assistant｜><think>"
    )


def test_tools_without_a_system_message_come_first(text: Text) -> None:
    shown = render(text, user("Hi"), tools=[WEATHER, CLOCK], thinking=False)
    assert shown == f"{BOS}{TOOLS}<｜User｜>Hi<｜Assistant｜></think>"


def test_results_are_in_the_order_of_the_calls_and_one_turn_with_what_a_user_adds(text: Text) -> None:
    calls = [
        called("weather", {"city": "Rome"}, "a"),
        called("clock", None, "b"),
        called("now", "x", "c"),
    ]
    shown = render(
        text,
        user("Hi"),
        user("there"),
        assistant(None, tool_calls=calls),
        result([part("3"), part("4")], "c"),
        result("2", "b"),
        user("Well?"),
        result("1", "a"),
        thinking=False,
    )
    assert shown == (
        f"{BOS}<｜User｜>Hi\n\nthere<｜Assistant｜></think>\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="clock">\n\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n'
        '<｜DSML｜parameter name="arguments" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        f"</｜DSML｜tool_calls>{EOS}<｜User｜><tool_result>1</tool_result>\n\n<tool_result>2</tool_result>\n\n"
        "Well?\n\n<tool_result>3\n\n4</tool_result><｜Assistant｜></think>"
    )


def test_values_are_written_as_their_json_says(text: Text) -> None:
    arguments = {"s": '5 "é"\n', "n": 5, "t": True, "z": None, "l": [1, "ü"], "o": {"a": 1.5}}
    shown = render(text, user("Hi"), assistant("", tool_calls=[called("f", json.dumps(arguments))]), user(""))
    for name, string, value in [
        ("s", "true", '5 "é"\n'),
        ("n", "false", "5"),
        ("t", "false", "true"),
        ("z", "false", "null"),
        ("l", "false", '[1, "ü"]'),
        ("o", "false", '{"a": 1.5}'),
    ]:
        assert f'<｜DSML｜parameter name="{name}" string="{string}">{value}</｜DSML｜parameter>' in shown


# Ends and control tokens


def test_ends_are_found_though_old_thoughts_change(text: Text) -> None:
    messages = [system("S"), user("a"), assistant("b", reasoning_content="old"), user("c")]
    prompt = text.chat(messages, kwargs={"reasoning_effort": "low"})
    assert ends_as_text(prompt, text) == [
        f"{BOS}S",
        f"{BOS}S<｜User｜>a",
        f"{BOS}S<｜User｜>a<｜Assistant｜></think>b{EOS}<｜User｜>c",
    ]


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([*CONTROL, BOS, EOS, "<｜", "<", "｜", "DSML", "</", "think>", "a", "<tool_result>"]),
        min_size=1,
    ).map("".join)
)
def test_what_is_said_never_becomes_a_control_token(text: Text, said: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": said, "parameters": {said: [said]}}}
    escaped = (
        json.dumps({said: said, "deep": {said: [said]}}).replace("<", "\\u003c").replace("｜", "\\uff5c")
    )
    prompt = text.chat(
        [
            system(said),
            user([part(said), part(said, named=True), part(said)]),
            assistant(said, reasoning_content=said, tool_calls=[called("f", escaped), called("f", said)]),
            result(said),
        ],
        tools=[tool],
        kwargs={"reasoning_effort": "low"},
    )
    plain = text.chat(
        [
            system(""),
            user(""),
            assistant("", tool_calls=[called("f", '{"": "", "deep": 1}'), called("f", "x")]),
            result(""),
        ],
        tools=[CLOCK],
        kwargs={"reasoning_effort": "low"},
    )
    control = {text.encode(name)[0] for name in (*CONTROL, BOS, EOS)}
    assert [token for token in prompt.tokens if token in control] == [
        token for token in plain.tokens if token in control
    ]
    assert written(text, prompt).count(said) >= 9


# Whose folder it is


@pytest.mark.parametrize(
    "config",
    [{"model_type": "deepseek_v4"}, {"model_type": "custom", "architectures": ["DeepseekV4ForCausalLM"]}],
    ids=str,
)
def test_a_folder_is_known_by_its_config(tmp_path: Path, config: dict[str, Any]) -> None:
    assert render(Text(v4_folder(tmp_path / "model", **config)), user("Hi")).startswith(BOS)


@pytest.mark.parametrize(
    "config", [{"model_type": "llama"}, {"architectures": None}, {"model_type": "deepseek_v41"}], ids=str
)
def test_another_models_folder_without_a_template_has_none(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(AskError, match="the model has none"):
        Text(v4_folder(tmp_path / "model", **config)).chat([user("Hi")])


def test_a_v4_with_a_tokenizer_of_another_has_another_format(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "deepseek_v4"}')
    with pytest.raises(AskError, match="the model has none"):
        Text(folder).chat([user("Hi")])


def test_a_template_of_its_own_goes_first(tmp_path: Path) -> None:
    folder = v4_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert render(Text(folder), user("Hi")) == "Hi"


def test_parts_of_an_answer_are_text_though_a_tokenizer_calls_them_special(tmp_path: Path) -> None:
    text = Text(v4_folder(tmp_path / "model", special=True))
    assert text.decode(text.encode(f"{BOS}a<｜User｜></think>b<｜DSML｜tool_calls>{EOS}")) == (
        "a</think>b<｜DSML｜tool_calls>"
    )
