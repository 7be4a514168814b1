"""Goal: the coldest that may go, always, at a price that does not grow. Method: against sorting."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tiercel.policy.evict import Lfu
from tiercel.tree.candidates import SWEEP_AT_LEAST, Candidates


@dataclass(eq=False)
class Thing:
    used: int
    hits: int = 0
    priority: int = 0
    free: bool = True
    place: int = 0


ACTIONS = st.tuples(st.sampled_from(["use", "bind", "free", "pop", "add"]), st.integers(0, 9))


@given(st.lists(ACTIONS, max_size=300))
def test_the_coldest_ready_thing_is_always_the_next(actions):
    policy, clock = Lfu(), 10
    line = Candidates(policy, lambda thing: thing.free, "place")
    things = [Thing(used=i) for i in range(10)]
    for thing in things:
        line.offer(thing)
    for action, index in actions:
        clock += 1
        thing = things[index] if index < len(things) else None
        if action == "add":
            things.append(Thing(clock))
            line.offer(things[-1])
        elif action == "pop":
            ready = [t for t in things if t.free]
            expected = min(ready, key=policy.rank) if ready else None
            assert line.coldest() is expected is line.pop()
            things = [t for t in things if t is not expected]
        elif thing is not None and action == "use":
            thing.used, thing.hits = clock, thing.hits + 1
        elif thing is not None:
            thing.free = action == "free"
            line.offer(thing)
        assert all(t in line for t in things if t.free)
        assert len(line) <= max(SWEEP_AT_LEAST, 2.5 * len(things)) + 1
