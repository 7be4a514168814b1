from __future__ import annotations

from collections.abc import Callable

import pytest

from tiercel.errors import SpecError
from tiercel.spec import (
    CacheSpec,
    Heads,
    Recurrence,
    State,
    Window,
    mha,
    mla,
    mla_indexer,
    recurrent,
    sliding_window,
)

HEADS = Heads(kv_heads=8, head_dim=64)
RECURRENCE = Recurrence(conv_channels=8192, conv_kernel=4, temporal_values=32 * 128 * 128)


def make_hybrid(window: int = 128, page_tokens: int = 64) -> CacheSpec:
    return sliding_window(
        "m", page_tokens, full_layers=(1, 3), window_layers=(0, 2, 4), window=window, heads=HEADS
    )


def make_recurrent() -> CacheSpec:
    return recurrent(
        "m", 64, attention_layers=(3,), recurrent_layers=(0, 1, 2), heads=HEADS, recurrence=RECURRENCE
    )


def test_llama_70b_takes_327_680_bytes_per_token() -> None:
    assert mha("llama", 64, 80, kv_heads=8, head_dim=128).bytes_per_token == 327_680


def test_keys_and_values_may_differ_in_width() -> None:
    spec = mha("mimo", 64, 48, kv_heads=4, head_dim=192, v_head_dim=128, dtype="bf16")
    assert spec.bytes_per_token == 4 * (192 + 128) * 48 * 2
    assert spec.bytes_of(spec.stream("k")) == 64 * 4 * 192 * 48 * 2
    assert spec.bytes_of(spec.stream("v")) == 64 * 4 * 128 * 48 * 2


def test_layers_are_a_number_or_the_ids_themselves() -> None:
    assert mha("m", 64, 3, 1, 8).layers == (0, 1, 2)
    assert mha("m", 64, (4, 7), 1, 8).layers == (4, 7)


def test_types_of_one_width_do_not_share_a_form() -> None:
    bf16, fp16 = (mha("m", 64, 2, 1, 8, dtype=dtype) for dtype in ("bf16", "fp16"))
    assert bf16.page_bytes == fp16.page_bytes
    assert bf16.form != fp16.form


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 1152), ("fp8", 656), ("fp32", 2304)])
def test_a_latent_of_512_and_64_channels(dtype: str, size: int) -> None:
    assert mla("v3", 64, 61, kv_lora_rank=512, rope_dim=64, dtype=dtype).bytes_per_token == 61 * size


def test_an_indexer_adds_132_bytes_per_token_and_layer() -> None:
    spec = mla_indexer("v32", 64, 61, 512, 64, index_head_dim=128, dtype="fp8")
    assert spec.bytes_per_token == 48_068
    assert spec.row_bytes(spec.stream("index")) == 8_448


def test_window_layers_are_in_tails_and_full_layers_in_pages() -> None:
    spec = make_hybrid()
    assert [s.name for s in spec.page_streams] == ["k", "v"]
    assert [s.name for s in spec.tail_streams] == ["window_k", "window_v"]
    assert spec.stream("window_v").keep == Window(128)
    assert spec.layers == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("window", "rows", "boundaries"), [(32, 32, 1), (64, 64, 1), (65, 64, 1), (128, 64, 2), (130, 64, 3)]
)
def test_a_tail_keeps_a_short_window_whole_and_a_long_one_page_by_page(
    window: int, rows: int, boundaries: int
) -> None:
    spec = make_hybrid(window)
    assert spec.tail_bytes == rows * 2 * 8 * 64 * 3 * 2
    assert spec.pages_per_window == boundaries
    replayed_last = rows + 64 * (boundaries - 1)  # the rows of all tails that a resume reads
    assert spec.replay_tokens == 2 * (window - 1) + replayed_last


def test_a_model_of_window_layers_only_has_tails_and_no_pages() -> None:
    spec = sliding_window("m", 64, full_layers=(), window_layers=(0, 1), window=16, heads=HEADS)
    assert spec.page_bytes == 0
    assert spec.tail_bytes == 2 * 2 * 16 * 8 * 64 * 2


def test_recurrent_layers_keep_one_state_of_the_whole_prefix() -> None:
    spec = make_recurrent()
    assert spec.stream("temporal").keep == spec.stream("conv").keep == State(entries=1, span=None)
    assert spec.bytes_of(spec.stream("conv")) == 3 * 8192 * 3 * 2
    assert spec.bytes_of(spec.stream("temporal")) == 3 * 32 * 128 * 128 * 4
    assert spec.page_bytes == 64 * 2 * 8 * 64 * 2
    assert spec.replay_tokens is None


def test_a_draft_that_reads_the_whole_prefix_lives_in_the_pages_of_its_target() -> None:
    target = make_hybrid()
    spec = target.with_draft(mha("draft", 64, 1, kv_heads=2, head_dim=64))
    assert [(s.name, s.layers) for s in spec.page_streams[2:]] == [("draft_k", (5,)), ("draft_v", (5,))]
    assert spec.page_bytes == target.page_bytes + 64 * 2 * 2 * 64 * 2
    assert spec.tail_streams == target.tail_streams


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: mha("m", 64, 2, -8, 64), "kv_heads = -8"),
        (lambda: mha("m", 64, 2, 8, 0), "head_dim = 0"),
        (lambda: mha("m", 64, 2, 8, 64, v_head_dim=-1), "v_head_dim = -1"),
        (lambda: mha("m", 64, 2, 8, 64, dtype="int3"), "dtype = 'int3'"),
        (lambda: mha("m", 64, -2, 8, 64), "layers = -2"),
        (lambda: mha("m", 64, (), 8, 64), "k.layers = ()"),
        (lambda: mha("m", -64, 2, 8, 64), "page_tokens = -64"),
        (lambda: mla("m", 64, 2, -512, 64), "kv_lora_rank = -512"),
        (lambda: mla("m", 64, 2, 512, -64), "rope_dim = -64"),
        (lambda: mla_indexer("m", 64, 2, 512, 64, -128), "index_head_dim = -128"),
        (lambda: make_hybrid(window=-1), "window_k.window = -1"),
        (
            lambda: sliding_window("m", 64, full_layers=(0,), window_layers=(), window=8, heads=HEADS),
            "window_k.layers = ()",
        ),
        (lambda: Recurrence(conv_channels=-1, conv_kernel=4, temporal_values=1), "conv_channels = -1"),
        (lambda: Recurrence(conv_channels=1, conv_kernel=4, temporal_values=0), "temporal_values = 0"),
        (lambda: mha("m", 64, 0, 8, 64), "layers = 0"),
    ],
)
def test_sizes_that_can_not_be_stored_are_refused_by_field_and_value(
    build: Callable[[], object], message: str
) -> None:
    with pytest.raises(SpecError) as refused:
        build()
    assert message in str(refused.value)


def test_layers_of_large_pages_arrive_evenly_and_the_last_group_is_small():
    groups = mha("qwen3-8b", 256, 36, kv_heads=8, head_dim=128, dtype="bf16").layer_groups()
    assert [layer for group in groups for layer in group] == list(range(36))
    assert [len(group) for group in groups] == [3] * 11 + [2, 1]
    assert len(mha("small", 64, 36, kv_heads=1, head_dim=64, dtype="bf16").layer_groups()) == 3
