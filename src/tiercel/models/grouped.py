"""Layers of grouped-query attention on pages alone: there are no rings.

    row of a page   │ head 0: k, v of token 0 │ k, v of token 1 │ … │ head 1: k, v of token 0 │ …
    query           │ q, 0  of each head that reads this kv head

The kernels' attention reads rows that are keys and values at once. So an entry is one head's key and value
side by side (`spec.attention.kv_stream`), a query is filled up with zeros, and only the second half of a
result counts. The kernels rotate neighbouring channels, the weights are made for rotating halves, as in
`transformers`: the channels of queries and keys are put in order once, at the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from tiercel.kernels.choice import ListKernels
from tiercel.kernels.reference import CosSin
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Weights
from tiercel.models.batch import Batch
from tiercel.models.entries import EntryRows
from tiercel.spec.attention import KEYS_VALUES

Shape = tuple[int, ...]

NUMBERS_AT_ONCE = 2**22
"""Lists of row numbers grow with tokens times context: more than 16 MiB of them are made part by part."""

NO_SINK = -math.inf


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


class Written(NamedTuple):
    """The entries that a call writes: its flat tokens, and the numbers of their entries, head by head."""

    tokens: Tensor
    numbers: Tensor


class Numbers:
    """Entries of a page: all tokens of its first kv head, then all of the second, and so on."""

    def __init__(self, page_tokens: int, kv_heads: int, device: torch.device) -> None:
        self.page_tokens = page_tokens
        self.heads = torch.arange(kv_heads, dtype=torch.int32, device=device)

    def first(self, tokens: Tensor) -> Tensor:
        """The number of a token's first entry: behind all heads of the whole pages before it."""
        return tokens + tokens // self.page_tokens * self.page_tokens * (len(self.heads) - 1)

    def of(self, tokens: Tensor) -> Tensor:
        """[tokens, kv heads]"""
        return self.first(tokens.long())[:, None] + self.heads * self.page_tokens

    def written(self, batch: Batch) -> Written | None:
        """Where a batch without rings writes. None: all its entries are in the pages already."""
        made = batch.new_entries(1, 1, 1, self.page_tokens)
        return None if made is None else Written(made.rows[:, 0], self.of(made.pages).flatten())


class Reach:
    """Which entries the queries of one call see, and which it writes. A query is one kv head of one token."""

    def __init__(self, batch: Batch, page_tokens: int, kv_heads: int, *, in_place: bool) -> None:
        self._span, self._visible = batch.span, batch.visible(1)
        numbers = Numbers(page_tokens, kv_heads, batch.span.device)
        self._heads = numbers.heads
        rows = batch.entries(1, page_tokens, in_place=True)
        self.read = None if in_place else numbers.of(rows[rows >= 0]).T.flatten()
        """Entries that are read out of the pages first, if attention can not read the pages itself."""
        if self.read is None:
            self._rows, self._steps = numbers.first(rows), self._heads * page_tokens
        else:
            self._rows = batch.entries(1, page_tokens, in_place=False)
            self._steps = self._heads * (len(self.read) // kv_heads)
        self.written = numbers.written(batch)
        self._list: tuple[int, Tensor] | None = None
        """The last list, with its first token: if one list is enough, every layer uses it."""

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields (queries, the entries each of them sees)."""
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

    def __init__(  # noqa: PLR0913
        self,
        grouping: Grouping,
        kernels: ListKernels,
        weights: Weights,
        memory: DeviceMemory,
        layer: int,
    ) -> None:
        """`weights`: this layer's; `layer`: its id in the memory."""
        g, self._grouping, self._k = grouping, grouping, kernels
        own = {name.removesuffix(".weight"): weight for name, weight in weights.items()}
        stream = memory.stream(KEYS_VALUES, layer)
        rows, head = memory.view(stream.name, layer), replace(stream, parts=stream.parts[:1])
        self.entries = EntryRows(kernels, rows, head, memory.spec.page_tokens * g.kv_heads)
        self._scale = g.head_dim**-0.5 * g.attention_factor**2
        self._sinks = torch.full((g.heads // g.kv_heads,), NO_SINK, device=memory.device)
        self._norms = own["input_layernorm"], own["post_attention_layernorm"]
        queries = in_pairs(own["self_attn.q_proj"], g.heads)
        keys = in_pairs(own["self_attn.k_proj"], g.kv_heads)
        self._input = kernels.pack(torch.cat([queries, keys, own["self_attn.v_proj"]]))
        self._widths = [len(queries), len(keys), len(keys)]
        self._q_norm, self._k_norm = (in_pairs(own[f"self_attn.{name}_norm"], 1) for name in "qk")
        self._out = kernels.pack(own["self_attn.o_proj"])
        gate_up = torch.cat([own["mlp.gate_proj"], own["mlp.up_proj"]])
        self._mlp = kernels.pack_all(gate_up[None]), kernels.pack_all(own["mlp.down_proj"][None])

    def __call__(self, x: Tensor, rotation: CosSin, reach: Reach) -> Tensor:
        """x [tokens, d] after this layer."""
        g, k = self._grouping, self._k
        x = x + self._attend(self.write(x, rotation, reach.written), rotation, reach)
        asked = x.new_empty(len(x), 0, dtype=torch.int64)  # experts: only the shared one
        return x + k.experts(k.norm(x, self._norms[1], g.eps), asked, asked.float(), self._mlp, math.inf)

    def write(self, x: Tensor, rotation: CosSin, written: Written | None) -> Tensor:
        """Make the entries of x [tokens, d]. Returns its queries [tokens, heads, dim], not rotated."""
        g, k = self._grouping, self._k
        made = k.linear(k.norm(x, self._norms[0], g.eps), self._input).split(self._widths, 1)
        heads: list[Tensor] = [part.unflatten(1, (-1, g.head_dim)) for part in made]
        q, key, value = heads
        if written is not None:
            key = k.norm_rotate(key, rotation, eps=g.eps, weight=self._k_norm)
            entries = torch.cat([key, value], 2)[written.tokens]
            self.entries.write(written.numbers, entries.flatten(0, 1))
        return q

    def _attend(self, q: Tensor, rotation: CosSin, reach: Reach) -> Tensor:
        g, k, tokens = self._grouping, self._k, len(q)
        q = k.norm_rotate(q, rotation, eps=g.eps, weight=self._q_norm)
        entries = self.entries.all() if reach.read is None else self.entries.read(reach.read)
        q = F.pad(q, (0, g.head_dim)).view(tokens * g.kv_heads, -1, 2 * g.head_dim)
        none = entries[:0], entries[:0]
        answers = [
            k.attention(q[part], none, seen[:, :0].contiguous(), entries, seen, self._sinks, self._scale)
            for part, seen in reach.parts()
        ]
        return k.linear(torch.cat(answers)[..., g.head_dim :].reshape(tokens, -1), self._out)


def in_pairs(x: Tensor, heads: int) -> Tensor:
    """Rows [heads · dim, …] where i rotates with i + dim / 2, in the order in which neighbours rotate."""
    halves: Tensor = x.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)
