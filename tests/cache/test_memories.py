"""Goal: memory is made when nothing else can be wrong, and given back if something is. Method: bad settings,
and a count of the host memories that are open."""

import pytest

from tests.simulation.specs import SPECS
from tiercel.cache import memories
from tiercel.cache.memories import make_memories
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError, TransferError
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


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"evict": "no.such:Policy"}, "no.such:Policy"),
        ({"fetch": "no.such:Policy"}, "no.such:Policy"),
        ({"copier": "kernel"}, "copier"),
    ],
)
def test_what_is_wrong_is_found_before_memory_is_made(opened, wrong, named):
    with pytest.raises(ConfigError, match=named):
        make_memories(SPEC, settings(**wrong))
    assert opened == []


def test_memory_that_nobody_can_copy_is_given_back(opened, monkeypatch):
    def fails(*_):
        raise TransferError("no device")

    monkeypatch.setattr(memories, "make_controller", fails)
    with pytest.raises(TransferError):
        make_memories(SPEC, settings())
    assert opened == ["made", "closed"]


def test_memories_of_no_cache_are_closed_by_who_made_them(opened):
    made = make_memories(SPEC, settings())
    assert made.host_pages == 8 and opened == ["made"]
    made.close()
    assert opened == ["made", "closed"]
