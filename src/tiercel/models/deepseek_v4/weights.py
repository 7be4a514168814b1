"""The weights of a DeepSeek V4 model: which there are, under which names, and how they are read.

A parameter's own name is the one of `transformers`; the parameters of an MTP layer are under `mtp.N.`, with
the names of `transformers` for its block. A checkpoint may use DeepSeek's original names instead, tensor by
tensor (what `transformers` saves is a mixture), and put `model.` before them or not.

    original                            here
    embed, head, norm, hc_head_X        model.embed_tokens, lm_head, model.norm, model.hc_head.hc_X
    layers.N.…                          model.layers.N.…
    mtp.N.{e,h}_proj, {e,h,}norm        the same
    mtp.N.hc_head_X, mtp.N.attn.…       mtp.N.hc_head.hc_X, mtp.N.self_attn.…
    ffn.experts.E.{w1,w3}, w2           mlp.experts.gate_up_proj[E] (w1 first), mlp.experts.down_proj[E]

What is stored as fp8 or fp4 with scales is multiplied out here: the model knows plain numbers only. Whatever
does not fit is found in the headers, before a byte is read; what is no number, while it is read. A draft that
nobody wants is left alone, whatever form it has: some checkpoints have DSpark's stages under `mtp.`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

import torch
from torch import Tensor

from tiercel.errors import WeightsError
from tiercel.models.checkpoint import Checkpoint, StoredTensor
from tiercel.models.deepseek_v4.config import FP8_BLOCK, SPARSE_RATIO, V4Config
from tiercel.models.loading import COMPUTED, FLOATS, check_finite, refuse

Shape = tuple[int, ...]

DRAFT = "mtp."
HEAD = ("lm_head.weight", "head.weight")
INTEGERS = ("I64", "I32")
SCALES = ("F8_E8M0", "F32", "BF16", "U8")
"""U8 is e8m0 too, from before safetensors had a name for it."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""e2m1 by its three low bits; the fourth is the sign. Two values per byte, the first in the low half."""

FP4_BLOCK = (1, 32)

BLOCKS: Mapping[str, tuple[int, int]] = {
    "F8_E4M3": FP8_BLOCK,
    "F4": FP4_BLOCK,
    "I8": FP4_BLOCK,
    "U8": FP4_BLOCK,
}
"""Rows and columns under one scale, by the dtype a quantized weight is stored in."""

PACKED = ("I8", "U8")
"""Where two fp4 values count as one in the header's shape. (F4 counts values.)"""


# Which parameters there are


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model."""

    name: str
    shape: Shape
    names: tuple[str, ...]
    """Under which a checkpoint may have it, its own among them, without `model.`"""
    pieces: tuple[WeightPiece, ...] = ()
    """In which a checkpoint may have it, if not whole."""
    integer: bool = False


@dataclass(frozen=True)
class WeightPiece:
    """What one stored tensor fills: a parameter, or some rows of one expert of it."""

    name: str
    """As a checkpoint has it, without `model.`"""
    parameter: str
    shape: Shape
    integer: bool = False
    expert: int | None = None
    first_row: int = 0

    def of(self, whole: Tensor) -> Tensor:
        """The part of the parameter that it fills."""
        if self.expert is None:
            return whole
        return whole[self.expert].narrow(0, self.first_row, self.shape[0])


Row = tuple[str, str, Shape]
"""A parameter inside a layer: its name here, its original name, its shape."""

ALSO = {"attn.kv_norm.weight": "attn.norm.weight"}
"""What `transformers` writes in place of an original name (its renaming does not come back the same)."""


def parameters(config: V4Config, *, draft: bool = True) -> dict[str, Parameter]:
    """Every parameter by its name; those of the MTP layers only with the draft."""
    rows = [*_ends(config)]
    for i, (ratio, hashed) in enumerate(zip(config.ratios, config.hash_layers, strict=True)):
        rows += _layer(config, f"layers.{i}.", ratio, hashed=hashed)
    for i in range(config.mtp_layers if draft else 0):
        rows += _draft_ends(config, f"{DRAFT}{i}.")
        rows += _layer(config, f"{DRAFT}{i}.", 0, hashed=False)
    return {each.name: each for each in rows}


def _ends(config: V4Config) -> Iterator[Parameter]:
    """What comes before and after the layers."""
    shape = config.vocab_size, config.hidden_size
    yield Parameter("model.embed_tokens.weight", shape, ("embed_tokens.weight", "embed.weight"))
    if not config.tie_word_embeddings:
        yield Parameter("lm_head.weight", shape, HEAD)
    yield Parameter("model.norm.weight", (config.hidden_size,), ("norm.weight",))
    yield from _named("", _hc_head(config))


def _draft_ends(config: V4Config, prefix: str) -> Iterator[Parameter]:
    """What an MTP layer has around its block. Embedding and head are the target's."""
    d = config.hidden_size
    shapes: dict[str, Shape] = {
        "e_proj": (d, d),
        "h_proj": (d, d),
        "enorm": (d,),
        "hnorm": (d,),
        "norm": (d,),
    }
    rows = [(f"{name}.weight", f"{name}.weight", shape) for name, shape in shapes.items()]
    yield from _named(prefix, [*rows, *_hc_head(config)])


def _layer(config: V4Config, prefix: str, ratio: int, *, hashed: bool) -> Iterator[Parameter]:
    d, n = config.hidden_size, config.hc_mult
    mixes = (2 + n) * n
    rows: list[Row] = [
        ("input_layernorm.weight", "attn_norm.weight", (d,)),
        ("post_attention_layernorm.weight", "ffn_norm.weight", (d,)),
    ]
    for site in ("attn", "ffn"):
        shapes: dict[str, Shape] = {"fn": (mixes, n * d), "base": (mixes,), "scale": (3,)}
        rows += [(f"{site}_hc.{name}", f"hc_{site}_{name}", shape) for name, shape in shapes.items()]
    yield from _named(prefix, [*rows, *_attention(config), *_compression(config, ratio), *_moe(config)])
    yield _choice(config, prefix, hashed=hashed)
    yield from _experts(config, prefix)


def _attention(config: V4Config) -> list[Row]:
    d, inner, latent = (
        config.hidden_size,
        config.heads * config.head_dim,
        config.o_groups * config.o_lora_rank,
    )
    return [
        ("self_attn.q_a_proj.weight", "attn.wq_a.weight", (config.q_lora_rank, d)),
        ("self_attn.q_a_norm.weight", "attn.q_norm.weight", (config.q_lora_rank,)),
        ("self_attn.q_b_proj.weight", "attn.wq_b.weight", (inner, config.q_lora_rank)),
        ("self_attn.kv_proj.weight", "attn.wkv.weight", (config.head_dim, d)),
        ("self_attn.kv_norm.weight", "attn.kv_norm.weight", (config.head_dim,)),
        ("self_attn.o_a_proj.weight", "attn.wo_a.weight", (latent, inner // config.o_groups)),
        ("self_attn.o_b_proj.weight", "attn.wo_b.weight", (d, latent)),
        ("self_attn.sinks", "attn.attn_sink", (config.heads,)),
    ]


def _compression(config: V4Config, ratio: int) -> list[Row]:
    """A compressor where the layer has one; a sparse layer's indexer has its own."""
    if not ratio:
        return []
    rows = _compressor(config, "", ratio, config.head_dim)
    if ratio == SPARSE_RATIO:
        heads, dim = config.index_heads, config.index_head_dim
        here, original = "self_attn.compressor.indexer.", "attn.indexer."
        rows += _compressor(config, "indexer.", ratio, dim)
        rows += [
            (f"{here}q_b_proj.weight", f"{original}wq_b.weight", (heads * dim, config.q_lora_rank)),
            (
                f"{here}scorer.weights_proj.weight",
                f"{original}weights_proj.weight",
                (heads, config.hidden_size),
            ),
        ]
    return rows


def _compressor(config: V4Config, owner: str, ratio: int, dim: int) -> list[Row]:
    """Where entries overlap a token has two roles, each with its own channels."""
    here, original = f"self_attn.compressor.{owner}", f"attn.{owner}compressor."
    channels = 2 * dim if ratio == SPARSE_RATIO else dim
    return [
        (f"{here}kv_proj.weight", f"{original}wkv.weight", (channels, config.hidden_size)),
        (f"{here}gate_proj.weight", f"{original}wgate.weight", (channels, config.hidden_size)),
        (f"{here}position_bias", f"{original}ape", (ratio, channels)),
        (f"{here}kv_norm.weight", f"{original}norm.weight", (dim,)),
    ]


def _moe(config: V4Config) -> list[Row]:
    """What every layer's MoE has, besides the experts and how they are chosen."""
    d, inner = config.hidden_size, config.moe_intermediate
    return [
        ("mlp.gate.weight", "ffn.gate.weight", (config.experts, d)),
        ("mlp.shared_experts.gate_proj.weight", "ffn.shared_experts.w1.weight", (inner, d)),
        ("mlp.shared_experts.up_proj.weight", "ffn.shared_experts.w3.weight", (inner, d)),
        ("mlp.shared_experts.down_proj.weight", "ffn.shared_experts.w2.weight", (d, inner)),
    ]


def _choice(config: V4Config, prefix: str, *, hashed: bool) -> Parameter:
    """A table from token to experts, or a bias that only selects."""
    if not hashed:
        rows: list[Row] = [("mlp.gate.e_score_correction_bias", "ffn.gate.bias", (config.experts,))]
    else:
        rows = [("mlp.gate.tid2eid", "ffn.gate.tid2eid", (config.vocab_size, config.experts_per_token))]
    return replace(next(_named(prefix, rows)), integer=hashed)


def _experts(config: V4Config, prefix: str) -> Iterator[Parameter]:
    """All experts in one tensor, which a checkpoint may have expert by expert."""
    count, d, inner = config.experts, config.hidden_size, config.moe_intermediate
    rows: list[Row] = [("mlp.experts.gate_up_proj", "", (count, 2 * inner, d))]
    rows += [("mlp.experts.down_proj", "", (count, d, inner))]
    first_rows: tuple[dict[str, int], ...] = ({"w1": 0, "w3": inner}, {"w2": 0})
    for each, first_row_of in zip(_named(prefix, rows), first_rows, strict=True):
        shape = each.shape[1] // len(first_row_of), each.shape[2]
        pieces = tuple(
            WeightPiece(f"{prefix}ffn.experts.{e}.{name}.weight", each.name, shape, expert=e, first_row=row)
            for e in range(count)
            for name, row in first_row_of.items()
        )
        yield replace(each, pieces=pieces)


def _hc_head(config: V4Config) -> list[Row]:
    n = config.hc_mult
    shapes: dict[str, Shape] = {"fn": (n, n * config.hidden_size), "base": (n,), "scale": (1,)}
    return [(f"hc_head.hc_{name}", f"hc_head_{name}", shape) for name, shape in shapes.items()]


def _named(prefix: str, rows: Iterable[Row]) -> Iterator[Parameter]:
    """Parameters of what `prefix` names: `model.` is part of their own name, but not in an MTP layer."""
    model = "" if prefix.startswith(DRAFT) else "model."
    for here, original, shape in rows:
        others = {here, original, ALSO.get(original, here)} - {""}
        yield Parameter(f"{model}{prefix}{here}", shape, tuple(sorted(f"{prefix}{name}" for name in others)))


# Which stored tensor fills what


@dataclass(frozen=True)
class Reading:
    """One stored tensor, the scales it is to be multiplied with, and what both fill."""

    piece: WeightPiece
    stored: StoredTensor
    scale: StoredTensor | None = None


@dataclass(frozen=True)
class WeightPlan:
    """All that is to be read, in the order of the files' bytes."""

    parameters: Mapping[str, Parameter]
    readings: tuple[Reading, ...]


def plan_weights(checkpoint: Checkpoint, config: V4Config, *, draft: bool = True) -> WeightPlan:
    """What is to be read for every parameter, from headers alone, or one error that names all that is wrong.

    Two things go by the checkpoint, not by its config, as in `transformers`: without any `mtp.` tensor it has
    no draft, and with a head of its own its embeddings are not tied.
    """
    unread = set() if draft else set(draft_names(checkpoint))
    stored = {
        name: each
        for name, each in checkpoint.tensors.items()
        if name not in unread and not name.endswith(COMPUTED)
    }
    if any(_bare(name) in HEAD for name in stored):
        config = replace(config, tie_word_embeddings=False)
    wanted = parameters(config, draft=draft and bool(draft_names(checkpoint)))
    piece_of = {name: piece for each in wanted.values() for name, piece in _pieces(each)}
    known = [each for name, each in stored.items() if _bare(name) in piece_of]
    loose = {name: each for name, each in stored.items() if _bare(name) not in piece_of}
    readings = [Reading(piece_of[_bare(each.name)], each, _take_scale(each, loose)) for each in known]
    missing, twice = _coverage(wanted, readings)
    unfit = [(each.stored.name, why) for each in readings if (why := _unfit(each))]
    faults = {
        "missing": missing,
        "not of this model": [(name, "") for name in sorted(loose)],
        "there twice": [(name, "") for name in twice],
        "unfit": unfit,
    }
    refuse(checkpoint, faults)
    return WeightPlan(wanted, tuple(readings))


def draft_names(checkpoint: Checkpoint) -> list[str]:
    """The tensors of a draft, of whatever kind."""
    return [name for name in checkpoint.tensors if _bare(name).startswith(DRAFT)]


def _bare(name: str) -> str:
    return name.removeprefix("model.")


def _pieces(parameter: Parameter) -> Iterator[tuple[str, WeightPiece]]:
    """Everything that can fill a parameter, by the name it would have."""
    for name in parameter.names:
        yield name, WeightPiece(name, parameter.name, parameter.shape, parameter.integer)
    for piece in parameter.pieces:
        yield piece.name, piece


def _take_scale(stored: StoredTensor, loose: dict[str, StoredTensor]) -> StoredTensor | None:
    """The scales of a quantized tensor, out of what has no other use."""
    if stored.dtype not in BLOCKS:
        return None
    names = [f"{stored.name}_scale_inv", f"{stored.name.removesuffix('.weight')}.scale"]
    return next((loose.pop(name) for name in names if name in loose), None)


def _coverage(
    wanted: Mapping[str, Parameter], readings: Iterable[Reading]
) -> tuple[list[tuple[str, str]], list[str]]:
    """(what nothing fills, what fills something that is filled already)"""
    filled: dict[str, list[Reading]] = {name: [] for name in wanted}
    for each in readings:
        filled[each.piece.parameter].append(each)
    missing: list[tuple[str, str]] = []
    twice: list[str] = []
    for name, own in filled.items():
        places = {(each.piece.expert, each.piece.first_row): each.stored.name for each in own}
        whole = (None, 0) in places
        if len(places) < len(own) or (whole and len(own) > 1):
            twice += [each.stored.name for each in own]
        elif not own:
            missing.append((name, _other_name(wanted[name])))
        elif not whole:
            missing += [
                (piece.name, "")
                for piece in wanted[name].pieces
                if (piece.expert, piece.first_row) not in places
            ]
    return missing, twice


def _other_name(parameter: Parameter) -> str:
    """How DeepSeek calls it, for those whose checkpoint does."""
    others = [name for name in parameter.names if name != _bare(parameter.name)]
    return f" ({others[0]})" if others else ""


def _unfit(reading: Reading) -> str:
    """Why a tensor can not be what its name says, or nothing."""
    piece, stored, scale = reading.piece, reading.stored, reading.scale
    block = None if piece.integer or len(piece.shape) < 2 else BLOCKS.get(stored.dtype)
    known = INTEGERS if piece.integer else FLOATS
    if block is None and stored.dtype not in known:
        return f" is {stored.dtype}, must be one of {', '.join(known)}"
    *before, last = piece.shape
    shape = (*before, last / 2) if block and stored.dtype in PACKED else piece.shape
    if stored.shape != shape:
        return f" is {list(stored.shape)} of {stored.dtype}, must be {list(piece.shape)}"
    if block is None:
        return ""
    if scale is None:
        return f" is {stored.dtype} and has no scale"
    *before, rows, columns = piece.shape
    shape = (*before, ceil(rows / block[0]), ceil(columns / block[1]))
    if scale.dtype not in SCALES or scale.shape != shape:
        return f" has a scale {list(scale.shape)} of {scale.dtype}, must be {list(shape)} of {SCALES[0]}"
    return ""


# Reading


def load_weights(
    checkpoint: Checkpoint,
    config: V4Config,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    draft: bool = True,
) -> dict[str, Tensor]:
    """Every parameter by its name, as plain numbers; expert tables are int64.

    Each stored tensor is read once and copied once, into its place. Tied embeddings are one tensor under two
    names. There are `mtp.` names if the checkpoint has the draft and it is wanted.
    """
    plan = plan_weights(checkpoint, config, draft=draft)
    weights: dict[str, Tensor] = {}
    for each in plan.parameters.values():
        own_dtype = torch.int64 if each.integer else dtype
        weights[each.name] = torch.empty(each.shape, dtype=own_dtype, device=device)
    for reading in plan.readings:
        target = reading.piece.of(weights[reading.piece.parameter])
        values = checkpoint.read(reading.stored.name)
        if reading.scale is None:
            target.copy_(values)
        else:
            scale = checkpoint.read(reading.scale.name)
            scale = scale.view(torch.float8_e8m0fnu) if reading.scale.dtype == "U8" else scale
            _dequantize(target, values, scale.to(torch.float32).to(device), BLOCKS[reading.stored.dtype])
        if reading.piece.integer:
            _check_experts(target, reading.stored, config)
        else:
            check_finite(target, reading.stored)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return weights


def _check_experts(table: Tensor, stored: StoredTensor, config: V4Config) -> None:
    if table.min() < 0 or table.max() >= config.experts:
        why = f"{stored.name} names experts that are not there: there are {config.experts}"
        raise WeightsError(stored.file, why, [stored.name])


def _dequantize(target: Tensor, values: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    """Writes values x scale: in place, one matrix after the other, so that nothing big is there twice."""
    if block == FP4_BLOCK:
        values = values.view(torch.uint8)
    if target.dim() > 2:
        for own in zip(target, values, scale, strict=True):
            _dequantize(*own, block)
        return
    if block == FP4_BLOCK:
        pairs = _fp4_pairs(target.dtype, target.device)
        index = values.flatten().to(target.device, torch.int32)
        torch.index_select(pairs, 0, index, out=target.view(-1, 2))
    else:
        target.copy_(values)
    rows, columns = block
    across = scale.repeat_interleave(columns, dim=1)[:, : target.shape[1]]
    if rows == 1:
        target.mul_(across)
        return
    for i, row in enumerate(across):
        target[i * rows : (i + 1) * rows].mul_(row)


@cache
def _fp4_pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 2]: the two values of every byte."""
    signed = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([signed[byte & 15], signed[byte >> 4]], dim=1)
