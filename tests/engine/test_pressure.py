"""Goal: with device and host full, every running text that can be served advances. Method: the scheduler and
the cache on memory without bytes (`benchmarks.pressure`): each page that a text needs is evicted, saved and
waited for."""

import pytest
from benchmarks.pressure import PAGE_TOKENS, Pressure

RUNNING = 320
"""More than one page is needed in every step."""


@pytest.mark.parametrize("evict", ["value", "lru"])
def test_all_running_texts_advance_where_device_and_host_are_full(evict):
    scene = Pressure(RUNNING, evict, cold_pages=1500)
    before = {task: task.drawn for task in scene.scheduler.running}
    assert scene.cache.pages.free < 16, "hardly any page is free, and each text needs one"
    parts = [len(scene.step().parts) for _ in range(PAGE_TOKENS)]
    assert min(parts) >= RUNNING - 8, "a text stands still until its page has been saved, and no longer"
    assert all(task.drawn - drawn >= PAGE_TOKENS - 4 for task, drawn in before.items())
    assert scene.scheduler.counters["preemptions"] == 0
