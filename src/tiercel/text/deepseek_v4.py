"""DeepSeek V4's chat format. Its checkpoints have no Jinja template; they come with a program that writes it,
`encoding/encoding_dsv4.py`. This module writes the same.

    <｜begin▁of▁sentence｜>{effort}{system}{tools}
    <｜User｜>{question}<｜Assistant｜><think>{thoughts}</think>{words}{calls}<｜end▁of▁sentence｜>
    <｜User｜><tool_result>{result}</tool_result><｜Assistant｜><think>

Without thinking, an answer begins with `</think>`. Thoughts of past answers are left out, unless there are
tools: then the model should see why it called them.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercel.errors import AskError
from tiercel.text.answer import CALLS, DSML, END_THINK, END_VALUE, THINK, CallFormat
from tiercel.text.conversation import ChatFormat, Conversation, Message

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"

THOROUGH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the "
    "root cause, rigorously stress-testing your logic against all potential paths, edge cases, and "
    "adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
RELENTLESS = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively "
    "decompose the problem into its most fundamental components, trace every causal chain to its root, and "
    "resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are "
    "certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
RELEASE = {"low": "", "high": THOROUGH, "max": RELENTLESS}
PREVIEW = {"low": "", "high": "", "max": THOROUGH}
"""Efforts of checkpoints from before July 2026, which were trained with these."""
EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}
"""Values of `reasoning_effort`, as DeepSeek's API maps them. `none` turns thinking off."""
EFFORT = "high"
"""The API's default. Thinking is on by default."""

TOOLS = f"""\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"{CALLS}" block like the following:

{CALLS}
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{END_VALUE}
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, \
arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_END = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


@dataclass
class Turn:
    """One message. Messages of a user and of tools that follow each other are one turn."""

    role: str
    message: Message
    parts: list[tuple[str | None, str]] = field(default_factory=list)
    """For a user's turn: (id of the tool call that is answered, or None; text)."""


class DeepSeekV4Format(ChatFormat):
    """Renders conversations. `efforts`: the instruction to the model for each effort."""

    control = (THINK, END_THINK, DSML)
    calls = CallFormat.DSML
    between = "\n\n"

    def __init__(self, efforts: Mapping[str, str]) -> None:
        self._efforts = efforts

    def render(self, talk: Conversation) -> str:
        effort, tools = _effort(talk.kwargs), talk.tools
        thinking = effort is not None
        turns = _turns(talk.messages)
        if tools and turns[0].role != "system":
            turns.insert(0, Turn("system", {}))
        keeps = bool(tools) or _switch(talk.kwargs, "drop_thinking") is False
        if thinking and not keeps:
            last = _last_user(turns)
            turns = [turn for at, turn in enumerate(turns) if turn.role != "developer" or at >= last]
        last = _last_user(turns)
        text = BOS + (self._efforts[effort] if effort else "")
        for at, turn in enumerate(turns):
            after = turns[at + 1].role if at + 1 < len(turns) else None
            match turn.role:
                case "system":
                    text += turn.message.get("content") or ""
                    if tools and at == 0:
                        schemas = "\n".join(_json(tool["function"]) for tool in tools)
                        text += f"\n\n{TOOLS}{schemas}{TOOLS_END}"
                case "assistant":
                    text += _answer(turn.message, thinking and (keeps or at > last))
                case "developer":
                    text += USER + turn.message["content"]
                case _:
                    text += USER + "\n\n".join(part for _, part in turn.parts)
            asks = turn.role in ("user", "developer")
            if (after == "assistant" and asks) or (after is None and talk.add_generation_prompt):
                text += ASSISTANT + (THINK if thinking and (keeps or at >= last) else END_THINK)
        return text


def read_deepseek_v4(
    folder: Path, config: Mapping[str, Any], vocabulary: Container[str]
) -> DeepSeekV4Format | None:
    """The format, if config.json names a DeepSeek V4 and the tokenizer has its tokens.

    The published program is searched for words, never run.
    """
    architectures = config.get("architectures") or []
    named = config.get("model_type") == "deepseek_v4" or "DeepseekV4ForCausalLM" in architectures
    if not named or USER not in vocabulary or ASSISTANT not in vocabulary:
        return None
    program = folder / "encoding" / "encoding_dsv4.py"
    try:
        published = program.read_text(encoding="utf-8", errors="replace")
    except OSError:
        published = ""
    preview = "REASONING_EFFORT_MAX" in published and "REASONING_EFFORT_PROMPTS" not in published
    return DeepSeekV4Format(PREVIEW if preview else RELEASE)


def _effort(kwargs: Mapping[str, Any]) -> str | None:
    """The effort of thinking; None: no thinking."""
    switches = [_switch(kwargs, name) for name in ("thinking", "enable_thinking")]
    asked = kwargs.get("reasoning_effort")
    if asked not in (None, "none", *EFFORTS):
        raise AskError("reasoning_effort", asked, f"must be one of none, {', '.join(EFFORTS)}")
    if asked == "none" or (False in switches and True not in switches):
        return None
    return EFFORTS[asked or EFFORT]


def _switch(kwargs: Mapping[str, Any], name: str) -> bool | None:
    value = kwargs.get(name)
    if value is not None and not isinstance(value, bool):
        raise AskError(f"chat_template_kwargs.{name}", value, "must be true or false")
    return value


def _turns(messages: Sequence[Message]) -> list[Turn]:
    """Messages as turns. Tool results are sorted by the order of their calls."""
    turns: list[Turn] = []
    order: dict[Any, int] = {}
    for at, message in enumerate(messages):
        role, said = message["role"], message.get("content") or ""
        follower = messages[at + 1]["role"] if at + 1 < len(messages) else None
        if role == "developer" and follower != "assistant" and all(turn.role == "system" for turn in turns):
            role = "system"  # OpenAI's developer is a system; DeepSeek's is a user with tools
        if role not in ("user", "tool", "function"):
            turns.append(Turn(role, message))
            if role == "assistant" and (calls := message.get("tool_calls")):
                order = {call["id"]: place for place, call in enumerate(calls) if call.get("id")}
            continue
        if not (turns and turns[-1].role == "user"):
            turns.append(Turn("user", message))
        if role == "user":
            turns[-1].parts.append((None, said))
        else:
            turns[-1].parts.append((message.get("tool_call_id") or "", f"<tool_result>{said}</tool_result>"))
            _sort(turns[-1].parts, order)
    return turns


def _sort(parts: list[tuple[str | None, str]], order: Mapping[Any, int]) -> None:
    places = [place for place, (call, _) in enumerate(parts) if call is not None]
    results = sorted((parts[place] for place in places), key=lambda part: order.get(part[0], 0))
    for place, result in zip(places, results, strict=True):
        parts[place] = result


def _last_user(turns: Sequence[Turn]) -> int:
    return max((at for at, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def _answer(message: Message, with_thoughts: bool) -> str:
    thoughts = (message.get("reasoning_content") or "") + END_THINK if with_thoughts else ""
    calls = "\n".join(_call(call["function"]) for call in message.get("tool_calls") or ())
    section = f"\n\n{CALLS}\n{calls}\n</{DSML}tool_calls>" if calls else ""
    return thoughts + (message.get("content") or "") + section + EOS


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}
    parameters = "\n".join(
        f'<{DSML}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else _json(value)}{END_VALUE}"
        for name, value in arguments.items()
    )
    return f'<{DSML}invoke name="{function["name"]}">\n{parameters}\n</{DSML}invoke>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
