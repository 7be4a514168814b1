from __future__ import annotations

from typing import Any

import pytest

from tiercel.errors import SpecError
from tiercel.spec import Part, State, Stream, Window


def make_stream(**changes: Any) -> Stream:
    fields: dict[str, Any] = {"name": "kv", "layers": (0, 1), "parts": (Part("value", 16),)}
    return Stream(**{**fields, **changes})


def test_a_row_holds_all_parts_of_all_entries_and_is_padded() -> None:
    stream = make_stream(parts=(Part("value", 576), Part("scale", 8)), tokens_per_entry=4, row_align=576)
    assert stream.row_bytes(256) == 37_440


@pytest.mark.parametrize(
    ("keep", "entries"), [(Window(8), 8), (Window(16), 16), (Window(100), 16), (State(entries=3), 3)]
)
def test_a_tail_row_holds_at_most_one_page_of_a_window_and_all_of_a_state(
    keep: Window | State, entries: int
) -> None:
    assert make_stream(keep=keep).entries_per_row(16) == entries


def test_a_window_shorter_than_a_page_takes_only_its_own_bytes() -> None:
    assert make_stream(keep=Window(8)).row_bytes(256) == 8 * 16


GROUPS = {
    "encoding": "fp8_groups",
    "parts": (Part("value", 16), Part("scale", 4)),
    "rope": 2,
    "group": 4,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "stream.name = ''"),
        ({"name": 5}, "stream.name = 5"),
        ({"layers": ()}, "kv.layers = ()"),
        ({"layers": (-1, 0)}, "kv.layers = (-1, 0)"),
        ({"layers": (2, 1)}, "kv.layers = (2, 1)"),
        ({"layers": (1, 1)}, "kv.layers = (1, 1)"),
        ({"layers": ("a",)}, "kv.layers = ('a',)"),
        ({"parts": ()}, "kv.parts = ()"),
        ({"parts": (Part("value", -16),)}, "kv.value.bytes = -16"),
        ({"parts": (Part("value", 0),)}, "kv.value.bytes = 0"),
        ({"parts": (Part("value", 8), Part("value", 8))}, "two parts have the same name"),
        ({"tokens_per_entry": -4}, "kv.tokens_per_entry = -4"),
        ({"row_align": 0}, "kv.row_align = 0"),
        ({"keep": Window(-128)}, "kv.window = -128"),
        ({"keep": State(entries=0)}, "kv.entries = 0"),
        ({"keep": State(span=-4)}, "kv.span = -4"),
        ({"rope": 8}, "kv.rope = 8: opaque has no such number"),
        ({"group": 8}, "kv.group = 8: opaque has no such number"),
        ({**GROUPS, "group": 0}, "kv.group = 0: must be a positive whole number"),
        ({**GROUPS, "rope": 8}, "kv.rope = 8: does not leave any of 16 B for others"),
        ({**GROUPS, "rope": -2}, "kv.rope = -2"),
        ({**GROUPS, "group": 5}, "kv.group = 5: does not divide 12 channels into at most 4 groups"),
        ({**GROUPS, "group": 2}, "kv.group = 2: does not divide 12 channels into at most 4 groups"),
        ({**GROUPS, "parts": (Part("value", 16),)}, "fp8_groups has two parts: values and scales"),
    ],
)
def test_a_stream_that_can_not_be_stored_is_refused_by_field_and_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as refused:
        make_stream(**changes)
    assert message in str(refused.value)
