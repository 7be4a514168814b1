"""Goal: the cut of a page into records follows from the model alone. Method: real and made-up models, whole
and in stages; golden values, so that no change of stored names goes unnoticed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.memory.specs import FLASH, SPECS, in_records
from tiercel.memory.layout import record_rows
from tiercel.spec import CacheSpec, Part, Stream, Window, load
from tiercel.spec.cache_spec import GRAIN_BYTES_LEAST, GRAINS_MOST
from tiercel.storage.record import ALIGN_LEAST
from tiercel.transfer.mover import forms_of
from tiercel.types import Kind

PAGE_KEY = bytes(range(32))
FLASH_STARTS = [
    *("31a95cc1", "3192fdd6", "31cad828", "313234b3"),
    *("3209152a", "326e0731", "32510158", "324ba9fe"),
]
"""The first bytes of the keys of a page's and of a tail's records. If they change, every user's store is
empty: raise the version of the format, and say so in the changelog."""


def starts_of(spec: CacheSpec) -> list[str]:
    return [form.key(PAGE_KEY)[:4].hex() for forms in forms_of(spec, ALIGN_LEAST).values() for form in forms]


def test_the_keys_of_v4_flash_are_what_they_were() -> None:
    assert starts_of(FLASH) == FLASH_STARTS
    assert FLASH.cut == (range(12), range(12, 22), range(22, 33), range(33, 43))
    assert [grain.bytes for grain in FLASH.grains(Kind.PAGE)] == [238_080, 238_080, 283_968, 238_080]


def test_another_process_computes_the_same_keys() -> None:
    code = """
import json
from tests.spec.test_grains import starts_of
from tiercel.spec import CacheSpec, load
flash = load("deepseek-v4-flash")
print(json.dumps([starts_of(flash), starts_of(CacheSpec.from_dict(flash.to_dict()))]))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(told.stdout) == [FLASH_STARTS, FLASH_STARTS]


def test_a_stage_of_whole_grains_has_the_records_of_the_whole_model() -> None:
    first, last = FLASH.stage(0, 22), FLASH.stage(22, 43)
    for kind in Kind:
        together = [*first.grains(kind), *last.grains(kind)]
        assert together == list(FLASH.grains(kind))
    assert sorted(starts_of(first) + starts_of(last)) == sorted(FLASH_STARTS)


def test_a_stage_that_holds_a_part_of_a_grain_has_a_record_of_its_own() -> None:
    part = FLASH.stage(0, 20)
    whole = {grain.form for grain in FLASH.grains(Kind.PAGE)}
    own = [grain.form for grain in part.grains(Kind.PAGE)]
    assert own[0] in whole and own[1] not in whole
    assert [grain.number for grain in part.grains(Kind.PAGE)] == [0, 1]


def test_a_draft_that_stores_no_pages_leaves_the_records_of_pages_as_they_are() -> None:
    with_draft = load("deepseek-v4-flash", draft=True)
    assert with_draft.grains(Kind.PAGE) == FLASH.grains(Kind.PAGE)
    assert with_draft.grains(Kind.TAIL)[:-1] == FLASH.grains(Kind.TAIL)[:-1]
    assert with_draft.grains(Kind.TAIL)[-1].form != FLASH.grains(Kind.TAIL)[-1].form


def test_small_models_are_not_cut() -> None:
    row = Stream("kv", tuple(range(8)), (Part("value", GRAIN_BYTES_LEAST // 8 - 1),))
    assert len(CacheSpec("small", 1, (row,)).cut) == 1
    assert len(CacheSpec("small", 4, (row,)).cut) == 3
    assert len(CacheSpec("large", 64, (row,)).cut) == GRAINS_MOST


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.whole is None])
def test_the_grains_of_an_item_together_are_its_bytes(name, kind) -> None:
    """Row by row, in the order of the item."""
    several = name not in ("mha, one token per page", "window shorter than a page")
    spec = in_records(SPECS[name]) if several and len(SPECS[name].layers) > 1 else SPECS[name]
    whole = [
        (stream.name, layer) for stream, layer, _ in record_rows(spec.streams_of(kind), spec.page_tokens)
    ]
    parts = [
        (stream.name, layer)
        for grain in spec.grains(kind)
        for stream, layer, _ in record_rows(grain.streams, spec.page_tokens)
    ]
    assert parts == whole
    assert sum(grain.bytes for grain in spec.grains(kind)) == spec.item_bytes(kind)


layers = st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True).map(sorted).map(tuple)


@given(st.lists(st.tuples(layers, st.integers(1, 2 * GRAIN_BYTES_LEAST)), min_size=1, max_size=4), layers)
def test_any_cut_has_every_layer_once_and_no_empty_range(rows, windows) -> None:
    streams = [Stream(f"s{n}", own, (Part("x", size),)) for n, (own, size) in enumerate(rows)]
    spec = CacheSpec("any", 1, (*streams, Stream("w", windows, (Part("x", 3),), Window(1))))
    assert [layer for own in spec.cut for layer in own] == list(range(spec.layers[-1] + 1))
    assert 1 <= len(spec.cut) <= GRAINS_MOST and all(spec.cut)
    assert len(spec.cut) <= max(1, spec.page_bytes // GRAIN_BYTES_LEAST)


def test_a_stage_that_stores_only_tails_has_one_record_without_bytes_for_a_page() -> None:
    spec = FLASH.stage(0, 2)
    (grain,) = spec.grains(Kind.PAGE)
    assert (grain.bytes, grain.streams, grain.form) == (0, (), spec.form)
