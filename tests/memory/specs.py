"""Declarations of every kind, small enough for thousands of round trips."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

from tiercel.spec import (
    CacheSpec,
    Heads,
    Recurrence,
    cache_spec,
    deepseek_v4,
    deepseek_v4_mtp,
    load,
    mha,
    mla,
    mla_indexer,
    recurrent,
    sliding_window,
)

SMALL_V4 = {
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "index_head_dim": 8,
    "sliding_window": 8,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
}
V4 = deepseek_v4(SMALL_V4, page_tokens=128)
FLASH = load("deepseek-v4-flash")


def in_records(spec: CacheSpec) -> CacheSpec:
    """The same, cut into several records as large models are."""
    own = replace(spec)
    with patch.object(cache_spec, "GRAIN_BYTES_LEAST", 1):
        assert len(own.cut) > 1, "it remembers the cut"
    return own


HEADS = Heads(kv_heads=2, head_dim=3)

SPECS: dict[str, CacheSpec] = {
    "mha": mha("mha", 4, 3, kv_heads=2, head_dim=4),
    "mha, values narrower than keys": mha("wide", 4, 2, kv_heads=1, head_dim=6, v_head_dim=2),
    "mha, one token per page": mha("single", 1, 2, kv_heads=1, head_dim=3),
    "mla": mla("mla", 4, 3, kv_lora_rank=8, rope_dim=2),
    "mla with an indexer": mla_indexer("dsa", 4, 2, kv_lora_rank=8, rope_dim=2, index_head_dim=6),
    "v4": V4,
    "v4 in records": in_records(V4),
    "v4 with its draft": V4.with_draft(deepseek_v4_mtp(SMALL_V4, page_tokens=128)),
    "v4, one layer": V4.stage(2, 3),
    "flash, one c4 layer": FLASH.stage(2, 3),
    "flash, one c128 layer": FLASH.stage(3, 4),
    "window longer than a page": sliding_window(
        "long", 4, full_layers=(0, 3), window_layers=(1, 2), window=10, heads=HEADS
    ),
    "window shorter than a page": sliding_window(
        "short", 8, full_layers=(1,), window_layers=(0, 2), window=3, heads=HEADS
    ),
    "windows only": sliding_window("bare", 4, full_layers=(), window_layers=(5, 6), window=4, heads=HEADS),
    "states": recurrent(
        "mamba",
        4,
        attention_layers=(1, 3),
        recurrent_layers=(0, 2),
        heads=HEADS,
        recurrence=Recurrence(conv_channels=5, conv_kernel=4, temporal_values=37),
    ),
    "ratio two": CacheSpec.from_dict(
        {
            "model": "made-up",
            "page_tokens": 8,
            "streams": [
                {"name": "half", "layers": [0, 2, 7], "parts": {"value": 5}, "tokens_per_entry": 2},
                {"name": "packed", "layers": [2], "parts": {"value": 3, "scale": 1}, "row_align": 7},
                {"name": "open", "layers": [0, 7], "parts": {"sum": 9}, "keep": {"state": 2, "span": 2}},
            ],
        }
    ),
}
