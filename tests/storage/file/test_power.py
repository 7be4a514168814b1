"""Goal: what was acknowledged is there after a power loss, also when a process was killed before it and
another one went on. Method: a script that is killed at every call in turn, a second script in the folder that
is left, and folders as a power loss at some calls of it could leave them (`power`); more of these by
TIERCEL_POWER_LOSSES."""

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.storage.file.make import SIZE, held, in_memory, key_of, make_store
from tests.storage.file.power import Disk, Killed
from tests.storage.file.test_faults import NAMES, SMALL, Ledger
from tiercel.storage.file import direct

IMAGES = int(os.environ.get("TIERCEL_POWER_LOSSES", "2"))
"""After every kill."""


@pytest.fixture
def folder(tmp_path):
    with in_memory(tmp_path) as folder:
        yield folder


class World:
    """A folder on a disk, the process that has it open, and what was promised."""

    def __init__(self, path: Path, size: int, monkeypatch) -> None:
        self.path, self.size = path, size
        self.ledger = Ledger()
        self.disk = Disk()
        self.store = None
        monkeypatch.setattr(direct, "calls", self.disk)

    def open(self) -> None:
        self.store = make_store(self.path, self.size)

    def close(self) -> None:
        self.doubt_evicted()
        self.store.close()  # type: ignore[attr-defined]
        self.store = None

    def doubt_evicted(self) -> None:
        if self.store is not None:
            evicted = set(self.store._index.removed)
            self.ledger.doubt([name for name in NAMES if key_of(name) in evicted])

    def run(self, script, at_call) -> int:
        """A process; answers how many calls it made, up to its end or its death."""
        self.disk.at_call, self.disk.count = at_call, 0
        try:
            script(self)
            self.close()
        except Killed:
            self.doubt_evicted()
            if self.store is not None:  # what the process held goes with it
                self.store._folder.close()
                for segment in self.store._index.segments.values():
                    segment.close()
                self.store = None
            self.disk.dead = False
        return self.disk.count

    def lose_power(self, image: Path, chance: random.Random) -> None:
        """What is left if it happens now has what was promised."""
        self.doubt_evicted()
        self.disk.image(image, chance)
        calls, direct.calls = direct.calls, direct.Calls()
        try:
            with make_store(image, 2 * self.size) as store:
                self.ledger.check(store)
                assert store.check().bad == []
        finally:
            direct.calls = calls
            shutil.rmtree(image)


def first(world: World) -> None:
    """Segments end, records are moved and evicted, deleted and put again; files go."""
    ledger = world.ledger
    world.open()
    ledger.put(world.store, *NAMES[:3])
    ledger.delete(world.store, NAMES[1])
    ledger.put(world.store, *NAMES[3:9])
    world.close()
    world.open()
    ledger.put(world.store, NAMES[9], NAMES[1])
    for start in range(10, 22, 3):
        held(world.store, *NAMES[2:5])
        ledger.put(world.store, *NAMES[start : start + 3])
    ledger.delete(world.store, *NAMES[2:12:2])
    ledger.compact(world.store)
    ledger.put(world.store, *NAMES[22:25])


def second(world: World) -> None:
    """Whoever comes after a killed process: what it finds is there, what it does not find is not."""
    ledger = world.ledger
    world.open()
    for name, there in zip(NAMES, held(world.store, *NAMES), strict=True):
        ledger.doubt([name])
        (ledger.there if there else ledger.gone).add(name)
    ledger.delete(world.store, *NAMES[12:15])
    ledger.compact(world.store)
    for start in range(25, 34, 3):
        ledger.put(world.store, *NAMES[start : start + 3])
        ledger.put(world.store, NAMES[start - 25])
    world.close()
    world.open()
    ledger.put(world.store, NAMES[34])


@pytest.mark.parametrize("size", [4 * SIZE, SMALL], ids=["roomy", "tight"])
def test_nothing_is_lost_by_a_kill_and_then_a_power_loss(folder, monkeypatch, size):
    chance = random.Random(size)
    kill, images = 0, 0
    while True:
        kill += 1
        world = World(folder / "store", size, monkeypatch)

        def die(number, world=world, kill=kill):
            world.disk.dead = number == kill

        if world.run(first, die) < kill:
            break

        def fail(number, world=world):
            nonlocal images
            if chance.random() < IMAGES / 40:
                world.lose_power(folder / "image", chance)
                images += 1

        world.run(second, fail)
        shutil.rmtree(folder / "store")
    assert kill > 50 and images > IMAGES * kill / 2


def test_what_a_killed_process_removed_does_not_come_back(folder, monkeypatch):
    """Its name was gone for the next process, and may yet be on the disk."""
    world = World(folder / "store", SMALL, monkeypatch)

    def die(number):
        world.disk.dead = (None in dict(world.disk.changes).values()) and world.store is not None

    def fill(world):
        world.open()
        for start in range(0, 40, 3):
            world.ledger.put(world.store, *NAMES[start : start + 3])
            held(world.store, *NAMES[:2])

    world.run(fill, die)

    def look(world):
        world.open()
        world.ledger.gone |= {n for n, hit in zip(NAMES, held(world.store, *NAMES), strict=True) if not hit}
        assert len(world.ledger.gone) < len(NAMES)
        for seed in range(8):
            world.lose_power(folder / "image", random.Random(seed))

    world.run(look, lambda number: None)
