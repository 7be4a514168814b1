"""Goal: no sequence of requests, evictions, faults and full pools breaks an invariant or serves a wrong byte.

Method: `world` runs whole caches from seeds, 50,000 steps here and as many as you like with `make soak`.
Hypothesis searches runs of its own and shrinks what it finds.
"""

import logging
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.foreign import ForeignWorld
from tests.simulation.run import run
from tests.simulation.specs import SPECS
from tests.simulation.world import SparseWorld, World

STEPS = 1000
SEEDS_PER_TEST = 10
COUNTED, FOREIGN_COUNTED, BLOCKS = 4, 3, 5
SPARSE_COUNTED = 10
"""Blocks of seeds that the tests run which count what happens: the first ones; all of the foreign engine.
And all blocks. Of the faults of `test_mutants`, all but two are noticed by a seed below 40."""


@pytest.fixture(autouse=True)
def quiet():
    """The simulation makes observers fail on purpose, and the cache logs each failure."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("block", range(COUNTED, BLOCKS))
def test_every_seed_holds(block):
    for seed in range(block * SEEDS_PER_TEST, (block + 1) * SEEDS_PER_TEST):
        run(seed, STEPS)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 2**32 - 1), max_size=120))
def test_every_run_hypothesis_finds_holds(setup, numbers):
    World(setup).run(numbers)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 2**32 - 1), max_size=120))
def test_every_run_hypothesis_finds_for_another_engine_holds(setup, numbers):
    ForeignWorld(setup).run(numbers)


def test_the_simulation_reaches_what_it_is_meant_to_test():
    """A simulation that never loads, fails or waits would hold too."""
    seen: dict[str, int] = {}
    specs = set()
    for seed in range(COUNTED * SEEDS_PER_TEST):
        world = run(seed, STEPS)
        specs.add(world.spec.model)
        for name, count in (world.cache.counters + world.store_counters + world.seen).items():
            seen[name] = seen.get(name, 0) + count
    assert specs == {spec.model for spec in SPECS.values()}
    for name in (
        "tokens_device", "tokens_host", "pages_loaded", "tails_loaded", "pages_saved", "tails_saved",
        "loads_failed", "saves_failed",
        "tokens_store", "pages_written", "tails_written", "bytes_read", "flaws", "failures", "timeouts",
        "fetches_late", "fetches_not_worth", "writes_refused", "writes_passed",
        "requests_finished", "requests_aborted", "requests_preempted", "observer_errors",
        "landings", "leases",
    ):  # fmt: skip
        assert seen.get(name, 0) >= 10, f"{name} hardly ever happens"


def test_the_simulation_of_sparse_pages_reaches_what_it_is_meant_to_test():
    """Steps read pages on the host, some of which were whole again or free when they were read."""
    seen: Counter[str] = Counter()
    for seed in range(SPARSE_COUNTED):
        world = run(seed, STEPS, SparseWorld)
        seen.update(world.cache.counters)
        seen.update(read=world.under_way.sparse_read, read_late=world.under_way.late_read)
    for name in ("pages_sparse", "pages_back", "read", "read_late", "requests_preempted"):
        assert seen[name] >= 10, f"{name} hardly ever happens"


def test_the_foreign_engine_reaches_what_it_is_meant_to_test():
    seen: Counter[str] = Counter()
    specs, partial = set(), 0
    for seed in range(FOREIGN_COUNTED * SEEDS_PER_TEST):
        world = run(seed, STEPS, ForeignWorld)
        specs.add(world.spec.model)
        partial += world.partial
        seen.update(world.cache.counters + world.store_counters)
        seen.update(world.seen)
    assert specs == {spec.model for spec in SPECS.values()} and partial >= 5
    for name in (
        "loads", "tails_loaded", "stale", "held_reads", "landings", "pages_loaded", "pages_saved",
        "tails_saved", "loads_failed", "saves_failed", "tokens_store", "pages_written", "bytes_read", "flaws",
        "leases",
    ):  # fmt: skip
        assert seen[name] >= 5, f"{name} hardly ever happens"
