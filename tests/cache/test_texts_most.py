"""Goal: it is told right how many texts fit on a device, whole and sparse. Method: the formula against the
places that a device really gives, and against the longest text that a cache takes."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.sparse import texts_fitting

from tiercel.cache import Request
from tiercel.cache.residency import LAST_PAGES, texts_most
from tiercel.config import CacheConfig
from tiercel.engine.config import places_of, staged_bytes, staged_pages_of
from tiercel.pages.frames import Frames
from tiercel.replay.null import Clock, null_cache
from tiercel.spec import load, mla_indexer

PLENTY = 10**6
SPECS = {name: load(name).apart for name in ("deepseek-v4-flash", "deepseek-v4-pro")}
SPECS["deepseek-v3.2"] = mla_indexer("deepseek-v3.2", 64, 61, 512, 64, 128, "fp8", index_topk=2048).apart
"""The latents that its indexer selects. It has no tails."""
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def fits(spec, frames, texts, pages, bodies):
    """Whether the pool of such a device has places for so many texts."""
    tails = 2 * spec.pages_per_window * spec.units_per_tail
    pool = Frames("device", frames, spec.frame_units, tags=(0, 1), order=range(frames))
    return pool.lack(texts * (pages + tails), texts * bodies) <= 0


@every_spec
@pytest.mark.parametrize("pages", [1, 2, 3, 9, 10, 40, 200, 1000])
@pytest.mark.parametrize("frames", [40, 333, 2000])
def test_so_many_texts_fit_and_no_more(spec, pages, frames):
    most = texts_most(spec, frames, pages, host_places=PLENTY, staged_pages=PLENTY)
    last = min(pages, LAST_PAGES)
    bodies = last + min(pages - last, spec.hot_places()[0])
    for count, own in ((most.whole, pages), (most.sparse, bodies)):
        assert fits(spec, frames, count, pages, own)
        assert not fits(spec, frames, count + 1, pages, own)
    assert most.sparse >= most.whole


@every_spec
def test_a_text_that_fits_alone_is_as_long_as_a_cache_takes(spec):
    for frames in (40, 200):
        config = CacheConfig(
            frames, staging_tails=4, host_bytes=PLENTY * spec.place_bytes, staged_pages=PLENTY
        )
        longest = null_cache(spec, config, Clock(), 1e9).pages_most
        given = {"host_places": PLENTY, "staged_pages": PLENTY}
        assert texts_most(spec, frames, longest, **given).sparse == 1
        assert texts_most(spec, frames, longest + 1, **given).sparse == 0


@pytest.mark.parametrize(("name", "device_bytes"), [("deepseek-v4-flash", 8e9), ("deepseek-v3.2", 60e9)])
def test_as_many_texts_of_128_k_begin_as_is_told(name, device_bytes):
    """With the shipping cache, texts whose host pages have landed: within three of a hundred."""
    spec, tokens, device_bytes = SPECS[name], 131_072, int(device_bytes)
    staged = staged_pages_of(device_bytes, spec, tokens + 4096)
    frames, _ = places_of(device_bytes - staged_bytes(staged, spec), spec)
    pages = tokens // spec.page_tokens
    most = texts_most(spec, frames, pages, host_places=PLENTY, staged_pages=staged)
    begun = texts_fitting(spec, device_bytes, tokens)
    assert abs(begun - most.sparse) <= 0.03 * begun
    assert begun >= 3 * texts_fitting(replace(spec, second=()), device_bytes, tokens)


def test_long_texts_begin_with_more_hot_rows_than_their_steps_need_where_there_is_room():
    """The second one has just room for those that are needed."""
    spec, pages, hot = SPECS["deepseek-v4-flash"], 512, list[int]()
    config = CacheConfig(288, 4, host_bytes=PLENTY * spec.place_bytes, staged_pages=600)
    cache = null_cache(spec, config, Clock(), 1e9)
    for number in range(2):
        chain = cache.chain(np.arange(pages * spec.page_tokens + 1) + 1_000_000 * number)
        cache.landed(cache.land(chain, 0, pages, tails=[pages]))
        begun = cache.begin(chain, room_for=chain.tokens)
        assert isinstance(begun, Request) and len(begun.sparse) == pages
        hot.append(len(begun.hot))
    assert hot == [16, 8] and spec.hot_places() == (8, 16)
    cache.check()


def test_texts_that_are_long_fit_more_than_four_times_as_often():
    spec = SPECS["deepseek-v4-flash"]
    most = texts_most(spec, 60_000, 4096, host_places=PLENTY, staged_pages=5000)
    assert (most.whole, most.sparse) == (14, 57)


def test_host_and_staging_area_are_limits_too():
    spec = SPECS["deepseek-v4-flash"]
    most = texts_most(spec, 2000, 100, host_places=350, staged_pages=100)
    assert most.sparse == 350 // (100 + spec.places_per_tail)
    assert texts_most(spec, 2000, 100, host_places=PLENTY, staged_pages=99).sparse == 0
    assert texts_most(replace(spec, second=()), 2000, 100, host_places=350, staged_pages=100).sparse == 0
