"""What DeepSeek V4 stores, from its Hugging Face config.

    stream            layers    keep            one entry is
    c4                sparse    prefix          4 tokens, compressed
    c4_index          sparse    prefix          4 tokens, the indexer's key
    c128              heavy     prefix          128 tokens, compressed
    window            all       window 128      1 token
    c4_state          sparse    state of 4      1 token: what the next c4 entry needs of this one
    c4_index_state    sparse    state of 4      the same for c4_index

The windows of two c4 entries overlap: an entry is made of its own 4 tokens and of the 4 before, which
count with the first half of their channels only. So at a boundary the last 4 tokens' rows are open. The
heavy layers do not overlap: pages of a multiple of 128 tokens leave nothing open, and other page sizes
are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercel.errors import SpecError
from tiercel.spec.attention import index_parts, values
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.hf_fields import layer_kinds, layers_of, per_layer, whole
from tiercel.spec.stream import PREFIX, Part, State, Stream, Window, check_positive

SLIDING = "sliding_attention"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"

RATES = {SPARSE: 4, HEAVY: 128}
"""Tokens per entry where a config says nothing else."""

FORMATS = ("fp8", "bf16", "fp32")
"""fp8 is the byte layout of production kernels; the others keep the model's plain numbers."""


@dataclass(frozen=True)
class _Entry:
    """The bytes of one entry of the attention, in one format."""

    parts: tuple[Part, ...]
    encoding: str
    row_align: int = 1


def deepseek_v4(
    config: Mapping[str, Any], page_tokens: int = 256, format: str = "fp8", model: str | None = None
) -> CacheSpec:
    """The target model. MTP layers are not in it: see `deepseek_v4_mtp`."""
    entry, rates, kinds = _entry(config, format), _rates(config), _kinds(config)
    sparse, heavy = layers_of(kinds, SPARSE), layers_of(kinds, HEAVY)
    history: list[Stream] = []
    states: tuple[Stream, ...] = ()
    if sparse:
        history += [_compressed(entry, rates[SPARSE], sparse), _index(config, format, rates[SPARSE], sparse)]
        states = _states(config, rates[SPARSE], sparse)
    if heavy:
        history.append(_compressed(entry, rates[HEAVY], heavy))
    window = _window(config, entry, layers=len(kinds))
    return CacheSpec(model or "deepseek_v4", page_tokens, (*history, window, *states))


def deepseek_v4_mtp(
    config: Mapping[str, Any], page_tokens: int = 256, format: str = "fp8", *, hidden: bool = False
) -> CacheSpec:
    """The draft: each MTP layer is one more window layer. Give it to `CacheSpec.with_draft`.

    `hidden` adds the streams of the token before a boundary, from which the draft's next entry is made: with
    it a draft goes on exactly after a tail, without it the first entry after the tail is missing.
    """
    layers = mtp_layers(config)
    check_positive("num_nextn_predict_layers", layers)
    if config.get("compress_ratios") is not None:
        for ratio in per_layer(config, "compress_ratios", extra=layers)[whole(config, "num_hidden_layers") :]:
            if ratio != 0:
                raise SpecError("compress_ratios", ratio, "an MTP layer is a window layer, ratio 0")
    streams = [_window(config, _entry(config, format), layers=layers)]
    if hidden:
        size = whole(config, "hc_mult") * whole(config, "hidden_size")
        keep, parts = State(entries=1, span=1), (values(size, "fp32"),)
        streams.append(Stream("hidden", tuple(range(layers)), parts, keep, encoding="fp32"))
    return CacheSpec("mtp", page_tokens, tuple(streams))


# Streams


def _compressed(entry: _Entry, rate: int, layers: tuple[int, ...]) -> Stream:
    return Stream(f"c{rate}", layers, entry.parts, PREFIX, rate, entry.row_align, entry.encoding)


def _index(config: Mapping[str, Any], format: str, rate: int, layers: tuple[int, ...]) -> Stream:
    dim = whole(config, "index_head_dim")
    parts, encoding = (index_parts(dim), "fp8_row") if format == "fp8" else ((values(dim, format),), format)
    return Stream(f"c{rate}_index", layers, parts, tokens_per_entry=rate, encoding=encoding)


def _window(config: Mapping[str, Any], entry: _Entry, *, layers: int) -> Stream:
    keep = Window(whole(config, "sliding_window"))
    return Stream("window", tuple(range(layers)), entry.parts, keep, 1, entry.row_align, entry.encoding)


def _states(config: Mapping[str, Any], rate: int, layers: tuple[int, ...]) -> tuple[Stream, ...]:
    """(kv, gate) of the last `rate` tokens, fp32 in every format: the compressor adds in fp32."""
    keep = State(entries=rate, span=rate)
    dims = {"state": whole(config, "head_dim"), "index_state": whole(config, "index_head_dim")}
    return tuple(
        Stream(f"c{rate}_{name}", layers, (values(2 * dim, "fp32"),), keep, encoding="fp32")
        for name, dim in dims.items()
    )


# Bytes of an entry


def _entry(config: Mapping[str, Any], format: str) -> _Entry:
    if format not in FORMATS:
        raise SpecError("format", format, f"is none of {', '.join(FORMATS)}")
    head_dim = whole(config, "head_dim")
    if format != "fp8":
        return _Entry((values(head_dim, format),), format)
    nope = head_dim - (rope := rope_dim(config))
    value = Part("value", nope + 2 * rope)
    return _Entry((value, Part("scale", _scale_bytes(nope))), "fp8_groups", row_align=value.bytes)


def _scale_bytes(nope: int) -> int:
    """One exponent byte per group of fp8 channels, padded to whole words.

    The group is the largest power of two up to 64 that divides the channels (`x & -x` is that power).
    """
    group = min(64, nope & -nope)
    return -(-(nope // group) // 4) * 4


def rope_dim(config: Mapping[str, Any]) -> int:
    """How many channels of a head turn with the position."""
    head_dim, factor = whole(config, "head_dim"), config.get("partial_rotary_factor")
    if config.get("qk_rope_head_dim") is None and isinstance(factor, int | float):
        field, rope = "partial_rotary_factor", int(head_dim * factor)
    else:
        field, rope = "qk_rope_head_dim", whole(config, "qk_rope_head_dim")
    if not 0 < rope < head_dim or rope % 2:
        why = f"gives {rope} rotary channels, must be even and between 0 and head_dim = {head_dim}"
        raise SpecError(field, config.get(field), why)
    return rope


# Kinds of layers


def _kinds(config: Mapping[str, Any]) -> Sequence[str]:
    """The kind of every layer, from `layer_types` or else from `compress_ratios`."""
    rates = _rates(config)
    if config.get("layer_types") is not None:
        return layer_kinds(config, (SLIDING, *rates))
    kind_of = {0: SLIDING} | {rate: kind for kind, rate in rates.items()}
    ratios = per_layer(config, "compress_ratios", extra=mtp_layers(config))
    ratios = ratios[: whole(config, "num_hidden_layers")]
    for i, ratio in enumerate(ratios):
        if ratio not in tuple(kind_of):
            raise SpecError(f"compress_ratios[{i}]", ratio, f"is none of {', '.join(map(str, kind_of))}")
    return [kind_of[ratio] for ratio in ratios]


def _rates(config: Mapping[str, Any]) -> dict[str, int]:
    given = config.get("compress_rates") or {}
    if not isinstance(given, Mapping) or not given.keys() <= RATES.keys():
        raise SpecError("compress_rates", given, f"must map {' and '.join(RATES)} to tokens per entry")
    for kind, rate in given.items():
        check_positive(f"compress_rates.{kind}", rate)
    rates = RATES | dict(given)
    if rates[SPARSE] == rates[HEAVY]:
        raise SpecError("compress_rates", given, "two kinds of layers have the same tokens per entry")
    return rates


def mtp_layers(config: Mapping[str, Any]) -> int:
    """1 where the config does not say: as in every published one. DSpark, another kind of draft, lists its
    stages in a field of its own."""
    name = "num_nextn_predict_layers"
    stages = config.get("dspark_target_layer_ids")
    return max(whole({name: 1, **config}, name, least=0), len(stages) if isinstance(stages, list) else 0)
