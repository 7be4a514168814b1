"""SGLang's stream of `/generate`: every event holds all text, tokens and logprobs so far.

If every token caused such an event, work and bytes would be quadratic in the length of the answer. So each
token is turned into JSON once, and a large event is sent only after the answer has grown by a fraction of its
size. Then all events together are a constant times the last one. SGLang's clients read the last event, or the
difference between events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiercel.engine.ask import Delta, TokenOut
from tiercel.server import logprobs
from tiercel.server.reply import to_json
from tiercel.text.text import Text

SMALL_CHARS = 16 << 10
"""Up to this size every token is an event: about 1,600 tokens of text, or 20 with 20 logprobs each."""

GROWTH = 1 / 16
"""Growth between larger events: together they are at most 17 times the last one."""


@dataclass
class JsonParts:
    """A JSON list or string that grows at its end."""

    pieces: list[str] = field(default_factory=list)
    chars: int = 0

    def add(self, pieces: Sequence[str]) -> None:
        self.pieces += pieces
        self.chars += sum(map(len, pieces))

    def joined(self, between: str) -> str:
        whole = between.join(self.pieces)
        self.pieces = [whole] if whole else []
        return whole


class Growing:
    """The growing fields of one answer, as JSON."""

    def __init__(self, text: Text | None, *, logged: bool, top: int) -> None:
        """`text`: gives the text of tokens in logprobs; None: they have none."""
        self._text = text
        self._logged = logged
        self._top = top
        self._said, self._ids = JsonParts(), JsonParts()
        names = ["input_token_logprobs", "output_token_logprobs"] if logged else []
        names += ["input_top_logprobs", "output_top_logprobs"] if logged and top else []
        self._lists = {name: JsonParts() for name in names}
        self._sent = 0

    def add(self, delta: Delta) -> None:
        self._said.add([to_json(delta.text)[1:-1]])
        self._ids.add([str(out.token) for out in delta.tokens])
        if self._logged:
            self._log("input", delta.prompt)
            self._log("output", delta.tokens)

    def _log(self, side: str, tokens: Sequence[TokenOut]) -> None:
        self._lists[f"{side}_token_logprobs"].add(
            [to_json(triple) for triple in logprobs.triples(self._text, tokens)]
        )
        if self._top:
            best = logprobs.top_triples(self._text, tokens, self._top)
            self._lists[f"{side}_top_logprobs"].add([to_json(triples) for triples in best])

    @property
    def due(self) -> bool:
        """Whether to send the next event. (The last event is always sent.)"""
        chars = sum(parts.chars for parts in (self._said, self._ids, *self._lists.values()))
        if chars > SMALL_CHARS and chars < self._sent * (1 + GROWTH):
            return False
        self._sent = chars
        return True

    def written(self, meta: str, more: str = "") -> str:
        """The answer so far. `meta` (a JSON object) and `more` (JSON fields) are new for each event."""
        lists = "".join(f',"{name}":[{parts.joined(",")}]' for name, parts in self._lists.items())
        own = f'"text":"{self._said.joined("")}","output_ids":[{self._ids.joined(",")}]'
        return f'{{{own},"meta_info":{meta[:-1]}{lists}}}{more}}}'
