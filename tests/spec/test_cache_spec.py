from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiercel.models
from tiercel.errors import SpecError
from tiercel.memory.buffers import frame_rows
from tiercel.spec import PREFIX, CacheSpec, Keep, Part, State, Stream, Window, deepseek_v4
from tiercel.spec.cache_spec import row_step
from tiercel.spec.presets import load
from tiercel.types import Kind


def make_stream(name: str = "kv", **changes: Any) -> Stream:
    fields: dict[str, Any] = {"layers": (0, 1), "parts": (Part("value", 16), Part("scale", 4))}
    return Stream(name, **{**fields, **changes})


def make_spec(*streams: Stream, page_tokens: int = 64, model: str = "m") -> CacheSpec:
    return CacheSpec(model, page_tokens, streams or (make_stream(),))


# Pages and tails


def test_prefix_streams_are_in_pages_and_all_others_in_tails() -> None:
    spec = make_spec(make_stream("a"), make_stream("b", keep=Window(8)), make_stream("c", keep=State()))
    assert [s.name for s in spec.page_streams] == ["a"]
    assert [s.name for s in spec.tail_streams] == ["b", "c"]
    assert spec.page_bytes == 2 * 64 * 20
    assert spec.tail_bytes == 2 * 8 * 20 + 2 * 20


@pytest.mark.parametrize(("window", "pages"), [(1, 1), (64, 1), (65, 1), (66, 2), (128, 2), (1000, 16)])
def test_a_window_longer_than_a_page_needs_the_tails_of_several_boundaries(window: int, pages: int) -> None:
    assert make_spec(make_stream(keep=Window(window))).pages_per_window == pages


def test_a_state_alone_needs_one_boundary_and_pages_alone_need_none() -> None:
    assert make_spec(make_stream(keep=State())).pages_per_window == 1
    assert make_spec().pages_per_window == 0


def test_a_tail_takes_whole_host_pages() -> None:
    spec = make_spec(make_stream("a", parts=(Part("x", 1),)), make_stream("b", keep=State(entries=7)))
    assert (spec.page_bytes, spec.tail_bytes, spec.places_per_tail) == (128, 280, 3)


# Replay


def test_the_windows_of_successive_layers_add_up() -> None:
    assert make_spec(make_stream(layers=(0, 1, 2), keep=Window(32))).replay_tokens == 2 * 31 + 32


def test_layers_that_read_pages_do_not_lengthen_a_replay() -> None:
    spec = make_spec(make_stream("a", layers=(0, 1, 3)), make_stream("b", layers=(2, 4), keep=Window(32)))
    assert spec.replay_tokens == 31 + 32


def test_a_state_adds_its_span_behind_the_windows_before_it() -> None:
    window = make_stream("w", layers=(0, 1), keep=Window(5))
    state = make_stream("s", layers=(2,), keep=State(entries=4, span=9))
    assert make_spec(window, state).replay_tokens == 2 * 4 + 9


def test_a_state_of_the_whole_prefix_can_not_be_replayed() -> None:
    assert make_spec(make_stream("w", keep=Window(5)), make_stream("s", keep=State())).replay_tokens is None


def test_a_spec_without_tails_replays_nothing() -> None:
    assert make_spec().replay_tokens == 0


# Derived specs


def test_a_stage_keeps_global_layer_ids_and_drops_streams_it_does_not_own() -> None:
    spec = make_spec(make_stream("a", layers=(0, 1, 2, 3)), make_stream("b", layers=(0, 1)))
    stage = spec.stage(2, 4)
    assert [(s.name, s.layers) for s in stage.streams] == [("a", (2, 3))]


def test_a_pool_holds_some_of_the_streams_and_the_rest_of_the_declaration_is_the_same() -> None:
    k, v = Stream("k", (0, 1), (Part("x", 4),)), Stream("v", (0, 1), (Part("x", 6),))
    spec = CacheSpec("m", 4, (k, v, Stream("w", (1,), (Part("x", 3),), Window(4))))
    held = spec.only(["w", "v"])
    assert [stream.name for stream in held.streams] == ["v", "w"]
    assert (held.page_bytes, held.tail_bytes) == (spec.bytes_of(v), spec.tail_bytes)
    assert held.replay_tokens == spec.replay_tokens
    with pytest.raises(SpecError, match="'x'.*is not a stream"):
        spec.only(["k", "x"])
    with pytest.raises(SpecError, match="at least one stream"):
        spec.only([])


def test_a_stage_without_bytes_is_refused() -> None:
    with pytest.raises(SpecError, match=r"stage = \(7, 9\)"):
        make_spec().stage(7, 9)


def test_draft_layers_follow_the_targets_in_the_same_page() -> None:
    spec = make_spec().with_draft(make_spec(make_stream(layers=(0,)), model="d"))
    assert [(s.name, s.layers) for s in spec.streams] == [("kv", (0, 1)), ("draft_kv", (2,))]
    assert (spec.model, spec.page_bytes) == ("m+d", 3 * 64 * 20)


def test_a_draft_with_other_pages_is_refused() -> None:
    with pytest.raises(SpecError, match=r"draft.page_tokens = 32: the target has 64"):
        make_spec().with_draft(make_spec(page_tokens=32))


def test_a_second_draft_of_the_same_streams_is_refused() -> None:
    drafted = make_spec().with_draft(make_spec())
    with pytest.raises(SpecError, match=r"streams = 'draft_kv': two streams have the same name"):
        drafted.with_draft(make_spec())


# Refusals


def test_entries_that_do_not_divide_a_page_are_refused() -> None:
    with pytest.raises(SpecError, match=r"kv.tokens_per_entry = 3: .*page_tokens = 64"):
        make_spec(make_stream(tokens_per_entry=3))


def test_streams_with_one_name_are_refused() -> None:
    with pytest.raises(SpecError, match=r"streams = 'kv': two streams have the same name"):
        make_spec(make_stream(), make_stream(layers=(5,)))


@pytest.mark.parametrize("page_tokens", [0, -64, True, 1.5, "64", None])
def test_a_page_size_that_is_no_positive_whole_number_is_refused(page_tokens: Any) -> None:
    with pytest.raises(SpecError) as refused:
        make_spec(page_tokens=page_tokens)
    assert f"page_tokens = {page_tokens!r}" in str(refused.value)


def test_a_spec_without_streams_is_refused() -> None:
    with pytest.raises(SpecError, match=r"streams = \(\)"):
        CacheSpec("m", 64, ())


# Form

STREAM_CHANGES: dict[str, dict[str, Any]] = {
    "name": {"name": "other"},
    "layers": {"layers": (0, 2)},
    "bytes of a part": {"parts": (Part("value", 17), Part("scale", 4))},
    "name of a part": {"parts": (Part("fp16", 16), Part("scale", 4))},
    "order of the parts": {"parts": (Part("scale", 4), Part("value", 16))},
    "window": {"keep": Window(8)},
    "state": {"keep": State(entries=2)},
    "span of a state": {"keep": State(entries=2, span=4)},
    "tokens per entry": {"tokens_per_entry": 4},
    "row alignment": {"row_align": 256},
    "groups": {"encoding": "fp8_groups", "group": 4},
    "channels of a group": {"encoding": "fp8_groups", "group": 8},
    "rope": {"encoding": "fp8_groups", "group": 4, "rope": 2},
}


def test_every_field_changes_the_form() -> None:
    base = make_spec()
    changed = {what: make_spec(replace(make_stream(), **change)) for what, change in STREAM_CHANGES.items()}
    changed["shard"] = replace(base, shard="0/2")
    changed["another shard"] = replace(base, shard="1/2")
    changed["page_tokens"] = replace(base, page_tokens=128)
    changed["number of streams"] = make_spec(make_stream(), make_stream("b"))
    changed["order of streams"] = make_spec(make_stream("b"), make_stream())
    forms = {what: spec.form for what, spec in {"base": base, **changed}.items()}
    assert len(set(forms.values())) == len(forms)
    assert all(CacheSpec.from_dict(spec.to_dict()) == spec for spec in changed.values())


def test_equal_specs_have_one_form_whoever_built_them_and_whatever_they_call_the_model() -> None:
    assert make_spec() is not make_spec()
    assert make_spec().form == make_spec().form == replace(make_spec(), model="another name").form
    assert len(make_spec().form) == 16


# Roles


def test_a_stream_is_found_by_its_role_and_a_layer_whatever_it_is_called() -> None:
    near, far = make_stream("a", layers=(0, 2), role="rows"), make_stream("b", layers=(1,), role="rows")
    spec = make_spec(near, far, make_stream("rows"))
    assert [spec.find("rows", layer) for layer in range(4)] == [near, far, near, None]
    assert spec.find("a", 0) is None


def test_a_draft_keeps_the_roles_of_its_streams_and_is_marked() -> None:
    spec = make_spec(make_stream(role="rows")).with_draft(make_spec(make_stream(layers=(0,), role="rows")))
    found = [spec.find("rows", layer) for layer in (0, 1, 2)]
    assert [(each.name, each.draft) for each in found if each] == [("kv", False)] * 2 + [("draft_kv", True)]


def test_two_streams_of_one_role_in_one_layer_are_refused() -> None:
    streams = make_stream("a", layers=(0, 1), role="rows"), make_stream("b", layers=(1, 2), role="rows")
    with pytest.raises(SpecError, match=r"streams = 'b': a layer has two streams of the role rows"):
        make_spec(*streams)


def test_a_role_says_nothing_of_how_bytes_lie() -> None:
    spec = make_spec(make_stream(role="rows"))
    assert spec == make_spec() and spec.form == make_spec().form and spec.to_dict() == make_spec().to_dict()


def test_how_many_entries_are_read_is_declared_and_says_nothing_of_how_bytes_lie() -> None:
    spec = make_spec(make_stream(selected=64), make_stream("index"))
    assert spec.form == make_spec(make_stream(), make_stream("index")).form
    again = CacheSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert [stream.selected for stream in again.streams] == [64, 0]
    with pytest.raises(SpecError, match=r"kv\.selected = -1"):
        make_stream(selected=-1)


def test_what_is_read_by_selection_may_be_apart_if_it_is_one_of_several_streams_of_a_page() -> None:
    chosen, index, other = make_stream(selected=64), make_stream("index"), make_stream("b", selected=9)
    assert make_spec(chosen, index).apart.second == ("kv",) and make_spec(chosen, index).apart.selective
    for streams in ((index,), (chosen,), (chosen, other, index)):
        assert make_spec(*streams).apart.second == ()
    draft = make_spec(make_stream(selected=64), make_stream("index"))
    assert draft.with_draft(draft).apart.second == ("kv",), "the pages of a draft are whole"


# Declarations

keeps: st.SearchStrategy[Keep] = st.one_of(
    st.just(PREFIX),
    st.builds(Window, st.integers(1, 16).map(lambda n: n * 8)),
    st.builds(State, st.integers(1, 9), st.none() | st.integers(1, 9)),
)
streams = st.builds(
    Stream,
    name=st.text(min_size=1, max_size=5),
    layers=st.sets(st.integers(0, 20), min_size=1).map(lambda ids: tuple(sorted(ids))),
    parts=st.dictionaries(st.text(max_size=3), st.integers(1, 600), min_size=1, max_size=3).map(
        lambda parts: tuple(Part(name, size) for name, size in parts.items())
    ),
    keep=keeps,
    tokens_per_entry=st.sampled_from([1, 2, 4, 8]),
    row_align=st.sampled_from([1, 16, 576]),
)
specs = st.builds(
    CacheSpec,
    model=st.text(),
    page_tokens=st.sampled_from([8, 64, 256]),
    streams=st.lists(streams, min_size=1, max_size=4, unique_by=lambda s: s.name).map(tuple),
    shard=st.text(max_size=3),
)


@given(specs)
def test_a_declaration_comes_back_from_json_as_the_same_spec(spec: CacheSpec) -> None:
    again = CacheSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert again.form == spec.form


@given(specs, st.integers(1, 20))
def test_two_stages_hold_the_bytes_of_the_whole(spec: CacheSpec, cut: int) -> None:
    sides = [
        (first, last) for first, last in ((0, cut), (cut, 21)) if set(range(first, last)) & {*spec.layers}
    ]
    stages = [spec.stage(first, last) for first, last in sides]
    assert sum(stage.page_bytes for stage in stages) == spec.page_bytes
    assert sum(stage.tail_bytes for stage in stages) == spec.tail_bytes


def declare(**changes: Any) -> dict[str, Any]:
    stream = {"name": "kv", "layers": [0], "parts": {"value": 4}, **changes}
    return {"model": "m", "page_tokens": 64, "streams": [stream]}


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ({"model": "m", "page_tokens": 64}, "spec.streams = None: is missing"),
        ({"model": 5, "page_tokens": 64, "streams": declare()["streams"]}, "model = 5"),
        ({**declare(), "pages": 3}, "spec.pages = 3: is not a field"),
        ({**declare(), "streams": 43}, "spec.streams = 43"),
        ({**declare(), "streams": ["kv"]}, "streams[0] = 'kv'"),
        (declare(layers=43), "streams[0].layers = 43"),
        (declare(layers=["0"]), "kv.layers = ('0',)"),
        (declare(parts=[4]), "streams[0].parts = [4]"),
        (declare(parts={"value": -4}), "kv.value.bytes = -4"),
        (declare(kepp="prefix"), "streams[0].kepp = 'prefix'"),
        (declare(keep="suffix"), "streams[0].keep = 'suffix'"),
        (declare(keep={"window": "8"}), "streams[0].keep = {'window': '8'}"),
        (declare(keep={"state": 1, "span": "4"}), "kv.span = '4'"),
        (declare(tokens_per_entry="4"), "kv.tokens_per_entry = '4'"),
    ],
)
def test_a_declaration_that_can_not_be_read_is_refused_by_field_and_value(
    declaration: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as refused:
        CacheSpec.from_dict(declaration)
    assert message in str(refused.value)


def test_a_stage_replays_what_the_whole_model_needs() -> None:
    whole = make_spec(make_stream(layers=(0, 1, 2, 3), keep=Window(9)))
    assert (
        whole.replay_tokens
        == whole.stage(2, 3).replay_tokens
        == whole.stage(1, 4).stage(3, 4).replay_tokens
        == 33
    )


def test_a_draft_is_added_before_stages_are_taken() -> None:
    spec = make_spec(make_stream())
    with pytest.raises(SpecError, match="draft"):
        spec.stage(0, 1).with_draft(spec)


def test_every_stream_is_of_one_kind_and_sizes_are_told_by_kind():
    spec = load("deepseek-v4-flash")
    assert sum((spec.streams_of(kind) for kind in Kind), ()) == spec.page_streams + spec.tail_streams
    assert [spec.item_bytes(kind) for kind in Kind] == [spec.page_bytes, spec.tail_bytes]
    assert [spec.places_of(kind) for kind in Kind] == [1, spec.places_per_tail]
    assert [kind.plural for kind in Kind] == ["pages", "tails"]


# A second pool of the device


@pytest.mark.parametrize(
    ("model", "unit", "frame", "tail", "most"),
    [("deepseek-v4-flash", 262_080, 4, 14, 0.051), ("deepseek-v4-pro", 374_400, 4, 14, 0.048)],
)
def test_a_frame_of_two_pools_has_the_units_that_leave_the_least_unused(model, unit, frame, tail, most):
    spec = replace(load(model), second=("c4",))
    assert (spec.unit_bytes, spec.frame_units, spec.units_per_tail) == (unit, frame, tail)
    assert spec.page_bytes < spec.frame_bytes < spec.page_bytes * (1 + most)


TINY = json.loads((Path(tiercel.models.__file__).parent / "tiny_v4" / "config.json").read_text())


@pytest.mark.parametrize(
    ("spec", "step"),
    [
        (load("deepseek-v4-flash"), 37_440),
        (load("deepseek-v4-pro"), 37_440),
        (deepseek_v4(TINY, 128, "fp32"), 1_024),
    ],
    ids=["flash", "pro", "tiny"],
)
def test_rows_of_the_second_pool_begin_at_multiples_of_a_step(spec, step):
    spec = replace(spec, second=("c4",))
    stream = spec.stream("c4")
    assert row_step(spec, stream) == step
    assert spec.unit_bytes % step == spec.row_bytes(stream) % step == spec.frame_bytes % step == 0
    assert all(piece.offset % step == 0 for _, ((_, piece),) in rows_of(spec, "c4"))


def test_a_step_suits_every_row_of_a_second_pool_with_several_streams():
    spec = replace(load("deepseek-v4-flash"), second=("c4_index", "c4"))
    step = row_step(spec, spec.stream("c4"))
    assert step == row_step(spec, spec.stream("c4_index"))
    for name in spec.second:
        assert all(
            piece.offset % step == piece.stride % step == 0 for _, ((_, piece),) in rows_of(spec, name)
        )


def rows_of(spec, name):
    return [(key, pieces) for key, pieces in frame_rows(spec).items() if key[0] == name]


def test_with_one_pool_a_unit_is_a_page():
    spec = load("deepseek-v4-flash")
    assert (spec.unit_bytes, spec.frame_units, spec.units_per_tail) == (spec.page_bytes, 1, 4)
    assert len(spec.pools) == 1 and {spec.pool_of(stream) for stream in spec.page_streams} == {0}


def test_a_second_pool_changes_no_stored_byte():
    spec = load("deepseek-v4-flash")
    apart = replace(spec, second=("c4",))
    assert apart.form == spec.form and apart.grains(Kind.PAGE) == spec.grains(Kind.PAGE)
    assert [stream.name for stream in apart.pools[1]] == ["c4"]
    assert apart.pool_of(apart.stream("c4")) == 1


@pytest.mark.parametrize("second", [("window",), ("nothing",), ("c4", "c4_index", "c128")])
def test_a_second_pool_has_some_streams_of_a_page_and_not_all(second):
    with pytest.raises(SpecError, match="second"):
        replace(load("deepseek-v4-flash"), second=second)


def test_a_stage_without_streams_of_one_pool_has_one_pool():
    spec = replace(load("deepseek-v4-flash"), second=("c4",))
    assert spec.stage(3, 4).second == () and spec.stage(2, 4).second == ("c4",)
    assert spec.only(["c4", "window"]).second == ()


@pytest.mark.parametrize("apart", [False, True], ids=["one pool", "two pools"])
@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_place_has_one_number_in_all_stages(name: str, stages: int, apart: bool) -> None:
    """A page and a tail take as many units of a stage as of the whole model, and little is left unused."""
    spec = load(name).apart if apart else load(name)
    ends = [spec.layers[-1] * i // stages for i in range(stages)] + [spec.layers[-1] + 1]
    cut = [spec.stage(*ends) for ends in pairwise(ends)]
    for stage in cut:
        first, *second = (sum(map(stage.bytes_of, streams)) for streams in stage.pools)
        assert stage.frame_units == spec.frame_units
        assert first <= stage.unit_bytes and sum(second) <= stage.unit_bytes * (spec.frame_units - 1)
        assert stage.units_per_tail <= spec.units_per_tail
    assert sum(stage.unit_bytes for stage in cut) <= spec.unit_bytes * 1.05
