"""One layer: attention on cached rows, then experts, each between hyper-connections.

every layer        the window: the last w tokens, own token included
sparse (ratio 4)   and the best k of the compressed entries, chosen by the indexer
heavy (ratio 128)  and all compressed entries
"""

from __future__ import annotations

from torch import Tensor

from tiercel.kernels.choice import Kernels
from tiercel.kernels.reference import CosSin
from tiercel.models.base import Weights, part_of
from tiercel.models.deepseek_v4.config import SPARSE_RATIO, V4Config
from tiercel.models.deepseek_v4.hyper import hyper_of, site_of
from tiercel.models.deepseek_v4.rows import Index, LayerRows, Setup, compressors_of
from tiercel.models.deepseek_v4.weights import (
    DOWN,
    GATE_UP,
    INDEX_QUERIES,
    INPUT,
    KEYS_VALUES,
    OUT,
    OUT_LOW,
    QUERIES,
)
from tiercel.models.flat import FlatBatch
from tiercel.models.loading import joined
from tiercel.models.rotary import Rotary


class Attention:
    """One layer. `__call__` takes flat tokens of several spans."""

    def __init__(self, setup: Setup, layer: int, weights: Weights, rotary: Rotary) -> None:
        self._config, self._k = setup.config, setup.kernels
        self._rows = LayerRows(setup, layer, weights, rotary)
        self._beside, self.restore = setup.beside, self._rows.restore
        draft = layer >= self._config.layers
        self._kv = self._k.pack(*joined(weights, KEYS_VALUES)) if draft else None
        """Also packed alone: `store` needs nothing else."""
        self._take_weights(weights, 0 if draft else self._config.ratios[layer])

    def _take_weights(self, w: Weights, ratio: int) -> None:
        """Join the matrices that read the same input."""
        c, k = self._config, self._k
        self._input = k.pack(*joined(w, INPUT))
        self._widths = [len(w["q_a_proj.weight"]), len(w["kv_proj.weight"])]
        for prefix in compressors_of(ratio).values():  # a token's row: kv, then gate
            self._widths.append(len(w[f"{prefix}kv_proj.weight"]) + len(w[f"{prefix}gate_proj.weight"]))
        self._queries, self._index_queries = k.pack(*joined(w, QUERIES)), None
        if ratio == SPARSE_RATIO:  # scores are only compared: their scale does not matter
            self._widths.append(len(w["compressor.indexer.scorer.weights_proj.weight"]))
            self._index_queries = k.pack(*joined(w, INDEX_QUERIES))
        self._q_norm = w["q_a_norm.weight"]
        self._out_low = k.pack_all(*(each.unflatten(0, (c.o_groups, -1)) for each in joined(w, OUT_LOW)))
        self._out = k.pack(*joined(w, OUT))

    def __call__(self, h: Tensor, rotation: CosSin, batch: FlatBatch) -> Tensor:
        """h [tokens, d], normed; `rotation`: the layer's kind, at these positions."""
        c, k = self._config, self._k
        q_low, kv, *rows = k.linear(h, self._input, wide=True).split(self._widths, 1)
        low, chosen = k.norm(q_low, self._q_norm, c.rms_norm_eps), None
        if self._index_queries is not None:
            _, index_rows, weights = rows
            with self._beside:
                asked = k.linear(low, self._index_queries).unflatten(1, (c.index_heads, c.index_head_dim))
                index = Index(k.norm_rotate(asked, rotation), weights, index_rows)
                chosen = self._rows.choose(batch, index)
        q = k.linear(low, self._queries).unflatten(1, (c.heads, c.head_dim))
        q = k.norm_rotate(q, rotation, eps=c.rms_norm_eps)
        new = self._rows.write(batch, kv, rotation, rows[0] if rows else None)
        self._beside.join()
        out = self._rows.attend(batch, q, new, chosen)
        out = k.norm_rotate(out, rotation, back=True).flatten(1)
        return k.linear(k.linear_groups(out, self._out_low), self._out)

    def store(self, h: Tensor, rotation: CosSin, batch: FlatBatch) -> None:
        """Write the entries of a call for a draft's layer, and return nothing."""
        assert self._kv is not None, "the layer is a draft's"
        self._rows.store(batch, self._k.linear(h, self._kv, wide=True), rotation)


class Experts:
    """Hash or score routed experts and one shared expert."""

    def __init__(self, config: V4Config, kernels: Kernels, weights: Weights) -> None:
        self._config, self._k = config, kernels
        self._gate = kernels.pack(weights["gate.weight"])
        self._bias = weights.get("gate.e_score_correction_bias")
        self._by_token = weights.get("gate.tid2eid")
        gate_up, down = joined(weights, GATE_UP), joined(weights, DOWN)  # the shared expert is the last
        self._matrices = kernels.pack_all(*gate_up), kernels.pack_all(*down)

    def __call__(self, x: Tensor, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """`positions`: -1 is padding, which asks no expert."""
        c, k = self._config, self._k
        chosen = None if self._by_token is None else self._by_token[tokens]
        logits = k.linear(x, self._gate, wide=True)
        asked = logits, chosen, self._bias, c.experts_per_token, c.routed_scaling_factor
        chosen, weights = k.route(*asked, positions)
        return k.experts(x, chosen, weights, self._matrices, c.swiglu_limit)


class Layer:
    """A layer of the target; with a number after its last one, a layer of the draft."""

    def __init__(self, setup: Setup, layer: int, weights: Weights, rotary: Rotary) -> None:
        config, k, self._hyper = setup.config, setup.kernels, hyper_of(setup.kernels)
        norms = {"attn": weights["input_layernorm.weight"], "ffn": weights["post_attention_layernorm.weight"]}
        self._sites = [site_of(config, k, part_of(weights, f"{at}_hc."), n) for at, n in norms.items()]
        self.attention = Attention(setup, layer, part_of(weights, "self_attn."), rotary)
        self.experts = Experts(config, k, part_of(weights, "mlp."))

    def __call__(self, x: Tensor, tokens: Tensor, rotation: CosSin, batch: FlatBatch) -> Tensor:
        """The streams [tokens, n, d] after this layer."""
        seen, place, mix = self._hyper.read(x, self._sites[0])
        x = self._hyper.write(x, self.attention(seen, rotation, batch), place, mix)
        seen, place, mix = self._hyper.read(x, self._sites[1])
        return self._hyper.write(x, self.experts(seen, tokens, batch.positions), place, mix)

    def store(self, x: Tensor, rotation: CosSin, batch: FlatBatch) -> None:
        """Write the entries of a draft's layer: they need its input only."""
        self.attention.store(self._hyper.read(x, self._sites[0])[0], rotation, batch)
