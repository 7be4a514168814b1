"""Goal: what is stored as fp8 or fp4 is fp8 on the device, and not one bit of an answer tells.
Method: one folder is loaded twice, once with all weights dequantized to bf16; logits and values are equal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.devices import every_device
from tests.models.folders import make_config, write_folder
from tests.models.spans import one_pool
from tests.models.test_weights import FP4_NAMES, FP8_NAMES, Tensors, blocks, fp4, fp8, in_original_form
from tests.models.test_weights import quantized as quantize
from tiercel.errors import WeightsError
from tiercel.kernels.choice import make_kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models import quantized
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.model import build
from tiercel.models.deepseek_v4.weights import GATE_UP, INPUT, QUERIES, WEIGHTS
from tiercel.models.frame import Frame
from tiercel.models.loading import SCALE, Plan, joined
from tiercel.spec import deepseek_v4

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
ROUND = make_config(
    hidden_size=128,
    num_hidden_layers=2,
    num_nextn_predict_layers=0,
    compress_ratios=[0, 4],
    num_hash_layers=1,
    num_attention_heads=2,
    head_dim=128,
    qk_rope_head_dim=16,
    q_lora_rank=128,
    o_lora_rank=128,
    index_n_heads=4,
    index_head_dim=32,
    moe_intermediate_size=128,
    hc_sinkhorn_iters=3,
)
"""All rows of what is quantized are multiples of 128."""
ALL_FP8_NAMES = FP8_NAMES + r"|indexer\.wq_b\.weight$"
NAMES = {ALL_FP8_NAMES: fp8, FP4_NAMES: fp4}
"""As published: fp8, with exponents as scales, and experts of fp4."""


def float_scales(values: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """fp8 with scales that are no powers of two: a product has to be rounded to bf16."""
    codes, scale, _ = fp8(values, chance)
    scale = torch.rand(scale.shape, generator=chance) * 0.1
    return codes, scale, codes.float() * blocks(scale, values.shape, (128, 128))


def make_folder(path: Path, config: dict[str, Any] = ROUND, names: Any = NAMES, **more: Tensor) -> Path:
    return write_folder(path, make_tensors(config, names) | more, config)


def make_tensors(config: dict[str, Any] = ROUND, names: Any = NAMES) -> Tensors:
    weights = WEIGHTS.random(V4Config.from_hf(config), 5, draft=True).read()
    return quantize(in_original_form(weights), names)[0]


def plan(folder: Path, **options: Any) -> Plan:
    checkpoint = Checkpoint(folder)
    return WEIGHTS.plan(checkpoint, V4Config.from_hf(checkpoint.config), BF16, **options)


def load(folder: Path, device: str = "cpu", **options: Any) -> Tensors:
    return plan(folder, **options).read(device)


def run(weights: Tensors, device: str) -> tuple[Frame, Tensor]:
    """The logits of a text of 17 tokens. A device computes one more: up to 16, fp8 has tiles of its own.
    (Their sums have the same order, but inside a tile Triton's interpreter adds in an order of its own.)"""
    own, kernels = V4Config.from_hf(ROUND), make_kernels("cuda", device, "bf16")
    memory = DeviceMemory(deepseek_v4(ROUND, 128, "bf16"), pages=2, tails=1, device=device)
    model = build(own, weights, memory, 1, kernels)
    tokens, pages = torch.arange(18) * 7 % 24, torch.tensor([1])
    logits = [model.forward([one_pool(tokens[:17], 0, pages, 0)], [0, 16])]
    if device == "cuda":
        logits.append(model.forward([one_pool(tokens[17:], 17, pages, 0)]))
    return model, torch.cat(logits)


def meant(weights: Tensors, name: str) -> Tensor:
    """An fp8 parameter, multiplied out."""
    numbers, scales = weights[name], weights[name + SCALE]
    if numbers.dim() == 2:
        return (numbers.float() * blocks(scales, numbers.shape, (128, 128))).to(BF16)
    each = [n.float() * blocks(s, n.shape, (128, 128)) for n, s in zip(numbers, scales, strict=True)]
    return torch.stack(each).to(BF16)


def check_same(stays: Tensors, plain: Tensors) -> None:
    for name, expected in plain.items():
        found = meant(stays, name) if stays[name].dtype == FP8 else stays[name]
        assert found.dtype == expected.dtype and torch.equal(found, expected), name


@every_device
def test_the_logits_are_those_of_weights_that_were_dequantized(tmp_path: Path, device: str) -> None:
    folder = make_folder(tmp_path, names={FP4_NAMES: fp4, ALL_FP8_NAMES: float_scales})
    stays, plain = (load(folder, device, fp8=each) for each in (True, False))
    (model, logits), (_, expected) = run(stays, device), run(plain, device)
    assert logits.isfinite().all() and torch.equal(logits, expected)
    first, second = model.layers._layers.values()  # type: ignore[attr-defined]
    attention, experts = first.attention, first.experts
    for matrix in (
        attention._input,
        attention._queries,
        attention._out_low,
        attention._out,
        *experts._matrices,
    ):
        assert matrix.data.dtype == FP8 and matrix.scale.dtype == torch.float32
    assert second.attention._input.data.dtype == BF16, "a compressor is bf16, and reads the same input"
    assert experts._matrices[0].data.data_ptr() == stays["model.layers.0.mlp.experts.gate_up_proj"].data_ptr()


@pytest.mark.parametrize(
    ("changes", "dequantized"),
    [
        ({}, ""),
        ({"hidden_size": 160}, "o_b_proj|down_proj"),
        ({"moe_intermediate_size": 192}, "gate_up_proj|shared_experts.(gate|up)_proj"),
        ({"o_lora_rank": 64}, "o_a_proj"),
        ({"q_lora_rank": 64}, "layers.0.self_attn.(q_a|kv)_proj"),
    ],
)
def test_pieces_that_would_share_a_scale_are_dequantized(
    tmp_path: Path, changes: dict[str, int], dequantized: str
) -> None:
    """A matrix is fp8 or bf16, all of it."""
    folder = make_folder(tmp_path, ROUND | changes)
    stays, plain = load(folder, fp8=True), load(folder)
    check_same(stays, plain)
    matrices = [
        name for name in plain if re.search(r"(q_a|q_b|o_a|o_b|self_attn\.kv|gate_up|up|down)_proj", name)
    ]
    for name in matrices:
        mixed = "layers.1.self_attn" in name and re.search(r"(q_a|kv)_proj", name)
        expected = BF16 if mixed or (dequantized and re.search(dequantized, name)) else FP8
        assert stays[name].dtype == expected, name
        assert (name + SCALE in stays) == (expected == FP8)


@pytest.mark.parametrize("apart", [0, 1, 14, 15, 40])
def test_fp4_is_exact_as_fp8_up_to_the_range_of_fp8(apart: int) -> None:
    """All 256 bytes under all scales."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1)[:, :80]
    codes = codes.roll(1) + torch.arange(128, dtype=torch.uint8)[:, None]
    chance = torch.Generator().manual_seed(3)
    exponents = torch.randint(100, 101 + apart, (128, 5), generator=chance)
    exponents[:, :2] = torch.tensor([100, 100 + apart])
    scale = torch.exp2(exponents.float() - 127)
    target, target_scale = torch.empty(128, 160, dtype=FP8), torch.empty(1, 2)
    expected = torch.empty(128, 160)
    quantized.dequantize(expected, codes, scale, quantized.FP4_BLOCK)
    exact = quantized.put(target, target_scale, codes, scale, quantized.FP4_BLOCK)
    assert exact == (apart <= 14)
    if exact:
        assert torch.equal(target.float() * blocks(target_scale, (128, 160), (128, 128)), expected)


def test_experts_that_are_not_exact_as_fp8_become_bf16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "layers.1.ffn.experts.2.w3"
    scale = torch.full((128, 4), 127, dtype=torch.uint8)
    scale[5, 0] = 100
    folder = make_folder(tmp_path, **{f"{name}.scale": scale.view(torch.float8_e8m0fnu)})
    with caplog.at_level("WARNING", "tiercel"):
        stays = load(folder, fp8=True)
    assert f"{name}.weight is not exact as fp8" in caplog.text
    check_same(stays, load(folder))
    mlp = "model.layers.1.mlp."
    assert stays[f"{mlp}experts.gate_up_proj"].dtype == BF16, "a matrix has one dtype"
    assert stays[f"{mlp}shared_experts.up_proj.weight"].dtype == BF16
    assert stays[f"{mlp}experts.down_proj"].dtype == FP8
    assert stays["model.layers.0.mlp.experts.gate_up_proj"].dtype == FP8


@pytest.mark.parametrize("spoiled", ["number", "scale", "product", "fp4 scale"])
def test_fp8_that_is_no_number_is_named(tmp_path: Path, spoiled: str) -> None:
    name = "layers.0.ffn.experts.1.w1" if spoiled == "fp4 scale" else "layers.0.attn.wo_b"
    written = make_tensors()
    numbers, scales = (written[f"{name}.{what}"].view(torch.uint8) for what in ("weight", "scale"))
    if spoiled in ("number", "product"):
        numbers[3, 4] = 0xFF if spoiled == "number" else 0x7E  # NaN, 448
    if spoiled != "number":
        scales[0, 0] = 254 if spoiled == "product" else 255  # 2¹²⁷, NaN
    with pytest.raises(WeightsError, match=rf"{name}\.weight holds NaN or Inf"):
        load(write_folder(tmp_path, written, ROUND), fp8=True)


@pytest.mark.parametrize("fp8_stays", [False, True])
def test_the_bytes_are_told_before_anything_is_read(tmp_path: Path, fp8_stays: bool) -> None:
    planned = plan(make_folder(tmp_path), fp8=fp8_stays)
    told, weights = planned.bytes, planned.read()
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in weights.values()}
    assert sum(told.values()) == sum(memory.values())
    assert set(told) == {"attention", "experts", "feed-forward", "embeddings", "other weights"}
    experts = 2 * 4 * 3 * 128 * 128  # of two layers: three experts and the shared one, three matrices each
    assert told["experts"] == (experts + experts // 128**2 * 4 if fp8_stays else 2 * experts)

    name = "layers.0.attn.wo_b.scale"
    spoiled = make_folder(tmp_path / "spoiled", **{name: torch.full((1, 2), 255, dtype=torch.uint8)})
    assert plan(spoiled, fp8=fp8_stays).bytes == told
    with pytest.raises(WeightsError, match="holds NaN or Inf"):
        load(spoiled, fp8=fp8_stays)


def test_what_is_one_matrix_is_not_copied(tmp_path: Path) -> None:
    weights = load(make_folder(tmp_path), fp8=True)
    for layer, part, names in ((0, "self_attn.", INPUT), (1, "self_attn.", QUERIES), (1, "mlp.", GATE_UP)):
        start = f"model.layers.{layer}.{part}"
        own = {name.removeprefix(start): each for name, each in weights.items() if name.startswith(start)}
        whole, scales = joined(own, names)
        copied = [joined({name: each.clone() for name, each in own.items()}, names)]
        assert whole.data_ptr() == own[names[0]].data_ptr()
        assert torch.equal(whole.view(torch.uint8), copied[0][0].view(torch.uint8))
        assert torch.equal(scales, copied[0][1]) and scales.data_ptr() == own[names[0] + SCALE].data_ptr()
