"""Another engine: its own device memory, its own places, its own eviction. It uses `HostCache` alone.

It knows which pages and tails it has on its device by their text, evicts any of them whenever it likes, and
never tells the cache. What it asks the cache for is compared byte for byte: what a load brought to it, and,
after every step, everything that can be read on the host.

In some runs its device does not hold the first stream of a page: that stream stays on the host, where the
engine reads it while a load holds it, and writes it when it saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from unittest.mock import patch

import tiercel.cache.core as cache_module
from tests.simulation.bytes import Bytes, Text, text_of
from tests.simulation.copies import HeldCopies
from tests.simulation.oracle import WatchedTree
from tests.simulation.specs import SPECS
from tests.simulation.stage import Indifferent, Stage
from tests.transfer.borrowed import make_borrowed
from tiercel.cache import HostCache, Transfer, Wait
from tiercel.cache.memories import make_memories
from tiercel.config import EVICT_POLICIES, FETCH_POLICIES, LAYOUTS, CacheConfig
from tiercel.errors import TransferError
from tiercel.transfer.plan import Direction
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Page

NAMESPACES = ((), (), ("a", "bc"), ("ab", "c"))
PAGES_MAX = 10


@dataclass(eq=False)
class Task:
    """A text the engine serves."""

    tokens: list[int]
    namespace: tuple[str, ...]
    chain: KeyChain

    def text(self, pages: int) -> Text:
        return text_of(self.namespace, self.tokens[: pages * self.chain.page_tokens])


@dataclass(eq=False)
class Device:
    """Places of one kind, and which text is at which of them."""

    free: list[int]
    at: dict[Text, int]
    busy: set[int]
    """A transfer reads or writes them."""

    def take(self, count: int, random: Random, keep: set[Text]) -> list[int] | None:
        """Its own eviction: anything that is not busy and not wanted now."""
        going = [text for text, here in self.at.items() if here not in self.busy and text not in keep]
        random.shuffle(going)
        while len(self.free) < count and going:
            self.drop(going.pop())
        return [self.free.pop() for _ in range(count)] if len(self.free) >= count else None

    def drop(self, text: Text) -> None:
        self.free.append(self.at.pop(text))


class ForeignWorld(Stage):
    ACTIONS = (
        ("arrive", 8),
        ("load", 20),
        ("compute", 16),
        ("save", 20),
        ("land", 4),
        ("landed", 12),
        ("release", 6),
        ("evict", 10),
        ("step", 20),
        ("copy", 18),
        ("fault", 2),
        ("flush", 4),
        ("store", 20),
        ("store_fault", 2),
        ("store_change", 1),
        ("leave", 2),
    )

    def __init__(self, setup: int) -> None:
        random = Random(setup)
        self.spec = SPECS[random.choice(sorted(SPECS))]
        self.copies = {direction: HeldCopies() for direction in Direction}
        pages, tails = random.choice([6, 9, 16]), random.choice([3, 6]) * self.spec.pages_per_window
        held = self.spec
        if len(self.spec.page_streams) > 1 and random.random() < 0.5:
            held = self.spec.only(stream.name for stream in self.spec.streams[1:])
        self.memory = make_borrowed(held, pages, max(1, tails), seed=setup)
        self.partial = held is not self.spec
        self.cache = self._make_cache(random)
        self.bytes = Bytes(self.spec, self.memory)
        self.set_up(random)
        self.limit_owners(setup)
        shuffled = [random.sample(range(count), count) for count in (pages, tails)]
        self.devices = {tail: Device(shuffled[tail], {}, set()) for tail in (False, True)}
        self.tasks: list[Task] = []
        self.texts: list[tuple[list[int], tuple[str, ...]]] = [([], ())]
        self.loading: dict[Transfer, list[tuple[bool, Text, int]]] = {}
        """What each load brings: whether it is a tail, of which text, to which place."""
        self.saving: dict[Transfer, list[tuple[bool, int]]] = {}
        self.holding: list[Transfer] = []
        self.seen: dict[str, int] = {
            "loads": 0,
            "tails_loaded": 0,
            "stale": 0,
            "held_reads": 0,
            "landings": 0,
        }

    def _make_cache(self, random: Random) -> HostCache:
        least = max(1, self.spec.places_per_tail)
        self.roomy = random.random() < 0.4
        """Most of what is saved reaches the store, and is waited for."""
        config = CacheConfig(
            fetch="wait" if self.roomy else random.choice(FETCH_POLICIES),
            store_writing_bytes=random.choice([1, 10_000, 1 << 20]),
            host_bytes=self.spec.place_bytes * least * (30 if self.roomy else random.choice([2, 5, 8, 16])),
            layout=random.choice(LAYOUTS),
            copier=random.choice(["reference", "direct"]),
            evict=random.choice([*EVICT_POLICIES, f"{Indifferent.__module__}:Indifferent"]),
            tails_per_path=random.randint(1, 4),
        )
        shuffled = lambda count: random.sample(range(count), count)  # noqa: E731
        with patch.object(cache_module, "PrefixTree", WatchedTree):
            memories = make_memories(self.spec, config, self.memory, executors=self.copies)
            return HostCache(self.spec, config, memories, pool_order=shuffled)

    def copier_writes(self, transfer: Transfer, row: tuple[str, int]) -> bool:
        return bool(self.saving[transfer]) and row in self.bytes.rows

    # What the engine does

    def _do_arrive(self, random: Random) -> None:
        if len(self.tasks) >= 6:
            self.tasks.pop(0)
        base, namespace = random.choice(self.texts[-12:])
        if random.random() < 0.1:
            namespace = random.choice(NAMESPACES)
        tokens = base[: random.choice([len(base), random.randint(0, len(base))])]
        if random.random() < (0.7 if self.roomy else 0.3):  # a document that others have read too
            tokens = [random.randint(0, 2)] * random.randint(1, PAGES_MAX * self.spec.page_tokens)
        tokens = tokens + [random.randint(0, 3) for _ in range(random.randint(1, 12))]
        tokens = tokens[: PAGES_MAX * self.spec.page_tokens + 1]
        self.texts.append((tokens, namespace))
        task = Task(tokens, namespace, self.chain_of(tokens, namespace))
        for pages, key in enumerate(task.chain.keys, 1):
            assert self.bytes.texts.setdefault(key, task.text(pages)) == task.text(pages), "I8"
        self.tasks.append(task)

    def _own(self, task: Task) -> int:
        """How many pages of a text its device has."""
        pages = 0
        while pages < len(task.chain.keys) and task.text(pages + 1) in self.devices[False].at:
            pages += 1
        return pages

    def _do_load(self, random: Random) -> None:
        """The rest of what the host has, after what the device has, and the tails to go on from."""
        if not self.tasks:
            return
        task = random.choice(self.tasks)
        found = self.cache.find(task.chain, replay=random.random() < 0.2)
        if isinstance(found, Wait):
            if random.random() < 0.1:
                self.cache.withdraw(task.chain)
            return
        assert found.pages * self.spec.page_tokens < max(1, len(task.tokens))
        first = min(self._own(task), found.pages)
        keep = {task.text(pages) for pages in range(1, first + 1)}
        wanted = [(False, task.text(pages)) for pages in range(first + 1, found.pages + 1)]
        wanted += [(True, task.text(tail.page.depth)) for tail in found.tails]
        places = {}
        for tail in (False, True):
            count = sum(kind is tail for kind, _ in wanted)
            busy = any(kind is tail and text in self.devices[tail].at for kind, text in wanted)
            places[tail] = None if busy else self.devices[tail].take(count, random, keep)
        if random.random() < 0.1:  # what was found may go before it is used
            random.choice([self._do_save, self._do_land, lambda _: self.cache.flush()])(random)
        loaded: Transfer | Wait | None = None
        if places[False] is not None and places[True] is not None:
            loaded = self.cache.load(
                found, places[False], first=first, tails=places[True], hold=self.partial, priority=0
            )
        if not isinstance(loaded, Transfer):
            for tail in (False, True):
                self.devices[tail].free += places[tail] or []
            self.seen["stale"] += isinstance(loaded, Wait)
            self.cache.withdraw(task.chain)
            return
        moved = []
        for (tail, text), here in zip(wanted, [*places[False], *places[True]], strict=True):  # type: ignore[misc]
            self.devices[tail].busy.add(here)
            moved.append((tail, text, here))
        self.loading[loaded] = moved

    def _do_compute(self, random: Random) -> None:
        """Pages after those its device has, and a tail where they end."""
        if not self.tasks:
            return
        task = random.choice(self.tasks)
        own = self._own(task)
        upto = min(len(task.chain.keys), own + random.randint(1, 4))
        keep = {task.text(pages) for pages in range(1, upto + 1)}
        missing = [n for n in range(own + 1, upto + 1) if task.text(n) not in self._arriving(tail=False)]
        if places := self.devices[False].take(len(missing), random, keep):
            for pages, here in zip(missing, places, strict=True):
                self._write(task, pages, here, tail=False)
        for pages in range(1, self._own(task) + 1):
            if (
                self.spec.tail_streams
                and random.random() < 0.5
                and task.text(pages) not in {*self.devices[True].at, *self._arriving(tail=True)}
                and (place_ := self.devices[True].take(1, random, set()))
            ):
                self._write(task, pages, place_[0], tail=True)

    def _arriving(self, *, tail: bool) -> set[Text]:
        return {text for moved in self.loading.values() for kind, text, _ in moved if kind is tail}

    def _write(self, task: Task, pages: int, here: int, *, tail: bool) -> None:
        self.bytes.write(here, task.chain.keys[pages - 1], task.text(pages), tail=tail)
        self.devices[tail].at[task.text(pages)] = here

    def _do_save(self, random: Random) -> None:
        if not self.tasks:
            return
        task = random.choice(self.tasks)
        own = self._own(task)
        first = random.choice([0, 0, random.randint(0, own)])
        places = [self.devices[False].at[task.text(pages)] for pages in range(first + 1, own + 1)]
        tails = {
            pages: self.devices[True].at[task.text(pages)]
            for pages in range(1, own + 1)
            if task.text(pages) in self.devices[True].at and random.random() < 0.8
        }
        transfer = self.cache.save(task.chain, first, places, tails=tails)
        named = [(False, here) for here in places] + [(True, here) for here in tails.values()]
        for tail, here in named:
            self.devices[tail].busy.add(here)
        self.saving[transfer] = named
        if self.partial and transfer.moves:
            self.writing.append(transfer)

    def _do_land(self, random: Random) -> None:
        """A peer has computed a text that this engine never saw."""
        if self.tasks:
            task = random.choice(self.tasks)
            self.saving[self._land(task.chain, random)] = []

    def _do_release(self, random: Random) -> None:
        if self.holding:
            self._release(self.holding.pop(random.randrange(len(self.holding))))

    def _release(self, transfer: Transfer) -> None:
        self._check_held(transfer)
        self.cache.release(transfer)

    def _check_held(self, transfer: Transfer) -> None:
        """What the engine reads on the host while it holds it."""
        for item, _, hosts in transfer.moves:
            tail = not isinstance(item, Page)
            text = self.bytes.texts[item.page.key if tail else item.key]
            self.host.check(self.bytes.expected(text, tail), hosts, tail=tail, who="what a load holds")
            self.seen["held_reads"] += 1

    def _do_evict(self, random: Random) -> None:
        """Its device lets go of something, and the cache never hears of it."""
        for tail, device in self.devices.items():
            idle = [text for text, here in device.at.items() if here not in device.busy]
            for text in random.sample(idle, random.choice([0, 1, len(idle)]) if idle else 0):
                self.bytes.poison(device.at[text], tail=tail)
                device.drop(text)

    def _do_store(self, random: Random) -> None:
        if self.tasks and random.random() < 0.3:
            self.cache.prefetch(random.choice(self.tasks).chain)
        self._store_works(random)

    def _do_leave(self, random: Random) -> None:
        if self.tasks:
            self.cache.withdraw(random.choice(self.tasks).chain)

    def _do_step(self, random: Random) -> None:
        self._pass_time(random)
        for transfer, error in [(ended.transfer, ended.error) for ended in self.cache.step()]:
            for tail, here in self.saving.pop(transfer, ()):
                if not self._in_use(tail, here):
                    self.devices[tail].busy.discard(here)
            for tail, text, here in self.loading.pop(transfer, ()):
                self._loaded(tail, text, here, error)
            if transfer.hold:
                self.holding.append(transfer)

    def _in_use(self, tail: bool, here: int) -> bool:
        return any((tail, here) in named for named in self.saving.values())

    def _loaded(self, tail: bool, text: Text, here: int, error: TransferError | None) -> None:
        device = self.devices[tail]
        device.busy.discard(here)
        if error is not None or text in device.at:  # failed, or computed meanwhile
            self.bytes.poison(here, tail=tail)
            device.free.append(here)
            return
        self.bytes.check(here, text, tail=tail, who="a load")
        device.at[text] = here
        self.seen["loads"] += 1
        self.seen["tails_loaded"] += tail

    # Always

    def check(self) -> None:
        self.cache.check()
        self.cache.tree.oracle.check()
        for item in self.cache.tree.items():
            assert item.device is None, "the tree knows of no device"
            if item.on_host:
                tail = not isinstance(item, Page)
                text = self.bytes.texts[item.page.key if tail else item.key]
                self.host.check(self.bytes.expected(text, tail), item.host, tail=tail, who="the tree")
        for tail, device in self.devices.items():
            for text, here in device.at.items():
                self.bytes.check(here, text, tail=tail, who="the engine's own")

    def wind_down(self) -> None:
        self.calm_down()
        for chain in self.fetching():
            self.cache.withdraw(chain)
        for _ in range(200):
            self._run_all()
            self._do_step(Random(0))
            if not (self.loading or self.saving or self.cache.busy):
                break
        assert not (self.loading or self.saving), "a transfer was never told to have ended"
        while self.holding:
            self._release(self.holding.pop())
        self.check()
        assert self.cache.flush() == 0, self.cache.show()
        pool = self.cache.host_pages
        assert pool.free == pool.capacity, f"I4: {pool.name} lost places"
        self._keep_counters()
        self.cache.close()
