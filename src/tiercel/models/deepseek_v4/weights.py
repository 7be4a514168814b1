"""The weights of a DeepSeek V4 model: which there are, under which names, and how they are read.

A parameter's own name is the one of `transformers`; the parameters of an MTP layer are under `mtp.N.`, with
the names of `transformers` for its layer. A checkpoint may use DeepSeek's original names instead, tensor by
tensor (what `transformers` saves is a mixture), and put `model.` before them or not.

    original                            here
    embed, head, norm, hc_head_X        model.embed_tokens, lm_head, model.norm, model.hc_head.hc_X
    layers.N.…                          model.layers.N.…
    mtp.N.{e,h}_proj, {e,h,}norm        the same
    mtp.N.hc_head_X, mtp.N.attn.…       mtp.N.hc_head.hc_X, mtp.N.self_attn.…
    ffn.experts.E.{w1,w3}, w2           mlp.experts.gate_up_proj[E] (w1 first), mlp.experts.down_proj[E]

Weights that are stored as fp8 or fp4 with scales are dequantized; or they stay fp8, for kernels that multiply
it, and the scales of `X` are under the name `X_scale`. A tensor that does not fit is found in the headers,
before a byte is read; NaN and Inf are found while reading. A draft that is not wanted is not looked at,
whatever its form: some checkpoints have DSpark's stages under `mtp.`
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.errors import WeightsError
from tiercel.models.base import BytesCheck, bytes_by_part
from tiercel.models.checkpoint import FLOATS, Checkpoint, StoredTensor, check_finite
from tiercel.models.deepseek_v4 import quantized
from tiercel.models.deepseek_v4.config import FP8_BLOCK, SPARSE_RATIO, V4Config
from tiercel.models.deepseek_v4.matrices import OUT_LOW, SCALE, Group, grouped
from tiercel.models.deepseek_v4.quantized import BLOCKS, FP8, PACKED, SCALES, Shape, scales_of
from tiercel.progress import progress

log = logging.getLogger(__name__)

DRAFT = "mtp."
HEAD = ("lm_head.weight", "head.weight")
INTEGERS = ("I64", "I32")

# Which parameters there are


class WeightPiece(NamedTuple):
    """What one stored tensor fills: a parameter, or some rows of one expert of it."""

    name: str
    """The name in a checkpoint, without `model.`"""
    shape: Shape
    expert: int | None = None
    first_row: int = 0

    def of(self, whole: Tensor) -> Tensor:
        """The part of the parameter that this piece fills."""
        if self.expert is None:
            return whole
        return whole[self.expert].narrow(0, self.first_row, self.shape[0])

    def scale_of(self, whole: Tensor) -> Tensor:
        """The part of an fp8 parameter's scales that this piece fills."""
        rows, _ = shape = scales_of(self.shape[-2:], FP8_BLOCK)
        return self._replace(shape=shape, first_row=self.first_row // self.shape[0] * rows).of(whole)


class Parameter(NamedTuple):
    """One tensor of the model."""

    name: str
    shape: Shape
    pieces: tuple[WeightPiece, ...]
    """The forms that a checkpoint may have it in: whole, under one of several names, or expert by expert."""
    integer: bool = False

    def dtype(self, matrices: torch.dtype) -> torch.dtype:
        """Hyper-connections and position biases stay fp32: they are no matrices of activations."""
        if self.integer:
            return torch.int64
        small = len(self.shape) < 2 or self.name.endswith(("fn", "position_bias"))
        return torch.float32 if small else matrices


Row = tuple[str, str, Shape]
"""A parameter inside a layer: its name here, its original name, its shape."""

ALSO = {"attn.kv_norm.weight": "attn.norm.weight"}
"""Names that `transformers` writes instead of original ones (its renaming is not reversible)."""


def parameters(config: V4Config, *, draft: bool = True) -> dict[str, Parameter]:
    """Every parameter by its name; those of the MTP layers only with the draft."""
    d, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    n = config.hc_mult
    shapes: dict[str, Shape] = {"fn": (n, n * d), "base": (n,), "scale": (1,)}
    head: list[Row] = [(f"hc_head.hc_{name}", f"hc_head_{name}", shape) for name, shape in shapes.items()]
    head.append(("norm.weight", "norm.weight", (d,)))
    found = [*_named("", [("embed_tokens.weight", "embed.weight", table), *head])]
    if not config.tie_word_embeddings:
        found.append(Parameter(HEAD[0], table, tuple(WeightPiece(name, table) for name in HEAD)))
    for i, (ratio, hashed) in enumerate(zip(config.ratios, config.hash_layers, strict=True)):
        found += _layer(config, f"layers.{i}.", ratio, hashed=hashed)
    own: dict[str, Shape] = {"e_proj": (d, d), "h_proj": (d, d), "enorm": (d,), "hnorm": (d,)}
    own_rows = [(f"{name}.weight", f"{name}.weight", shape) for name, shape in own.items()]
    for i in range(config.mtp_layers if draft else 0):
        found += _named(f"{DRAFT}{i}.", [*own_rows, *head])
        found += _layer(config, f"{DRAFT}{i}.", 0, hashed=False)
    return {each.name: each for each in found}


def _layer(config: V4Config, prefix: str, ratio: int, *, hashed: bool) -> Iterator[Parameter]:
    c, d, n, inner = config, config.hidden_size, config.hc_mult, config.moe_intermediate
    heads, latent, mixes = c.heads * c.head_dim, c.o_groups * c.o_lora_rank, (2 + n) * n
    rows: list[Row] = [
        ("input_layernorm.weight", "attn_norm.weight", (d,)),
        ("post_attention_layernorm.weight", "ffn_norm.weight", (d,)),
        ("self_attn.q_a_proj.weight", "attn.wq_a.weight", (c.q_lora_rank, d)),
        ("self_attn.q_a_norm.weight", "attn.q_norm.weight", (c.q_lora_rank,)),
        ("self_attn.q_b_proj.weight", "attn.wq_b.weight", (heads, c.q_lora_rank)),
        ("self_attn.kv_proj.weight", "attn.wkv.weight", (c.head_dim, d)),
        ("self_attn.kv_norm.weight", "attn.kv_norm.weight", (c.head_dim,)),
        ("self_attn.o_a_proj.weight", "attn.wo_a.weight", (latent, heads // c.o_groups)),
        ("self_attn.o_b_proj.weight", "attn.wo_b.weight", (d, latent)),
        ("self_attn.sinks", "attn.attn_sink", (c.heads,)),
        ("mlp.gate.weight", "ffn.gate.weight", (c.experts, d)),
        ("mlp.shared_experts.gate_proj.weight", "ffn.shared_experts.w1.weight", (inner, d)),
        ("mlp.shared_experts.up_proj.weight", "ffn.shared_experts.w3.weight", (inner, d)),
        ("mlp.shared_experts.down_proj.weight", "ffn.shared_experts.w2.weight", (d, inner)),
    ]
    sites: dict[str, Shape] = {"fn": (mixes, n * d), "base": (mixes,), "scale": (3,)}
    for at in ("attn", "ffn"):
        rows += [(f"{at}_hc.{name}", f"hc_{at}_{name}", shape) for name, shape in sites.items()]
    if ratio:
        rows += _compressor(c, "", ratio, c.head_dim)
    if ratio == SPARSE_RATIO:
        index, here, original = c.index_heads, "self_attn.compressor.indexer.", "attn.indexer."
        queries = index * c.index_head_dim, c.q_lora_rank
        rows += _compressor(c, "indexer.", ratio, c.index_head_dim)
        rows.append((f"{here}q_b_proj.weight", f"{original}wq_b.weight", queries))
        rows.append((f"{here}scorer.weights_proj.weight", f"{original}weights_proj.weight", (index, d)))
    if hashed:
        table: Row = ("mlp.gate.tid2eid", "ffn.gate.tid2eid", (c.vocab_size, c.experts_per_token))
        yield next(_named(prefix, [table]))._replace(integer=True)
    else:
        rows.append(("mlp.gate.e_score_correction_bias", "ffn.gate.bias", (c.experts,)))
    yield from _named(prefix, rows)
    yield _experts(prefix, "gate_up_proj", (c.experts, 2 * inner, d), {"w1": 0, "w3": inner})
    yield _experts(prefix, "down_proj", (c.experts, d, inner), {"w2": 0})


def _compressor(config: V4Config, owner: str, ratio: int, dim: int) -> list[Row]:
    """If entries overlap, a token counts in two of them, each with its own channels."""
    here, original = f"self_attn.compressor.{owner}", f"attn.{owner}compressor."
    channels = 2 * dim if ratio == SPARSE_RATIO else dim
    return [
        (f"{here}kv_proj.weight", f"{original}wkv.weight", (channels, config.hidden_size)),
        (f"{here}gate_proj.weight", f"{original}wgate.weight", (channels, config.hidden_size)),
        (f"{here}position_bias", f"{original}ape", (ratio, channels)),
        (f"{here}kv_norm.weight", f"{original}norm.weight", (dim,)),
    ]


def _experts(prefix: str, name: str, shape: Shape, first_rows: Mapping[str, int]) -> Parameter:
    """All experts in one tensor. A checkpoint may have it expert by expert, in matrices of these names."""
    count, rows, columns = shape
    whole = next(_named(prefix, [(f"mlp.experts.{name}", f"mlp.experts.{name}", shape)]))
    size = rows // len(first_rows), columns
    pieces = (
        WeightPiece(f"{prefix}ffn.experts.{e}.{matrix}.weight", size, e, row)
        for e in range(count)
        for matrix, row in first_rows.items()
    )
    return whole._replace(pieces=(*whole.pieces, *pieces))


def _named(prefix: str, rows: Iterable[Row]) -> Iterator[Parameter]:
    """Parameters below `prefix`: `model.` is part of their own name, but not in an MTP layer."""
    model = "" if prefix.startswith(DRAFT) else "model."
    for here, original, shape in rows:
        names = sorted({here, original, ALSO.get(original, here)})
        pieces = tuple(WeightPiece(f"{prefix}{name}", shape) for name in names)
        yield Parameter(f"{model}{prefix}{here}", shape, pieces)


# Which stored tensor fills what


class Reading(NamedTuple):
    """One stored tensor, the scales it is to be multiplied with, and what both fill."""

    parameter: Parameter
    piece: WeightPiece
    stored: StoredTensor
    scale: StoredTensor | None


def plan_weights(
    checkpoint: Checkpoint, config: V4Config, *, draft: bool = True
) -> tuple[dict[str, Parameter], list[Reading]]:
    """All parameters, and what is to be read for them in the order of the files' bytes; from headers alone.

    As in `transformers`, the checkpoint decides two things, not its config: without any `mtp.` tensor it has
    no draft, and with a head of its own its embeddings are not tied. One error names all that is wrong.
    """
    drafted = draft_names(checkpoint)
    unread = set() if draft else set(drafted)
    stored = [each for name, each in checkpoint.tensors.items() if name not in unread]
    if any(_bare(each.name) in HEAD for each in stored):
        config = replace(config, tie_word_embeddings=False)
    wanted = parameters(config, draft=draft and bool(drafted))
    fills = {piece.name: (each, piece) for each in wanted.values() for piece in each.pieces}
    loose = {each.name: each for each in stored if _bare(each.name) not in fills}
    known = [each for each in stored if each.name not in loose]
    readings = [Reading(*fills[_bare(each.name)], each, _take_scale(each, loose)) for each in known]
    missing, twice = _coverage(wanted, readings)
    faults = {
        "missing": missing,
        "not of this model": [(name, "") for name in sorted(loose)],
        "there twice": [(name, "") for name in twice],
        "unfit": [(each.stored.name, why) for each in readings if (why := _unfit(each))],
    }
    checkpoint.refuse(faults)
    return wanted, readings


def draft_names(checkpoint: Checkpoint) -> list[str]:
    """The tensors of a draftof any kind."""
    return [name for name in checkpoint.tensors if _bare(name).startswith(DRAFT)]


def has_mtp(checkpoint: Checkpoint, config: V4Config) -> bool:
    """Whether a checkpoint has all MTP layers that its config names, and no other draft. Random weights have
    those that the config names."""
    if checkpoint.random_seed is not None:
        return config.mtp_layers > 0
    if not draft_names(checkpoint):
        return False
    try:
        plan_weights(checkpoint, config)
    except WeightsError:
        return False
    return True


def _bare(name: str) -> str:
    return name.removeprefix("model.")


def _take_scale(stored: StoredTensor, loose: dict[str, StoredTensor]) -> StoredTensor | None:
    """The scales of a quantized tensor, taken from the tensors that have no other use."""
    if stored.dtype not in BLOCKS:
        return None
    names = [f"{stored.name}_scale_inv", f"{stored.name.removesuffix('.weight')}.scale"]
    return next((loose.pop(name) for name in names if name in loose), None)


def _coverage(
    wanted: Mapping[str, Parameter], readings: Iterable[Reading]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns (what nothing fills, what fills something that is filled already)."""
    filled: dict[str, list[Reading]] = {name: [] for name in wanted}
    for each in readings:
        filled[each.parameter.name].append(each)
    missing, twice = list[tuple[str, str]](), list[str]()
    for name, own in filled.items():
        places = {(each.piece.expert, each.piece.first_row) for each in own}
        pieces, whole = wanted[name].pieces, (None, 0) in places
        if len(places) < len(own) or (whole and len(own) > 1):
            twice += [each.stored.name for each in own]
        elif not own:  # with its name in DeepSeek's checkpoints
            others = [p.name for p in pieces if p.expert is None and p.name != _bare(name)]
            missing.append((name, f" ({others[0]})" if others else ""))
        elif not whole:
            experts = [piece for piece in pieces if piece.expert is not None]
            missing += [(p.name, "") for p in experts if (p.expert, p.first_row) not in places]
    return missing, twice


def _unfit(reading: Reading) -> str:
    """Why a tensor does not fit its name; empty: it does."""
    parameter, piece, stored, scale = reading
    block = None if parameter.integer or len(piece.shape) < 2 else BLOCKS.get(stored.dtype)
    known = INTEGERS if parameter.integer else FLOATS
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
    shape = scales_of(piece.shape, block)
    if scale.dtype not in SCALES or scale.shape != shape:
        return f" has a scale {list(scale.shape)} of {scale.dtype}, must be {list(shape)} of {SCALES[0]}"
    return ""


def make_groups(
    wanted: Mapping[str, Parameter],
    readings: Iterable[Reading],
    matrices: torch.dtype,
    config: V4Config,
    *,
    fp8: bool,
) -> list[tuple[Group, list[Reading]]]:
    """How all parameters lie in memory, and what fills them, in the order in which a checkpoint has them.

    `fp8`: a matrix stays fp8 if all its parts are fp8 or fp4. Otherwise all of it is dequantized.
    """
    stored = dict[str, list[Reading]]()
    for each in readings:
        stored.setdefault(each.parameter.name, []).append(each)
    found, (wholes, alone) = [], grouped(wanted)
    for names in [*wholes, *([name] for name in alone)]:
        own = [each for name in names for each in stored.get(name, ())]
        stays = fp8 and names in wholes and bool(own) and all(_may_stay(each, config) for each in own)
        dtype = FP8 if stays else wanted[names[0]].dtype(matrices)
        found.append((Group({name: wanted[name].shape for name in names}, dtype), own))
    place = {name: i for i, name in enumerate(stored)}
    return sorted(found, key=lambda each: min(place.get(name, 0) for name in each[0].shapes))


def _may_stay(reading: Reading, config: V4Config) -> bool:
    """Whether a tensor can be fp8 with scales of 128 x 128. Pieces of a matrix are put together at multiples
    of 128 rows only: otherwise numbers of two pieces would share a scale."""
    parameter, piece, stored, scale = reading
    rows = piece.shape[-2] // (config.o_groups if parameter.name.endswith(OUT_LOW) else 1)
    return scale is not None and rows % FP8_BLOCK[0] == 0 and quantized.may_stay(stored.dtype, scale.dtype)


# Reading


def load_weights(  # noqa: PLR0913
    checkpoint: Checkpoint,
    config: V4Config,
    device: str = "cpu",
    matrices: torch.dtype = torch.float32,
    *,
    draft: bool = True,
    fp8: bool = False,
    check: BytesCheck = lambda _: None,
) -> dict[str, Tensor]:
    """Every parameter by its name: matrices in the type asked for, all else fp32; expert tables are int64.

    Each stored tensor is read once and copied once, into its place. Tied embeddings are one tensor under two
    names. There are `mtp.` names if the checkpoint has the draft and it is wanted. `fp8`: quantized matrices
    stay fp8, where that is exact. `check` is given the bytes that all this takes, before a byte is read.
    """
    if checkpoint.random_seed is not None:
        return random_weights(config, checkpoint.random_seed, device, matrices, check, draft=draft)
    wanted, readings = plan_weights(checkpoint, config, draft=draft)
    groups = make_groups(wanted, readings, matrices, config, fp8=fp8)
    check(_bytes_of(groups))
    weights = dict[str, Tensor]()
    with progress("weights", sum(group.bytes for group, _ in groups)) as done:
        for group, own in groups:
            weights |= _load(group, own, checkpoint, config, device, matrices)
            done(group.bytes)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return weights


def _bytes_of(groups: Iterable[tuple[Group, list[Reading]]]) -> dict[str, int]:
    return bytes_by_part((next(iter(group.shapes)), group.bytes) for group, _ in groups)


def _load(
    group: Group,
    readings: Sequence[Reading],
    checkpoint: Checkpoint,
    config: V4Config,
    device: str,
    matrices: torch.dtype,
) -> dict[str, Tensor]:
    """Load one matrix. If it can not be fp8 exactly, it is read again, as `matrices`."""
    weights = group.allocate(device)
    for parameter, piece, stored, scaled_by in readings:
        target, values = piece.of(weights[parameter.name]), checkpoint.read(stored.name)
        if scaled_by is None:
            target.copy_(values)
            if parameter.integer:
                _check_experts(target, stored, config)
            else:
                check_finite(target, stored)
            continue
        scale = quantized.as_fp32(checkpoint.read(scaled_by.name)).to(device)
        if group.dtype != FP8:
            quantized.dequantize(target, values, scale, BLOCKS[stored.dtype])
            check_finite(target, stored)
            continue
        target_scale = piece.scale_of(weights[parameter.name + SCALE])
        if not quantized.put(target, target_scale, values, scale, BLOCKS[stored.dtype]):
            log.warning("%s is not exact as fp8: it becomes %s", stored.name, matrices)
            del weights, target, target_scale  # their memory is needed again
            group = group._replace(dtype=matrices)
            return _load(group, readings, checkpoint, config, device, matrices)
        quantized.check_fp8(target, target_scale, stored)
    return weights


def random_weights(
    config: V4Config,
    seed: int,
    device: str = "cpu",
    matrices: torch.dtype = torch.float32,
    check: BytesCheck = lambda _: None,
    *,
    draft: bool = False,
) -> dict[str, Tensor]:
    """Weights from a seed, made on the device, scaled so that activations keep their size. A draft's weights
    come last: the model's are the same with and without it."""
    chance = torch.Generator(device).manual_seed(seed)
    wanted = parameters(config, draft=draft)
    groups = make_groups(wanted, (), matrices, config, fp8=False)
    check(_bytes_of(groups))
    weights = {name: made for group, _ in groups for name, made in group.allocate(device).items()}
    for each in wanted.values():
        made = weights[each.name]
        if each.integer:
            first = torch.randint(config.experts, (len(made), 1), device=device, generator=chance)
            made.copy_((first + torch.arange(made.shape[1], device=device)) % config.experts)
        elif each.name.endswith("norm.weight"):
            made.fill_(1.0)
        elif len(each.shape) < 2:
            made.normal_(0.0, 0.02, generator=chance)
        else:
            made.normal_(0.0, each.shape[-1] ** -0.5, generator=chance)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return weights


def _check_experts(table: Tensor, stored: StoredTensor, config: V4Config) -> None:
    if table.min() < 0 or table.max() >= config.experts:
        why = f"{stored.name} names experts that are not there: there are {config.experts}"
        raise WeightsError(stored.file, why, [stored.name])
