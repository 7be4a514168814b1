"""What an engine is asked and what it returns: plain values."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiercel.asks.times import HistogramStats, RequestTimes
from tiercel.cache.audit import CacheStats
from tiercel.errors import AskError
from tiercel.events import EventStats
from tiercel.policy.resume import Reuse
from tiercel.text.grammar import Grammar
from tiercel.types import Namespace, PageKey

FINITE = sys.float_info.max


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when to stop. Checked where it is made: `check_sampling`."""

    max_tokens: int = 128
    min_tokens: int = 0
    """No token that ends the answer is drawn before this many tokens. A stop string may end it sooner."""
    temperature: float = 1.0
    """0 takes the best token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    """The same seed and the same text give the same draw, whatever else runs."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    keep_stop: bool = False
    """Whether the text that stopped it is part of the answer."""
    skip_special_tokens: bool = True
    """Whether special tokens have no text. A token that ends the answer never has text."""
    logprobs: int | None = None
    """None: no logprobs. n: the logprob of each drawn token, and of the n best tokens."""
    grammar: Grammar | None = None
    """Only tokens that the grammar allows are drawn, and the answer ends where the grammar is complete,
    whatever `ignore_eos` and `min_tokens` say. Logprobs are over all tokens."""


@dataclass(frozen=True)
class Allowed:
    """The numbers that a field may hold. A bool, nan and inf are refused."""

    low: float
    high: float
    whole: bool = False
    above: bool = False  # `low` itself is left out

    def holds(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        border = f"above {self.low:g}" if self.above else f"of at least {self.low:g}"
        most = "" if self.high == FINITE else f" and at most {self.high:g}"
        return f"a {'whole' if self.whole else 'finite'} number {border}{most}"


RANGES: Mapping[str, Allowed] = {
    "max_tokens": Allowed(0, FINITE, whole=True),
    "min_tokens": Allowed(0, FINITE, whole=True),
    "temperature": Allowed(0, FINITE),
    "top_p": Allowed(0, 1, above=True),
    "top_k": Allowed(0, FINITE, whole=True),
    "min_p": Allowed(0, 1),
    "seed": Allowed(-(2**63), 2**63 - 1, whole=True),
    "presence_penalty": Allowed(-2, 2),
    "frequency_penalty": Allowed(-2, 2),
    "repetition_penalty": Allowed(0, FINITE, above=True),
    "logprobs": Allowed(0, 20, whole=True),
}
"""The limits of OpenAI and SGLang, except that temperatures and repetition penalties may be above 2."""


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises an `AskError` that names the first field with a value that can not be used."""
    for name, allowed in RANGES.items():
        value = getattr(sampling, name)
        if value is not None or name not in ("seed", "logprobs"):
            _within(name, value, allowed)
    if sampling.min_tokens > sampling.max_tokens:
        raise AskError("min_tokens", sampling.min_tokens, f"is more than max_tokens, {sampling.max_tokens}")
    tokens = Allowed(0, vocab_size - 1, whole=True)
    for token, bias in sampling.logit_bias.items():
        _within("logit_bias", token, tokens)
        _within(f"logit_bias[{token}]", bias, Allowed(-100, 100))
    for token in sampling.stop_tokens:
        _within("stop_tokens", token, tokens)
    for index, stop in enumerate(sampling.stop):
        if not isinstance(stop, str) or not stop:
            raise AskError(f"stop[{index}]", stop, "must be a text that is not empty")


def _within(name: str, value: object, allowed: Allowed) -> None:
    if not allowed.holds(value):
        raise AskError(name, value, f"must be {allowed}")


def first_token(sampling: Sampling) -> Sampling:
    """The same sampling for one token only, for a prompt that another server goes on from."""
    return replace(sampling, max_tokens=1, min_tokens=0, stop=(), grammar=None)


@dataclass(frozen=True)
class Prefiller:
    """The server that computes a prompt for another one. A router names it to both servers: the first one
    gets its own address."""

    host: str
    port: int
    room: str
    """The router's name of the prompt."""


@dataclass(frozen=True)
class Ask:
    """One text to be continued."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    turn_ends: tuple[int, ...] = ()
    """Positions after which the text may go on differently: message ends and named break points."""
    namespace: Namespace = ()
    priority: int = 0
    prompt_logprobs_from: int | None = None
    """Logprobs of the prompt's tokens from this position on. Pages behind it are computed, not reused."""
    prefiller: Prefiller | None = None
    """Who computes the prompt, if a router named one. `EngineService` uses it, the engine does not."""
    for_others: bool = False
    """Another server goes on from the prompt: its pages are brought to the host at once."""
    tenant: str = ""
    """The owner of the pages: their bytes are counted, and may be limited. Empty: no owner. Required: asks of
    different tenants have different namespaces."""
    keys: Sequence[PageKey] | None = None
    """Names of the pages of the prompt and of its answer, where the tokens are not known (a replay)."""

    @cached_property
    def prompt_array(self) -> npt.NDArray[np.int64]:
        """The prompt as an array. A long tuple is converted once: that takes 1 ms for 32,000 tokens."""
        return np.asarray(self.prompt)


class TokenOut(NamedTuple):
    """One token and, if asked for, how likely it was."""

    token: int
    logprob: float | None = None
    """None for the first token of a text: nothing came before it."""
    top: tuple[tuple[int, float], ...] = ()
    """The best (token, logprob), best first."""


class Finish(Enum):
    """Why a text ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    GRAMMAR = "grammar"
    """The answer can not follow its grammar any further."""


class Usage(NamedTuple):
    """Tokens of one request, and how many tokens of its prompt each tier supplied. The rest was computed."""

    prompt_tokens: int
    completion_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    store_tokens: int = 0
    replayed_tokens: int = 0
    """Computed tokens whose pages were found, but no tail after them (`policy.resume`)."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        return self.device_tokens + self.host_tokens + self.store_tokens


class Delta(NamedTuple):
    """What one step brought for one request."""

    request_id: str
    usage: Usage
    tokens: tuple[TokenOut, ...] = ()
    text: str = ""
    """Text that may be shown now. Half a character, or a possible stop string, is held back."""
    prompt: tuple[TokenOut, ...] = ()
    """The prompt's tokens with their logprobs, once, if they were asked for."""
    finish: Finish | None = None
    stopped_by: str | int | None = None
    """The stop string or token that ended the answer."""
    error: str = ""


@dataclass(frozen=True)
class Explanation:
    """What a request reused, and which machines share the stored pages (`spec.identity`)."""

    reuse: Reuse
    share: str
    accept_length: float | None = None
    """Tokens per step, of the steps with guesses for it; None: there was no such step."""
    times: RequestTimes | None = None
    sparse_pages: int = 0
    """Reused pages whose selected entries were read on the host when it began."""


@dataclass(frozen=True)
class QueueStats:
    """Requests, by where they are."""

    waiting: int
    loading: int
    running: int
    tokens: int
    """Tokens of all these requests: prompts, and answers so far."""


@dataclass(frozen=True)
class EngineStats(CacheStats):
    """The cache's statistics, and the engine's own. Without KV events `events` is None."""

    queue: QueueStats
    engine: Mapping[str, int]
    accept_length: Mapping[str, float] = field(default_factory=dict)
    """Tokens per step with guesses over the first tokens after texts began, by the slowest tier that their
    beginnings came from: device, host, store, or computed."""
    times: Mapping[str, HistogramStats | Mapping[str, HistogramStats]] = field(default_factory=dict)
    """Seconds of requests: in the queue, to the first token by source, from token to token."""
    device_use: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the device's memory: weights, cache; where the device tells it, other and free."""
    events: EventStats | None = None
    stages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """For each stage of a model that is cut: `busy_s`, the seconds that it has computed."""
    shared: Mapping[str, int] | None = None
    """For a server that offers its pages to others: readers, leases, bytes sent."""

    @property
    def accept_length_mean(self) -> float | None:
        """Mean number of tokens in a step with guesses; None: there was no such step."""
        steps = self.engine.get("guessing_steps", 0)
        return self.engine["guessing_tokens"] / steps if steps else None


@dataclass
class Answer:
    """The Deltas of one ask, added up."""

    request_id: str = ""
    usage: Usage = Usage(0)
    tokens: list[TokenOut] = field(default_factory=list)
    text: str = ""
    prompt: list[TokenOut] = field(default_factory=list)
    """The prompt's tokens with their logprobs, if they were asked for."""
    finish: Finish | None = None
    stopped_by: str | int | None = None
    error: str = ""

    def add(self, delta: Delta) -> None:
        self.request_id, self.usage = delta.request_id, delta.usage
        self.tokens += delta.tokens
        self.text += delta.text
        self.prompt += delta.prompt
        self.finish, self.stopped_by, self.error = delta.finish, delta.stopped_by, delta.error
