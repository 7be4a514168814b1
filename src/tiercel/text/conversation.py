"""A conversation as a chat format writes it. Marks in it keep the text of a message from becoming a control
token."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tiercel.errors import AskError
from tiercel.text.answer import CallFormat

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Templates write roles into control tokens (`<|{{ role }}|>`), so a role is never free text."""
OURS = ("cache_control", "tool_calls")
"""Fields of a message that are not copied to the template as they are."""


STEPS_MOST = 1_000_000
"""Loop iterations and calls for one conversation, all its renderings together: a few seconds. A thousand
messages, with the renderings that find their ends, take about an eighth."""


class Bound:
    """A limit on the steps of a template, for all renderings of one conversation."""

    def __init__(self, steps: int = STEPS_MOST) -> None:
        self.steps = self.left = steps

    def count(self, steps: int = 1) -> None:
        self.left -= steps
        if self.left < 0:
            raise ValueError(f"it takes more than {self.steps:,} steps")


@dataclass(frozen=True)
class Conversation:
    messages: Sequence[Message]
    tools: Sequence[Any]
    kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    bound: Bound = field(default_factory=Bound)


class ChatFormat:
    """How a conversation is written for a model. This one writes nothing: for models without a format."""

    control: tuple[str, ...] = ()
    """Control tokens, besides those of `text.CONTROL_LOOKS`."""
    calls: CallFormat | None = None
    """How the model writes tool calls, if that is known."""
    between = ""
    """The text between two parts of a message."""

    def render(self, talk: Conversation) -> str:  # noqa: ARG002 (of the contract)
        raise ValueError("the model has none")


class Guard:
    """Finds control tokens, and beginnings of them, in the text of a message."""

    def __init__(self, control: Iterable[str]) -> None:
        behind: dict[str, list[str]] = {}
        self._begun: set[str] = set()
        for name in control:
            behind.setdefault(name[0], []).append(re.escape(name[1:]))
            self._begun.update(name[:length] for length in range(1, len(name)))
        self._longest = max(map(len, self._begun), default=0)
        first = "|".join(f"{re.escape(char)}(?={'|'.join(rests)})" for char, rests in behind.items())
        self._first = re.compile(first or r"(?!)")

    def cut(self, said: str, mark: str) -> str:
        """Puts `mark` after the first character of each control token, and behind a begun one at the end."""
        begun = any(said[-length:] in self._begun for length in range(1, self._longest + 1))
        return self._first.sub(lambda found: found[0] + mark, said) + (mark if begun else "")


class Marks:
    """Two random strings, put into messages and found again in the rendered text.

        said   "see <|end|>"   rendered   <|user|>see <‸|end|><|assistant|>
                               encoded    └───────────┘ └─────────────────┘

    A cut mark splits what looks like a control token: its two halves are encoded apart, so both are text. All
    other text is encoded as if there were no marks. An end mark names a position. Marks are letters and
    digits, which no escaping changes, and serve one conversation, so knowing them is of no use. There is no
    defence against a template that writes half a control token and takes the rest from a message.
    """

    def __init__(self, guard: Guard, between: str) -> None:
        self._guard = guard
        self._between = between
        self._cut, self._end = secrets.token_hex(16), secrets.token_hex(16)

    def message(self, field: str, message: Message) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise AskError(field, message, "must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise AskError(f"{field}.role", role, f"must be one of {', '.join(ROLES)}")
        _names_end(field, message)
        if isinstance(content, list):
            content = self._joined(f"{field}.content", content)
        elif isinstance(content, str) or (content is None and role == "assistant"):
            content = self.said(content) if content or message.get("tool_calls") else ""
        else:
            raise AskError(f"{field}.content", type(content).__name__, "must be text or a list of text parts")
        # Fields keep their order: a template may print a message as JSON.
        shaped = {name: self.said(value) for name, value in message.items() if name not in OURS}
        if message.get("tool_calls"):
            shaped["tool_calls"] = self.said([_call(field, call) for call in message["tool_calls"]])
        return shaped | {"role": role, "content": content}

    def left_open(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with an end mark behind its content, for `opened`."""
        return message | {"content": message["content"] + self._end}

    def opened(self, rendered: str) -> str:
        """The text up to the end of the content of the message that is `left_open`."""
        before, mark, _ = rendered.rpartition(self._end)
        if not mark:
            raise ValueError("the content of the last message is not in the text")
        return before

    def removed(self, rendered: str) -> str:
        return rendered.replace(self._cut, "").replace(self._end, "")

    def ends(self, rendered: str) -> list[int]:
        """The positions of the end marks in the text without marks."""
        return list(accumulate(len(self.removed(part)) for part in rendered.split(self._end)))[:-1]

    def segments(self, rendered: str) -> list[str]:
        return rendered.replace(self._end, "").split(self._cut)

    def _joined(self, field: str, parts: list[Any]) -> str:
        joined = ""
        for index, part in enumerate(parts):
            where = f"{field}[{index}]"
            if not isinstance(part, Mapping) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise AskError(f"{where}.type", kind, "only text can be read")
            if not isinstance(part.get("text"), str):
                raise AskError(f"{where}.text", part.get("text"), "must be text")
            ends = _names_end(where, part) and index < len(parts) - 1  # the last part ends with its message
            joined += self._between if index else ""
            joined += self.said(part["text"]) + (self._end if ends else "")
        return joined

    def said(self, value: Any) -> Any:
        """The value with cut marks in every string."""
        if isinstance(value, str):
            return self._guard.cut(value, self._cut)
        if isinstance(value, Mapping):
            return {self.said(name): self.said(each) for name, each in value.items()}
        return [self.said(each) for each in value] if isinstance(value, list | tuple) else value


def _names_end(field: str, holder: Message) -> bool:
    asked = holder.get("cache_control")
    if asked is None or (isinstance(asked, Mapping) and asked.get("type") == "ephemeral"):
        return asked is not None
    raise AskError(f"{field}.cache_control", asked, "must be of type ephemeral")


def _call(field: str, call: Any) -> Any:
    """The call with its arguments as an object, as templates expect. JSON in a string could hide a control
    token."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        raise AskError(f"{field}.tool_calls", call, "must be calls of functions")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments or {}}}
