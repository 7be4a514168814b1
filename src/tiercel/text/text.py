"""Text to tokens and back, for the tokenizer of one model folder, as Hugging Face writes it.

tokenizer.json           the tokenizer
tokenizer_config.json    the tokens that begin and end a text; perhaps the chat template
chat_template.jinja      the chat template, if it has its own file; or chat_template.json
generation_config.json   more tokens that end a text; config.json may have some, too
config.json              the model's type: DeepSeek V4 has a chat format instead of a template
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import Any

from tokenizers import Encoding, Tokenizer

from tiercel.errors import AskError, LengthError, WeightsError
from tiercel.text.answer import CALL, DSML, END_CALL, END_THINK, THINK
from tiercel.text.conversation import ChatFormat, Conversation, Guard, Marks, Message
from tiercel.text.deepseek_v4 import read_deepseek_v4
from tiercel.text.grammar import Grammars
from tiercel.text.pieces import Pieces, bytes_per_token_most, without_prefix
from tiercel.text.template import TEMPLATE_FAILS, read_template

CONTROL_LOOKS = ("<|", "<｜", "｜")
"""Added tokens that begin like this are control tokens, even if not special: DeepSeek's `<｜User｜>` is not.
`<think>` and the like are text: templates look for them in assistant messages."""
SHOWN = (THINK, END_THINK, DSML, CALL, END_CALL)
"""Tokens that are shown in an answer, even if the tokenizer calls them special."""
ENDS_SOUGHT = 128
"""A message's end is found by rendering the messages up to it. Only the newest ends are sought, this many:
earlier requests of the conversation found the others."""
ENDS_MESSAGES = 1 << 15
"""How many messages all these renderings have together: 128 ends of 300 messages, 8 of 4,000. About 50 ms."""


@dataclass(frozen=True)
class Prompt:
    """A conversation as the model reads it."""

    tokens: tuple[int, ...]
    turn_ends: tuple[int, ...]
    """Token positions where messages and parts with `cache_control` end. Ascending."""
    thinks: bool = False
    """Whether the answer begins with thoughts."""


class Text:
    """The tokenizer and the chat format of one model. Threads may share it."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self._tokenizer = _read_tokenizer(folder / "tokenizer.json")
        decoder = self._tokenizer.decoder
        self._decoder = Pieces(folder / "tokenizer.json", decoder and json.loads(decoder.__getstate__()))
        config = _read_json(folder / "tokenizer_config.json")
        names = {  # bos_token, eos_token, …: variables of templates
            name: value.get("content", "") if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        own, vocabulary = _read_json(folder / "config.json"), self._tokenizer.get_vocab()
        found = read_template(folder, config, names) or read_deepseek_v4(folder, own, vocabulary)
        self._format = found or ChatFormat()
        self.calls = self._format.calls
        """How the model writes tool calls; None: that is not known, and calls can not be parsed."""
        added = self._tokenizer.get_added_tokens_decoder()
        self.hidden = frozenset(
            token for token, each in added.items() if each.special and each.content not in SHOWN
        )
        """Special tokens: `decode` leaves them out."""
        self._added = frozenset(added)
        self._guard = Guard(
            each.content
            for each in added.values()
            if each.special or each.content.startswith(CONTROL_LOOKS) or each.content in self._format.control
        )
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.token_ids: int = max(vocabulary.values(), default=-1) + 1
        """More than `vocab_size` where ids are left out."""
        bos, eos = (self._tokenizer.token_to_id(names.get(name, "")) for name in ("bos_token", "eos_token"))
        self._lead = [bos] if config.get("add_bos_token") is True and bos is not None else []
        ends = [eos]
        for name in ("generation_config.json", "config.json"):
            given = _read_json(folder / name).get("eos_token_id")
            given = given if isinstance(given, list) else [given]
            if any(type(token) not in (int, NoneType) for token in given):
                raise WeightsError(
                    folder / name, f"eos_token_id = {given!r}: must be a token or a list of them"
                )
            ends += given
        self.eos = frozenset(token for token in ends if token is not None)
        self.control = self.eos | {
            token
            for token, each in added.items()
            if (each.special or each.content.startswith(CONTROL_LOOKS)) and each.content not in SHOWN
        }
        """Tokens that are never part of the text of an answer with a grammar."""
        self.think_end: int | None = self._tokenizer.token_to_id(END_THINK)
        """The token between thoughts and words; None: it is not one token."""
        self._pieces: dict[int, bytes] = {}
        self.grammars = Grammars(self)

    def encode(
        self,
        text: str,
        *,
        field: str = "text",
        tokens_max: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """A whole text as tokens, after the bos token if there is one. It may hold control tokens.
        `add_special_tokens` False: nothing is added to the text.

        Raises `LengthError`, without encoding, if its length alone gives more than `tokens_max` tokens.
        """
        self._check_length(text, field, tokens_max)
        tokens = self._encode(text, field=field, whole=add_special_tokens).ids
        return self._lead + tokens if add_special_tokens and tokens[:1] != self._lead else tokens

    def tokens_within(self, text: str) -> list[int]:
        """The tokens of a piece of text inside another one: no space is put before it."""
        return [token for _, encoding in self._within(text, "text") for token in encoding.ids]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """A whole text. Bytes that are not UTF-8 become U+FFFD."""
        hidden = self.hidden if skip_special_tokens else ()
        names = [self._tokenizer.id_to_token(token) for token in tokens if token not in hidden]
        shown = [name for name in names if name is not None]
        first = b"".join(map(self._decoder.of_first, shown[:1]))
        rest = b"".join(map(self._decoder.of, shown[1:]))
        return self._decoder.whole((first + rest).decode("utf-8", "replace"))

    def piece(self, token: int) -> str:
        """One token as text, special tokens included. Half a character becomes U+FFFD."""
        return self.piece_bytes(token).decode("utf-8", "replace")

    def piece_bytes(self, token: int) -> bytes:
        """The exact bytes of one token, often half a character. An id without a token has no bytes."""
        if (piece := self._pieces.get(token)) is None:
            piece = self._pieces[token] = self._decoder.of(self._tokenizer.id_to_token(token) or "")
        return piece

    def difference(self, folder: Path) -> str | None:
        """A token that is another one for the tokenizer of this folder; None: both have the same tokens."""
        other = _read_tokenizer(folder / "tokenizer.json")
        own, others = (
            {token: piece for piece, token in each.get_vocab(with_added_tokens=True).items()}
            for each in (self._tokenizer, other)
        )
        for token in sorted(own.keys() | others.keys()):
            if own.get(token) != others.get(token):
                return f"token {token} is {own.get(token)!r} for the model, and {others.get(token)!r} there"
        return None

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tokens_max: int | None = None,
    ) -> Prompt:
        """The conversation in the model's format. No text of a message or tool becomes a control token.

        `continue_final_message`: the last message is the beginning of the answer, and is left open.

        Raises `LengthError` as `encode` does. A message ends where the rendering of the messages up to it
        ends, if the whole rendering begins with that.
        """
        self._check_messages(messages, tokens_max)
        marks = Marks(self._guard, self._format.between)
        shaped = [marks.message(f"messages[{index}]", message) for index, message in enumerate(messages)]
        if not shaped:
            raise AskError("messages", [], "there must be one")
        if continue_final_message:
            if shaped[-1]["role"] != "assistant" or not shaped[-1]["content"] or shaped[-1].get("tool_calls"):
                why = "needs a last message of the assistant, with content and without tool calls"
                raise AskError("continue_final_message", True, why)
            shaped[-1], add_generation_prompt = marks.left_open(shaped[-1]), False
        talk = Conversation(shaped, marks.said(list(tools)), marks.said(kwargs or {}), add_generation_prompt)
        try:
            rendered = self._format.render(talk)
            rendered = marks.opened(rendered) if continue_final_message else rendered
        except AskError:
            raise
        except TEMPLATE_FAILS as error:
            why = f"the chat template does not take them: {marks.removed(str(error))}"
            raise AskError("messages", [message["role"] for message in shaped], why) from error
        self._check_length(marks.removed(rendered), "messages", tokens_max)
        first, *cut = marks.segments(rendered)
        segments = [(first, self._encode(first, field="messages"))]
        segments += [within for text in cut for within in self._within(text, "messages")]
        tokens = tuple(token for _, encoding in segments for token in encoding.ids)
        thinks = rendered.rstrip().endswith(THINK)
        if tokens_max is not None and len(tokens) > tokens_max:
            return Prompt(tokens, (), thinks)  # the caller refuses it: its ends are not needed
        ends = set(marks.ends(rendered)[-ENDS_SOUGHT:])
        everyone = range(len(shaped))
        named = [index for index in everyone if messages[index].get("cache_control")]
        sought = {0, *everyone[-ENDS_SOUGHT:], *named[-ENDS_SOUGHT:]}
        talk, left = replace(talk, add_generation_prompt=False), ENDS_MESSAGES
        for index in sorted(sought, reverse=True):  # the newest matter most, if the steps run out
            if index >= left:
                continue
            left -= index + 1
            try:
                before = self._format.render(replace(talk, messages=shaped[: index + 1]))
            except TEMPLATE_FAILS:
                continue  # the template does not take a conversation that ends here
            if rendered.startswith(before):
                ends.add(len(marks.removed(before)))
        turn_ends = tuple(sorted(set(_tokens_before(segments, ends)) - {0}))
        return Prompt(tokens, turn_ends, thinks)

    def _check_messages(self, messages: Sequence[Message], tokens_max: int | None) -> None:
        """Refuses a conversation that can not fit before it is rendered. A message gives at least one token,
        and the tokens of its text; but templates may trim it, and leave out an assistant's thoughts."""
        if tokens_max is None:
            return
        if len(messages) > tokens_max:
            raise LengthError("messages", tokens=len(messages), tokens_max=tokens_max)
        said = (words.strip() for each in messages for words in _words(each))
        self._check_length("".join(said), "messages", tokens_max)

    def _check_length(self, text: str, field: str, tokens_max: int | None) -> None:
        """Refuses a text that can not fit. One that may fit is encoded and then counted by the caller."""
        if tokens_max is None or 4 * len(text) <= tokens_max:
            return
        most = self._bytes_per_token_most
        least = 0 if most is None else -(-len(text.encode("utf-8", "replace")) // most)
        if least > tokens_max:
            raise LengthError(field, tokens=least, tokens_max=tokens_max)

    @cached_property
    def _bytes_per_token_most(self) -> int | None:
        lengths = [len(self.piece_bytes(token)) for token in range(self.token_ids)]
        return bytes_per_token_most(json.loads(self._tokenizer.to_str()), lengths)

    def _encode(self, text: str, *, field: str, whole: bool = False) -> Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise AskError(field, text[error.start], "is half a character") from error
        return _encode(self._tokenizer, text, whole=whole)

    def _within(self, text: str, field: str) -> list[tuple[str, Encoding]]:
        """The tokens of a text that goes on from another one, in one or two parts. If the tokenizer puts a
        space before texts, this one gets none; after a control token it does, as everywhere."""
        encoding = self._encode(text, field=field)
        if self._inner is None:
            return [(text, encoding)]
        every = zip(encoding.ids, encoding.offsets, strict=True)
        until = next((start for token, (start, _) in every if token in self._added), len(text))
        parts = [(text[:until], self._inner), (text[until:], self._tokenizer)]
        return [(part, _encode(by, part)) for part, by in parts if part]

    @cached_property
    def _inner(self) -> Tokenizer | None:
        """The tokenizer for text inside another one; None: it is the same one."""
        steps = {name: getattr(self._tokenizer, name) for name in ("normalizer", "pre_tokenizer")}
        own = {name: step and json.loads(step.__getstate__()) for name, step in steps.items()}
        inner = {name: without_prefix(step) for name, step in own.items()}
        if inner == own:
            return None
        return Tokenizer.from_str(json.dumps(json.loads(self._tokenizer.to_str()) | inner))


_TIMES = threading.local()


def tokenizing_s() -> float:
    """The CPU time that this thread has spent in tokenizers: other threads can use the interpreter then."""
    return getattr(_TIMES, "tokenizing_s", 0.0)


def _encode(tokenizer: Tokenizer, text: str, *, whole: bool = False) -> Encoding:
    start_s = time.thread_time()
    try:
        return tokenizer.encode(text, add_special_tokens=whole)
    finally:
        _TIMES.tokenizing_s = tokenizing_s() + time.thread_time() - start_s


def _tokens_before(segments: Sequence[tuple[str, Encoding]], positions: Iterable[int]) -> list[int]:
    """For each character position: how many tokens before it do not depend on the text after it.

    The tokens of a word that crosses the position do not count: another ending may split it differently.
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


def _words(message: Message) -> Iterator[str]:
    """The text of a message, unless an assistant wrote it. The message is not checked yet."""
    match message:
        case {"role": "assistant"}:
            return
        case {"content": str(text)}:
            yield text
        case {"content": list(parts)}:
            for part in parts:
                match part:
                    case {"text": str(text)}:
                        yield text


def _read_tokenizer(file: Path) -> Tokenizer:
    _read_json(file, needed=True)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(file, f"is not a tokenizer: {error}") from error
    # Settings left over from training: a prompt is never truncated or padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
