"""Running the simulation from a seed, and making a failing run short."""

from __future__ import annotations

from random import Random

from tests.simulation.foreign import ForeignWorld
from tests.simulation.schedule import ScheduleWorld
from tests.simulation.world import World

AnyWorld = World | ForeignWorld | ScheduleWorld
Kind = type[World] | type[ForeignWorld] | type[ScheduleWorld]


def numbers_of(seed: int, steps: int) -> list[int]:
    random = Random(seed)
    return [random.getrandbits(32) for _ in range(steps)]


def run(seed: int, steps: int, kind: Kind = World) -> AnyWorld:
    """A run that fails is shrunk; the error names the seed and the few steps that are enough."""
    world, numbers = kind(seed), numbers_of(seed, steps)
    try:
        world.run(numbers)
    except AssertionError as error:
        short = shrink(kind, seed, numbers[: len(world.log)])
        lines = [f"seed {seed}: {error}", f"{kind.__name__}({seed}).run({short})"]
        lines += _replay(kind, seed, short).log
        raise AssertionError("\n".join(lines)) from error
    return world


def shrink(kind: Kind, setup: int, numbers: list[int]) -> list[int]:
    """Leave out ever smaller parts of a failing run as long as it still fails."""
    size = max(1, len(numbers) // 2)
    while size:
        start = 0
        while start < len(numbers):
            shorter = numbers[:start] + numbers[start + size :]
            if _fails(kind, setup, shorter):
                numbers = shorter
            else:
                start += size
        size //= 2
    return numbers


def _fails(kind: Kind, setup: int, numbers: list[int]) -> bool:
    try:
        kind(setup).run(numbers)
    except AssertionError:
        return True
    return False


def _replay(kind: Kind, setup: int, numbers: list[int]) -> AnyWorld:
    world = kind(setup)
    try:
        world.run(numbers)
    except AssertionError:
        world.log.append(world.cache.show())
    return world
