"""Grammars of answers: JSON schemas, regular expressions and context-free grammars as masks of tokens.

    Grammar ── compiled once (`Grammars`) ──► Matcher, one for each answer
    token drawn ──► Matcher.take            the answer so far
    Matchers    ──► fill_masks              one bit for each token that may come next

llguidance does the work. A special token is no text: no grammar allows it, except the tokens that end the
answer, where the grammar is complete. A matcher is a function of the tokens it has taken, so an answer that
was preempted goes on as before.

Every answer waits for the masks of every other one, so their time is limited: an answer whose masks take more
CPU time than `ANSWER_S` and `TOKEN_S` allow ends with an error, and its grammar is refused for a while. The
time to compile is not limited here: a server tries a client's grammar in another process first (`trial.py`).
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tiercel.errors import GrammarError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

Masks = NDArray[np.int32]
"""[rows, words]: bit t % 32 of word t // 32 tells whether token t may come next."""

SOURCE_BYTES_MOST = 128 << 10
"""OpenAI allows 120,000 characters of names and values in a schema."""
PROPERTIES_MOST = 500
"""The most properties of one object: 500 take 0.1 s to compile, twice as many four times as long."""
COMPILED_MOST, COMPILED_BYTES_MOST = 64, 256 << 20
"""Grammars that are kept compiled. One takes about a millisecond to compile."""
FORCED_MOST = 4096
"""Texts that grammars left no choice about, whose tokens are remembered: names in objects come again and
again."""
CORES_LEAST = 8
"""From this number of cores on, masks are computed by several threads. With two busy ones it takes 4 ms to
wake a thread, and 1 ms to compute 16 masks in this one."""
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 10_000,
    "max_items_in_row": 20_000,
    "verbose_errors": False,
}
"""So one mask of an absurd regular expression takes 20 ms, and then its answer ends with an error. (The first
mask may take 0.3 s.) A state takes 1 to 2 kB for each answer. x86-64, llguidance 1.9.1, 2026-11-17."""
ANSWER_S, TOKEN_S = 0.05, 0.002
"""CPU time that all masks of one answer may take: at first, and more for each of its tokens. With a
vocabulary of 129,280 a mask of JSON takes 0.05 to 0.2 ms, the slowest of twenty useful grammars 0.7 ms, and
an ambiguous grammar 900 ms."""
REFUSED_S, PAUSE_S = 300.0, 10.0
"""How long a grammar whose masks took longer is refused, and how long its owner may use no new grammar."""
REFUSED_MOST = 1024
ALONE, BATCH_S = 8, 0.01
"""An answer's first masks are computed alone, so that their time is known; later ones together with others,
until together they take `BATCH_S`."""

QUOTED = re.compile(r"\s*(\d+ \||\^+$)")
AT_SCHEMA = "at 1(8): failed to compile JSON schema: "
REASON_CHARS_MOST = 300

JSON_OPTIONS = {"whitespace_pattern": r"\x20|\x0D?\x0A[\x20\x09]{0,40}"}
"""Between the parts of JSON: a space, or a new line and its indentation. Without a bound a weak model may
write nothing else."""
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates write JSON: a call reads the same when the client sends it back."""


@dataclass(frozen=True)
class Grammar:
    """What an answer has to look like: a plain value, made by the functions below."""

    source: str
    """The grammar in the language of llguidance."""
    after: int | None = None
    """The answer is free up to this token: the end of the model's thoughts. None: the grammar begins at
    once."""
    owner: str = ""
    """Whose grammar it is, among the users of a server."""
    compiled: Compiled | None = field(default=None, compare=False, repr=False)
    """Keeps the grammar compiled while an ask has it."""


def json_schema(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """JSON that a schema allows. `lenient`: keywords that can not be enforced are ignored, not refused."""
    return f"start: {json_rule(schema, lenient=lenient)}"


def json_rule(schema: Mapping[str, Any], *, lenient: bool = False, one_line: bool = False) -> str:
    """JSON that a schema allows, as a part of a rule."""
    options = {**(ONE_LINE if one_line else JSON_OPTIONS), "lenient": lenient}
    try:
        _check_size(schema)
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error


def _check_size(schema: Any) -> None:
    for name, each in schema.items() if isinstance(schema, Mapping) else enumerate(schema):
        if name == "properties" and isinstance(each, Mapping) and len(each) > PROPERTIES_MOST:
            raise GrammarError(f"an object has {len(each):,} properties, {PROPERTIES_MOST} are allowed")
        if isinstance(each, Mapping | list):
            _check_size(each)


def regex(pattern: str) -> str:
    """A text that matches a regular expression from its beginning to its end."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str]) -> str:
    """One of these texts. A mask of 6,000 texts takes 0.2 ms as one terminal, 27 ms as a rule."""
    return f"start: TEXT\nTEXT: {' | '.join(map(json.dumps, texts))}"


def ebnf(rules: str) -> str:
    """A context-free grammar: GBNF, as SGLang's `ebnf`, or Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(rules)
    except Exception as error:  # the library raises plain Exception
        raise GrammarError(str(error)) from error


@dataclass(frozen=True, eq=False)
class Compiled:
    """A grammar that can be used."""

    inner: LLMatcher
    bytes: int
    """Memory that the grammar takes, as far as that is known."""


class Vocabulary(Protocol):
    """What grammars need of a tokenizer: a part of `Text`."""

    token_ids: int
    eos: frozenset[int]
    control: frozenset[int]

    def piece_bytes(self, token: int) -> bytes: ...

    def tokens_within(self, text: str) -> list[int]: ...


class Grammars:
    """The compiled grammars of one tokenizer, and those whose masks took too long. Threads may share it."""

    def __init__(self, text: Vocabulary, clock: Callable[[], float] = time.monotonic) -> None:
        self.text, self._clock = text, clock
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._until_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Until when something is refused: ("source", a source) or new grammars of ("owner", a name)."""

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Makes the tokenizer for llguidance once: it takes half a second for a vocabulary of 129,280."""
        from llguidance import LLTokenizer, TokenizerWrapper

        tokens = _Tokens(self.text)
        return LLTokenizer(TokenizerWrapper(tokens), eos_token=sorted(self.text.eos) or None)

    @cached_property
    def _limits(self) -> LLParserLimits:
        from llguidance import LLParserLimits

        return LLParserLimits(**LIMITS)

    def check(self, grammar: Grammar, bytes_known: int = 0) -> Compiled:
        """The compiled grammar, which is kept. Raises `GrammarError` if the grammar can not be used.
        `bytes_known`: its memory, if that is known."""
        if self._wait_s("source", grammar.source) > 0:
            raise GrammarError(TOO_SLOW)
        return grammar.compiled or self._find(grammar.source, bytes_known)

    def keeps(self, source: str) -> bool:
        """Whether a grammar is compiled now."""
        with self._lock:
            return source in self._compiled

    def matcher(self, grammar: Grammar, ends: frozenset[int]) -> Matcher:
        """A matcher for a new answer. `ends`: the tokens that end it."""
        inner = (grammar.compiled or self._find(grammar.source)).inner.deep_copy()
        words = (self._tokenizer.vocab_size + 31) // 32
        time_left = MaskTime(lambda: self._refuse(grammar))
        return Matcher(inner, grammar.after, ends, ends - self.text.eos, words, time_left)

    def pause_s(self, owner: str) -> float:
        """How long this owner may use no new grammar, because the masks of one took too long."""
        return self._wait_s("owner", owner)

    def _refuse(self, grammar: Grammar) -> None:
        now = self._clock()
        with self._lock:
            self._until_s["source", grammar.source] = now + REFUSED_S
            self._until_s["owner", grammar.owner] = now + PAUSE_S
            while len(self._until_s) > REFUSED_MOST:
                self._until_s.popitem(last=False)

    def _wait_s(self, kind: str, name: str) -> float:
        with self._lock:
            return self._until_s.get((kind, name), 0.0) - self._clock() if self._until_s else 0.0

    def _find(self, source: str, bytes_known: int = 0) -> Compiled:
        with self._lock:
            found = self._compiled.get(source)
            if found is not None:
                self._compiled.move_to_end(source)
                return found
            tokenizer, limits = self._tokenizer, self._limits
        found = Compiled(_compile(source, tokenizer, limits), bytes_known)
        with self._lock:
            self._compiled[source] = found
            while len(self._compiled) > COMPILED_MOST or self._bytes > COMPILED_BYTES_MOST:
                self._compiled.popitem(last=False)
        return found

    @property
    def _bytes(self) -> int:
        return sum(each.bytes for each in self._compiled.values())


def _compile(source: str, tokenizer: LLTokenizer, limits: LLParserLimits) -> LLMatcher:
    from llguidance import LLMatcher

    if len(source) > SOURCE_BYTES_MOST:
        raise GrammarError(f"it is longer than {SOURCE_BYTES_MOST:,} B")
    compiled = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not compiled.is_error():
        first = compiled.deep_copy()
        allowed = any(first.compute_bitmask())
        if not allowed and not first.is_error():
            raise GrammarError("no text matches it")
        compiled = first if first.is_error() else compiled
    if compiled.is_error():
        raise GrammarError(_reason(compiled))
    return compiled


def _reason(matcher: LLMatcher) -> str:
    """The library's own words, without places in a source that the client has not written."""
    message = matcher.get_error().removesuffix("<non-verbose/>").strip()
    if message.startswith("NoExtension"):
        return "no text matches it"
    lines = [line for line in message.splitlines() if not QUOTED.match(line)]
    return " ".join(" ".join(lines).split()).removeprefix(AT_SCHEMA)[:REASON_CHARS_MOST]


class _Tokens:
    """A vocabulary as llguidance takes it."""

    def __init__(self, text: Vocabulary) -> None:
        self.tokens = [text.piece_bytes(token) for token in range(text.token_ids)]
        self.special_token_ids = sorted(text.control)
        self.eos_token_id = min(text.eos, default=0)
        self.bos_token_id = None
        self._tokens_within = lru_cache(FORCED_MOST)(text.tokens_within)

    def __call__(self, text: str) -> list[int]:
        """Tokens of text that a grammar leaves no choice about: those that the model was trained on."""
        return self._tokens_within(text)


TOO_SLOW = "its masks take too long: every other answer waits for them"


class MaskTime:
    """The CPU time that the masks of one answer take, all of it together."""

    def __init__(self, ran_out: Callable[[], None]) -> None:
        self._left_s, self._ran_out = ANSWER_S, ran_out
        self.alone = ALONE
        """How many masks are still to be computed alone."""

    @property
    def over(self) -> bool:
        return self._left_s < 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within the block, the thread's CPU time is counted."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.add(time.thread_time() - began_s)

    def add(self, seconds: float) -> None:
        before, self._left_s = self._left_s, self._left_s - seconds
        if before >= 0 > self._left_s:
            self._ran_out()

    def next_token(self) -> None:
        if not self.over:
            self._left_s += TOKEN_S


class Matcher:
    """One answer and its grammar."""

    def __init__(
        self,
        inner: LLMatcher,
        after: int | None,
        ends: frozenset[int],
        more_ends: frozenset[int],
        words: int,
        time_left: MaskTime,
    ) -> None:
        """`more_ends`: ends that llguidance does not know. `words`: the words of its masks."""
        self._inner, self._after, self.words = inner, after, words
        self._ends, self._more_ends = ends, more_ends
        self._ended = False
        self.time = time_left

    def copy(self) -> Matcher:
        """A matcher in the same state, for the same answer."""
        copy = Matcher(
            self._inner.deep_copy(), self._after, self._ends, self._more_ends, self.words, self.time
        )
        copy._ended = self._ended
        return copy

    @property
    def begun(self) -> bool:
        """Whether the grammar decides about the next token."""
        return self._after is None and not self._ended

    def take(self, token: int) -> None:
        """The answer goes on with a token. Raises `GrammarError` if that is not possible."""
        if self._ended:
            return
        if self._after is not None:
            self._after = None if token == self._after else self._after
        elif self.time.over:
            raise GrammarError(TOO_SLOW)
        elif token in self._ends and not self._inner.is_error():
            self._ended = True
        else:
            self.time.next_token()
            with self.time.taken():
                self._inner.consume_token(token)
            if self._inner.is_error():
                raise GrammarError(f"the answer can not follow its grammar: {_reason(self._inner)}")

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come next, one after the other."""
        free = 0
        if self._after is not None:
            while free < len(tokens) and tokens[free] not in self._ends:
                free += 1
                if tokens[free - 1] == self._after:
                    break
            else:
                return free
        if self._ended or self.time.over:
            return 0
        with self.time.taken():
            count = free + self._inner.validate_tokens(list(tokens[free:]))
        if count < len(tokens) and tokens[count] in self._ends:  # not counted where nothing else is possible
            ahead = self._inner.deep_copy()
            count += ahead.consume_tokens(list(tokens[free:count])) and ahead.is_accepting()
        return count

    def _write(self, mask: NDArray[np.int32], found: NDArray[np.int32]) -> None:
        """`found`: what llguidance allows, if the grammar has begun."""
        if not self.begun or self.time.over or self._inner.is_error():  # `take` raises the error
            mask[:] = -1
            if self._after is not None:  # thoughts end before the answer does
                for token in self._ends:
                    mask[token // 32] &= ~BITS[token % 32]
            return
        common = min(len(mask), len(found))
        mask[:common] = found[:common]
        mask[common:] = 0
        if self._more_ends and self._inner.is_accepting():
            for token in self._more_ends:
                mask[token // 32] |= BITS[token % 32]


BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


class Asked(NamedTuple):
    """Masks that are wanted: for the next token, and for the token after each guess."""

    matcher: Matcher
    row: int
    """The row of the first mask. The others follow it."""
    guesses: Sequence[int] = ()
    """Tokens that are `valid`."""


def fill_masks(masks: Masks, asked: Sequence[Asked]) -> None:
    """Write the masks that are asked for, those of different answers at the same time. No matcher changes."""
    ahead = [each._replace(matcher=each.matcher.copy()) if each.guesses else each for each in asked]
    while ahead:
        begun = [each.matcher for each in ahead if each.matcher.begun]
        found = np.empty((len(begun), begun[0].words if begun else 0), np.int32)
        _compute(begun, found)
        of_begun = iter(found)
        following = []
        for matcher, row, guesses in ahead:
            matcher._write(masks[row], next(of_begun) if matcher.begun else masks[row])
            if guesses:
                matcher.take(guesses[0])
                following.append(Asked(matcher, row + 1, guesses[1:]))
        ahead = following


def _compute(matchers: Sequence[Matcher], found: Masks) -> None:
    """What llguidance allows next, one row for each matcher. A matcher without time left computes nothing."""
    several = len(matchers) > 1 and (os.cpu_count() or 1) >= CORES_LEAST
    together = [each for each in enumerate(matchers) if several and not each[1].time.alone]
    for i, matcher in enumerate(matchers):
        if matcher.time.over or (several and not matcher.time.alone):
            continue
        with matcher.time.taken():
            matcher._inner.unsafe_compute_mask_ptr(found.ctypes.data + i * found.strides[0], found.strides[0])
        matcher.time.alone = max(0, matcher.time.alone - 1)
    if together:
        began_s = time.perf_counter()
        inner = [(matcher._inner, i) for i, matcher in together]
        _executor().unsafe_compute_mask_ptr(inner, found.ctypes.data, found.strides[0], len(matchers))
        if time.perf_counter() - began_s > BATCH_S:
            for _, matcher in together:
                matcher.time.alone = ALONE


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()
