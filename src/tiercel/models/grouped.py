"""Layers of grouped-query attention on pages alone: there are no rings.

    row of a page   │ head 0: k, v of token 0 │ k, v of token 1 │ … │ head 1: k, v of token 0 │ …

An entry is one head's key and value side by side (`spec.attention.kv_stream`). The kernels rotate
neighbouring channels, the weights are made for rotating halves, as in `transformers`: the channels of queries
and keys are put in order once, at the start.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels
from tiercel.kernels.entries import Entries
from tiercel.kernels.reference import CosSin
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Weights
from tiercel.models.flat import FlatBatch
from tiercel.models.loading import joined
from tiercel.models.rows import entries_in
from tiercel.spec.attention import KEYS_VALUES

Shape = tuple[int, ...]

GATE_UP = ("gate_proj.weight", "up_proj.weight")
"""The parameters of an MLP that are one matrix."""


class Grouping(NamedTuple):
    """The dimensions of a layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    attention_factor: float = 1.0
    """What YaRN multiplies cos and sin with."""


def layer_shapes(hidden_size: int, inner: int, grouping: Grouping) -> dict[str, Shape]:
    """The parameters of one layer, without `.weight`."""
    d, dim = hidden_size, grouping.head_dim
    queries, keys = grouping.heads * dim, grouping.kv_heads * dim
    return {
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


def heads_of(memory: DeviceMemory, kv_heads: int, layer: int) -> Entries:
    """The entries of one layer: all tokens of a page's first kv head, then all of the second, and so on."""
    stream = memory.stream(KEYS_VALUES, layer)
    head = replace(stream, parts=stream.parts[:1])
    return entries_in(memory.view(stream.name, layer), head, memory.spec.page_tokens * kv_heads)


class Attention:
    """Attention of one layer to the whole text."""

    def __init__(
        self, grouping: Grouping, kernels: Kernels, weights: Weights, memory: DeviceMemory, layer: int
    ) -> None:
        g, self._grouping, self._k = grouping, grouping, kernels
        self._entries = heads_of(memory, g.kv_heads, layer)
        self._pool = memory.spec.pool_of(memory.stream(KEYS_VALUES, layer))
        self._scale = g.head_dim**-0.5 * g.attention_factor**2
        queries = in_pairs(weights["q_proj.weight"], g.heads)
        keys = in_pairs(weights["k_proj.weight"], g.kv_heads)
        self._input = kernels.pack(torch.cat([queries, keys, weights["v_proj.weight"]]))
        self._widths = [len(queries), len(keys), len(keys)]
        self._q_norm, self._k_norm = (in_pairs(weights[f"{name}_norm.weight"], 1) for name in "qk")
        self._out = kernels.pack(weights["o_proj.weight"])

    def __call__(self, h: Tensor, rotation: CosSin, batch: FlatBatch) -> Tensor:
        """h [tokens, d], normed."""
        g, k = self._grouping, self._k
        made = k.linear(h, self._input).split(self._widths, 1)
        q, key, value = (part.unflatten(1, (-1, g.head_dim)) for part in made)
        flat = batch.pools[self._pool]
        where = self._entries, flat, batch.write_from
        k.store_heads(key, value, rotation, *where, eps=g.eps, weight=self._k_norm)
        q = k.norm_rotate(q, rotation, eps=g.eps, weight=self._q_norm)
        how = g.kv_heads, flat, self._scale, batch.longest
        return k.linear(k.grouped_attention(q, self._entries, *how).flatten(1), self._out)


class FeedForward(Protocol):
    def __call__(self, h: Tensor, batch: FlatBatch) -> Tensor: ...


class Mlp:
    """A gated MLP."""

    def __init__(self, kernels: Kernels, weights: Weights) -> None:
        self._k = kernels
        self._gate_up = kernels.pack(*joined(weights, GATE_UP))
        self._down = kernels.pack(*joined(weights, ("down_proj.weight",)))

    def __call__(self, h: Tensor, batch: FlatBatch) -> Tensor:  # noqa: ARG002
        k = self._k
        return k.linear(k.gated(k.linear(h, self._gate_up)), self._down)


class Mixture:
    """Experts chosen by softmax; none is shared."""

    def __init__(self, kernels: Kernels, weights: Weights, per_token: int, *, normed: bool) -> None:
        """`normed`: the weights of a token's experts are divided by their sum."""
        self._k, self._per_token, self._normed = kernels, per_token, normed
        self._gate = kernels.pack(weights["gate.weight"])
        names = "experts.gate_up_proj", "experts.down_proj"
        gate_up, down = (kernels.pack_all(weights[name]) for name in names)
        self._matrices = gate_up, down

    def __call__(self, h: Tensor, batch: FlatBatch) -> Tensor:
        k, logits = self._k, self._k.linear(h, self._gate, wide=True)
        how = {"normed": self._normed, "position": batch.positions}
        chosen, weights = k.route_softmax(logits, self._per_token, **how)
        return k.experts(h, chosen, weights, self._matrices, math.inf, shared=False)


class Layer:
    """Attention, then a feed-forward, each added to what it reads."""

    def __init__(
        self, attention: Attention, feed_forward: FeedForward, kernels: Kernels, weights: Weights, eps: float
    ) -> None:
        self._attention, self._feed_forward, self._k, self._eps = attention, feed_forward, kernels, eps
        names = "input_layernorm.weight", "post_attention_layernorm.weight"
        self._norms = [weights[name] for name in names]

    def __call__(self, x: Tensor, rotation: CosSin, batch: FlatBatch) -> Tensor:
        """x [tokens, d] after this layer."""
        h = self._k.norm(x, self._norms[0], self._eps)
        x = x + self._attention(h, rotation, batch)
        return x + self._feed_forward(self._k.norm(x, self._norms[1], self._eps), batch)


def in_pairs(x: Tensor, heads: int) -> Tensor:
    """Rows [heads · dim, …] where i rotates with i + dim / 2, in the order in which neighbours rotate."""
    halves: Tensor = x.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)
