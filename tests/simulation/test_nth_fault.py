"""Goal: whichever allocation, copy or callback fails, nothing is left half done. Method: one scene, run once
for every n with the n-th
of them failing; around the call that met the fault the state is compared, and afterwards the scene goes on
to its end."""

import logging
from unittest.mock import patch

import pytest

import tiercel.cache.core as cache_module
import tiercel.cache.places as places_module
from tests.simulation.world import Actor, World
from tiercel.cache import Loaded, RequestState, TieredCache, Wait
from tiercel.cache.memories import make_memories
from tiercel.pages.pool import Short
from tiercel.transfer.plan import Direction


class Fault:
    """Fires at the n-th call."""

    def __init__(self, n):
        self.n = n
        self.calls = 0
        self.fired = False

    def due(self):
        self.calls += 1
        self.fired = self.fired or self.calls == self.n
        return self.calls == self.n


class Scene(World):
    """The world's cache and bytes, without its dice: two texts that share a prefix, a device too small for
    both."""

    def _make_cache(self, random, options):
        from tests.simulation.oracle import WatchedTree
        from tests.simulation.specs import SPECS
        from tiercel.config import CacheConfig

        self.spec = SPECS["compressed"]
        config = CacheConfig(
            device_pages=6 + 2 * self.spec.places_per_tail,
            staging_tails=2,
            host_bytes=40 * self.spec.place_bytes,
            copier="reference",
            tail_every_pages=4,
        )
        with patch.object(cache_module, "PrefixTree", WatchedTree):
            memories = make_memories(self.spec, config, executors=self.copies)
            return TieredCache(self.spec, config, memories)

    def _attach(self, random):
        """The scene has two tiers."""

    def actor(self, tokens):
        return Actor(tokens, (), self.cache.chain(tokens), {})

    def try_begin(self, actor):
        outcome = self.cache.begin(actor.chain)
        if not isinstance(outcome, Wait):
            actor.request = outcome
            actor.written = outcome.committed * self.spec.page_tokens
        return outcome

    def settle(self):
        """Let every transfer end; a request whose load failed begins again."""
        lost = []
        for _ in range(4):
            for loaded in self.cache.step():
                assert isinstance(loaded, Loaded)
                if loaded.error:
                    lost.append(loaded.request)
            for copies in self.copies.values():
                while copies.held:
                    copies.run(0)
        self.check()
        return lost

    def carry_out(self, tokens, fault):
        """One request from begin to finish, whatever fails on the way."""
        actor = self.actor(tokens)
        for _ in range(20):
            if actor.request is None:
                self._unchanged_by(fault, lambda: self.try_begin(actor))
            if actor.request is None:
                self.settle()
                continue
            if actor.request in self.settle():
                actor.request = None
                continue
            if self._compute_all(actor, fault):
                self.cache.finish(actor.request)
                self.settle()
                return
        raise AssertionError("the scene never ended")

    def _compute_all(self, actor, fault):
        assert actor.request.state is RequestState.RUNNING
        self._read(actor)
        size = len(actor.tokens)
        outcome = self._unchanged_by(fault, lambda: self.cache.extend(actor.request, size))
        if isinstance(outcome, Wait):
            self.settle()
            return False
        pages = size // self.spec.page_tokens
        for page in range(actor.written // self.spec.page_tokens, pages):
            self.bytes.write(
                actor.request.table[page], actor.chain.keys[page], actor.text(page + 1), tail=False
            )
        for boundary, tail in outcome.tails.items():
            page = boundary // self.spec.page_tokens
            self.bytes.write(tail, actor.chain.keys[page - 1], actor.text(page), tail=True)
        actor.written = size
        self.cache.commit(actor.request, size)
        self.check()
        return True

    def _unchanged_by(self, fault, call):
        before, events, fired = self._snapshot(), len(self.cache.tree.copies.events), fault.fired
        outcome = call()
        unmoved = len(self.cache.tree.copies.events) == events
        if fault.fired and not fired and isinstance(outcome, Wait) and unmoved:
            assert self._snapshot() == before, "I5: a failed operation left a trace"
        self.check()
        return outcome


def play(fault, install):
    scene = Scene(0)
    with install(scene, fault):
        first, second = [1] * 16, [1] * 8 + [2] * 9
        scene.carry_out(first, fault)
        scene.carry_out(second, fault)
        scene.carry_out(first + [3] * 4, fault)
        scene.carry_out(second + [3] * 4, fault)
    end = scene._snapshot()
    scene.observer_fails = False
    scene.wind_down()
    return end, scene.cache.counters


def failing_allocations(scene, fault):
    real = places_module.reserve  # type: ignore[attr-defined]

    def reserve(pool, *counts):
        return Short(pool.name, 1) if fault.due() else real(pool, *counts)

    return patch.object(places_module, "reserve", reserve)


def failing_copies(scene, fault):
    real = scene.copier.copy

    def copy(direction, leg):
        if fault.due():
            raise OSError("the n-th copy")
        real(direction, leg)

    return patch.object(scene.copier, "copy", copy)


def failing_callbacks(scene, fault):
    real = scene.cache.core._observer

    def observe(event):
        real(event)
        if fault.due():
            raise RuntimeError("the n-th callback")

    return patch.object(scene.cache.core, "_observer", observe)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("install", [failing_allocations, failing_copies, failing_callbacks])
def test_the_nth_fault_leaves_no_trace_for_every_n(install):
    clean, counters = play(Fault(0), install)
    assert counters["pages_loaded"] and counters["tails_loaded"] and counters["pages_saved"], (
        "the scene has loads"
    )
    n = 0
    while True:
        n += 1
        fault = Fault(n)
        end, counters = play(fault, install)
        if not fault.fired:
            break
        if install is failing_callbacks:
            assert end == clean and counters["observer_errors"] == 1
        if install is failing_copies:
            assert counters["loads_failed"] + counters["saves_failed"] == 1
    assert n > 6, "the scene is too short to mean anything"


def test_a_fault_in_a_load_is_the_request_s_alone_and_the_next_try_is_right():
    fault = Fault(0)
    scene = Scene(0)
    scene.carry_out([1] * 16, fault)
    scene.carry_out([2] * 17, fault)
    actor = scene.actor([1] * 20)
    index = scene.cache.tree.index
    before = [(index[key].on_host, index[key].device) for key in actor.chain.keys if key in index]
    scene.try_begin(actor)
    assert actor.request.state is RequestState.LOADING
    scene.cache.step()
    scene.copier.copies_until_fault = 0
    scene.copies[Direction.LOAD].run(0)
    (loaded,) = scene.cache.step()
    assert loaded.error is not None and loaded.error.__cause__ is not None
    assert [(index[key].on_host, index[key].device) for key in actor.chain.keys if key in index] == before
    scene.check()
    scene.carry_out([1] * 20, fault)
    scene.wind_down()
