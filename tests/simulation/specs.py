"""Small declarations of every kind, so that a page is a few hundred bytes and a test a few milliseconds."""

from __future__ import annotations

from dataclasses import replace

from tests.memory.specs import in_records
from tiercel.spec import CacheSpec, Part, State, Stream, Window

K = Stream("k", (0, 2), (Part("bf16", 4),))
V = Stream("v", (0, 2), (Part("bf16", 6),))
PACKED = Stream("packed", (1, 2), (Part("value", 5), Part("scale", 2)), tokens_per_entry=2, row_align=5)
RATIO_TWO = CacheSpec.from_dict(
    {
        "model": "made-up",
        "page_tokens": 4,
        "streams": [
            {"name": "half", "layers": [0, 1], "parts": {"value": 3}, "tokens_per_entry": 2},
            {"name": "recent", "layers": [1], "parts": {"value": 2}, "keep": {"window": 4}},
        ],
    }
)

SPECS = {
    "full attention": CacheSpec("mha", 4, (K, V)),
    "packed": CacheSpec("packed", 4, (PACKED,)),
    "short window": CacheSpec("short", 4, (K, Stream("window", (1,), (Part("bf16", 7),), Window(3)))),
    "long window": CacheSpec("long", 4, (V, Stream("window", (1, 3), (Part("bf16", 3),), Window(10)))),
    "recurrent": CacheSpec("state", 4, (K, Stream("conv", (1,), (Part("fp32", 50),), State()))),
    "compressed": CacheSpec(
        "v4",
        4,
        (
            PACKED,
            Stream("window", (0, 1, 2), (Part("value", 4), Part("scale", 1)), Window(4), row_align=4),
            Stream("state", (1, 2), (Part("fp32", 8),), State(2, span=2)),
        ),
    ),
    "ratio two": RATIO_TWO,
    "with a draft": CacheSpec("target", 4, (K,)).with_draft(
        CacheSpec("mtp", 4, (Stream("window", (0,), (Part("x", 9),), Window(4)),))
    ),
    "last stage": CacheSpec(
        "staged", 4, (K, PACKED, Stream("window", (0, 2), (Part("x", 3),), Window(2)))
    ).stage(2, 3),
}
SPECS["in records"] = in_records(SPECS["compressed"])
SPECS["two pools"] = CacheSpec(
    "sparse",
    4,
    (
        K,
        Stream("v", (0, 2), (Part("bf16", 14), Part("scale", 6)), selected=5),
        PACKED,
        Stream("window", (0, 2), (Part("x", 40),), Window(4)),
    ),
    second=("v",),
)
SPECS["two pools, even"] = CacheSpec(
    "even",
    4,
    (
        replace(K, selected=3),
        V,
        Stream("state", (1,), (Part("fp32", 200),), State()),
    ),
    second=("k",),
)
SELECTIVE = ("two pools", "two pools, even")
"""Those whose pages may be sparse."""
