"""Text to tokens and back, for the tokenizer of one model folder: byte-level BPE, as Hugging Face writes it.

tokenizer.json           the tokenizer
tokenizer_config.json    which tokens begin and end a text; the chat template
chat_template.jinja      the chat template, where it has a file of its own
generation_config.json   more tokens that end a text; so may config.json
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer

from tiercel.errors import AskError, WeightsError

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Templates make control tokens of roles (`<|{{ role }}|>`), so a role is never free text."""
CONTROL_LOOKS = ("<|", "<｜")
"""Added tokens that look so are control tokens, special or not: DeepSeek's `<｜User｜>` is called ordinary.
`<think>` and its like are text: templates look for them in what an assistant said."""
ENDS_SOUGHT = 128
"""Message ends are found by rendering the messages up to each. In a longer conversation only the newest are
sought: each of the others was among the newest once."""
TEMPLATE_FAILS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + rank): byte for rank, byte in enumerate(sorted({*range(0x100)} - {*PRINTABLE}))
}
"""The alphabet of byte-level BPE, as GPT-2 chose it: a printable character for every byte."""


@dataclass(frozen=True)
class Prompt:
    """A conversation as the model reads it."""

    tokens: tuple[int, ...]
    turn_ends: tuple[int, ...]
    """Token positions at which messages, and parts that were named, end. Ascending."""


@dataclass(frozen=True)
class Piece:
    """Text that may be shown now, and the stop string that was met, if one was."""

    text: str
    stopped_by: str | None = None


class Text:
    """The tokenizer and the chat template of one model. Not changed by use: threads may share it."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self._tokenizer = _read_tokenizer(folder / "tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json")
        self._template = _read_template(folder, config)
        self._names = {  # bos_token, eos_token, …: templates may write them
            name: value.get("content", "") if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        added = self._tokenizer.get_added_tokens_decoder()
        self.hidden = frozenset(token for token, each in added.items() if each.special)
        """Special tokens: `decode` leaves them out."""
        self._marks = Marks(
            each.content for each in added.values() if each.special or each.content.startswith(CONTROL_LOOKS)
        )
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        bos, eos = (
            self._tokenizer.token_to_id(self._names.get(name, "")) for name in ("bos_token", "eos_token")
        )
        self._lead = [bos] if config.get("add_bos_token") is True and bos is not None else []
        ends = [eos]
        for name in ("generation_config.json", "config.json"):
            given = _read_json(folder / name).get("eos_token_id")
            ends += given if isinstance(given, list) else [given]
        self.eos = frozenset(token for token in ends if token is not None)
        self._pieces: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """A whole text, with what this tokenizer puts before one. Control tokens in it are control tokens."""
        tokens = self._encode(text, field="text", whole=True).ids
        return tokens if tokens[:1] == self._lead else self._lead + tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, without special tokens. Bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def piece(self, token: int) -> str:
        """One token by itself, special ones too."""
        return self.piece_bytes(token).decode("utf-8", "replace")

    def piece_bytes(self, token: int) -> bytes:
        """The bytes of one token: often no whole characters, and nothing where an id has no token."""
        if (piece := self._pieces.get(token)) is None:
            name = self._tokenizer.id_to_token(token) or ""
            spelled = all(char in BYTES for char in name)  # added tokens may be written in any characters
            piece = self._pieces[token] = bytes(BYTES[char] for char in name) if spelled else name.encode()
        return piece

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Prompt:
        """The conversation through the model's template. What messages say gives no control token.

        A message's end is where the messages up to it, rendered alone, end, if all of them begin with that.
        """
        marks = self._marks
        shaped = [marks.message(f"messages[{index}]", message) for index, message in enumerate(messages)]
        if not shaped:
            raise AskError("messages", [], "there must be one")
        try:
            rendered = self._render(shaped, add_generation_prompt)
        except TEMPLATE_FAILS as error:
            why = f"the chat template does not take them: {error}"
            raise AskError("messages", [message["role"] for message in shaped], why) from error
        ends = set(marks.ends(rendered)[-ENDS_SOUGHT:])
        everyone = range(len(shaped))
        named = [index for index in everyone if messages[index].get("cache_control")]
        for index in {0, *everyone[-ENDS_SOUGHT:], *named[-ENDS_SOUGHT:]}:
            try:
                before = self._render(shaped[: index + 1], False)
            except TEMPLATE_FAILS:
                continue  # it wants more than these messages
            if rendered.startswith(before):
                ends.add(len(marks.removed(before)))
        segments = [(text, self._encode(text, field="messages")) for text in marks.segments(rendered)]
        tokens = tuple(token for _, encoding in segments for token in encoding.ids)
        return Prompt(tokens, tuple(sorted(set(_tokens_before(segments, ends)) - {0})))

    def _encode(self, text: str, *, field: str, whole: bool = False) -> Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise AskError(field, text[error.start], "is half a character") from error
        return self._tokenizer.encode(text, add_special_tokens=whole)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        if self._template is None:
            raise ValueError("the model has none")
        asked = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        # Hugging Face gives the absent ones too: templates compare them with none.
        return self._template.render(**self._names, **asked, tools=None, documents=None)


class Marks:
    """Two texts that nobody can guess: put into messages, found again in what a template made of them.

        said   "see <|end|>"   rendered   <|user|>see <‸|end|><|assistant|>
                               encoded    └───────────┘ └─────────────────┘

    A cut mark parts what looks like a control token; its halves, encoded by themselves, are text. All else is
    encoded as if nothing had been done, and templates may trim and split it. An end mark names a position.
    Both are letters and digits: they come through any escaping. A template that writes half a control token
    and leaves the other half to a message is not defended against; roles, which it may, are not free text.
    """

    def __init__(self, control: Iterable[str]) -> None:
        self._cut, self._end = secrets.token_hex(16), secrets.token_hex(16)
        behind: dict[str, list[str]] = {}
        self._begun: set[str] = set()
        for name in control:
            behind.setdefault(name[0], []).append(re.escape(name[1:]))
            self._begun.update(name[:length] for length in range(1, len(name)))
        self._longest = max(map(len, self._begun), default=0)
        first = "|".join(f"{re.escape(char)}(?={'|'.join(rests)})" for char, rests in behind.items())
        self._first = re.compile(first or r"(?!)")

    def message(self, field: str, message: Message) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise AskError(field, message, "must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise AskError(f"{field}.role", role, f"must be one of {', '.join(ROLES)}")
        _names_end(field, message)
        if isinstance(content, list):
            content = self._joined(f"{field}.content", content)
        elif isinstance(content, str) or (content is None and message.get("tool_calls")):
            content = self._said(content)
        else:
            raise AskError(f"{field}.content", type(content).__name__, "must be text or a list of text parts")
        # In the order they were given: a template may write a message out.
        shaped = {name: self._said(value) for name, value in message.items() if name != "cache_control"}
        return shaped | {"role": role, "content": content}

    def removed(self, rendered: str) -> str:
        return rendered.replace(self._cut, "").replace(self._end, "")

    def ends(self, rendered: str) -> list[int]:
        """Where the end marks were, in what is left without marks."""
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
            ends = _names_end(where, part) and index < len(parts) - 1  # the last part's is the message's own
            joined += self._said(part["text"]) + (self._end if ends else "")
        return joined

    def _said(self, value: Any) -> Any:
        """Control tokens are cut after the first character, and one that is only begun at its end."""
        if isinstance(value, str):
            begun = any(value[-length:] in self._begun for length in range(1, self._longest + 1))
            return self._first.sub(lambda found: found[0] + self._cut, value) + (self._cut if begun else "")
        if isinstance(value, Mapping):
            return {self._said(name): self._said(each) for name, each in value.items()}
        return [self._said(each) for each in value] if isinstance(value, list | tuple) else value


class TextStream:
    """The text of tokens as they come. All pieces together are `decode` of all tokens, up to the stop string.

    Held back are half characters, and what may become a stop string. The stop string is the one that is whole
    first, and the longest of these: it does not depend on how the text was parted into tokens.
    """

    def __init__(self, text: Text, stop: tuple[str, ...] = (), keep_stop: bool = False) -> None:
        self._text = text
        self._stops = [StopString(each) for each in stop]
        self._keep_stop = keep_stop
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._stopped = False

    def push(self, token: int) -> Piece:
        assert not self._stopped, "a stop string was met"
        return self._given(
            "" if token in self._text.hidden else self._utf8.decode(self._text.piece_bytes(token))
        )

    def finish(self) -> str:
        """What was held back and is text after all."""
        if self._stopped:
            return ""
        last = self._given(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return last.text + held

    def _given(self, new: str) -> Piece:
        if not self._stops:
            return Piece(new)
        text, self._held = self._held + new, ""
        for end, char in enumerate(new, start=len(text) - len(new) + 1):
            if whole := [each.text for each in self._stops if each.next(char)]:
                stop = max(whole, key=len)
                self._stopped = True
                return Piece(text[: end if self._keep_stop else end - len(stop)], stop)
        sure = len(text) - max(each.matched for each in self._stops)
        self._held = text[sure:]
        return Piece(text[:sure])


class StopString:
    """How much of one stop string the text ends with, a character at a time (Knuth, Morris, Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0]
        """Of each beginning: the longest shorter beginning that it ends with."""
        for char in text[1:]:
            self._shorter.append(self._longer(self._shorter[-1], char))

    def next(self, char: str) -> bool:
        """Whether it is whole now."""
        self.matched = self._longer(self.matched, char)
        return self.matched == len(self.text)

    def _longer(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == char)


def _tokens_before(segments: Sequence[tuple[str, Encoding]], positions: Iterable[int]) -> list[int]:
    """How many tokens are the same whatever comes behind each character position.

    A word that goes on behind a position counts for nothing: it could have been parted otherwise.
    """
    counts, todo = [], deque(sorted(positions))
    tokens = start = 0
    for text, encoding in segments:
        offsets = encoding.offsets
        while todo and todo[0] <= start + len(text):
            inside = todo.popleft() - start
            count = bisect_right(offsets, inside, key=itemgetter(1))
            if count < len(offsets) and offsets[count][0] < inside:
                word = encoding.token_to_word(count)
                while count and encoding.token_to_word(count - 1) == word:
                    count -= 1
            counts.append(tokens + count)
        tokens, start = tokens + len(offsets), start + len(text)
    return counts


def _names_end(field: str, holder: Message) -> bool:
    asked = holder.get("cache_control")
    if asked is None or (isinstance(asked, Mapping) and asked.get("type") == "ephemeral"):
        return asked is not None
    raise AskError(f"{field}.cache_control", asked, "must be of type ephemeral")


def _read_tokenizer(file: Path) -> Tokenizer:
    kind = _read_json(file, needed=True).get("decoder")
    kinds = kind.get("decoders", [kind]) if isinstance(kind, dict) else []
    if [each.get("type") for each in kinds] != ["ByteLevel"]:
        raise WeightsError(file, "is no byte-level tokenizer: no other can be streamed exactly here")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # it has no kind of its own
        raise WeightsError(file, f"is no tokenizer: {error}") from error


def _read_template(folder: Path, config: Mapping[str, Any]) -> Template | None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    file, given = folder / "chat_template.jinja", config.get("chat_template")
    try:
        if file.exists():
            given = file.read_text(encoding="utf-8")
        if isinstance(given, list):
            given = {each["name"]: each["template"] for each in given}.get("default")
        return None if given is None else environment.from_string(given)
    except (TemplateError, OSError, ValueError, LookupError) as error:
        raise WeightsError(folder, f"has a chat template that can not be read: {error}") from error


def _tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    """As in Hugging Face's templates: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _raise_exception(why: str) -> NoReturn:
    raise TemplateError(why)


def _read_json(file: Path, *, needed: bool = False) -> dict[str, Any]:
    if not needed and not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(file, f"can not be read: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(file, "must hold one JSON object")
    return value
