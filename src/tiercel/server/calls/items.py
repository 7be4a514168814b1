"""What answers of `/v1/responses` said: later requests refer to it instead of sending it again.

    id of a response ──► its turn: what was asked, what was answered, and the response before it
    id of an item    ──► the turn that has it

All of it is in memory, and gone when the server ends. A turn is found only with the owner and the salt of the
request that made it. Above `bytes_max` the owner that has most loses its least recently used turns: no owner
can push out those of others.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

TURN_BYTES = 1024
"""About the bytes of a turn's objects and ids, so that very short turns are limited too."""


class Whose(NamedTuple):
    """Who may find a turn."""

    owner: str
    """A digest of the API key, or of the tenant (`border.Visit.owner`)."""
    salt: str
    """The request's `cache_salt`: one key may serve several users."""


Name = tuple[Whose, str]


@dataclass(frozen=True)
class Turn:
    """One response. Items are JSON, because its length is known."""

    before: str | None
    """The response that it continued."""
    asked: bytes
    """A list of items."""
    said: Mapping[str, bytes]
    """Items by id, in their order."""

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return TURN_BYTES + len(self.asked) + sum(map(len, self.said.values()))


class Items:
    """The turns of one server. Any thread may use it."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._turns: dict[str, OrderedDict[Name, Turn]] = {}
        """The turns of each owner. The owner that was not active for longest comes first."""
        self._bytes: Counter[str] = Counter()
        self._homes: dict[Name, Name] = {}
        self._lock = threading.Lock()

    @property
    def bytes_used(self) -> int:
        return self._bytes.total()

    def add(self, whose: Whose, response_id: str, turn: Turn) -> None:
        """A turn with the same id is replaced."""
        name, owner = (whose, response_id), whose.owner
        with self._lock:
            self._remove(name)
            if turn.size > self.bytes_max:
                return
            self._turns.setdefault(owner, OrderedDict())[name] = turn
            self._homes.update({(whose, item_id): name for item_id in turn.said})
            self._bytes[owner] += turn.size
            while self.bytes_used > self.bytes_max:
                ((most, _),) = self._bytes.most_common(1)
                self._remove(next(iter(self._turns[most])))

    def item(self, whose: Whose, item_id: str) -> bytes | None:
        """An item of an answer, or None: it never was in an answer to this client, or it was forgotten."""
        with self._lock:
            name = self._homes.get((whose, item_id))
            turn = None if name is None else self._used(name)
            return None if turn is None else turn.said[item_id]

    def turns(self, whose: Whose, response_id: str) -> list[Turn] | None:
        """The conversation up to a response, from its beginning; None: a part of it is not known."""
        found: dict[str, Turn] = {}
        wanted: str | None = response_id
        with self._lock:
            while wanted is not None:
                turn = self._used((whose, wanted))
                # A client may choose ids, and so make a turn that continues itself.
                if turn is None or wanted in found:
                    return None
                found[wanted] = turn
                wanted = turn.before
        return list(found.values())[::-1]

    def _used(self, name: Name) -> Turn | None:
        turns = self._turns.get(name[0].owner, OrderedDict[Name, Turn]())
        turn = turns.get(name)
        if turn is not None:
            turns.move_to_end(name)
        return turn

    def _remove(self, name: Name) -> None:
        whose, _ = name
        turn = self._turns.get(whose.owner, OrderedDict[Name, Turn]()).pop(name, None)
        if turn is None:
            return
        for item_id in turn.said:
            del self._homes[whose, item_id]
        self._bytes[whose.owner] -= turn.size
        if not self._turns[whose.owner]:
            del self._turns[whose.owner], self._bytes[whose.owner]
