from __future__ import annotations

from typing import Any

import pytest

from tiercel.errors import SpecError
from tiercel.spec import PRESETS, CacheSpec, State, Window, deepseek_v4, deepseek_v4_mtp, mha

FLASH, PRO = PRESETS["deepseek-v4-flash"], PRESETS["deepseek-v4-pro"]
KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def make_tiny(**changes: Any) -> dict[str, Any]:
    """Six layers, 48 + 16 channels, in the words of DeepSeek's own config."""
    config = {
        "num_hidden_layers": 6,
        "num_nextn_predict_layers": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "index_head_dim": 32,
        "sliding_window": 32,
        "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    }
    return {name: value for name, value in {**config, **changes}.items() if value is not None}


def with_layer_types(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same config in the words of Hugging Face."""
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    return {**config, "compress_ratios": None, "layer_types": [KINDS[ratio] for ratio in ratios], **changes}


# The real models


def test_flash_takes_998_208_bytes_per_page_of_256_tokens() -> None:
    spec = deepseek_v4(FLASH)
    rows = {s.name: (len(s.layers), spec.row_bytes(s)) for s in spec.page_streams}
    assert rows == {"c4": (21, 37_440), "c4_index": (21, 8_448), "c128": (20, 1_728)}
    assert spec.page_bytes == 998_208
    assert int(spec.bytes_per_token) == 3_899


def test_flash_takes_3_649_920_bytes_per_tail() -> None:
    spec = deepseek_v4(FLASH)
    rows = {s.name: (len(s.layers), spec.row_bytes(s)) for s in spec.tail_streams}
    assert rows == {"window": (43, 74_880), "c4_state": (21, 16_384), "c4_index_state": (21, 4_096)}
    assert spec.tail_bytes == 3_649_920
    assert spec.pages_per_window == 1


@pytest.mark.parametrize(("config", "rope", "group"), [(FLASH, 64, 64), (PRO, 64, 64), (make_tiny(), 16, 16)])
def test_its_streams_declare_their_rotary_channels_and_how_many_others_share_a_scale(
    config: dict[str, Any], rope: int, group: int
) -> None:
    declared = {s.name: (s.rope, s.group) for s in deepseek_v4(config).streams}
    groups = dict.fromkeys(("c4", "c128", "window"), (rope, group))
    assert declared == dict.fromkeys(("c4_index", "c4_state", "c4_index_state"), (0, 0)) | groups
    assert {(s.rope, s.group) for s in deepseek_v4(config, format="bf16").streams} == {(0, 0)}


def test_flash_keeps_a_window_and_the_open_rows_of_the_compressor() -> None:
    spec = deepseek_v4(FLASH)
    assert spec.stream("window").keep == Window(128)
    assert spec.stream("window").layers == tuple(range(43))
    assert spec.stream("c4_state").keep == spec.stream("c4_index_state").keep == State(entries=4, span=4)
    assert spec.stream("c4").layers == tuple(range(2, 43, 2))
    assert spec.stream("c128").layers == tuple(range(3, 43, 2))


def test_pro_takes_1_430_208_bytes_per_page() -> None:
    spec = deepseek_v4(PRO)
    assert (len(spec.stream("c4").layers), len(spec.stream("c128").layers)) == (30, 31)
    assert spec.page_bytes == 1_430_208


def test_a_missing_tail_is_replayed_from_all_windows_in_a_row() -> None:
    assert deepseek_v4(FLASH).replay_tokens == 43 * 127 + 1 == 5_462
    assert deepseek_v4(PRO).replay_tokens == 61 * 127 + 1 == 7_748


def test_a_page_without_fp8_takes_6_880_bytes_per_token() -> None:
    assert deepseek_v4(FLASH, format="bf16").bytes_per_token == 6_880
    assert deepseek_v4(FLASH, format="fp32").bytes_per_token == 2 * 6_880


def test_the_compressor_state_is_fp32_in_every_format() -> None:
    sizes = {format: deepseek_v4(FLASH, format=format).stream("c4_state").parts for format in ("fp8", "bf16")}
    assert sizes["fp8"] == sizes["bf16"]


# Any configuration


@pytest.mark.parametrize(
    ("head_dim", "rope", "value", "scale"),
    [
        (512, 64, 576, 8),
        (64, 16, 80, 4),
        (96, 32, 128, 4),
        (384, 64, 448, 8),
        (40, 8, 48, 4),
        (51, 2, 53, 52),
    ],
)
def test_an_fp8_entry_has_one_scale_byte_per_group_padded_to_words(
    head_dim: int, rope: int, value: int, scale: int
) -> None:
    c4 = deepseek_v4(make_tiny(head_dim=head_dim, qk_rope_head_dim=rope)).stream("c4")
    assert [(part.name, part.bytes) for part in c4.parts] == [("value", value), ("scale", scale)]
    assert c4.row_align == value


def test_a_tiny_model_stores_84_bytes_per_entry() -> None:
    spec = deepseek_v4(make_tiny(), page_tokens=128)
    assert spec.stream("window").bytes_per_entry == 84
    assert spec.stream("c4_index").bytes_per_entry == 36
    assert spec.replay_tokens == 6 * 31 + 1


def test_layer_types_say_the_same_as_compress_ratios() -> None:
    assert deepseek_v4(with_layer_types(make_tiny())) == deepseek_v4(make_tiny())


def test_a_rotary_fraction_says_the_same_as_a_rotary_width() -> None:
    assert deepseek_v4(make_tiny(qk_rope_head_dim=None, partial_rotary_factor=0.25)) == deepseek_v4(
        make_tiny()
    )


def test_compress_rates_change_ratios_and_names() -> None:
    rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64}
    spec = deepseek_v4(with_layer_types(make_tiny(), compress_rates=rates), page_tokens=64)
    assert [(s.name, s.tokens_per_entry) for s in spec.page_streams] == [
        ("c8", 8),
        ("c8_index", 8),
        ("c64", 64),
    ]
    assert spec.stream("c8_state").keep == State(entries=8, span=8)


def test_compress_ratios_are_understood_by_the_rates_of_the_config() -> None:
    rates = {"compressed_sparse_attention": 2}
    spec = deepseek_v4(make_tiny(compress_rates=rates, compress_ratios=[0, 2, 2, 128, 2, 128]))
    assert spec.stream("c2").layers == (1, 2, 4)


@pytest.mark.parametrize(("ratio", "names"), [(0, ["window"]), (128, ["c128", "window"])])
def test_a_kind_without_layers_has_no_stream(ratio: int, names: list[str]) -> None:
    spec = deepseek_v4(make_tiny(compress_ratios=[ratio] * 6, index_head_dim=None))
    assert [s.name for s in spec.streams] == names


# Stages and drafts


def test_four_stages_of_flash_hold_together_what_the_whole_holds() -> None:
    spec = deepseek_v4(FLASH)
    stages = [spec.stage(first, min(first + 11, 43)) for first in range(0, 43, 11)]
    owned = [(s.name, layer) for stage in stages for s in stage.streams for layer in s.layers]
    assert len(stages) == 4
    assert sorted(owned) == sorted((s.name, layer) for s in spec.streams for layer in s.layers)
    assert stages[3].layers == tuple(range(33, 43))
    assert sum(stage.page_bytes for stage in stages) == spec.page_bytes
    assert len({stage.form for stage in stages}) == 4


def test_the_mtp_draft_is_one_more_window_layer() -> None:
    spec = deepseek_v4(FLASH)
    drafted = spec.with_draft(deepseek_v4_mtp(FLASH))
    assert drafted.streams[:-1] == spec.streams
    assert (drafted.streams[-1].name, drafted.streams[-1].layers) == ("draft_window", (43,))
    assert drafted.page_bytes == spec.page_bytes
    assert drafted.tail_bytes == spec.tail_bytes + 74_880
    assert drafted.replay_tokens == 44 * 127 + 1


def test_the_stage_that_owns_the_last_layers_owns_the_draft() -> None:
    drafted = deepseek_v4(FLASH).with_draft(deepseek_v4_mtp(FLASH))
    assert "draft_window" not in [s.name for s in drafted.stage(0, 33).streams]
    assert drafted.stage(33, 44).stream("draft_window").layers == (43,)


def test_a_draft_that_reads_the_whole_prefix_joins_the_page() -> None:
    spec = deepseek_v4(FLASH)
    drafted = spec.with_draft(mha("draft", 256, 1, kv_heads=2, head_dim=64))
    assert drafted.page_bytes == spec.page_bytes + 256 * 2 * 2 * 64 * 2
    assert drafted.stream("draft_k").layers == (43,)


# Refusals


def refusal(config: dict[str, Any], **arguments: Any) -> str:
    with pytest.raises(SpecError) as refused:
        deepseek_v4(config, **arguments)
    return str(refused.value)


def test_pages_that_cut_an_entry_are_refused() -> None:
    message = refusal(make_tiny(), page_tokens=200)
    assert message.startswith("c128.tokens_per_entry = 128: ")
    assert "page_tokens = 200" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 0, 4, 7, 4, 128, 0]}, "compress_ratios[3] = 7: is none of 0, 4, 128"),
        ({"layer_types": ["sliding_attention"] * 5 + ["linear"]}, "layer_types[5] = 'linear'"),
        ({"compress_ratios": []}, "compress_ratios = []: has 0 values for num_hidden_layers = 6"),
        ({"layer_types": []}, "layer_types = []: has 0 values"),
        ({"compress_ratios": [0] * 9}, "has 9 values for num_hidden_layers = 6"),
        ({"compress_ratios": None}, "compress_ratios = None"),
        ({"compress_ratios": 4}, "compress_ratios = 4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"head_dim": -64}, "head_dim = -64"),
        ({"head_dim": None}, "head_dim = None: is missing"),
        ({"index_head_dim": -1}, "index_head_dim = -1"),
        ({"sliding_window": -32}, "sliding_window = -32"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim = 64: gives 64 rotary channels"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim = None"),
        ({"compress_rates": {"linear": 4}}, "compress_rates = {'linear': 4}"),
        ({"compress_rates": {"compressed_sparse_attention": -4}}, "compressed_sparse_attention = -4"),
        ({"compress_rates": {"compressed_sparse_attention": 128}}, "the same tokens per entry"),
    ],
)
def test_a_config_that_can_not_be_stored_is_refused_by_field_and_value(
    changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(make_tiny(**changes))


def test_an_unknown_format_is_refused() -> None:
    assert refusal(make_tiny(), format="fp6") == "format = 'fp6': is none of fp8, bf16, fp32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 0, "compress_ratios": [0] * 6}, "num_nextn_predict_layers = 0"),
        (
            {"compress_ratios": [0, 0, 4, 128, 4, 128, 4]},
            "compress_ratios = 4: an MTP layer is a window layer",
        ),
    ],
)
def test_a_draft_the_config_does_not_have_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        deepseek_v4_mtp(make_tiny(**changes))
    assert message in str(refused.value)


def test_the_format_of_the_draft_is_that_of_its_target() -> None:
    def entry(spec: CacheSpec) -> object:
        return spec.stream("window").parts

    for format in ("fp8", "bf16", "fp32"):
        assert entry(deepseek_v4_mtp(FLASH, format=format)) == entry(deepseek_v4(FLASH, format=format))


def test_a_draft_that_shall_go_on_exactly_keeps_the_streams_before_a_boundary() -> None:
    config = FLASH | {"hc_mult": 4, "hidden_size": 4096}
    spec = deepseek_v4(config).with_draft(deepseek_v4_mtp(config, hidden=True))
    assert spec.stream("draft_hidden").layers == (43,) and spec.replay_tokens == 44 * 127 + 1
    assert spec.bytes_of(spec.stream("draft_hidden")) == 4 * 4096 * 4
