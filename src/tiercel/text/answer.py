"""A parser for answers: it separates reasoning, content and tool calls while the text arrives.

    thoughts</think>words

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

A string parameter is written as it is, any other as JSON. One JSON object may stand instead of parameters.
Qwen, Hermes and others write calls as JSON objects:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris", "days": 3}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from enum import Enum
from typing import Any, NamedTuple

THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
CALLS, END_CALLS = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"
END_INVOKE, END_VALUE = f"</{DSML}invoke>", f"</{DSML}parameter>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
TAG = re.compile(
    rf'\s*<(?P<end>/?){DSML}(?P<kind>\w+)(\s+name="(?P<name>[^"]*)")?(\s+string="(?P<string>true|false)")?\s*>'
)
TAG_CHARS_MOST = 1000
CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\<]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')
"""How a call in the JSON format begins."""


class CallFormat(Enum):
    """How a model writes tool calls."""

    DSML = "DeepSeek's tags"
    JSON = "JSON in <tool_call>"


class CallPart(NamedTuple):
    """The new part of one tool call. The first part has the name."""

    number: int
    name: str | None = None
    arguments: str = ""
    """The next characters of the JSON object."""


class AnswerDelta(NamedTuple):
    """The new part of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPart, ...] = ()


class AnswerReader:
    """Parses one answer. The result does not depend on how the text was cut into pieces.

    At the first format error the rest becomes content, and the open call is not closed: a client must not
    take half a call for a whole one.
    """

    def __init__(self, *, thinks: bool, calls: CallFormat | None) -> None:
        """`calls`: how calls are written, if there may be any."""
        self._held = self._tagged = ""
        self._final = False
        self._reasoning = self._content = ""
        self._calls: dict[int, CallPart] = {}
        self._call = -1
        self._inside = False
        as_json = calls is CallFormat.JSON
        self._opening = (f"\n{CALL}", CALL) if as_json else (f"\n\n{CALLS}", CALLS)
        self._read_calls = self._json_call if as_json else self._tool_calls
        self._parser = self._answer(thinks, bool(calls))

    @property
    def called(self) -> bool:
        """Whether the answer calls tools and every call is complete."""
        return self._call >= 0 and not self._inside

    def push(self, text: str, *, final: bool = False) -> AnswerDelta:
        """The new part. Text that may become a tag is held back; `final` drops half a tag inside a call."""
        self._held += text
        self._final = final
        next(self._parser)
        said = AnswerDelta(self._reasoning, self._content, tuple(self._calls.values()))
        self._reasoning = self._content = ""
        self._calls = {}
        return said

    # The parser is a generator: it yields when it needs more text. The parts of it that read calls return
    # whether they found what they expected.

    def _answer(self, thinks: bool, calls: bool) -> Generator[None, None, None]:
        while thinks:
            before, found = self._until((END_THINK,), self._final)
            self._reasoning += before
            thinks = not found
            if thinks:
                yield
        while calls:
            before, found = self._until(self._opening, self._final)
            self._content += before
            if found:
                calls = yield from self._read_calls()
            else:
                yield
        while True:
            self._content += self._held
            self._held = ""
            yield

    def _json_call(self) -> Generator[None, None, bool]:
        """A call in the JSON format. It is sent while it is written, if its name comes first."""
        while (head := CALL_HEAD.match(self._held)) is None:
            if END_CALL in self._held or self._final:
                return self._json_call_at_once()
            yield
        self._held = self._held[head.end() :]
        self._call += 1
        self._calls[self._call] = CallPart(self._call, head["name"])
        self._inside = True
        arguments = yield from self._json_arguments()
        while not (END_CALL in self._held or self._final):
            yield
        rest, found = self._until((END_CALL,), final=True)
        if found and _is_json(head[0] + arguments + rest):
            self._add_arguments(rest[0])
            self._inside = False
            return True
        if found or not f"}}}}{END_CALL}".startswith("".join(rest.split())):
            self._content += rest + (END_CALL if found else "")
        return False

    def _json_arguments(self) -> Generator[None, None, str]:
        """Sends an object while it is written, up to its last bracket: that is held back until the call is
        known to be good."""
        written, depth, in_string, escaped = "", 0, False, False
        while True:
            for at, char in enumerate(self._held):
                if in_string:
                    in_string, escaped = escaped or char != '"', not escaped and char == "\\"
                    continue
                in_string = char == '"'
                depth += (char in "{[") - (char in "}]")
                if not depth:
                    said, self._held = self._held[:at], self._held[at:]
                    self._add_arguments(said)
                    return written + said
            written += self._held
            self._add_arguments(self._held)
            self._held = ""
            yield

    def _json_call_at_once(self) -> bool:
        written, found = self._until((END_CALL,), final=True)
        match _parsed(written) if found else None:
            case {"name": str(name), "arguments": dict(arguments)}:
                self._call += 1
                written = json.dumps(arguments, ensure_ascii=False)
                self._calls[self._call] = CallPart(self._call, name, written)
                return True
        self._content += CALL + written + (END_CALL if found else "")
        return False

    def _tool_calls(self) -> Generator[None, None, bool]:
        while True:
            match self._tag():
                case None:
                    yield
                case ("", "invoke", str(name), None):
                    self._call += 1
                    self._calls[self._call] = CallPart(self._call, name)
                    self._inside = True
                    if not (yield from self._invoke()):
                        return False
                    self._inside = False
                case ("/", "tool_calls", None, None):
                    return True
                case _:
                    self._held = self._tagged + self._held
                    return False

    def _invoke(self) -> Generator[None, None, bool]:
        lead = "{"
        while True:
            if lead == "{" and self._held.lstrip().startswith("{"):
                return (yield from self._object())
            match self._tag():
                case None:
                    yield
                case ("", "parameter", str(name), str(string)):
                    self._add_arguments(f"{lead}{json.dumps(name, ensure_ascii=False)}: ")
                    lead = ", "
                    yield from self._value(string == "true")
                case ("/", "invoke", None, None):
                    self._add_arguments("{}" if lead == "{" else "}")
                    return True
                case _:
                    self._held = self._tagged + self._held
                    return False

    def _object(self) -> Generator[None, None, bool]:
        while not (self._final or END_INVOKE in self._held):
            yield
        value, found = self._until((END_INVOKE,))
        self._add_arguments(value.strip())
        if not found:
            yield
        return _is_json(value)

    def _value(self, is_string: bool) -> Generator[None, None, None]:
        if is_string:
            self._add_arguments('"')
        found = False
        while not found:
            if is_string or self._final or END_VALUE in self._held:  # JSON is parsed when it is complete
                value, found = self._until((END_VALUE,))
                if is_string:
                    value = json.dumps(value, ensure_ascii=False)[1:-1] + ('"' if found else "")
                elif found and not _is_json(value):
                    value = json.dumps(value, ensure_ascii=False)
                self._add_arguments(value)
            if not found:
                yield

    def _tag(self) -> tuple[str | None, ...] | None:
        """Take the next tag from the text; None: more text is needed; (): there is no tag."""
        self._tagged = ""
        if found := TAG.match(self._held):
            self._tagged, self._held = found[0], self._held[found.end() :]
            return found["end"], found["kind"], found["name"], found["string"]
        begun = self._held.lstrip()
        fits = any(begun.startswith(start) or start.startswith(begun) for start in (f"<{DSML}", f"</{DSML}"))
        if not fits or "\n" in begun or len(begun) > TAG_CHARS_MOST:
            return ()
        if self._final:
            self._held = ""
        return None

    def _add_arguments(self, text: str) -> None:
        if not text:
            return
        part = self._calls.get(self._call, CallPart(self._call))
        self._calls[self._call] = part._replace(arguments=part.arguments + text)

    def _until(self, needles: tuple[str, ...], final: bool = False) -> tuple[str, bool]:
        """The text before the first needle, and whether there is one, which is dropped. Without one, the text
        that can not be the start of a needle."""
        places = [(place, -len(each)) for each in needles if (place := self._held.find(each)) >= 0]
        if places:
            place, length = min(places)
            before, self._held = self._held[:place], self._held[place - length :]
            return before, True
        longest = 0 if final else min(len(self._held), max(map(len, needles)) - 1)
        ends = (self._held[-size:] for size in range(longest, 0, -1))
        keep = next((end for end in ends if any(each.startswith(end) for each in needles)), "")
        before, self._held = self._held[: len(self._held) - len(keep)], keep
        return before, False


def _is_json(value: str) -> bool:
    return _parsed(value) is not NO_JSON


NO_JSON = object()


def _parsed(value: str) -> Any:
    try:
        return json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return NO_JSON


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
