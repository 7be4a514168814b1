"""How a conversation is sent: as token ids, as a text, or as a chat."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from tiercel.bench.load import Conversation, Turn, ids_of

TEXT = """
time year people way day thing life world school state family group country problem hand part place
case week company system program question work number night point home water room mother area money
story fact month right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name team minute idea body information back
parent face level office door health person art war history party result change morning reason
research moment air teacher force paper music light voice land road table plan price rule sound
value test tree river summer
"""
WORDS = TEXT.split()
"""Most tokenizers have these words as one token each, so a text of n words has about n tokens."""


class Form(Enum):
    """How a prompt is written. Only with ids is its length exact."""

    IDS = "ids"
    TEXT = "text"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Form.CHAT else "/v1/completions"


class Said:
    """One conversation so far, as a server is sent it.

    In a chat the answers are the server's own words, as clients send them back. In the other forms they come
    from the seed: every run then sends the same bytes, whatever the server says.
    """

    def __init__(self, conversation: Conversation, form: Form) -> None:
        self._form = form
        self._ids: list[int] = []
        self._messages: list[dict[str, str]] = []
        if form is not Form.CHAT:
            self._ids += ids_of(conversation.shared)
        elif conversation.shared:
            self._messages.append({"role": "system", "content": as_text(ids_of(conversation.shared))})

    def ask(self, turn: Turn) -> dict[str, Any]:
        """The fields of the request that asks this turn."""
        new = ids_of(turn.message)
        if self._form is Form.CHAT:
            self._messages.append({"role": "user", "content": as_text(new)})
            return {"messages": self._messages}
        self._ids += new
        return {"prompt": self._ids if self._form is Form.IDS else as_text(self._ids)}

    def answered(self, turn: Turn, text: str) -> None:
        if self._form is Form.CHAT:
            self._messages.append({"role": "assistant", "content": text})
        else:
            self._ids += turn.answer.ids


def as_text(ids: Iterable[int]) -> str:
    return " ".join(WORDS[each % len(WORDS)] for each in ids)
