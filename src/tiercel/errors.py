"""What the world can break, drawn as a tree. What only a bug can break is an assertion.

    TiercelError
    ├── InputError            a field of what a caller gave us; names the field and the value
    │   ├── SpecError         a cache declaration that can not be stored
    │   ├── ConfigError       a setting
    │   ├── TokenError        token ids or a namespace that can not name a page
    │   └── AskError          a request that can not be served; LengthError: a text that is too long
    ├── QueueFull             more is waiting than may wait; the same request may come again
    ├── EngineError           the engine has failed and serves no more, until it is started again
    ├── BudgetError           host memory that is not there; carries both numbers
    ├── WeightsError          a model's files: broken, or of another model; names file and tensors
    ├── TraceError            a recorded trace that can not be replayed; names file and line
    ├── LogitsError           a model's answer that names no token
    ├── GrammarError          a grammar that can not be used, or an answer that can not follow it any further
    ├── TransferError         a copy that failed; its plan fails, nothing else
    └── StoreError            an operation of a store that failed; the store goes on
        └── StoreAway         the store can not be reached; it may be there later

A full pool is none of these: it is an outcome (`tiercel.cache.Wait`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TiercelError(Exception):
    """Everything this package raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """As another process gets it: with its words and fields, whatever it was made from."""
        return _same, (type(self), self.args, vars(self))


def _same(kind: type[TiercelError], words: tuple[Any, ...], named: dict[str, Any]) -> TiercelError:
    error = kind.__new__(kind)
    error.args = words
    vars(error).update(named)
    return error


class InputError(TiercelError, ValueError):
    """One field that can not be used as given."""

    def __init__(self, field: str, value: object, why: str) -> None:
        super().__init__(f"{field} = {value!r}: {why}")
        self.field, self.value, self.why = field, value, why


class SpecError(InputError):
    """A cache declaration that can not be stored."""


class ConfigError(InputError):
    """A setting that can not be used."""


class TokenError(InputError):
    """Token ids or a namespace that can not name a page."""


class AskError(InputError):
    """A request that can not be served as it was asked."""


class LengthError(AskError):
    """A text with more tokens than there is room for. `tokens`: at least this many."""

    def __init__(self, field: str, *, tokens: int, tokens_max: int) -> None:
        super().__init__(field, f"{tokens} tokens", f"the context is {tokens_max} tokens long")
        self.tokens, self.tokens_max = tokens, tokens_max


class QueueFull(TiercelError):
    """More is waiting than may wait. Nothing was begun; the same request may be sent again later."""

    def __init__(self, *, waiting: int, waiting_max: int, retry_after_s: int = 1) -> None:
        then = f"try again in {retry_after_s} s or more"
        super().__init__(f"{waiting} requests are waiting, {waiting_max} may; {then}")
        self.retry_after_s = retry_after_s


class EngineError(TiercelError):
    """The engine has failed in a way that leaves its state in doubt. It serves no more."""


class RunnerLost(TiercelError):
    """What computes is gone, with all that its device held. An engine starts it again."""

    def __init__(self, why: str, *, computing: bool) -> None:
        """`computing`: whether a step was under way: then its texts end with this error."""
        super().__init__(why)
        self.computing = computing


class BudgetError(TiercelError):
    """Host memory was asked for that the machine does not have."""

    def __init__(self, *, bytes_asked: int, bytes_available: int) -> None:
        super().__init__(
            f"host memory of {bytes_asked:,} B was asked for, {bytes_available:,} B are available"
        )
        self.bytes_asked, self.bytes_available = bytes_asked, bytes_available


class WeightsError(TiercelError):
    """A model's files can not be read, or do not hold this model. Names the file and the tensors."""

    def __init__(self, file: object, why: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(f"{file}: {why}")
        self.file, self.why, self.tensors = str(file), why, tuple(tensors)


class TraceError(TiercelError):
    """A trace can not be read, or lacks what a replay needs. Names the file and the line, if there is one."""

    def __init__(self, file: object, why: str, line: int | None = None) -> None:
        super().__init__(f"{file}: {why}" if line is None else f"{file}, line {line}: {why}")
        self.file, self.why, self.line = str(file), why, line


class LogitsError(TiercelError):
    """A model computed something from which no token can be drawn. One request fails, nothing else."""


class GrammarError(TiercelError):
    """A grammar can not be compiled, or became too complex while an answer followed it."""


class TransferError(TiercelError):
    """A copy failed. The cause is chained."""


class StoreError(TiercelError):
    """An operation of a store failed; nothing is known of what it should have done. The cause is chained."""


class StoreAway(StoreError):
    """A store can not be opened because nothing answers where it should be. It may be there later."""
