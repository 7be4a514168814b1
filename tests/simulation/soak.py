"""`make soak`: fresh seeds until stopped, or until one fails."""

from __future__ import annotations

import logging
import sys
import time

from tests.simulation.foreign import ForeignWorld
from tests.simulation.run import Kind, run
from tests.simulation.schedule import ScheduleWorld, SparseScheduleWorld
from tests.simulation.stages import StagedScheduleWorld
from tests.simulation.world import SparseWorld, World

STEPS = 2000
WORLDS: tuple[Kind, ...] = (
    World,
    ScheduleWorld,
    ForeignWorld,
    SparseWorld,
    SparseScheduleWorld,
    StagedScheduleWorld,
)


def main() -> None:
    logging.disable(logging.CRITICAL)
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else time.time_ns() % 2**40
    start, count = time.monotonic(), 0
    while True:
        run(seed, STEPS, WORLDS[count % len(WORLDS)])
        seed, count = seed + 1, count + 1
        if count % 20 == 0:
            rate = count * STEPS / (time.monotonic() - start)
            print(f"{count * STEPS:,} steps, {rate:,.0f} steps/s, next seed {seed}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
