"""Builders: what the common kinds of attention store, as a `CacheSpec`.

    builder           in pages        in tails
    mha               k, v
    mla               latent
    mla_indexer       latent, index
    sliding_window    k, v            window_k, window_v
    recurrent         k, v            conv, temporal

A stream of any other shape is declared as a `Stream`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tiercel.errors import SpecError
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.stream import PREFIX, Keep, Part, State, Stream, Window, check_positive

DTYPE_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}

MLA_SCALE_GROUP = 128
"""Latent channels that share one fp32 scale in the fp8 row of DeepSeek V3 and V3.2."""

KEYS_VALUES = "keys and values"
"""The role of a stream that `kv_stream` declares."""

Layers = int | tuple[int, ...]
"""A number of layers, counted from 0, or the layer ids themselves."""


@dataclass(frozen=True)
class Heads:
    """The keys and values of one token in one layer. `v_head_dim` None: as wide as the keys."""

    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_positive("kv_heads", self.kv_heads)
        check_positive("head_dim", self.head_dim)
        check_positive("v_head_dim", 1 if self.v_head_dim is None else self.v_head_dim)


@dataclass(frozen=True)
class Recurrence:
    """The state of one recurrent layer: the last inputs of its convolution, and its temporal state.

    `temporal_values` is heads x head_dim x state_dim. The temporal state is fp32 because it adds up over the
    whole text.
    """

    conv_channels: int
    conv_kernel: int
    temporal_values: int
    conv_dtype: str = "bf16"
    temporal_dtype: str = "fp32"

    def __post_init__(self) -> None:
        for field in fields(self)[:3]:
            check_positive(field.name, getattr(self, field.name))

    @property
    def conv_values(self) -> int:
        """Values of the convolution's state. The newest input is not kept: it comes with the next token."""
        return self.conv_channels * (self.conv_kernel - 1)


def mha(
    model: str,
    page_tokens: int,
    layers: Layers,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    dtype: str = "bf16",
) -> CacheSpec:
    """Multi-head or grouped-query attention. K and V are two streams: they may differ in width."""
    heads = Heads(kv_heads, head_dim, v_head_dim, dtype)
    return CacheSpec(model, page_tokens, _kv_streams(_ids(layers), heads))


def kv_stream(layers: tuple[int, ...], kv_heads: int, head_dim: int, dtype: str) -> Stream:
    """Keys and values as our attention reads them: a head's key and value are one row, and all rows of one
    head in a page lie together.

    (If instead all heads of a token lie together, attention takes twice as long.)
    """
    head = values(2 * head_dim, dtype)
    others = (replace(head, name=f"{dtype}.{i}") for i in range(1, kv_heads))
    return Stream("kv", layers, (head, *others), encoding=dtype, role=KEYS_VALUES)


def mla(
    model: str, page_tokens: int, layers: Layers, kv_lora_rank: int, rope_dim: int, dtype: str = "bf16"
) -> CacheSpec:
    """Multi-head latent attention: one latent per token, from which all heads take keys and values."""
    latent = Stream("latent", _ids(layers), (_latent(kv_lora_rank, rope_dim, dtype),))
    return CacheSpec(model, page_tokens, (latent,))


def mla_indexer(  # noqa: PLR0913
    model: str,
    page_tokens: int,
    layers: Layers,
    kv_lora_rank: int,
    rope_dim: int,
    index_head_dim: int,
    dtype: str = "bf16",
    index_topk: int = 0,
) -> CacheSpec:
    """Latent attention that reads only tokens an indexer selects: its fp8 keys are a second stream.
    `index_topk`: how many it selects; 0: that is not known."""
    spec = mla(model, page_tokens, layers, kv_lora_rank, rope_dim, dtype)
    latents = (replace(stream, selected=index_topk) for stream in spec.streams)
    return replace(spec, streams=(*latents, Stream("index", spec.layers, index_parts(index_head_dim))))


def sliding_window(
    model: str,
    page_tokens: int,
    *,
    full_layers: tuple[int, ...],
    window_layers: tuple[int, ...],
    window: int,
    heads: Heads,
) -> CacheSpec:
    """Some layers read the whole prefix, the others the last `window` tokens. All may be window layers."""
    full = _kv_streams(full_layers, heads) if full_layers else ()
    return CacheSpec(model, page_tokens, full + _kv_streams(window_layers, heads, Window(window), "window_"))


def recurrent(
    model: str,
    page_tokens: int,
    *,
    attention_layers: tuple[int, ...],
    recurrent_layers: tuple[int, ...],
    heads: Heads,
    recurrence: Recurrence,
) -> CacheSpec:
    """Attention layers among recurrent ones, whose state at a boundary no replay can rebuild."""
    parts = {
        "conv": values(recurrence.conv_values, recurrence.conv_dtype),
        "temporal": values(recurrence.temporal_values, recurrence.temporal_dtype),
    }
    states = (Stream(name, recurrent_layers, (part,), State()) for name, part in parts.items())
    return CacheSpec(model, page_tokens, (*_kv_streams(attention_layers, heads), *states))


def values(count: int, dtype: str) -> Part:
    """`count` numbers of one type. The part has the type's name: bf16 and fp16 must not share a form."""
    if dtype not in DTYPE_BYTES:
        raise SpecError("dtype", dtype, f"is none of {', '.join(DTYPE_BYTES)}")
    return Part(dtype, count * DTYPE_BYTES[dtype])


def index_parts(index_head_dim: int) -> tuple[Part, ...]:
    """One fp8 key of a sparse-attention indexer and its fp32 scale."""
    check_positive("index_head_dim", index_head_dim)
    return Part("value", index_head_dim), Part("scale", 4)


def _latent(kv_lora_rank: int, rope_dim: int, dtype: str) -> Part:
    """One latent. In fp8 it has fp32 scales and the rotary channels stay bf16: 656 B at 512 + 64."""
    check_positive("kv_lora_rank", kv_lora_rank)
    check_positive("rope_dim", rope_dim)
    if dtype != "fp8":
        return values(kv_lora_rank + rope_dim, dtype)
    scales = -(-kv_lora_rank // MLA_SCALE_GROUP)
    return Part("fp8", kv_lora_rank + 4 * scales + 2 * rope_dim)


def _kv_streams(
    layers: tuple[int, ...], heads: Heads, keep: Keep = PREFIX, prefix: str = ""
) -> tuple[Stream, ...]:
    widths = {"k": heads.head_dim, "v": heads.v_head_dim or heads.head_dim}
    return tuple(
        Stream(f"{prefix}{name}", layers, (values(heads.kv_heads * width, heads.dtype),), keep)
        for name, width in widths.items()
    )


def _ids(layers: Layers) -> tuple[int, ...]:
    if not isinstance(layers, int):
        return tuple(layers)
    check_positive("layers", layers)
    return tuple(range(layers))
