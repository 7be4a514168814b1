from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.memory.specs import FLASH, SPECS
from tiercel.config import LAYOUTS as CONFIGURED
from tiercel.errors import ConfigError
from tiercel.memory.layout import LAYOUTS, Layout, Range, joined, make_layout, pour_tails
from tiercel.spec import Part, Stream
from tiercel.types import Kind

PAGE_TOKENS = 4
ALL = tuple(LAYOUTS)


@st.composite
def page_streams(draw: st.DrawFn) -> list[Stream]:
    count = draw(st.integers(1, 3))
    return [
        Stream(
            name=f"s{i}",
            layers=tuple(sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=4)))),
            parts=tuple(
                Part(f"p{j}", size)
                for j, size in enumerate(draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
            ),
            tokens_per_entry=draw(st.sampled_from([1, 2, 4])),
            row_align=draw(st.integers(1, 6)),
        )
        for i in range(count)
    ]


layouts = st.builds(
    make_layout,
    st.sampled_from(ALL),
    page_streams(),
    st.just(PAGE_TOKENS),
    places=st.integers(1, 4),
    second=st.sampled_from([(), ("s0",), ("s1", "s2")]),
)


def bytes_of(ranges: Iterable[Range]) -> list[int]:
    return [byte for offset, size in ranges for byte in range(offset, offset + size)]


def rows_of(layout: Layout, place: int) -> list[list[int]]:
    """The byte numbers of each row of one place, in record order."""
    return [
        bytes_of(piece.at(place) for _, piece in layout.rows[stream.name, layer])
        for layer in range(6)
        for stream in layout.streams
        if layer in stream.layers
    ]


@given(layouts)
def test_regions_never_overlap_and_cover_every_byte(layout: Layout) -> None:
    seen = [byte for place in range(layout.places) for row in rows_of(layout, place) for byte in row]
    assert sorted(seen) == list(range(layout.bytes_total))


@given(layouts)
def test_the_ranges_of_a_place_are_the_bytes_of_its_rows(layout: Layout) -> None:
    for place in range(layout.places):
        rows = [byte for row in rows_of(layout, place) for byte in row]
        ranges = layout.place_ranges(place)
        assert joined(ranges) == ranges
        assert bytes_of(ranges) == rows
        if layout.name == "page_first_direct":
            whole = (Range(place * layout.place_bytes, layout.place_bytes),)
            assert layout.place_ranges(place, Kind.TAIL) == whole
            assert layout.second or ranges == whole


@given(layouts)
def test_the_rows_of_a_pool_lie_together_in_their_own_order(layout: Layout) -> None:
    if layout.name != "page_first_direct":
        return
    starts = {
        apart: [
            piece.offset
            for (name, _), ((_, piece),) in layout.rows.items()
            if (name in layout.second) is apart
        ]
        for apart in (False, True)
    }
    assert starts[False] + starts[True] == sorted(starts[False] + starts[True])


@given(layouts, st.data())
def test_a_cut_is_that_part_of_the_place(layout: Layout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.place_bytes))
    size = data.draw(st.integers(0, layout.place_bytes - start))
    place = data.draw(st.integers(0, layout.places - 1))
    whole = bytes_of(layout.place_ranges(place, Kind.TAIL))
    assert bytes_of(piece.at(place) for piece in layout.cut(start, size)) == whole[start : start + size]


@given(layouts, page_streams(), st.data())
def test_a_tail_is_poured_over_its_host_pages_in_order(
    layout: Layout, tail_streams: list[Stream], data: st.DataObject
) -> None:
    tail_bytes = sum(len(stream.layers) * stream.row_bytes(PAGE_TOKENS) for stream in tail_streams)
    needed = -(-tail_bytes // layout.place_bytes)
    host = make_layout(layout.name, layout.streams, PAGE_TOKENS, needed + 2, layout.second)
    rows = pour_tails(host, tail_streams, PAGE_TOKENS)
    places = data.draw(st.permutations(range(needed + 2)))[:needed]
    poured = [
        byte
        for layer in range(6)
        for stream in tail_streams
        for index, piece in rows.get((stream.name, layer), ())
        for byte in bytes_of([piece.at(places[index])])
    ]
    pages = [byte for place in places for byte in bytes_of(host.place_ranges(place, Kind.TAIL))]
    assert poured == pages[:tail_bytes]


K = Stream("k", (0, 1), (Part("bf16", 10),))
V = Stream("v", (1,), (Part("bf16", 7),))


def test_the_drawing_of_the_layouts() -> None:
    """k0 k1 v1 of places 0 and 1, two entries each: 20, 20 and 14 bytes a row."""

    def starts(name: str, place: int, second: tuple[str, ...] = ()) -> list[int]:
        layout = make_layout(name, (K, V), 2, 2, second)
        rows = [layout.rows[name] for name in (("k", 0), ("k", 1), ("v", 1))]
        return [piece.at(place).offset for ((_, piece),) in rows]

    assert starts("layer_first", 0) == [0, 40, 80]
    assert starts("layer_first", 1) == [20, 60, 94]
    assert starts("page_first_direct", 1) == starts("page_first", 1) == [54, 74, 94]
    assert starts("page_first_direct", 0, ("k",)) == [14, 34, 0]


def test_consecutive_layers_of_a_page_lie_together() -> None:
    first, both = Stream("first", (0, 2), (Part("a", 3),)), Stream("both", (0, 1, 2), (Part("b", 5),))
    layout = make_layout("page_first_direct", (first, both), 1, 4)
    assert [(name, piece.offset) for name, ((_, piece),) in layout.rows.items()] == [
        (("first", 0), 0),
        (("both", 0), 3),
        (("both", 1), 8),
        (("first", 2), 13),
        (("both", 2), 16),
    ]


def test_a_flash_page_is_one_record_of_998208_bytes() -> None:
    layout = make_layout("page_first_direct", FLASH.page_streams, FLASH.page_tokens, 10)
    assert layout.place_ranges(3) == (Range(3 * 998_208, 998_208),)


def test_with_c4_apart_a_flash_page_is_two_ranges_and_its_record_takes_of_both_in_turn() -> None:
    layout = make_layout("page_first_direct", FLASH.page_streams, FLASH.page_tokens, 10, ("c4",))
    first, start = 211_968, 3 * 998_208
    ranges = layout.place_ranges(3)
    c4 = [each for each in ranges if each.offset >= start + first]
    assert ranges[:2] == (Range(start + first, 37_440), Range(start, 8_448 + 1_728))
    assert c4 == [Range(start + first + 37_440 * i, 37_440) for i in range(21)]
    assert layout.place_ranges(3, Kind.TAIL) == (Range(start, 998_208),)
    one = make_layout("page_first_direct", FLASH.page_streams, FLASH.page_tokens, 10)
    assert list(layout.rows) == list(one.rows), "record order"


def test_a_flash_page_is_a_range_for_each_row_layer_first() -> None:
    layout = make_layout("layer_first", FLASH.page_streams, FLASH.page_tokens, 10)
    assert [size for _, size in layout.place_ranges(3)] == [37_440, 8_448, 1_728] * 20 + [37_440, 8_448]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_place_takes_the_bytes_the_spec_says(spec, name: str) -> None:
    layout = make_layout(name, spec.page_streams, spec.page_tokens, 5)
    assert (layout.place_bytes, layout.bytes_total) == (spec.page_bytes, 5 * spec.page_bytes)


def test_places_and_layers_that_do_not_exist_are_bugs() -> None:
    layout = make_layout("page_first_direct", (K, V), 2, 2)
    for wrong in (
        lambda: layout.place_ranges(2),
        lambda: layout.cut(50, 5),
    ):
        with pytest.raises(AssertionError):
            wrong()


def test_the_configuration_knows_every_layout() -> None:
    assert set(LAYOUTS) == set(CONFIGURED)
    with pytest.raises(ConfigError, match="layer_last"):
        make_layout("layer_last", (K,), 2, 1)
