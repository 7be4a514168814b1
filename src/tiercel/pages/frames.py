"""The places of a device with two pools: narrow and wide ones in the same memory.

    frame 0   │ head │ body               │      a narrow place is one unit: any of these four
    frame 1   │ head │ unit │ unit │ unit │      a wide place is a body: it has the number of its frame
                       └ a broken body  ──┘

A body holds one wide place, or it is broken into units. A head is always a unit, so a page that takes a head
and a body breaks nothing. Narrow places are given out where they break no body, as long as there are such
places: the body with the fewest free units first, so that others become whole again.

So how many wide places are free does not follow from how many units are free: `lack` counts bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, cast

from tiercel.pages.pool import Id, following
from tiercel.types import PLACE_MASK, TAG_SHIFT


class Frames(Generic[Id]):
    """`frames` frames of `units` units. Ids of narrow and of wide places have tags of their own, and may be
    mixed in all calls. Misuse is an assertion, as in `PagePool`."""

    def __init__(
        self, name: str, frames: int, units: int, *, tags: tuple[int, int], order: Sequence[int]
    ) -> None:
        assert units > 1, "a frame has a head and a body"
        assert sorted(order) == list(range(frames)), "the order names every frame once"
        self.name, self.units, self.capacity = name, units, frames * units
        self._narrow_tag, self._wide_tag = (tag << TAG_SHIFT for tag in tags)
        self._next: dict[int, list[Id]] = {
            tag: [cast(Id, tag | place) for place in range(count)]
            for tag, count in ((self._narrow_tag, self.capacity), (self._wide_tag, frames))
        }
        """For each tag and place: the id that is taken, or that will be given out next."""
        self._taken: dict[int, list[int]] = {tag: [0] * self.capacity for tag in self._next}
        """For each tag and place: the id that is taken; 0: none is. Wide places are fewer than these."""
        self._heads = [frame * units for frame in reversed(order)]
        """Heads that are free; the last is taken first."""
        self._bodies: list[dict[int, None]] = [{} for _ in range(units)]
        """The frames with so many free units in their bodies; the last entry: those with whole bodies."""
        self._bodies[-1].update(dict.fromkeys(reversed(order)))
        self._free = [units - 1] * frames
        """For each frame, how many units of its body are free."""
        self._loose = 0
        """Free units of broken bodies."""
        self._leaving: set[Id] = set()
        self._leaves = [0] * frames
        """For each frame, how many units of its body are leaving."""
        self._heads_later, self._whole_later, self._loose_later = len(self._heads), frames, 0
        """What is free when all that leaves has left."""

    @property
    def free(self) -> int:
        """Narrow places that could be taken, if no wide ones are."""
        return len(self._heads) + self._loose + len(self._bodies[-1]) * (self.units - 1)

    @property
    def leaving(self) -> int:
        return len(self._leaving)

    def lack(self, narrow: int, wide: int = 0, *, later: bool = False) -> int:
        """How many bodies are missing for so many places. Units of several broken bodies are no body.
        `later`: when all that leaves has left."""
        heads, whole, loose = len(self._heads), len(self._bodies[-1]), self._loose
        if later:
            heads, whole, loose = self._heads_later, self._whole_later, self._loose_later
        to_break = -(-max(0, narrow - heads - loose) // (self.units - 1))
        return wide + to_break - whole

    def take(self, narrow: int, wide: int = 0) -> list[Id]:
        """Take places, the narrow ones first. Required: `lack` says that none is missing."""
        assert wide <= len(self._bodies[-1]), f"{wide} of {len(self._bodies[-1])} whole bodies of {self.name}"
        bodies = self._grant(self._wide_tag, self._take_bodies(wide))
        taken = self._grant(self._narrow_tag, self._take_heads(min(narrow, len(self._heads))))
        while len(taken) < narrow:
            taken += self._grant(self._narrow_tag, [self._take_unit()])
        return taken + bodies

    def _grant(self, tag: int, places: Sequence[int]) -> list[Id]:
        taken, ids = self._taken[tag], self._next[tag]
        for place in places:
            assert not taken[place], f"I1: {self.name} gives a place twice"
            taken[place] = ids[place]
        return [ids[place] for place in places]

    def _take_bodies(self, count: int) -> list[int]:
        """Nothing of a whole body leaves. So these count as `_change` would count them, one by one."""
        frames = [self._bodies[-1].popitem()[0] for _ in range(count)]
        self._bodies[0].update(dict.fromkeys(frames))
        for frame in frames:
            self._free[frame] = 0
        self._whole_later -= count
        return frames

    def _take_heads(self, count: int) -> list[int]:
        heads = self._heads[: -count - 1 : -1]
        del self._heads[len(self._heads) - count :]
        self._heads_later -= count
        return heads

    def _take_unit(self) -> int:
        """A unit of a body: all heads are taken."""
        frames = next((frames for frames in self._bodies[1:] if frames), None)
        assert frames, f"no unit of {self.name} is free"
        frame = next(reversed(frames))
        self._change(frame, free=-1)
        return self._taken[self._narrow_tag].index(0, frame * self.units + 1)

    def leave(self, ids: Iterable[Id]) -> None:
        """These places will be released as soon as they have been saved."""
        for page_id in ids:
            once = page_id not in self._leaving and self.own([page_id])
            assert once, f"I3: what leaves {self.name} is owned, and leaves once"
            self._leaving.add(page_id)
            self._count_leaving(page_id, 1)

    def release(self, ids: Sequence[Id]) -> None:
        """Give places back. Required: every id is owned now and named once."""
        once = len(set(ids)) == len(ids) and self.own(ids)
        assert once, f"I3: {self.name} does not own each of {[hex(i) for i in ids]} once"
        for page_id in reversed(ids):
            if page_id in self._leaving:
                self._leaving.remove(page_id)
                self._count_leaving(page_id, -1)
            tag, place = page_id >> TAG_SHIFT << TAG_SHIFT, page_id & PLACE_MASK
            self._taken[tag][place] = 0
            self._next[tag][place] = following(page_id)
            if tag == self._wide_tag:
                self._change(place, free=self.units - 1)
            elif place % self.units == 0:
                self._heads.append(place)
                self._heads_later += 1
            else:
                self._change(place // self.units, free=1)

    def _count_leaving(self, page_id: Id, sign: int) -> None:
        place = page_id & PLACE_MASK
        if page_id >> TAG_SHIFT << TAG_SHIFT == self._wide_tag:
            self._change(place, leaves=sign * (self.units - 1))
        elif place % self.units == 0:
            self._heads_later += sign
        else:
            self._change(place // self.units, leaves=sign)

    def _change(self, frame: int, *, free: int = 0, leaves: int = 0) -> None:
        """So many more units of a body are free, or are leaving."""
        del self._bodies[self._free[frame]][frame]
        self._count(frame, -1)
        self._free[frame] += free
        self._leaves[frame] += leaves
        self._count(frame, 1)
        self._bodies[self._free[frame]][frame] = None

    def _count(self, frame: int, sign: int) -> None:
        free, later, whole = self._free[frame], self._free[frame] + self._leaves[frame], self.units - 1
        self._loose += sign * (free if free < whole else 0)
        self._loose_later += sign * (later if later < whole else 0)
        self._whole_later += sign * (later == whole)

    def own(self, ids: Iterable[int]) -> bool:
        """Whether all of these places are taken."""
        (narrow, wide), most = self._taken.values(), self.capacity
        return all((at := i & PLACE_MASK) < most and (narrow[at] == i or wide[at] == i) for i in ids)

    def owned_ids(self) -> frozenset[Id]:
        return frozenset(cast(Id, each) for taken in self._taken.values() for each in taken if each)

    def check(self) -> None:
        """I4: every unit is free or taken once, alone or as a part of a body; what is counted is so."""
        (narrow, wide), units = self._taken.values(), self.units
        heads = [unit for unit in range(0, self.capacity, units) if not narrow[unit]]
        assert sorted(self._heads) == heads, f"I4: heads of {self.name}"
        free, leaves = list[int](), list[int]()
        for frame, is_wide in enumerate(wide[: len(self._free)]):
            body = range(frame * units + 1, (frame + 1) * units)
            taken = sum(narrow[unit] > 0 for unit in body)
            assert not (taken and is_wide), f"I4: {self.name} gives the units of a body twice"
            free.append(0 if is_wide else units - 1 - taken)
            ids = [self._next[self._narrow_tag][unit] for unit in body] + [
                self._next[self._wide_tag][frame]
            ] * (units - 1)
            leaves.append(sum(each in self._leaving for each in ids))
        assert free == self._free and leaves == self._leaves, f"I4: {self.name} miscounts units"
        assert all(frame in self._bodies[count] for frame, count in enumerate(free))
        assert sum(map(len, self._bodies)) == len(free)
        later = [count + gone for count, gone in zip(free, leaves, strict=True)]
        loose = (sum(count for count in counts if count < units - 1) for counts in (free, later))
        assert (self._loose, self._loose_later) == tuple(loose), f"I4: {self.name} miscounts loose units"
        assert self._whole_later == later.count(units - 1), f"I4: {self.name} miscounts bodies"
        first = sum(each in self._leaving for each in self._next[self._narrow_tag][::units])
        assert self._heads_later == len(heads) + first, f"I4: {self.name} miscounts heads"
