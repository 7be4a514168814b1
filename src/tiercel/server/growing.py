"""An answer that is told again and again, longer each time, as SGLang's `/generate` streams it.

Every event holds all text, tokens and logprobs so far. Written anew for every token that would be work, and
bytes, by the square of the answer. So each token becomes JSON once, and an event is sent for every token only
while it is small; a larger one waits until the answer has grown by a part of itself. All events together are
then a constant times the last one. Clients of SGLang read the last event, or what is new in each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from tiercel.engine.ask import Delta, TokenOut
from tiercel.server import logprobs
from tiercel.server.service import Text

SMALL_CHARS = 16 << 10
"""Up to here every token is an event: some 1,600 tokens of text, or 20 with 20 logprobs each."""

GROWTH = 1 / 16
"""From there on. All events together are at most 17 times the last one, and those before it."""


@dataclass
class Parts:
    """A list in JSON, or a text, to which something is added now and then."""

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
    """What only grows of one answer, as JSON."""

    def __init__(self, text: Text | None, *, logged: bool, top: int) -> None:
        """`text`: for the text of tokens in logprobs, if it is asked for."""
        self._text = text
        self._logged = logged
        self._top = top
        self._said, self._ids = Parts(), Parts()
        names = ["input_token_logprobs", "output_token_logprobs"] if logged else []
        names += ["input_top_logprobs", "output_top_logprobs"] if logged and top else []
        self._lists = {name: Parts() for name in names}
        self._sent = 0

    def add(self, delta: Delta) -> None:
        self._said.add([_json(delta.text)[1:-1]])
        self._ids.add([str(out.token) for out in delta.tokens])
        if self._logged:
            self._log("input", delta.prompt)
            self._log("output", delta.tokens)

    def _log(self, side: str, tokens: Sequence[TokenOut]) -> None:
        self._lists[f"{side}_token_logprobs"].add(
            [_json(triple) for triple in logprobs.triples(self._text, tokens)]
        )
        if self._top:
            best = logprobs.top_triples(self._text, tokens, self._top)
            self._lists[f"{side}_top_logprobs"].add([_json(triples) for triples in best])

    @property
    def due(self) -> bool:
        """Whether it is time for the next event. The last one is always sent, and nobody asks."""
        chars = sum(parts.chars for parts in (self._said, self._ids, *self._lists.values()))
        if chars > SMALL_CHARS and chars < self._sent * (1 + GROWTH):
            return False
        self._sent = chars
        return True

    def written(self, meta: str, more: str = "") -> str:
        """The whole answer so far. `meta` and `more` are objects in JSON: what is new each time."""
        lists = "".join(f',"{name}":[{parts.joined(",")}]' for name, parts in self._lists.items())
        own = f'"text":"{self._said.joined("")}","output_ids":[{self._ids.joined(",")}]'
        return f'{{{own},"meta_info":{meta[:-1]}{lists}}}{more}}}'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
