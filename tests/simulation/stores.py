"""Stores under the simulation's hand: they fail, lie, forget and come back, as it says."""

from __future__ import annotations

from random import Random

from tiercel.errors import StoreError
from tiercel.storage.memory import MemoryStore

READ_LIES = ("flip", "cut", "swap", "stale", "zero", "deny")
LIES = (*READ_LIES, "promise", "forget_to_answer")
FAULTS = ("raise", "full", "loses_what_it_took")


class FalseStore(MemoryStore):
    """Honest until it is told not to be. What it does then is drawn from the world's own numbers."""

    def __init__(self, random: Random) -> None:
        super().__init__(size=random.choice([None, None, 150, 4000, 40_000]))
        self.random = random
        self.mood: str | None = None
        self.times = 0
        self.old: dict[bytes, bytes] = {}
        self.lies = 0
        self.liar = random.choice([0.0, 0.2, 0.5])
        """How often it lies of its own accord when it is read."""

    def _struck(self, *moods: str) -> bool:
        """Whether this call is one of those that go wrong; after a few the store is honest again."""
        if self.mood not in moods:
            return False
        self.times -= 1
        if self.times <= 0:
            self.mood = None
        return True

    def contains(self, keys):
        if self._struck("raise"):
            raise OSError("the simulation made the store fail")
        there = super().contains(keys)
        if self._struck("promise"):
            return [True] * len(there)
        return there[:-1] if self._struck("forget_to_answer") else there

    def put(self, values):
        if self._struck("raise"):
            raise StoreError("the simulation made the store fail")
        if self._struck("full"):
            return [False] * len(values)
        if self._struck("loses_what_it_took"):
            return [True] * len(values)
        for value in values:
            self.old.setdefault(value.key, b"".join(value.parts))
        return super().put(values)

    def get(self, wanted):
        if self._struck("raise"):
            raise TimeoutError("the simulation made the store fail")
        mood = self.mood
        if not self._struck(*READ_LIES):
            if self.random.random() >= self.liar:
                return super().get(wanted)
            mood = self.random.choice([*READ_LIES, "swap", "swap", "swap"])
        there = super().get(wanted)
        answers = []
        for each, here in zip(wanted, there, strict=True):
            answers.append(self._lie(mood, each, here))
        return answers

    def _lie(self, mood, wanted, here) -> bool:
        data = bytearray(b"".join(wanted.parts))
        if mood == "deny":
            self.lies += here
            return False
        others: list[bytes] = []
        if mood == "swap":
            others = [value for value in self._values.values() if len(value) == len(data)]
        elif mood == "stale":
            others = [value[: len(data)].ljust(len(data), b"?") for value in self.old.values()]
        others = [value for value in others if value != data]  # its own value would be no lie
        if others:
            data = bytearray(self.random.choice(others))
        elif mood == "cut":
            at = self.random.randrange(len(data))
            data[at:] = bytes(len(data) - at)
        elif mood == "zero":
            data[:] = bytes(len(data))
        else:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        self.lies += 1
        at = 0
        for part in wanted.parts:
            part[:] = data[at : at + len(part)]
            at += len(part)
        return here or self.random.random() < 0.5
