"""What DeepSeek V4 stores, from its Hugging Face config.

    stream            layers    keep            one entry is
    c4                sparse    prefix          4 tokens, compressed
    c4_index          sparse    prefix          4 tokens, the indexer's key
    c128              heavy     prefix          128 tokens, compressed
    window            all       window 128      1 token
    c4_state          sparse    state of 4      1 token: what the next c4 entry needs of this one
    c4_index_state    sparse    state of 4      the same for c4_index

The windows of two c4 entries overlap: an entry is made of its own 4 tokens and of the 4 before, which
count with the first half of their channels only. So at a boundary the rows of the last 4 tokens are still
needed. The heavy layers do not overlap: a page is a multiple of 128 tokens, so a boundary leaves no entry
open; other page sizes are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tiercel.errors import SpecError
from tiercel.spec.attention import index_parts, values
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.hf_fields import layers_of, per_layer, whole
from tiercel.spec.stream import PREFIX, Keep, Part, State, Stream, Window, check_positive

SLIDING = "sliding_attention"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"

RATES = {SPARSE: 4, HEAVY: 128}
"""Tokens per entry, unless `compress_rates` of a config has other numbers."""

ENTRIES, INDEX, WINDOW, HIDDEN = "entries", "index", "window", "hidden"
STATE_OF = {ENTRIES: "state", INDEX: "index state"}
"""Roles of streams. `STATE_OF[role]` is the role of the stream that keeps the rows of the last tokens, which
the next entry of `role` needs. Heavy layers have no such stream: a boundary leaves no entry open there."""

FORMATS = ("fp8", "bf16", "fp32")
"""fp8 is the byte layout of production kernels; the others keep the model's plain numbers."""


class _Entry(NamedTuple):
    """The bytes of one entry of the attention, in one format."""

    parts: tuple[Part, ...]
    encoding: str
    row_align: int = 1
    rope: int = 0
    group: int = 0

    def stream(
        self,
        name: str,
        layers: tuple[int, ...],
        keep: Keep,
        role: str,
        tokens_per_entry: int = 1,
        selected: int = 0,
    ) -> Stream:
        how = {"tokens_per_entry": tokens_per_entry, "selected": selected, **self._asdict()}
        return Stream(name, layers, keep=keep, role=role, **how)


def deepseek_v4(
    config: Mapping[str, Any], page_tokens: int = 256, format: str = "fp8", model: str | None = None
) -> CacheSpec:
    """The target model. MTP layers are not in it: see `deepseek_v4_mtp`."""
    entry, rates, kinds = _entry(config, format), compress_rates(config), kinds_of(config)
    streams, states = list[Stream](), list[Stream]()
    if sparse := layers_of(kinds, SPARSE):
        rate, dim = rates[SPARSE], whole(config, "index_head_dim")
        best = 0 if config.get("index_topk") is None else whole(config, "index_topk")
        index = (
            _Entry((values(dim, format),), format) if format != "fp8" else _Entry(index_parts(dim), "fp8_row")
        )
        streams += [
            entry.stream(f"c{rate}", sparse, PREFIX, ENTRIES, rate, best),
            index.stream(f"c{rate}_index", sparse, PREFIX, INDEX, rate),
        ]
        # (kv, gate) of the last `rate` tokens, fp32 in every format: the compressor adds in fp32
        for name, role, width in (
            (f"c{rate}_state", STATE_OF[ENTRIES], whole(config, "head_dim")),
            (f"c{rate}_index_state", STATE_OF[INDEX], dim),
        ):
            state = _Entry((values(2 * width, "fp32"),), "fp32")
            states.append(state.stream(name, sparse, State(entries=rate, span=rate), role))
    if heavy := layers_of(kinds, HEAVY):
        streams.append(entry.stream(f"c{rates[HEAVY]}", heavy, PREFIX, ENTRIES, rates[HEAVY]))
    window = _window(config, entry, layers=len(kinds))
    return CacheSpec(model or "deepseek_v4", page_tokens, (*streams, window, *states))


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
        for ratio in config["compress_ratios"][len(kinds_of({**config, "layer_types": None})) :]:
            if ratio != 0:
                raise SpecError("compress_ratios", ratio, "an MTP layer is a window layer, ratio 0")
    streams = [_window(config, _entry(config, format), layers=layers)]
    if hidden:
        size = whole(config, "hc_mult") * whole(config, "hidden_size")
        streams.append(_hidden(size, tuple(range(layers))))
    return CacheSpec("mtp", page_tokens, tuple(streams))


def _hidden(size: int, layers: tuple[int, ...]) -> Stream:
    """What a draft's next entry is made from: it is kept for the token before a boundary."""
    return _Entry((values(size, "fp32"),), "fp32").stream("hidden", layers, State(entries=1, span=1), HIDDEN)


def _window(config: Mapping[str, Any], entry: _Entry, *, layers: int) -> Stream:
    keep = Window(whole(config, "sliding_window"))
    return entry.stream("window", tuple(range(layers)), keep, WINDOW)


def _entry(config: Mapping[str, Any], format: str) -> _Entry:
    """fp8 has one exponent byte per group of channels, padded to whole words. A group is the largest power of
    two up to 64 that divides the channels (`x & -x` is that power)."""
    if format not in FORMATS:
        raise SpecError("format", format, f"is none of {', '.join(FORMATS)}")
    head_dim = whole(config, "head_dim")
    if format != "fp8":
        return _Entry((values(head_dim, format),), format)
    nope = head_dim - (rope := rope_dim(config))
    group = min(64, nope & -nope)
    value, scale = Part("value", nope + 2 * rope), Part("scale", -(-(nope // group) // 4) * 4)
    return _Entry((value, scale), "fp8_groups", value.bytes, rope, group)


def rope_dim(config: Mapping[str, Any]) -> int:
    """How many channels of a head rotate with the position."""
    head_dim, factor = whole(config, "head_dim"), config.get("partial_rotary_factor")
    if config.get("qk_rope_head_dim") is None and isinstance(factor, int | float):
        field, rope = "partial_rotary_factor", int(head_dim * factor)
    else:
        field, rope = "qk_rope_head_dim", whole(config, "qk_rope_head_dim")
    if not 0 < rope < head_dim or rope % 2:
        why = f"gives {rope} rotary channels, must be even and between 0 and head_dim = {head_dim}"
        raise SpecError(field, config.get(field), why)
    return rope


def kinds_of(config: Mapping[str, Any]) -> Sequence[str]:
    """The kind of every layer, from `layer_types` or else from `compress_ratios`."""
    rates = compress_rates(config)
    if config.get("layer_types") is not None:
        return per_layer(config, "layer_types", known=(SLIDING, *rates))
    kind_of = {0: SLIDING} | {rate: kind for kind, rate in rates.items()}
    ratios = per_layer(config, "compress_ratios", known=tuple(kind_of), extra=mtp_layers(config))
    return [kind_of[ratio] for ratio in ratios[: whole(config, "num_hidden_layers")]]


def compress_rates(config: Mapping[str, Any]) -> dict[str, int]:
    """Tokens per entry of the two kinds of layers that compress."""
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
    """1 unless the config has a number: every published model has one. DSpark, another kind of draft, lists
    its stages in a field of its own."""
    name = "num_nextn_predict_layers"
    stages = config.get("dspark_target_layer_ids")
    return max(whole({name: 1, **config}, name, least=0), len(stages) if isinstance(stages, list) else 0)
