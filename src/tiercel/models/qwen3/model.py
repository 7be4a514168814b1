"""Qwen3 on cached pages: takes spans, writes their keys and values to the pages, reads them, answers logits.

Every layer reads the whole prefix, and all of it is in pages: there are no rings and no tails.

    row of a page   │ head 0: k, v of token 0 │ k, v of token 1 │ … │ head 1: k, v of token 0 │ …
    query           │ q, 0  of each head that reads this kv head

The kernels' attention reads rows that are keys and values at once. So an entry is one head's key and value
side by side, a query is filled up with zeros, and of an answer the second half counts. The kernels turn
neighbouring channels and Qwen3 turns halves: those of queries and keys are put in order once, at the start.

A missing dimension is never guessed, and a setting that the model does not support is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from tiercel.errors import SpecError
from tiercel.kernels.choice import Kernels, ListKernels, make_kernels
from tiercel.kernels.reference import CosSin
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import (
    BeforeLayer,
    BytesCheck,
    Dimensions,
    Draft,
    Span,
    Weights,
    at_once,
    bytes_by_part,
    named,
    part_of,
)
from tiercel.models.batch import Batch
from tiercel.models.checkpoint import FLOATS, Checkpoint, StoredTensor, check_finite
from tiercel.models.entries import EntryRows
from tiercel.models.families import Family
from tiercel.models.rotary import Rope, Rotary, read_rope, rope_kind
from tiercel.progress import told
from tiercel.spec.attention import values
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.hf_fields import check_only, number, per_layer, whole
from tiercel.spec.stream import Stream

Shape = tuple[int, ...]

ONLY: Mapping[str, object] = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
"""Settings of other models that this model has fixed."""

ROPE_ONLY: Mapping[str, object] = {"truncate": True, "partial_rotary_factor": 1.0}

FORMATS = ("fp32", "bf16")

STREAM = "kv"
"""One entry per token, one part per kv head: its key, turned, then its value."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

NUMBERS_AT_ONCE = 2**22
"""Lists of row numbers grow with tokens times context: more than 16 MiB of them are made part by part."""

NO_SINK = -math.inf


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Dimensions):
    """Every dimension the model and its weights need."""

    intermediate_size: int
    layers: int = named("num_hidden_layers")
    heads: int = named("num_attention_heads")
    kv_heads: int
    head_dim: int
    rope: Rope
    attention_factor: float
    """What YaRN multiplies cos and sin with."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """From the object in `config.json`. Anything unusable is a `SpecError` that names it."""
        check_only(config, ONLY)
        if config.get("quantization_config") is not None:
            raise SpecError("quantization_config", config["quantization_config"], "is not supported")
        if config.get("layer_types") is not None:
            per_layer(config, "layer_types", known=("full_attention",))
        some = "num_attention_heads" if config.get("num_key_value_heads") is None else "num_key_value_heads"
        rope, attention_factor = _rope(config)
        own = cls.read(config, kv_heads=whole(config, some), rope=rope, attention_factor=attention_factor)
        if own.heads % own.kv_heads:
            raise SpecError(some, own.kv_heads, f"must divide num_attention_heads = {own.heads}")
        if own.head_dim % 2:
            raise SpecError("head_dim", own.head_dim, "must be even: channels turn in pairs")
        return own


def _rope(config: Mapping[str, Any]) -> tuple[Rope, float]:
    """Plain or YaRN, and the factor of cos and sin. As in `transformers`, `rope_scaling` goes before
    `rope_parameters`."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise SpecError("rope_scaling", given, "must be an object")
    check_only(given, ROPE_ONLY)
    rope = read_rope(given, number(given if "rope_theta" in given else config, "rope_theta"))
    if rope_kind(given) != "yarn":
        return rope, 1.0
    for name in ("mscale", "mscale_all_dim"):
        if given.get(name) is not None:
            raise SpecError(name, given[name], "is not supported: attention_factor says it")
    if given.get("attention_factor") is not None:
        return rope, number(given, "attention_factor")
    return rope, 0.1 * math.log(max(rope.factor, 1.0)) + 1.0


def declare(config: Mapping[str, Any], page_tokens: int, format: str) -> CacheSpec:
    """A head's key and value are one row for attention, and its rows of a page lie together: a part each.

    (Where a token's heads lie together, rows of one head are far apart: attention took twice as long.)
    """
    if format not in FORMATS:
        raise SpecError("format", format, f"is none of {', '.join(FORMATS)}, which Qwen3 has")
    own = Qwen3Config.from_hf(config)
    head = values(2 * own.head_dim, format)
    others = (replace(head, name=f"{format}.{i}") for i in range(1, own.kv_heads))
    stream = Stream(STREAM, tuple(range(own.layers)), (head, *others), encoding=format)
    return CacheSpec("qwen3", page_tokens, (stream,))


# Weights


def parameters(config: Qwen3Config, *, tied: bool) -> dict[str, Shape]:
    """Every parameter by its name."""
    d, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    layer: dict[str, Shape] = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (queries, d),
        "self_attn.k_proj": (keys, d),
        "self_attn.v_proj": (keys, d),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "self_attn.o_proj": (d, queries),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (inner, d),
        "mlp.up_proj": (inner, d),
        "mlp.down_proj": (d, inner),
    }
    ends: dict[str, Shape] = {EMBEDDING: (config.vocab_size, d), "model.norm.weight": (d,)}
    if not tied:
        ends[HEAD] = ends[EMBEDDING]
    layers = range(config.layers)
    return ends | {f"model.layers.{i}.{name}.weight": layer[name] for i in layers for name in layer}


def load_weights(  # noqa: PLR0913
    checkpoint: Checkpoint,
    config: Qwen3Config,
    device: str = "cpu",
    matrices: torch.dtype = torch.float32,
    *,
    draft: bool = False,  # noqa: ARG001 - there is none
    fp8: bool = False,  # noqa: ARG001 - no Qwen3 checkpoint that is read here has it
    check: BytesCheck = lambda _: None,
) -> dict[str, Tensor]:
    """Every parameter by its name: matrices in the type asked for, norms in fp32. One error names all
    that does not fit, before a byte is read.

    As in `transformers`, embeddings are not tied where the checkpoint has a head of its own.
    """
    stored = checkpoint.tensors
    wanted = parameters(config, tied=config.tie_word_embeddings and HEAD not in stored)
    known = [(each, wanted[name]) for name, each in stored.items() if name in wanted]
    faults = {
        "missing": [(name, "") for name in wanted if name not in stored],
        "not of this model": [(name, "") for name in sorted(stored) if name not in wanted],
        "unfit": [(each.name, why) for each, shape in known if (why := _unfit(each, shape))],
    }
    checkpoint.refuse(faults)
    dtypes = {name: matrices if len(shape) > 1 else torch.float32 for name, shape in wanted.items()}
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in wanted.items()}
    check(bytes_by_part(sizes.items()))
    weights = {}
    with told("weights", sum(sizes.values())) as done:
        for each, _ in known:
            weights[each.name] = checkpoint.read(each.name).to(device, dtypes[each.name], copy=True)
            check_finite(weights[each.name], each)
            done(sizes[each.name])
    weights.setdefault(HEAD, weights[EMBEDDING])
    return weights


def _unfit(stored: StoredTensor, shape: Shape) -> str:
    """Why a tensor can not be what its name says, or nothing."""
    if stored.shape == shape and stored.dtype in FLOATS:
        return ""
    return f" is {list(stored.shape)} of {stored.dtype}, must be {list(shape)} of {', '.join(FLOATS)}"


# The model


class Reach:
    """Which entries the queries of one call see, and which it writes. A query is one kv head of one token."""

    def __init__(self, batch: Batch, page_tokens: int, kv_heads: int, *, in_place: bool) -> None:
        self._span, self._visible, self._page_tokens = batch.span, batch.visible(1), page_tokens
        self._heads = torch.arange(kv_heads, dtype=torch.int32, device=batch.span.device)
        rows = batch.entries(1, page_tokens, in_place=True)
        self.read = None if in_place else self._numbers(rows[rows >= 0]).T.flatten()
        """What is to be read out of the pages first, where attention can not read them itself."""
        if self.read is None:
            self._rows, self._steps = self._first(rows), self._heads * page_tokens
        else:
            self._rows = batch.entries(1, page_tokens, in_place=False)
            self._steps = self._heads * (len(self.read) // kv_heads)
        made = batch.new_entries(1, 1, 1, page_tokens)
        self.written = None if made is None else (made.rows[:, 0], self._numbers(made.pages).flatten())
        """(flat tokens, numbers of their entries, head by head)"""
        self._list: tuple[int, Tensor] | None = None
        """The list made last, by its first token: where one is enough, every layer uses it."""

    def _first(self, tokens: Tensor) -> Tensor:
        """Where the first head's entry of a token is: before it are the whole pages, with all their heads."""
        return tokens + tokens // self._page_tokens * self._page_tokens * (len(self._heads) - 1)

    def _numbers(self, tokens: Tensor) -> Tensor:
        """[tokens, kv heads]"""
        return self._first(tokens.long())[:, None] + self._heads * self._page_tokens

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(queries, the entries each of them sees)"""
        heads, context = len(self._heads), self._rows.shape[1]
        tokens = max(1, NUMBERS_AT_ONCE // (heads * context))
        for first in range(0, len(self._span), tokens):
            if self._list is None or self._list[0] != first:
                self._list = first, self._seen(first, first + tokens)
            yield slice(first * heads, (first + tokens) * heads), self._list[1]

    def _seen(self, first: int, end: int) -> Tensor:
        visible = self._visible[first:end, None]
        numbers = torch.arange(int(visible.max()), device=visible.device)
        rows = self._rows[self._span[first:end], : len(numbers)]
        rows = rows[:, None, :] + self._steps[:, None]
        return torch.where((numbers < visible)[:, None, :], rows, -1).flatten(0, 1)


class Layer:
    """Attention, then a gated MLP, each added to what it reads."""

    def __init__(
        self, config: Qwen3Config, kernels: ListKernels, layer: int, weights: Weights, memory: DeviceMemory
    ) -> None:
        c, self._config, self._k = config, config, kernels
        part = part_of(weights, f"model.layers.{layer}.")
        own = {name.removesuffix(".weight"): weight for name, weight in part.items()}
        spec, stream = memory.spec, memory.spec.stream(STREAM)
        rows, head = memory.view(STREAM, layer), replace(stream, parts=stream.parts[:1])
        self.entries = EntryRows(kernels, rows, head, spec.page_tokens * c.kv_heads, c.head_dim)
        self._scale = c.head_dim**-0.5 * c.attention_factor**2
        self._sinks = torch.full((c.heads // c.kv_heads,), NO_SINK, device=memory.device)
        self._norms = own["input_layernorm"], own["post_attention_layernorm"]
        queries = in_pairs(own["self_attn.q_proj"], c.heads)
        keys = in_pairs(own["self_attn.k_proj"], c.kv_heads)
        self._input = kernels.pack(torch.cat([queries, keys, own["self_attn.v_proj"]]))
        self._widths = [len(queries), len(keys), len(keys)]
        self._q_norm, self._k_norm = (in_pairs(own[f"self_attn.{name}_norm"], 1) for name in "qk")
        self._out = kernels.pack(own["self_attn.o_proj"])
        gate_up = torch.cat([own["mlp.gate_proj"], own["mlp.up_proj"]])
        self._mlp = kernels.pack_all(gate_up[None]), kernels.pack_all(own["mlp.down_proj"][None])

    def __call__(self, x: Tensor, turn: CosSin, reach: Reach) -> Tensor:
        """x [tokens, d] after this layer."""
        k, eps = self._k, self._config.rms_norm_eps
        x = x + self._attend(k.norm(x, self._norms[0], eps), turn, reach)
        asked = x.new_empty(len(x), 0, dtype=torch.int64)  # of experts: only the shared one
        return x + k.experts(k.norm(x, self._norms[1], eps), asked, asked.float(), self._mlp, math.inf)

    def _attend(self, h: Tensor, turn: CosSin, reach: Reach) -> Tensor:
        c, k = self._config, self._k
        q, key, value = (
            part.unflatten(1, (-1, c.head_dim)) for part in k.linear(h, self._input).split(self._widths, 1)
        )
        q = k.norm_rotate(q, turn, eps=c.rms_norm_eps, weight=self._q_norm)
        key = k.norm_rotate(key, turn, eps=c.rms_norm_eps, weight=self._k_norm)
        if reach.written is not None:
            tokens, numbers = reach.written
            self.entries.write(numbers, torch.cat([key, value], 2)[tokens].flatten(0, 1))
        entries = self.entries.all() if reach.read is None else self.entries.read(reach.read)
        q = F.pad(q, (0, c.head_dim)).view(len(h) * c.kv_heads, -1, 2 * c.head_dim)
        none = entries[:0], entries[:0]
        answers = [
            k.attention(q[part], none, seen[:, :0].contiguous(), entries, seen, self._sinks, self._scale)
            for part, seen in reach.parts()
        ]
        return k.linear(torch.cat(answers)[..., c.head_dim :].reshape(len(h), -1), self._out)


def in_pairs(x: Tensor, heads: int) -> Tensor:
    """Rows [heads · dim, …] of which i turns with i + dim / 2, in the order in which neighbours turn."""
    halves: Tensor = x.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


class Qwen3:
    """The whole model. Entries lie in pages alone, by position: a guess that is refused is overwritten."""

    draft: Draft | None = None

    def __init__(  # noqa: PLR0913
        self,
        config: Qwen3Config,
        weights: Weights,
        memory: DeviceMemory,
        _rings: int,
        kernels: Kernels | None = None,
        _guesses_max: int = 0,
    ) -> None:
        self.config, self.vocab_size = config, config.vocab_size
        offered = kernels or make_kernels(device=str(memory.device), offered=FAMILY.kernels)
        self.kernels = k = cast("ListKernels", offered)
        self._page_tokens = memory.spec.page_tokens
        self._embedding, self._lm_head = weights[EMBEDDING], k.pack(weights[HEAD])
        self._norm = weights["model.norm.weight"]
        self._rotary = Rotary(config.rope, config.head_dim, memory.device)
        self.layers = [Layer(config, k, i, weights, memory) for i in range(config.layers)]

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], rows: Sequence[int] | None = None, before: BeforeLayer = at_once
    ) -> Tensor:
        """Logits of these flat tokens; None: of the last token of each span."""
        batch = Batch(spans, 0, self._embedding.device)
        turn = self._rotary.at(batch.positions, batch.longest)
        in_place = self.layers[0].entries.in_place
        reach = Reach(batch, self._page_tokens, self.config.kv_heads, in_place=in_place)
        x = self._embedding[batch.tokens]
        for i, layer in enumerate(self.layers):
            before(i)
            x = layer(x, turn, reach)
        x = x[batch.last if rows is None else torch.as_tensor(rows, dtype=torch.long, device=x.device)]
        return self.kernels.linear(self.kernels.norm(x, self._norm, self.config.rms_norm_eps), self._lm_head)

    def warm_up(self, _longest: int) -> None:
        """Nothing is prepared."""

    def resume(self, ring: int, tails: Sequence[tuple[int, int]]) -> None:
        """Pages hold everything."""


FAMILY = Family(read=Qwen3Config.from_hf, declare=declare, load=load_weights, build=Qwen3)
