from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.memory.specs import FLASH, SPECS, V4, in_records
from tests.transfer.rig import pieces_of
from tiercel.errors import BudgetError, ConfigError
from tiercel.memory.buffers import BorrowedMemory, DeviceMemory, HostMemory
from tiercel.memory.layout import LAYOUTS
from tiercel.spec import CacheSpec, Part, State, Stream, mha
from tiercel.spec.cache_spec import row_step
from tiercel.types import PLACE_BITS, TAG_SHIFT, HostPageId, Kind


def make_host_id(place: int) -> HostPageId:
    return HostPageId(3 << TAG_SHIFT | 9 << PLACE_BITS | place)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_device_views_are_the_flat_bytes_row_after_row(spec) -> None:
    device = DeviceMemory(spec, pages=3, tails=2)
    for flat, streams in ((device.flat_pages, spec.page_streams), (device.flat_tails, spec.tail_streams)):
        flat.copy_(torch.arange(flat.numel()) % 251)
        rows = [(layer, stream) for layer in spec.layers for stream in streams if layer in stream.layers]
        views = [device.view(stream.name, layer) for layer, stream in rows]
        if views:  # a place of a model with windows only is plain bytes, and some stages have unused ones
            there = torch.cat([view.flatten() for view in views])
            assert torch.equal(there, flat[: len(there)])
            assert len(there) == len(flat) or (streams == spec.page_streams and spec.whole is not None)


def test_a_device_view_is_not_a_copy() -> None:
    device = DeviceMemory(V4, pages=3, tails=2)
    view = device.view("c4", 1)
    assert view.shape == (3, V4.row_bytes(V4.stream("c4")))
    view[1] = 9
    assert int(device.flat_pages.sum()) == 9 * view.shape[1]


def test_target_and_draft_see_their_parts_of_one_memory_under_their_own_names() -> None:
    target = mha("target", V4.page_tokens, 3, kv_heads=2, head_dim=4)
    both = DeviceMemory(target.with_draft(V4), pages=3, tails=2)
    for own, prefix, first in ((target, "", 0), (V4, "draft_", 3)):
        part = both.part(own, draft=own is V4)
        assert part.spec is own
        assert set(part.rows) == {(stream.name, layer) for stream in own.streams for layer in stream.layers}
        for name, layer in part.rows:
            here, whole = part.view(name, layer), both.view(prefix + name, first + layer)
            assert (here.data_ptr(), here.shape) == (whole.data_ptr(), whole.shape)


def test_no_tails_are_no_bytes() -> None:
    device = DeviceMemory(V4, pages=3, tails=0)
    assert device.flat_tails.numel() == 0
    assert device.view("window", 0).shape[0] == 0


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_host_memory_holds_as_many_pages_as_the_budget_pays(spec, name: str) -> None:
    with HostMemory(spec, name, 5 * spec.place_bytes - 1) as host:
        assert host.pages == 4
        assert host.flat.numel() == 4 * spec.place_bytes
        names = [(stream.name, layer) for stream in spec.tail_streams for layer in stream.layers]
        poured = [piece for name in names for _, piece in host.rows[name][1]]
        assert sum(piece.bytes for piece in poured) == spec.tail_bytes
        assert spec.tail_bytes <= spec.places_per_tail * spec.place_bytes


def test_a_budget_below_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="one host page takes"):
        HostMemory(V4, "page_first_direct", V4.place_bytes - 1)


def test_a_budget_above_the_machine_is_refused() -> None:
    with pytest.raises(BudgetError):
        HostMemory(V4, "page_first_direct", 1 << 50)


@pytest.mark.parametrize("name", ["page_first", "page_first_direct"])
def test_a_page_is_one_record_by_its_id(name: str) -> None:
    with HostMemory(V4, name, 4 * V4.page_bytes) as host:
        ((record,),) = host.views([make_host_id(2)], [V4.page_bytes])
        record[:] = bytes([7]) * len(record)
        assert host.flat.nonzero().flatten().tolist() == list(range(2 * V4.page_bytes, 3 * V4.page_bytes))


def test_bytes_of_a_record_are_had_range_by_range_in_every_layout() -> None:
    with HostMemory(V4, "layer_first", 4 * V4.page_bytes) as host:
        (views,) = host.views([make_host_id(2), make_host_id(0)], [V4.page_bytes + 5])
        assert sum(map(len, views)) == V4.page_bytes + 5 and len(views) > 2
        with pytest.raises(AssertionError, match="1 bytes more"):
            host.views([make_host_id(2)], [V4.page_bytes + 1])


def test_closing_host_memory_twice_is_closing_it_once() -> None:
    host = HostMemory(V4, "page_first_direct", 4 * V4.page_bytes)
    host.close()
    host.close()
    assert host.flat.numel() == 0


def test_a_view_that_outlives_host_memory_still_has_its_bytes() -> None:
    host = HostMemory(V4, "page_first_direct", 4 * V4.page_bytes)
    ((record,),) = host.views([make_host_id(1)], [V4.page_bytes])
    record[:] = bytes([3]) * len(record)
    host.close()
    assert sum(record) == 3 * V4.page_bytes


# Two pools


APART = replace(V4, second=("c4",))


@pytest.mark.parametrize("spec", [APART, replace(FLASH, second=("c4",))], ids=["v4", "flash"])
@pytest.mark.parametrize("staged", [0, 5])
def test_a_row_of_the_second_pool_is_found_by_its_number(spec: CacheSpec, staged: int) -> None:
    memory, stream = DeviceMemory(spec, pages=3, tails=1, staged=staged), spec.stream("c4")
    memory.flat_pages.random_(0, 256)
    rows = memory.sparse_rows(stream)
    assert rows.stride(0) == memory.row_step == row_step(spec, stream)
    assert rows.data_ptr() == memory.flat_pages.data_ptr()
    last = (len(rows) - 1) * memory.row_step + rows.shape[1]
    assert 0 <= memory.flat_pages.numel() - last < memory.row_step, "as many as fit"
    for layer in stream.layers:
        (step, first), view = memory.sparse_place(stream, layer), memory.view("c4", layer)
        assert len(view) == 3
        for place in range(3):
            row = rows[place * step + first]
            assert row.data_ptr() == view[place].data_ptr() and torch.equal(row, view[place])


def test_staged_rows_lie_behind_the_frames_and_belong_to_nobody_else() -> None:
    memory, stream = DeviceMemory(APART, pages=3, tails=1, staged=5), APART.stream("c4")
    row_bytes = APART.row_bytes(stream)
    frames = 3 * APART.frame_bytes
    assert (memory.frames, memory.pages) == (3, 3 * APART.frame_units)
    assert memory.flat_pages.numel() == frames + 5 * row_bytes
    rows, step = memory.sparse_rows(stream), row_bytes // memory.row_step
    for number in range(5):
        rows[memory.staged_first + number * step] = number + 1
    assert not memory.flat_pages[:frames].any()
    own = memory.flat_pages[frames:].view(5, row_bytes)
    assert torch.equal(own, torch.arange(1, 6, dtype=torch.uint8)[:, None].expand(5, row_bytes))
    for _, pieces in memory.rows.values():
        ends = (piece.offset + (memory.pages - 1) * piece.stride + piece.bytes for _, piece in pieces)
        stride = max(piece.stride for _, piece in pieces)
        assert stride == APART.frame_bytes or max(ends) <= frames, "a unit, or a piece of a tail"
    assert memory.view("c4", 1).shape[0] == 3


def test_a_part_of_memory_has_the_rows_of_the_whole_by_number() -> None:
    both = DeviceMemory(APART.with_draft(replace(V4, second=())), pages=3, tails=2, staged=2)
    part = both.part(APART)
    stream = APART.stream("c4")
    whole = both.spec.stream("c4")
    assert part.sparse_place(stream, 1) == both.sparse_place(whole, 1)
    assert part.sparse_rows(stream).shape == both.sparse_rows(whole).shape
    assert part.staged_first == both.staged_first


def test_a_target_sees_as_many_bodies_as_the_whole_memory_has() -> None:
    draft = mha("draft", V4.page_tokens, 9, kv_heads=2, head_dim=8)
    both = DeviceMemory(APART.with_draft(draft), pages=3, tails=2)
    part = both.part(APART)
    assert part.spec.frame_units != both.spec.frame_units
    assert len(part.view("c4", 1)) == 3 and len(part.view("c128", 2)) == both.pages


def test_staged_rows_are_those_of_one_stream() -> None:
    for spec in (V4, replace(V4, second=("c4", "c4_index"))):
        with pytest.raises(AssertionError, match="one stream"):
            DeviceMemory(spec, pages=3, tails=1, staged=1)
    assert DeviceMemory(V4, pages=3, tails=1).row_step == 0


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("spec", [V4, APART], ids=["one pool", "two pools"])
def test_where_a_row_is_on_the_host(spec: CacheSpec, name: str) -> None:
    with HostMemory(spec, name, 4 * spec.page_bytes) as host:
        host.flat.random_(0, 256)
        for stream in spec.page_streams:
            for layer in stream.layers:
                address, stride = host.where(stream, layer)
                for place in range(4):
                    assert address + place * stride == host.view(stream.name, layer)[place].data_ptr()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("spec", [V4, APART, in_records(APART)], ids=["one pool", "two pools", "records"])
def test_the_views_of_a_page_or_tail_are_its_record(spec: CacheSpec, kind: Kind, name: str) -> None:
    with HostMemory(spec, name, 9 * spec.page_bytes) as host:
        host.flat.random_(0, 256)
        places = tuple(range(8, -1, -1))[: spec.places_of(kind)]
        rows = [
            torch.cat(pieces_of(host, stream.name, layer, places))
            for layer in spec.layers
            for stream in spec.streams_of(kind)
            if layer in stream.layers
        ]
        sizes = [grain.bytes for grain in spec.grains(kind)]
        parts = host.views(map(make_host_id, places), sizes, kind)
        assert [sum(map(len, part)) for part in parts] == sizes
        record = b"".join(view for part in parts for view in part)
        assert record == torch.cat(rows).numpy().tobytes()


# Borrowed


PAIR = CacheSpec(
    "pair", 2, (Stream("k", (0, 3), (Part("x", 4),)), Stream("w", (3,), (Part("x", 6),), State()))
)


def test_borrowed_rows_are_where_their_owner_has_them() -> None:
    both = torch.arange(5 * 2 * 8, dtype=torch.uint8).view(5, 2, 8)
    states = torch.zeros(3, 3, dtype=torch.int16)
    memory = BorrowedMemory(PAIR, {("k", 0): both[:, 1], ("k", 3): both[:, 0], ("w", 3): states})
    assert (memory.pages, memory.tails) == (5, 3)
    k = PAIR.stream("k")
    assert memory.column(k, 0)[1:] == (8, 16, 8) and memory.column(k, 3)[1:] == (0, 16, 8)
    assert torch.equal(memory.view("k", 0), both[:, 1])
    memory.view("w", 3)[2] = 1
    assert states[2].tolist() == [257] * 3 and not states[:2].any()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({("k", 3): None}, "no tensor was given"),
        ({("k", 3): torch.zeros(5, 9, dtype=torch.uint8)}, "a row is 8 B, in whole places"),
        ({("k", 3): torch.zeros(5, 2, 8, dtype=torch.uint8)[:, :, ::2]}, "a row is 8 B, in whole places"),
        ({("k", 3): torch.zeros(4, 8, dtype=torch.uint8)}, "as many places each"),
    ],
)
def test_tensors_that_can_not_hold_the_rows_are_refused(wrong: dict, why: str) -> None:
    rows = {("k", layer): torch.zeros(5, 8, dtype=torch.uint8) for layer in (0, 3)}
    rows |= {("w", 3): torch.zeros(3, 6, dtype=torch.uint8)} | wrong
    with pytest.raises(ConfigError, match=why):
        BorrowedMemory(PAIR, {name: tensor for name, tensor in rows.items() if tensor is not None})


# Shared


def test_memory_another_process_maps_is_the_same_memory() -> None:
    with (
        HostMemory(V4, "page_first_direct", 4 * V4.page_bytes, shared=True) as host,
        HostMemory(V4, "page_first_direct", 4 * V4.page_bytes, path=host.path) as there,
    ):
        there.flat[17] = 5
        assert host.flat[17] == 5
        with pytest.raises(ConfigError, match="is not .* of shared memory"):
            HostMemory(V4, "page_first_direct", 3 * V4.page_bytes, path=host.path)


def test_memory_is_this_process_s_own_unless_it_is_asked_for_as_shared() -> None:
    with HostMemory(V4, "page_first_direct", 4 * V4.page_bytes) as host:
        assert host.path == ""


def test_streams_of_borrowed_memory_may_lie_in_places_of_their_own() -> None:
    spec = CacheSpec("m", 4, (Stream("a", (0,), (Part("x", 8),)), Stream("b", (0, 1), (Part("x", 4),))))
    rows = {("a", 0): torch.zeros(9, 16, dtype=torch.uint8)}
    rows |= {("b", layer): torch.zeros(9, 16, dtype=torch.uint8) for layer in (0, 1)}
    memory = BorrowedMemory(spec, rows, {"a": (1, 2)})
    assert [part for part, _ in memory.rows["a", 0][1]] == [1, 2]
    assert [part for part, _ in memory.rows["b", 1][1]] == [0]
    with pytest.raises(ConfigError, match="lies in 2 places"):
        BorrowedMemory(spec, rows, {"a": (1,)})
