"""Goal: with device and host full, every running text that can be served advances. Method: the scheduler and
the cache on memory without bytes (`benchmarks.pressure`): each page that a text needs is evicted, saved and
waited for. Where pages may be sparse, many texts of one length pass the ends of pages in the same step."""

from random import Random

import pytest
from benchmarks.pressure import PAGE_TOKENS, SPEC, Scene, full, sparse

from tiercel.config import CacheConfig

SEEDS = 8
RUNNING = 320
"""More than one page is needed in every step."""


@pytest.mark.parametrize("evict", ["value", "lru"])
def test_all_running_texts_advance_where_device_and_host_are_full(evict):
    scene = full(RUNNING, evict, cold_pages=1500)
    before = {task: task.drawn for task in scene.scheduler.running}
    assert scene.cache.pages.free < 16, "hardly any page is free, and each text needs one"
    parts = [len(scene.step().parts) for _ in range(PAGE_TOKENS)]
    assert min(parts) >= RUNNING - 8, "a text stands still until its page has been saved, and no longer"
    assert all(task.drawn - drawn >= PAGE_TOKENS - 4 for task, drawn in before.items())
    assert scene.scheduler.counters["preemptions"] == 0


@pytest.mark.parametrize(("running", "pages", "frames"), [(64, 20, 900), (256, 10, 2600)])
def test_texts_pass_the_ends_of_pages_together_while_their_first_pages_are_on_the_host(
    running, pages, frames
):
    """Each saves a page, has one become sparse and takes another one, in the same steps."""
    scene = sparse(running, pages, frames)
    before = {task: task.drawn for task in scene.scheduler.running}
    parts = [len(scene.step().parts) for _ in range(2 * PAGE_TOKENS + 10)]
    assert len(before) == running and scene.cache.counters["pages_sparse"] > 8 * running
    assert sum(parts) > 0.99 * running * len(parts), "hardly anybody stands still"
    assert all(task.drawn - drawn >= 0.95 * len(parts) for task, drawn in before.items())
    scene.cache.check()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_step_reads_no_more_of_the_host_than_it_has_room_for(seed):
    """Prompts and new turns are computed side by side. While a step is planned, pages become sparse also for
    texts that are in it already."""
    random, spec = Random(seed), SPEC.apart
    most, frames = random.choice([20, 50]), random.choice([60, 150])
    config = CacheConfig(frames, 64, host_bytes=3000 * spec.place_bytes, staged_pages=most)
    scene = Scene(spec, config, running=8, step_tokens=random.choice([256, 1024, 2048]))
    cache, scheduler, texts, asked, steps = scene.cache, scene.scheduler, [("first", 1)], 0, 0
    while scheduler.tasks or asked < 60:
        assert (steps := steps + 1) < 4000, "every text ends"
        if asked < 60 and random.random() < 0.3 and len(scheduler.tasks) < 10:
            text, known = random.choice(texts) if random.random() < 0.6 else (f"{asked}th", 0)
            pages = min(known + random.choice([1, 2, 4, 10, 20, 40]), cache.pages_most - 4)
            texts.append((text, pages))
            scene.ask(pages * PAGE_TOKENS, random.choice([5, 60]), text)
            asked += 1
        step, staged = scene.plan(), set[int]()
        for part in step.parts:
            request = scheduler.seats.in_ring[part.ring].request
            staged.update(cache.residency.staged(request, part.end - part.start))
        assert len(staged) <= most
        cache.check()
        scene.advance(step)
    assert cache.counters["pages_sparse"] > 0
