"""The weights of a DeepSeek V4 model: which there are, under which names, and which are one matrix.

A parameter's own name is the one of `transformers`; the parameters of an MTP layer are under `mtp.N.`, with
the names of `transformers` for its layer. A checkpoint may use DeepSeek's original names instead, tensor by
tensor (what `transformers` saves is a mixture), and put `model.` before them or not.

    original                            here
    embed, head, norm, hc_head_X        model.embed_tokens, lm_head, model.norm, model.hc_head.hc_X
    layers.N.…                          model.layers.N.…
    mtp.N.{e,h}_proj, {e,h,}norm        the same
    mtp.N.hc_head_X, mtp.N.attn.…       mtp.N.hc_head.hc_X, mtp.N.self_attn.…
    ffn.experts.E.{w1,w3}, w2           mlp.experts.gate_up_proj[E] (w1 first), mlp.experts.down_proj[E]

Some checkpoints have other drafts than MTP layers under `mtp.`: DSpark's stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tiercel.models.deepseek_v4.config import SPARSE_RATIO, V4Config
from tiercel.models.loading import HEADS, Parameter, WeightSpec, experts, plain
from tiercel.models.quantized import Shape

DRAFT = "mtp."

INPUT = (
    "q_a_proj.weight",
    "kv_proj.weight",
    "compressor.kv_proj.weight",
    "compressor.gate_proj.weight",
    "compressor.indexer.kv_proj.weight",
    "compressor.indexer.gate_proj.weight",
    "compressor.indexer.scorer.weights_proj.weight",
)
KEYS_VALUES = ("kv_proj.weight",)
"""A part of `INPUT`, which a draft multiplies by itself too."""
QUERIES, INDEX_QUERIES = ("q_b_proj.weight",), ("compressor.indexer.q_b_proj.weight",)
OUT_LOW, OUT = ("o_a_proj.weight",), ("o_b_proj.weight",)
GATE_UP = ("experts.gate_up_proj", "shared_experts.gate_proj.weight", "shared_experts.up_proj.weight")
DOWN = ("experts.down_proj", "shared_experts.down_proj.weight")

Row = tuple[str, str, Shape]
"""A parameter inside a layer: its name here, its original name, its shape."""

WIDE = ("fn", "position_bias")
"""Parameters that stay fp32: hyper-connections and position biases are no matrices of activations."""

ALSO = {"attn.kv_norm.weight": "attn.norm.weight"}
"""Names that `transformers` writes instead of original ones (its renaming is not reversible)."""


def parameters(config: V4Config) -> dict[str, Parameter]:
    """Every parameter by its name. Those of the MTP layers come last."""
    d, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    n = config.hc_mult
    shapes: dict[str, Shape] = {"fn": (n, n * d), "base": (n,), "scale": (1,)}
    head: list[Row] = [(f"hc_head.hc_{name}", f"hc_head_{name}", shape) for name, shape in shapes.items()]
    head.append(("norm.weight", "norm.weight", (d,)))
    found = [*_named("", [("embed_tokens.weight", "embed.weight", table), *head])]
    if not config.tie_word_embeddings:
        found.append(plain(HEADS[0], table, *HEADS))
    for i, (ratio, hashed) in enumerate(zip(config.ratios, config.hash_layers, strict=True)):
        found += _layer(config, f"layers.{i}.", ratio, hashed=hashed)
    own: dict[str, Shape] = {"e_proj": (d, d), "h_proj": (d, d), "enorm": (d,), "hnorm": (d,)}
    own_rows = [(f"{name}.weight", f"{name}.weight", shape) for name, shape in own.items()]
    for i in range(config.mtp_layers):
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
        yield next(_named(prefix, [table]))._replace(experts=c.experts)
    else:
        rows.append(("mlp.gate.e_score_correction_bias", "ffn.gate.bias", (c.experts,)))
    for each in _named(prefix, rows):
        yield each._replace(parts=c.o_groups) if each.name.endswith(OUT_LOW) else each
    all_of_them, one = f"{_owner(prefix)}mlp.experts.", f"{prefix}ffn.experts.{{}}."
    gate_up = [f"{one}{name}.weight" for name in ("w1", "w3")]
    yield experts(f"{all_of_them}gate_up_proj", (c.experts, 2 * inner, d), *gate_up)
    yield experts(f"{all_of_them}down_proj", (c.experts, d, inner), f"{one}w2.weight")


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


def _owner(prefix: str) -> str:
    """How names of a layer begin here: `model.` is part of them, but not in an MTP layer."""
    return prefix if prefix.startswith(DRAFT) else f"model.{prefix}"


def _named(prefix: str, rows: Iterable[Row]) -> Iterator[Parameter]:
    """Parameters below `prefix`."""
    for here, original, shape in rows:
        names = (f"{prefix}{name}" for name in (original, ALSO.get(original, here)))
        found = plain(f"{_owner(prefix)}{here}", shape, *names)
        yield found._replace(wide=here.endswith(WIDE))


WEIGHTS = WeightSpec(
    parameters,
    matrices={"self_attn.": (INPUT, QUERIES, INDEX_QUERIES, OUT_LOW, OUT), "mlp.": (GATE_UP, DOWN)},
    draft=(DRAFT,),
)
