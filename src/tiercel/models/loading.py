"""Weights, from the files of a checkpoint to tensors on a device. A family declares which there are (a
`WeightSpec`); everything else is here.

    stored tensors                                  a parameter               in memory
    one of several names, with `model.` or not  →   the whole of it       ┐   alone, or beside the others
    experts.0.up_proj, experts.1.up_proj, …     →   rows of each expert   ├→  of its matrix
    numbers of fp8 or fp4, and their scales     →   any of both           ┘

All is planned from the headers. A tensor that does not fit is found before a byte is read, and one error
names all that is wrong. Then the bytes are told. NaN and Inf are found while reading. Weights that are stored
with scales are dequantized; or they stay fp8, for kernels that multiply it, and the scales of `X` are under
the name `X_scale`.

As in `transformers`, a checkpoint decides two things, not its config: without any tensor of a draft it has no
draft, and with a head of its own its embeddings are not tied.

Everything that reads the same input is one matrix: its parameters lie one after the other, so that nothing is
copied to put them together.

    │ q_a_proj │ kv_proj │ compressor.kv_proj │ …                          one matrix [n, k], of one dtype
    │ experts 0, 1, 2, … │ the shared expert's gate_proj │ its up_proj │   matrices [m, n, k]
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiercel.errors import WeightsError
from tiercel.models import quantized
from tiercel.models.base import Dimensions, Stage, Weights
from tiercel.models.checkpoint import FLOATS, Checkpoint, StoredTensor, check_finite
from tiercel.models.quantized import BLOCKS, FP8, FP8_BLOCK, PACKED, SCALES, Shape, scales_of
from tiercel.progress import progress

log = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEADS = (HEAD, "head.weight")
"""What a checkpoint calls the head."""

LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""How the name of a layer's parameter begins."""

SCALE = "_scale"
"""Added to the name of an fp8 matrix: the name of its scales."""

INTEGERS = ("I64", "I32")

PARTS = {
    "self_attn.": "attention",
    "experts.": "experts",
    "mlp.": "feed-forward",
    "embed_tokens.": "embeddings",
    "lm_head.": "embeddings",
}
"""The purpose of parameters, by the first fitting part of a name; all others are `other weights`."""

# What a family declares


class Piece(NamedTuple):
    """What one stored tensor fills: a parameter, or some rows of one expert of it."""

    name: str
    """The name in a checkpoint, which may have `model.` before it or not."""
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
    pieces: tuple[Piece, ...]
    """The forms that a checkpoint may have it in: whole, under one of several names, or expert by expert."""
    wide: bool = False
    """Stays fp32 although it has rows and columns: it is no matrix of activations."""
    experts: int = 0
    """More than 0: it is a table of experts, whole numbers below this one."""
    parts: int = 1
    """Matrices that its rows are multiplied as: two of them do not share a scale of fp8."""

    @property
    def integer(self) -> bool:
        return self.experts > 0

    def dtype(self, matrices: torch.dtype) -> torch.dtype:
        if self.integer:
            return torch.int64
        return torch.float32 if self.wide or len(self.shape) < 2 else matrices


def plain(name: str, shape: Shape, *others: str) -> Parameter:
    """A parameter that is stored whole, under its own name or one of `others`."""
    return Parameter(name, shape, tuple(Piece(each, shape) for each in sorted({_bare(name), *others})))


def experts(name: str, shape: Shape, *matrices: str) -> Parameter:
    """All experts in one tensor [experts, rows, columns]. A checkpoint may have it expert by expert, in
    matrices of these names, one below the other; {} stands for the expert."""
    count, rows, columns = shape
    size = rows // len(matrices), columns
    pieces = [
        Piece(matrix.format(e), size, e, i * size[0])
        for e in range(count)
        for i, matrix in enumerate(matrices)
    ]
    return Parameter(name, shape, (Piece(_bare(name), shape), *pieces))


@dataclass(frozen=True)
class WeightSpec:
    """The weights of a family."""

    parameters: Callable[[Any], Mapping[str, Parameter]]
    """Dimensions → every parameter by its name, a draft's last; a head only if embeddings are not tied."""
    matrices: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """The matrices of each part of a layer, by the parameters that they are made of. The first of them is in
    every layer that has the matrix."""
    draft: tuple[str, ...] = ()
    """How the names of a draft's parameters begin; empty: there is none."""

    def of(self, config: Any, *, draft: bool) -> dict[str, Parameter]:
        """Every parameter by its name; those of a draft only if it is wanted."""
        all_of_them = self.parameters(config).items()
        return {name: each for name, each in all_of_them if draft or not name.startswith(self.draft)}

    def draft_names(self, checkpoint: Checkpoint) -> list[str]:
        """The tensors of a draft of any kind."""
        return [name for name in checkpoint.tensors if _bare(name).startswith(self.draft)]

    def has_draft(self, checkpoint: Checkpoint, config: Dimensions) -> bool:
        """Whether a checkpoint has all of the draft that its config names, and no other draft. Random weights
        have what the config names."""
        if checkpoint.random_seed is not None:
            return len(self.of(config, draft=True)) > len(self.of(config, draft=False))
        if not self.draft_names(checkpoint):
            return False
        try:
            self._match(checkpoint, config, draft=True)
        except WeightsError:
            return False
        return True

    def plan(
        self,
        checkpoint: Checkpoint,
        config: Dimensions,
        matrices: torch.dtype = torch.float32,
        *,
        draft: bool = True,
        fp8: bool = False,
    ) -> Plan:
        """What is to be read, from headers alone. A draft that is not wanted is not looked at, whatever its
        form.

        Matrices become the type asked for, tables of experts int64, all else fp32. `fp8`: a matrix stays fp8
        if all its parts are fp8 or fp4 and that is exact. Otherwise all of it is dequantized.
        """
        if checkpoint.random_seed is not None:
            return self.random(config, checkpoint.random_seed, matrices, draft=draft)
        wanted, readings = self._match(checkpoint, config, draft=draft)
        return self._lay_out(checkpoint, wanted, readings, matrices, fp8=fp8)

    def random(
        self, config: Any, seed: int, matrices: torch.dtype = torch.float32, *, draft: bool = False
    ) -> Plan:
        """Weights from a seed. A model's are the same with and without a draft."""
        return self._lay_out(seed, self.of(config, draft=draft), [], matrices)

    def _match(
        self, checkpoint: Checkpoint, config: Dimensions, *, draft: bool
    ) -> tuple[dict[str, Parameter], list[Reading]]:
        """All parameters, and what is to be read for them in the order of the files' bytes."""
        drafted = self.draft_names(checkpoint)
        unread = set() if draft else set(drafted)
        stored = [each for name, each in checkpoint.tensors.items() if name not in unread]
        if any(_bare(each.name) in HEADS for each in stored):
            config = replace(config, tie_word_embeddings=False)
        wanted = self.of(config, draft=draft and bool(drafted))
        fills = {_bare(piece.name): (each, piece) for each in wanted.values() for piece in each.pieces}
        loose = {each.name: each for each in stored if _bare(each.name) not in fills}
        known = [each for each in stored if each.name not in loose]
        readings = [Reading(*fills[_bare(each.name)], each, _take_scale(each, loose)) for each in known]
        missing, twice = _coverage(wanted, readings)
        faults = {
            "missing": missing,
            "not of this model": [(name, "") for name in sorted(loose)],
            "there twice": [(name, "") for name in twice],
            "unfit": [(each.stored.name, why) for each in readings if (why := each.unfit())],
        }
        checkpoint.refuse(faults)
        return wanted, readings

    def _lay_out(
        self,
        source: Checkpoint | int,
        wanted: Mapping[str, Parameter],
        readings: Iterable[Reading],
        matrices: torch.dtype,
        *,
        fp8: bool = False,
    ) -> Plan:
        """How all parameters will lie in memory, in the order in which a checkpoint has them."""
        stored = dict[str, list[Reading]]()
        for each in readings:
            stored.setdefault(each.parameter.name, []).append(each)
        found, (wholes, alone) = list[Group](), self._wholes(wanted)
        for names in [*wholes, *([name] for name in alone)]:
            own = [each for name in names for each in stored.get(name, ())]
            stays = fp8 and names in wholes and bool(own) and all(each.may_stay() for each in own)
            dtype = FP8 if stays else wanted[names[0]].dtype(matrices)
            found.append(Group({name: wanted[name].shape for name in names}, dtype, own))
        place = {name: i for i, name in enumerate(stored)}
        found.sort(key=lambda group: min(place.get(name, 0) for name in group.shapes))
        return Plan(source, wanted, found, matrices)

    def _wholes(self, names: Iterable[str]) -> tuple[list[list[str]], list[str]]:
        """Returns (the parameters of each matrix, those that belong to none)."""
        rest, wholes = dict.fromkeys(names), list[list[str]]()
        known = [[part + name for name in own] for part, all_ in self.matrices.items() for own in all_]
        for name in list(rest):
            for own in known:
                if name.endswith(own[0]):
                    layer = name.removesuffix(own[0])
                    wholes.append([layer + each for each in own if layer + each in rest])
        for name in (name for whole in wholes for name in whole):
            del rest[name]
        return wholes, list(rest)


def _bare(name: str) -> str:
    return name.removeprefix("model.")


# Which stored tensor fills what


class Reading(NamedTuple):
    """One stored tensor, the scales it is to be multiplied with, and what both fill."""

    parameter: Parameter
    piece: Piece
    stored: StoredTensor
    scale: StoredTensor | None

    def unfit(self) -> str:
        """Why the tensor does not fit its name; empty: it does."""
        parameter, piece, stored, scale = self
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

    def may_stay(self) -> bool:
        """Whether the tensor can be fp8 with scales of 128 x 128. Pieces of a matrix are put together at
        multiples of 128 rows only: otherwise numbers of two pieces would share a scale."""
        rows = self.piece.shape[-2] // self.parameter.parts
        if self.scale is None or rows % FP8_BLOCK[0]:
            return False
        return quantized.may_stay(self.stored.dtype, self.scale.dtype)


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
        elif not own:  # with its other name
            others = [p.name for p in pieces if p.expert is None and p.name != _bare(name)]
            missing.append((name, f" ({others[0]})" if others else ""))
        elif not whole:
            of_experts = [piece for piece in pieces if piece.expert is not None]
            missing += [(p.name, "") for p in of_experts if (p.expert, p.first_row) not in places]
    return missing, twice


# Memory


class Group(NamedTuple):
    """Parameters that lie together, or a single one, and what fills them. If they are fp8, their scales lie
    together too."""

    shapes: Mapping[str, Shape]
    dtype: torch.dtype
    readings: Sequence[Reading]

    def _parts(self) -> Iterator[tuple[torch.dtype, Mapping[str, Shape]]]:
        yield self.dtype, self.shapes
        if self.dtype == FP8:
            scales = {name + SCALE: scales_of(shape, FP8_BLOCK) for name, shape in self.shapes.items()}
            yield torch.float32, scales

    @property
    def bytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for dtype, own in self._parts() for shape in own.values())

    def allocate(self, device: str) -> dict[str, Tensor]:
        """Every parameter and its scales by their names."""
        found = dict[str, Tensor]()
        for dtype, shapes in self._parts():
            sizes = [prod(shape) for shape in shapes.values()]
            parts = torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes)
            found |= {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return found


def joined(weights: Weights, names: Sequence[str]) -> tuple[Tensor, ...]:
    """These parameters as one matrix, or as several if the first of them is several; and the scales, if they
    are fp8. They are copied only if they do not lie together."""
    own = [weights[name] for name in names if name in weights]
    scales = [weights[name + SCALE] for name in names if name + SCALE in weights]
    assert len(scales) in (0, len(own)), names
    return tuple(_whole(parts) for parts in (own, scales) if parts)


def _whole(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    shape = sum(each.numel() for each in parts) // first[0].numel(), *first.shape[1:]
    memory, at = first.untyped_storage().data_ptr(), first.storage_offset()
    for each in parts:
        here = each.untyped_storage().data_ptr() == memory and each.storage_offset() == at
        if not (here and each.is_contiguous() and each.dtype == first.dtype):
            return torch.cat([each.flatten() for each in parts]).view(shape)
        at += each.numel()
    return first.as_strided(shape, first.stride())


# Reading


class Plan(NamedTuple):
    """What is to be read, and how it will lie in memory."""

    source: Checkpoint | int
    """An int: a seed."""
    wanted: Mapping[str, Parameter]
    groups: Sequence[Group]
    matrices: torch.dtype
    elsewhere: Sequence[Group] = ()
    """What other stages read."""

    def of_stage(self, stage: Stage, *, draft: bool) -> Plan:
        """Only what a stage reads. `draft`: whether the model's own draft is read, which embeds tokens."""
        embeds = stage.begins or (stage.ends and (draft or HEAD not in self.wanted))

        def reads(name: str) -> bool:
            layer = LAYER.match(name)
            if layer is not None:
                return int(layer[1]) in stage.layers
            return embeds if name == EMBEDDING else stage.ends

        own, others = list[Group](), list[Group]()
        for group in self.groups:
            (own if reads(next(iter(group.shapes))) else others).append(group)
        return self._replace(groups=own, elsewhere=others)

    @property
    def bytes(self) -> dict[str, int]:
        """What the weights will take, by purpose."""
        found = dict[str, int]()
        for group in self.groups:
            name = next(iter(group.shapes))
            part = next((part for piece, part in PARTS.items() if piece in name), "other weights")
            found[part] = found.get(part, 0) + group.bytes
        return found

    def read(self, device: str = "cpu") -> dict[str, Tensor]:
        """Every parameter by its name. Each stored tensor is read once and copied once, into its place. Tied
        embeddings are one tensor under two names."""
        weights = dict[str, Tensor]()
        with progress("weights", sum(group.bytes for group in self.groups)) as done:
            for group in self.groups:
                weights |= self._load(group, device)
                done(group.bytes)
        if isinstance(self.source, int):  # a stage has the numbers that the whole model has there
            others = {name: each for group in self.elsewhere for name, each in group.allocate(device).items()}
            self._randomize({**weights, **others}, torch.Generator(device).manual_seed(self.source))
        if HEAD not in self.wanted and EMBEDDING in weights:
            weights[HEAD] = weights[EMBEDDING]
        return weights

    def _randomize(self, weights: Weights, chance: torch.Generator) -> None:
        """Scaled so that activations keep their size, parameter by parameter."""
        for each in self.wanted.values():
            made = weights[each.name]
            if each.integer:
                device = made.device
                first = torch.randint(each.experts, (len(made), 1), device=device, generator=chance)
                made.copy_((first + torch.arange(made.shape[1], device=device)) % each.experts)
            elif each.name.endswith("norm.weight"):
                made.fill_(1.0)
            elif len(each.shape) < 2:
                made.normal_(0.0, 0.02, generator=chance)
            else:
                made.normal_(0.0, each.shape[-1] ** -0.5, generator=chance)

    def _load(self, group: Group, device: str) -> dict[str, Tensor]:
        """Load one matrix. If it can not be fp8 exactly, it is read again, as `matrices`."""
        weights = group.allocate(device)
        for parameter, piece, stored, scaled_by in group.readings:
            assert isinstance(self.source, Checkpoint)
            target, values = piece.of(weights[parameter.name]), self.source.read(stored.name)
            if scaled_by is None:
                target.copy_(values)
                if not parameter.integer:
                    check_finite(target, stored)
                elif target.min() < 0 or target.max() >= parameter.experts:
                    why = f"{stored.name} names experts that are not there: there are {parameter.experts}"
                    raise WeightsError(stored.file, why, [stored.name])
                continue
            scale = quantized.as_fp32(self.source.read(scaled_by.name)).to(device)
            if group.dtype != FP8:
                quantized.dequantize(target, values, scale, BLOCKS[stored.dtype])
                check_finite(target, stored)
                continue
            target_scale = piece.scale_of(weights[parameter.name + SCALE])
            if not quantized.put(target, target_scale, values, scale, BLOCKS[stored.dtype]):
                log.warning("%s is not exact as fp8: it becomes %s", stored.name, self.matrices)
                del weights, target, target_scale  # their memory is needed again
                return self._load(group._replace(dtype=self.matrices), device)
            quantized.check_fp8(target, target_scale, stored)
        return weights
