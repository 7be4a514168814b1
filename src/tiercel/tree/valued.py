"""What may leave a tier, what is worth least first (`policy.worth`).

Worth falls with age, so its order changes while nothing happens, and one heap can not hold it. But among
items with the same chance and the same weight, the oldest is always worth least. So the items are put into
buckets, one for each chance and for each step of the weight, and each bucket is a heap by the last use. The
least worth of all is at the head of a bucket. There are some tens of buckets.

    end,    weight 0.7    ● used 3   ● used 9   ● used 31         worth of the heads: 0.7 ÷ age of ●3, …
    passed, weight 4.0    ● used 7   ● used 8
    …

The weight of an item may become another one while the item waits, because tails before it come and go. It is
computed again when the item is offered again, and when it reaches the head of its bucket.

Pages that no tail makes reachable save nothing, unless a text is replayed. They leave before everything else,
the least recently used first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf, log2
from typing import Any

from tiercel.policy.evict import EvictPolicy
from tiercel.policy.worth import Chance, Chances, weight
from tiercel.tree.candidates import Candidates, Entry, EvictOrder, Heap
from tiercel.tree.node import Item, Page, Tail

FAR = 32
"""The most pages between a tail and the one before it that count. So no look at a tail takes long. (More
pages change no hit ratio by more than 0.2 %.)"""

STEPS = 2
"""Buckets for each doubling of the weight."""


Weight = tuple[Chance, float, int]
"""The chance, the weight and the last use of an item."""


class Worth:
    """What the items of one tree are worth.

    `tail_pages`: how many pages take as much memory as a tail. `replay_pages`: how many pages are computed
    again where a text is resumed without a tail; None: this is impossible. `now` is the clock of the tree.
    """

    def __init__(
        self, pages_per_window: int, tail_pages: float, replay_pages: int | None, now: Callable[[], int]
    ) -> None:
        self.chances = Chances()
        self.now = now
        self.tail_pages = tail_pages
        self.far = FAR if replay_pages is None else min(FAR, replay_pages)
        """The most pages that a tail saves."""
        self._window = pages_per_window

    def __call__(self, item: Item) -> float:
        if unreachable(item):
            return 0.0
        chance, weight, used = self.weigh(item)
        return chance.factor * weight / (self.now() - used + 1)

    def young(self, item: Item) -> float:
        """What the item is worth when it has just been used."""
        chance, weight, _ = self.weigh(item)
        return chance.factor * weight

    def weigh(self, item: Item) -> Weight:
        """A page with a tail is worth what its tail is worth; any other page makes some tail reachable."""
        if isinstance(item, Page):
            if item.tail is None:
                return self.chances.end, weight(hits=item.hits, saved=1, freed=1), item.used
            item = item.tail
        assert item.chance is not None
        page = item.page
        saved, freed = self._saved(page), self.tail_pages
        if page.children == 0:
            freed += _alone(page, saved)
        return item.chance, weight(hits=item.hits, saved=saved, freed=freed), item.used

    def _saved(self, page: Page) -> int:
        """Pages from the tail before this page to its end. Tails that are read together with the tail on this
        page are not counted as tails before it."""
        here, distance, window = page.parent, 1, self._window
        while distance < self.far and here is not None and here.parent is not None:
            if here.tail is not None and distance >= window:
                break
            distance += 1
            here = here.parent
        return distance

    # What happens to tails

    def placed(self, tail: Tail) -> None:
        tail.chance = self.chances.of(tail.boundary, tail.page.children)
        tail.since = self.now()

    def used(self, tail: Tail, *, hit: bool) -> None:
        """Called before `tail.used` changes."""
        self._observe(tail, hit)
        tail.since = self.now()

    def followed(self, tail: Tail) -> bool:
        """More or fewer texts go on after this tail. Returns whether its class has changed."""
        changed = self.chances.of(tail.boundary, tail.page.children) is not tail.chance
        if changed:
            self._observe(tail, hit=False)
            self.placed(tail)
        return changed

    def left(self, tail: Tail) -> None:
        """The tail before it inherits its use: texts that were resumed here will be resumed there."""
        self._observe(tail, hit=False)
        before = tail.page.parent
        while before is not None and before.tail is None:
            before = before.parent
        if before is not None and before.tail is not None and before.tail.used < tail.used:
            self.used(before.tail, hit=False)
            before.tail.used = tail.used

    def _observe(self, tail: Tail, hit: bool) -> None:
        assert tail.chance is not None
        self.chances.observe(tail.chance, used=tail.used, since=tail.since, now=self.now(), hit=hit)


def _alone(page: Page, most: int) -> int:
    """How many pages at the end of a text belong to no other text, counted up to `most`."""
    here, count = page.parent, 1
    while count < most and here is not None and here.children == 1:
        count += 1
        here = here.parent
    return count


def unreachable(item: Item) -> bool:
    """Whether no tail makes a page reachable: none is on it, and no page follows it."""
    return isinstance(item, Page) and item.tail is None and item.children == 0


class Bucket(Heap):
    """Items of one chance and about one weight: a heap, the least recently used first."""

    __slots__ = ("chance", "number", "weight")

    def __init__(self, number: int, chance: Chance, level: int) -> None:
        super().__init__()
        self.number = number
        self.chance = chance
        self.weight: float = 2.0 ** (level / STEPS)


class Valued(EvictOrder):
    """Pages and tails for which `ready` holds, in the order of their worth. The place of an item is the
    number of its bucket."""

    def __init__(self, worth: Worth, ready: Callable[[Any], bool], place: str) -> None:
        super().__init__(ready, place)
        self._worth = worth
        self._unreachable = Bucket(1, Chance(0.0), 0)
        """Pages that no tail makes reachable."""
        self._buckets: dict[tuple[Chance, int], Bucket] = {}
        """One bucket for each chance and step of the weight. There are some tens of them, and they stay."""
        self._filled: dict[int, Bucket] = {}
        """Buckets with items, without the one of the unreachable."""
        self._first: Bucket | None = None
        """The bucket of the item that was coldest when the buckets were last compared. A path leaves page by
        page, and a page often enters the bucket that the page after it has left."""
        self._first_at = (0, 0, 0)
        """At that comparison: the clock, how often chances were computed, the last use of that item."""
        self._serial = 0
        self._entries = 0

    def offer(self, item: Item) -> None:
        """Offer an item; also called when its worth has changed."""
        if not self.ready(item):
            return
        bucket, used = self._weigh(item)
        if getattr(item, self._place) != bucket.number:
            self._push(item, bucket, used)
            self._sweep_some()

    def coldest(self) -> Item | None:
        while (first := self._coldest_bucket()) is not None:
            if self._is_right(first):
                return first.first()[2]
        return None

    def _coldest_bucket(self) -> Bucket | None:
        """The bucket whose first item is worth least."""
        if len(self._unreachable):
            return self._unreachable  # worth nothing: there is nothing to compare
        clock, chances, first = self._worth.now(), self._worth.chances.computed, self._first
        if first is not None and len(first) and (clock, chances, first.first()[0]) <= self._first_at:
            return first
        first, least, now = None, inf, clock + 1
        for bucket in self._filled.values():
            used = (bucket.first() if bucket.old else bucket.fresh[0])[0]
            worth = bucket.chance.factor * bucket.weight / (now - used)
            if worth < least:
                first, least = bucket, worth
        if first is not None:
            self._first, self._first_at = first, (clock, chances, first.first()[0])
        return first

    def _is_right(self, bucket: Bucket) -> bool:
        """Whether the first entry of a bucket is right. If not, it is corrected."""
        used, serial, item = bucket.first()
        if getattr(item, self._place) != bucket.number:
            self._pop(bucket)
            return False
        if not self.ready(item):
            self._pop(bucket)
            setattr(item, self._place, 0)
            return False
        right, now = self._weigh(item)
        if right is not bucket:
            self._pop(bucket)
            self._push(item, right, now)
        elif now != used:
            bucket.replace((now, serial, item))
        return right is bucket and now == used

    def pop(self) -> Item | None:
        item = self.coldest()
        if item is not None:
            self._pop(self._bucket_of(item))
            setattr(item, self._place, 0)
        return item

    def weight_of(self, item: Item) -> float:
        """The weight of the bucket that an item waits in."""
        return self._bucket_of(item).weight

    def _bucket_of(self, item: Item) -> Bucket:
        number = getattr(item, self._place)
        return self._unreachable if number == self._unreachable.number else self._filled[number]

    def _weigh(self, item: Item) -> tuple[Bucket, int]:
        if unreachable(item):
            return self._unreachable, item.used
        chance, weight, used = self._worth.weigh(item)
        key = chance, round(STEPS * log2(weight))
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(len(self._buckets) + 2, *key)
        return bucket, used

    def _push(self, item: Item, bucket: Bucket, used: int) -> None:
        setattr(item, self._place, bucket.number)
        self._serial += 1
        self._entries += 1
        if bucket is not self._first:
            self._first = None
        if not len(bucket) and bucket is not self._unreachable:
            self._filled[bucket.number] = bucket
        bucket.push((used, self._serial, item))

    def _pop(self, bucket: Bucket) -> None:
        bucket.pop()
        self._popped(bucket)

    def _popped(self, bucket: Bucket) -> None:
        self._entries -= 1
        if not len(bucket) and bucket is not self._unreachable:
            del self._filled[bucket.number]

    def _heaps(self) -> Iterable[Heap]:
        return self._unreachable, *self._filled.values()

    def _file_again(self, heap: Heap, entry: Entry) -> None:
        """An entry that waits is weighed again."""
        assert isinstance(heap, Bucket)
        self._popped(heap)
        item = entry[2]
        if getattr(item, self._place) != heap.number:
            return
        if self.ready(item):
            self._push(item, *self._weigh(item))
        else:
            setattr(item, self._place, 0)

    def __len__(self) -> int:
        return self._entries


def make_order(
    evict: EvictPolicy, worth: Worth | None, ready: Callable[[Any], bool], place: str
) -> EvictOrder:
    """The candidates for which `ready` holds, in the order of a policy."""
    return Candidates(evict, ready, place) if worth is None else Valued(worth, ready, place)
