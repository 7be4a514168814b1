"""One layer: attention on cached rows, then experts, each between hyper-connections.

    every layer        the window: the last w tokens, own token included
    sparse (ratio 4)   and the best k of the compressed entries, chosen by the indexer
    heavy (ratio 128)  and all compressed entries

A query at position t sees the compressed entries i < (t + 1) // ratio: entry i exists once its last token
does, and is then in the pages. So a call first writes its new entries, then all its queries read, and the
page table is the only thing between them.

A request keeps in rings what its next tokens need: per layer the last w - 1 window entries, encoded as in a
tail; per compressor (kv, gate) of the last 8 or 128 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels
from tiercel.kernels.reference import CosSin, Site
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Weights, part_of
from tiercel.models.batch import Batch, rows_before
from tiercel.models.deepseek_v4.config import SPARSE_RATIO, V4Config
from tiercel.models.entries import Codec, EntryRows, Parts, Rings, plain_codec
from tiercel.models.rotary import Rotary


class Setup(NamedTuple):
    """What all layers of one model share."""

    config: V4Config
    kernels: Kernels
    memory: DeviceMemory
    rings: int

    def rows(self, stream: str, layer: int) -> EntryRows:
        spec = self.memory.spec
        rows = self.memory.view(stream, layer)
        return EntryRows(self.kernels, rows, spec.stream(stream), spec.page_tokens, self.config.rope_dim)

    def make_rings(self, rows: int, codec: Codec) -> Rings:
        return Rings(self.kernels, self.rings, rows, codec, self.memory.device)


class Compressor:
    """Turns every `ratio` tokens into one entry; with overlap, each token counts in two entries.

    tokens      … 4i-4 … 4i-1 │ 4i … 4i+3 │ …
    entry i     first halves  ┴ second halves              ratio 4: width 8, stride 4
    """

    def __init__(self, setup: Setup, layer: int, stream: str, weights: Weights, rotary: Rotary) -> None:
        self._k, self._eps, self._rotary = setup.kernels, setup.config.rms_norm_eps, rotary
        self._norm, self._bias = weights["kv_norm.weight"], weights["position_bias"]
        self.pages = setup.rows(stream, layer)
        keeps = any(each.name == f"{stream}_state" for each in setup.memory.spec.tail_streams)
        self._tails = setup.rows(f"{stream}_state", layer) if keeps else None
        """The rows of entries that a boundary leaves open, if it can leave any."""
        self.ratio, self._channels = self._bias.shape
        self._dim = len(self._norm)
        self._width = self.ratio * self._channels // self._dim
        self.weight = torch.cat([weights["kv_proj.weight"], weights["gate_proj.weight"]])
        """Projects a token to its row: kv, then gate."""
        self._recent = setup.make_rings(self._width, plain_codec(4 * 2 * self._channels))

    def extend(self, batch: Batch, rows: Tensor) -> None:
        """Write the entries that end in this call, and the open rows of its tails."""
        recent = self._recent
        made = batch.new_entries(self.ratio, self._width, recent.rows, self.pages.per_row)
        if made is not None:
            entry = self._k.compress((recent.read(), rows), made.rows, self._bias, self._dim)
            turn = self._rotary.at(made.positions)
            entry = self._k.norm_rotate(entry[:, None, :], turn, eps=self._eps, weight=self._norm)
            self.pages.write(made.pages, entry[:, 0, :])
        data = recent.codec.encode(rows)
        for i, span in enumerate(batch.spans if self._tails else ()):
            for boundary, place in span.tails.items():
                numbers = batch.recent_before(boundary, self.ratio, i, recent.rows)
                self._write_tail(place, recent.codec.decode(recent.gather(data, numbers)))
        recent.keep(batch, data)

    def _write_tail(self, place: int, rows: Tensor) -> None:
        """Of open rows, later entries use the first channels only."""
        assert self._tails is not None
        halves = rows.unflatten(1, (2, self._channels))[:, :, : self._dim].flatten(1)
        self._tails.write_row(place, self._tails.codec.encode(halves))

    def restore(self, ring: int, place: int, boundary: int) -> None:
        if self._tails is None:
            return
        halves = self._tails.codec.decode(self._tails.read_row(place)).unflatten(1, (2, self._dim))
        rows = halves.new_zeros(len(halves), 2, self._channels)
        rows[:, :, : self._dim] = halves
        self._recent.restore(ring, boundary, self._recent.codec.encode(rows.flatten(1)))

    def entries(self, batch: Batch, *, in_place: bool) -> Tensor:
        """The pool that `batch.entries` numbers."""
        if in_place:
            return self.pages.all()
        rows = batch.entries(self.ratio, self.pages.per_row, in_place=True)
        return self.pages.read(rows[rows >= 0].long())


class Attention:
    """One layer. `__call__` takes flat tokens of several spans."""

    def __init__(self, setup: Setup, layer: int, weights: Weights, rotary: Rotary) -> None:
        self._config, self._k = setup.config, setup.kernels
        draft = layer == self._config.layers
        ratio = 0 if draft else self._config.ratios[layer]
        self._tails = setup.rows("draft_window" if draft else "window", layer)
        self._recent = setup.make_rings(rows_before(self._config.window), self._tails.codec)
        parts = {f"c{ratio}": "compressor."} if ratio else {}
        if ratio == SPARSE_RATIO:
            parts[f"c{ratio}_index"] = "compressor.indexer."
        self._compressors = [
            Compressor(setup, layer, stream, part_of(weights, prefix), rotary)
            for stream, prefix in parts.items()
        ]
        self._in_place = all(each.pages.in_place for each in self._compressors)
        self._take_weights(weights)

    def _take_weights(self, w: Weights) -> None:
        """Everything that reads the same input is one matrix."""
        c, pack = self._config, self._k.pack
        inputs = [w["q_a_proj.weight"], w["kv_proj.weight"], *(each.weight for each in self._compressors)]
        queries = [w["q_b_proj.weight"]]
        if len(self._compressors) == 2:
            scale = c.index_head_dim**-0.5 * c.index_heads**-0.5
            inputs.append(w["compressor.indexer.scorer.weights_proj.weight"] * scale)
            queries.append(w["compressor.indexer.q_b_proj.weight"])
        self._input, self._widths = pack(torch.cat(inputs)), [len(each) for each in inputs]
        self._queries, self._query_widths = pack(torch.cat(queries)), [len(each) for each in queries]
        self._q_norm, self._kv_norm = w["q_a_norm.weight"], w["kv_norm.weight"]
        self._sinks, self._scale = w["sinks"], c.head_dim**-0.5
        self._out_low = self._k.pack_all(w["o_a_proj.weight"].unflatten(0, (c.o_groups, -1)))
        self._out = pack(w["o_b_proj.weight"])

    def restore(self, ring: int, place: int, boundary: int) -> None:
        """The ring goes on from the tail at this place."""
        self._recent.restore(ring, boundary, self._tails.read_row(place))
        for compressor in self._compressors:
            compressor.restore(ring, place, boundary)

    def __call__(self, h: Tensor, turn: CosSin, batch: Batch) -> Tensor:
        """h [tokens, d], normed; `turn` of the layer's kind at these positions."""
        c, k = self._config, self._k
        q_low, kv, *rest = k.linear(h, self._input).split(self._widths, 1)
        queries = k.linear(k.norm(q_low, self._q_norm, c.rms_norm_eps), self._queries)
        q, *index_q = queries.split(self._query_widths, 1)
        q = k.norm_rotate(q.unflatten(1, (c.heads, c.head_dim)), turn, eps=c.rms_norm_eps)
        kv = k.norm_rotate(kv[:, None, :], turn, eps=c.rms_norm_eps, weight=self._kv_norm)[:, 0, :]
        new = self._recent.codec.encode(kv)
        for compressor, rows in zip(self._compressors, rest, strict=False):
            compressor.extend(batch, rows)
        if index_q:
            chosen = self._best_rows(batch, index_q[0], rest[2], turn)
        elif self._compressors:
            own = self._compressors[0]
            chosen = batch.seen_entries(own.ratio, own.pages.per_row, in_place=self._in_place)
        else:
            chosen = h.new_empty(len(h), 0, dtype=torch.int32)
        entries = self._compressors[0].entries(batch, in_place=self._in_place) if self._compressors else kv
        recent, window = (self._recent.read(), self._recent.codec.decode(new)), batch.window(c.window)
        out = k.attention(q, recent, window, entries, chosen, self._sinks, self._scale)
        self._write_tails(batch, new)
        self._recent.keep(batch, new)
        out = k.norm_rotate(out, turn, back=True).flatten(1)
        return k.linear(k.linear_groups(out, self._out_low), self._out)

    def _best_rows(self, batch: Batch, q: Tensor, weights: Tensor, turn: CosSin) -> Tensor:
        """The rows of the compressed entries that the indexer finds best for each token."""
        c, (own, index) = self._config, self._compressors
        q = self._k.norm_rotate(q.unflatten(1, (c.index_heads, c.index_head_dim)), turn)
        rows = batch.entries(own.ratio, own.pages.per_row, in_place=self._in_place)
        keys = index.entries(batch, in_place=self._in_place)
        return self._k.best_rows(q, weights, keys, rows, batch.span, batch.visible(own.ratio), c.index_topk)

    def _write_tails(self, batch: Batch, new: Parts) -> None:
        for i, span in enumerate(batch.spans):
            for boundary, place in span.tails.items():
                assert boundary > span.start, "a tail is written by the span that reaches it"
                # of a window longer than a page, the tails before it have the rest
                numbers = batch.recent_before(boundary, self._tails.per_row, i, self._recent.rows)
                self._tails.write_row(place, self._recent.gather(new, numbers))


def site_of(config: V4Config, kernels: Kernels, weights: Weights, norm: Tensor) -> Site:
    """A hyper-connection: how a layer's attention or experts read the streams, or how the head reads them.

    `norm` is the weight of the norm behind it.
    """
    n, scale = config.hc_mult, weights["scale"]
    if len(scale) == 3:  # of collapse, place and mix; the head has the first only
        scale = scale.repeat_interleave(torch.tensor([n, n, n * n], device=scale.device))
    fn, eps = kernels.pack(weights["fn"]), config.rms_norm_eps
    return Site(fn, scale, weights["base"], norm, n, config.hc_sinkhorn_iters, config.hc_eps, eps)


class Experts:
    """Hash or score routed experts and one shared expert."""

    def __init__(self, config: V4Config, kernels: Kernels, weights: Weights) -> None:
        self._config, self._k = config, kernels
        self._gate = kernels.pack(weights["gate.weight"])
        self._bias = weights.get("gate.e_score_correction_bias")
        self._by_token = weights.get("gate.tid2eid")
        shared = [weights[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")]
        gate_up = torch.cat([weights["experts.gate_up_proj"], torch.cat(shared[:2])[None]])
        down = torch.cat([weights["experts.down_proj"], shared[2][None]])
        self._matrices = kernels.pack_all(gate_up), kernels.pack_all(down)

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        c, k = self._config, self._k
        chosen = None if self._by_token is None else self._by_token[tokens]
        logits = k.linear(x, self._gate)
        chosen, weights = k.route(logits, chosen, self._bias, c.experts_per_token, c.routed_scaling_factor)
        return k.experts(x, chosen, weights, self._matrices, c.swiglu_limit)


class Layer:
    """A layer of the target, or, with the number after its last one, the draft's."""

    def __init__(self, setup: Setup, layer: int, weights: Weights, rotary: Rotary) -> None:
        config, self._k = setup.config, setup.kernels
        norms = {"attn": weights["input_layernorm.weight"], "ffn": weights["post_attention_layernorm.weight"]}
        self._sites = [site_of(config, self._k, part_of(weights, f"{at}_hc."), n) for at, n in norms.items()]
        self.attention = Attention(setup, layer, part_of(weights, "self_attn."), rotary)
        self.experts = Experts(config, self._k, part_of(weights, "mlp."))

    def __call__(self, x: Tensor, tokens: Tensor, turn: CosSin, batch: Batch) -> Tensor:
        """The streams [tokens, n, d] after this layer."""
        seen, place, mix = self._k.hyper_read(x, self._sites[0])
        x = self._k.hyper_write(x, self.attention(seen, turn, batch), place, mix)
        seen, place, mix = self._k.hyper_read(x, self._sites[1])
        return self._k.hyper_write(x, self.experts(seen, tokens), place, mix)
