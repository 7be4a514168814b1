from __future__ import annotations

import json

import pytest

from tiercel.errors import ConfigError
from tiercel.spec import CacheSpec, Part, State, Stream, Window, capacity_of, load

SIZES = ("row", "page", "tail", "token")


def fit(bytes: int, pages: int, tokens: int, tails: int) -> dict[str, int]:
    return {"bytes": bytes, "pages": pages, "tokens": tokens, "tails": tails}


def make_spec() -> CacheSpec:
    """Pages of 80 B, tails of 90 B."""
    parts = (Part("value", 5),)
    return CacheSpec(
        "m",
        8,
        (
            Stream("kv", (0, 1), parts),
            Stream("window", (2, 3, 4, 5), parts, Window(4)),
            Stream("state", (6,), (Part("x", 10),), State()),
        ),
    )


def test_each_stream_is_in_pages_or_in_tails() -> None:
    streams = capacity_of(make_spec())["streams"]
    assert list(streams[0]) == [
        "name",
        "keep",
        "layers",
        "selected",
        "tokens_per_entry",
        *(f"bytes_per_{x}" for x in SIZES),
    ]
    assert [tuple(stream.values()) for stream in streams] == [
        ("kv", "prefix", 2, 0, 1, 40, 80, 0, 10),
        ("window", "window 4", 4, 0, 1, 20, 0, 80, 0),
        ("state", "state 1", 1, 0, 1, 10, 0, 10, 0),
    ]


def test_totals_are_those_of_the_spec() -> None:
    table = capacity_of(load("deepseek-v4-flash"))
    assert (table["bytes_per_page"], table["bytes_per_tail"], table["bytes_per_token"]) == (
        998_208,
        3_649_920,
        3_899,
    )
    assert (table["replay_tokens"], table["pages_per_window"]) == (5_462, 1)
    assert sum(s["bytes_per_page"] for s in table["streams"]) == table["bytes_per_page"]
    assert sum(s["bytes_per_tail"] for s in table["streams"]) == table["bytes_per_tail"]


def test_only_whole_pages_hold_tokens() -> None:
    table = capacity_of(make_spec(), device_bytes=80 * 3 + 79, host_bytes=79)
    assert table["device"] == fit(bytes=319, pages=3, tokens=24, tails=1)
    assert table["host"] == fit(bytes=79, pages=0, tokens=0, tails=0)


def test_a_tail_takes_whole_pages() -> None:
    table = capacity_of(make_spec(), device_bytes=360, host_bytes=360)
    assert table["device"] is not None
    assert table["host"] is not None
    assert (table["device"]["tails"], table["host"]["tails"]) == (2, 2)


def test_memory_that_was_not_given_is_not_guessed() -> None:
    table = capacity_of(make_spec())
    assert table["device"] is None
    assert table["host"] is None


def test_streams_without_pages_or_without_tails_fit_in_any_memory() -> None:
    pages, tails = make_spec().stage(0, 2), make_spec().stage(2, 7)
    assert capacity_of(pages, host_bytes=800)["host"] == fit(bytes=800, pages=10, tokens=80, tails=0)
    assert capacity_of(tails, host_bytes=900)["host"] == fit(bytes=900, pages=0, tokens=0, tails=10)


def test_negative_memory_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="host_bytes = -1"):
        capacity_of(make_spec(), host_bytes=-1)


def test_the_table_can_be_written_as_json() -> None:
    data = json.loads(json.dumps(capacity_of(make_spec(), device_bytes=160)))
    assert data["device"] == {"bytes": 160, "pages": 2, "tokens": 16, "tails": 1}
    assert data["streams"][0]["bytes_per_page"] == 80
    assert bytes.fromhex(data["form"]) == make_spec().form
