"""Goal: memory is made when nothing else can be wrong, and given back if something is. Method: bad settings,
and a count of the host memories that are open."""

import pytest

from tests.simulation.specs import SPECS
from tiercel.cache import memories
from tiercel.cache.memories import make_memories
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError
from tiercel.memory.buffers import HostMemory

SPEC = SPECS["full attention"]


@pytest.fixture
def opened(monkeypatch):
    """What was done with host memories."""
    done = []

    class Counted(HostMemory):
        def __init__(self, *given, **named):
            done.append("made")
            super().__init__(*given, **named)

        def close(self):
            done.append("closed")
            super().close()

    monkeypatch.setattr(memories, "HostMemory", Counted)
    return done


def settings(**more):
    return CacheConfig(8, host_bytes=8 * SPEC.place_bytes, **more)


@pytest.mark.parametrize("wrong", [{"evict": "no.such:Policy"}, {"fetch": "no.such:Policy"}])
def test_a_policy_that_is_not_there_is_found_before_memory_is_made(opened, wrong):
    with pytest.raises(ConfigError, match="no.such:Policy"):
        make_memories(SPEC, settings(**wrong))
    assert opened == []


def test_memory_that_nobody_can_copy_is_given_back(opened):
    with pytest.raises(ConfigError, match="copier"):
        make_memories(SPEC, settings(copier="kernel"))
    assert opened == ["made", "closed"]


def test_memories_of_no_cache_are_closed_by_who_made_them(opened):
    made = make_memories(SPEC, settings())
    assert made.host_pages == 8 and opened == ["made"]
    made.close()
    assert opened == ["made", "closed"]
