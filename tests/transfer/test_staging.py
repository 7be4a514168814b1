"""Goal: a tail that is poured into any places is collected again byte for byte, and nothing else is written.
Method: every declaration with tails, random places; on a GPU too, where there is one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.kernels.devices import on_gpu
from tests.memory.specs import SPECS, V4
from tests.transfer.rig import pieces_of
from tiercel.memory.buffers import DeviceMemory
from tiercel.spec import CacheSpec
from tiercel.transfer.staging import Staging

WITH_TAILS = {name: spec for name, spec in SPECS.items() if spec.tail_streams}


@pytest.mark.parametrize("spec", WITH_TAILS.values(), ids=WITH_TAILS)
@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_what_is_poured_is_collected_and_nothing_else_is_touched(spec: CacheSpec, device: str) -> None:
    each, chance = spec.places_per_tail, random.Random(0)
    memory = DeviceMemory(spec, 3 * each + 2, 4, device)
    for flat in (memory.flat_pages, memory.flat_tails):
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))
    places = chance.sample(range(memory.pages), 2 * each)
    first, second = tuple(places[:each]), tuple(places[each:])
    tails, pages = memory.flat_tails.clone(), memory.flat_pages.clone()
    staging = Staging(memory)
    staging.pour([(3, first), (1, second)])
    assert torch.equal(memory.flat_tails, tails)
    for stream in spec.tail_streams:
        for layer in stream.layers:
            view = memory.view(stream.name, layer)
            for place, kept in ((3, first), (1, second)):
                row = torch.cat(pieces_of(memory, stream.name, layer, kept))
                assert torch.equal(row, view[place]), (stream.name, layer)
    others = [place for place in range(memory.pages) if place not in places]
    for stream in spec.page_streams:
        for layer in stream.layers:
            flat, pieces = memory.rows[stream.name, layer]
            for place in others:
                ((offset, size),) = [piece.at(place) for _, piece in pieces]
                assert torch.equal(flat[offset : offset + size], pages[offset : offset + size])
    poured = memory.flat_pages.clone()
    staging.collect([(0, first), (2, second)])
    assert torch.equal(memory.flat_pages, poured)
    for stream in spec.tail_streams:
        for layer in stream.layers:
            view = memory.view(stream.name, layer)
            assert torch.equal(view[[0, 2]], view[[3, 1]])
    staging.pour([])


@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_tails_use_the_frames_only(device: str) -> None:
    """Staged rows of the second pool lie behind them."""
    spec = replace(V4, second=("c4",))
    memory = DeviceMemory(spec, 2 * spec.units_per_tail, 2, device, staged=7)
    frames = memory.frames * spec.frame_bytes
    memory.flat_pages[frames:].fill_(9)
    memory.flat_tails.random_(0, 256)
    wanted, staging = memory.flat_tails.clone(), Staging(memory)
    kept = [
        tuple(range(memory.pages - n * spec.units_per_tail, memory.pages)[: spec.units_per_tail])
        for n in (1, 2)
    ]
    staging.pour(list(enumerate(kept)))
    memory.flat_tails.zero_()
    staging.collect(list(enumerate(kept)))
    assert torch.equal(memory.flat_tails, wanted)
    assert memory.flat_pages.numel() - frames == 7 * spec.row_bytes(spec.stream("c4"))
    assert bool((memory.flat_pages[frames:] == 9).all()), "the last units of the last frame are the end"


def test_a_place_that_is_not_there_is_a_bug() -> None:
    spec = next(iter(WITH_TAILS.values()))
    staging = Staging(DeviceMemory(spec, spec.places_per_tail, 1))
    kept = tuple(range(spec.places_per_tail))
    with pytest.raises(AssertionError, match="I7"):
        staging.pour([(1, kept)])
    with pytest.raises(AssertionError, match="I7"):
        staging.collect([(0, tuple(place + 1 for place in kept))])
