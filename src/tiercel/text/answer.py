"""A parser for answers: it separates reasoning, content and tool calls while the text arrives.

    thoughts</think>words

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

A string parameter is written as it is, any other as JSON. One JSON object may stand instead of parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
CALLS, END_INVOKE, END_VALUE = f"<{DSML}tool_calls>", f"</{DSML}invoke>", f"</{DSML}parameter>"
TAG = re.compile(
    rf'\s*<(?P<end>/?){DSML}(?P<kind>\w+)(\s+name="(?P<name>[^"]*)")?(\s+string="(?P<string>true|false)")?\s*>'
)
TAG_CHARS_MOST = 1000


class CallPart(NamedTuple):
    """The new part of one tool call. The first part has the name."""

    number: int
    name: str | None = None
    arguments: str = ""
    """The next characters of the JSON object."""


class Said(NamedTuple):
    """The new part of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPart, ...] = ()


class AnswerReader:
    """Parses one answer. The result does not depend on how the text was cut into pieces.

    At the first format error the rest becomes content, and the open call is not closed: a client must not
    take half a call for a whole one.
    """

    def __init__(self, *, thinks: bool, calls: bool) -> None:
        self._reads_calls = calls
        self._state: Callable[[bool], bool] = self._thought if thinks else self._words
        self._held = ""
        self._reasoning = self._content = ""
        self._calls: dict[int, CallPart] = {}
        self._call = -1
        self._parameters = 0
        self._string = self._inside = False
        self._tagged = ""

    @property
    def called(self) -> bool:
        """Whether the answer calls tools and every call is complete."""
        return self._call >= 0 and not self._inside

    def push(self, text: str, *, final: bool = False) -> Said:
        """The new part. Text that may become a tag is held back; `final` drops half a tag inside a call."""
        self._held += text
        while self._state(final):
            pass
        said = Said(self._reasoning, self._content, tuple(self._calls.values()))
        self._reasoning = self._content = ""
        self._calls = {}
        return said

    def _thought(self, final: bool) -> bool:
        before, found = self._until((END_THINK,), final)
        self._reasoning += before
        if found:
            self._state = self._words
        return found

    def _words(self, final: bool) -> bool:
        if not self._reads_calls:
            return self._rest(final)
        before, found = self._until((f"\n\n{CALLS}", CALLS), final)
        self._content += before
        if found:
            self._state = self._between_calls
        return found

    def _rest(self, _: bool) -> bool:
        self._content += self._held
        self._held = ""
        return False

    def _between_calls(self, final: bool) -> bool:
        match self._tag(final):
            case ("", "invoke", str(name), None):
                self._call += 1
                self._parameters, self._inside = 0, True
                self._calls[self._call] = CallPart(self._call, name)
                self._state = self._invoke
            case ("/", "tool_calls", None, None):
                self._state = self._words
            case found:
                return self._other(found)
        return True

    def _invoke(self, final: bool) -> bool:
        """Between the parameters of a call."""
        if not self._parameters and self._held.lstrip().startswith("{"):
            self._state = self._object
            return True
        match self._tag(final):
            case ("", "parameter", str(name), str(string)):
                lead = ", " if self._parameters else "{"
                self._add_arguments(f"{lead}{json.dumps(name, ensure_ascii=False)}: ")
                self._parameters += 1
                self._string = string == "true"
                if self._string:
                    self._add_arguments('"')
                self._state = self._value
            case ("/", "invoke", None, None):
                self._add_arguments("}" if self._parameters else "{}")
                self._inside = False
                self._state = self._between_calls
            case found:
                return self._other(found)
        return True

    def _object(self, final: bool) -> bool:
        if not (final or END_INVOKE in self._held):
            return False
        value, found = self._until((END_INVOKE,))
        self._add_arguments(value.strip())
        if found and _is_json(value):
            self._inside = False
            self._state = self._between_calls
        else:
            self._state = self._rest
        return found

    def _value(self, final: bool) -> bool:
        if not (self._string or final or END_VALUE in self._held):
            return False  # JSON is parsed when it is complete
        value, found = self._until((END_VALUE,))
        if self._string:
            self._add_arguments(json.dumps(value, ensure_ascii=False)[1:-1] + ('"' if found else ""))
        else:
            whole_json = not found or _is_json(value)
            self._add_arguments(value if whole_json else json.dumps(value, ensure_ascii=False))
        if found:
            self._state = self._invoke
        return found

    def _tag(self, final: bool) -> tuple[str | None, ...] | None:
        """The next tag; None: more text is needed to tell; (): no tag."""
        if found := TAG.match(self._held):
            self._tagged, self._held = found[0], self._held[found.end() :]
            return found["end"], found["kind"], found["name"], found["string"]
        if not _may_become_tag(self._held):
            return ()
        if final:
            self._held = ""
        return None

    def _other(self, found: tuple[str | None, ...] | None) -> bool:
        if found is None:
            return False
        self._held = (self._tagged if found else "") + self._held
        self._state = self._rest
        return True

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


def _may_become_tag(text: str) -> bool:
    begun = text.lstrip()
    fits = any(begun.startswith(start) or start.startswith(begun) for start in (f"<{DSML}", f"</{DSML}"))
    return fits and "\n" not in begun and len(begun) <= TAG_CHARS_MOST


def _is_json(value: str) -> bool:
    try:
        json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return False
    return True


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
