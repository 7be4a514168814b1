"""DeepSeek-V4 for training: dense masks, no cache, parameter names of Hugging Face plus `mtp.0.*`.

Same function as `DeepseekV4ForCausalLM` (check.py compares them), other shape of computation:
window attention in blocks of W queries against 2W keys, all heads as rows of one product (they share
one K=V head); every expert for every token, as two products, with the routing weight in between.
A sequence must be a multiple of the window; compressed entries of incomplete groups do not exist.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from sinkhorn import sinkhorn
from torch import Tensor, nn

HIDDEN = -1e30  # a masked logit; finite, so that a row with nothing visible is not NaN
YARN = {
    "type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}


@dataclass(frozen=True)
class Config:
    vocab_size: int = 4096
    hidden_size: int = 256
    compress_ratios: tuple[int, ...] = (0, 0, 4, 128, 4, 128)
    num_attention_heads: int = 4
    head_dim: int = 128
    qk_rope_head_dim: int = 16
    q_lora_rank: int = 96
    o_groups: int = 2
    o_lora_rank: int = 64
    sliding_window: int = 64
    index_n_heads: int = 16
    index_head_dim: int = 64
    index_topk: int = 64
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    num_hash_layers: int = 2
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: dict[str, int | str] = field(default_factory=lambda: dict(YARN))
    max_position_embeddings: int = 16384


def rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.eps) * self.weight


def linear(fan_in: int, fan_out: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(fan_in, fan_out, bias=False)
    nn.init.normal_(layer.weight, std=gain * fan_in**-0.5)
    return layer


def rope_frequencies(config: Config, compressed: bool) -> Tensor:
    rope = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    inv = theta ** -(torch.arange(0, rope, 2).double() / rope)
    if not compressed:
        return inv.float()
    yarn = config.rope_scaling
    factor, original = float(yarn["factor"]), float(yarn["original_max_position_embeddings"])

    def correction(rotations: float) -> float:
        return rope * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(correction(float(yarn["beta_fast"]))), 0)
    high = min(math.ceil(correction(float(yarn["beta_slow"]))), rope - 1)
    ramp = ((torch.arange(rope // 2).double() - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (inv / factor * ramp + inv * (1 - ramp)).float()


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, sign: int = 1) -> Tensor:
    """Interleaved RoPE on the last channels; `positions` has the axes of x up to its channels."""
    angle = positions.float()[..., None] * frequencies
    cos, sin = angle.cos(), angle.sin() * sign
    width = 2 * frequencies.shape[0]
    even, odd = x[..., -width:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-width].float(), turned), dim=-1)


class Compressor(nn.Module):
    """Groups of `ratio` tokens to one entry each; ratio 4 also reads the group before (overlap)."""

    def __init__(self, config: Config, ratio: int, width: int) -> None:
        super().__init__()
        self.ratio, self.width, self.overlap = ratio, width, ratio == 4
        both = width * (2 if self.overlap else 1)
        self.kv_proj = linear(config.hidden_size, both)
        self.gate_proj = linear(config.hidden_size, both, 0.5)
        self.position_bias = nn.Parameter(torch.zeros(ratio, both))
        self.kv_norm = RMSNorm(width, config.rms_norm_eps)
        self.register_buffer("frequencies", rope_frequencies(config, compressed=True), persistent=False)

    def entries(self, h: Tensor) -> Tensor:
        count = h.shape[1] // self.ratio
        h = h[:, : count * self.ratio]
        kv = self.kv_proj(h).float().unflatten(1, (count, self.ratio))
        gate = self.gate_proj(h).float().unflatten(1, (count, self.ratio)) + self.position_bias
        if self.overlap:
            kv, gate = self.with_group_before(kv, 0.0), self.with_group_before(gate, HIDDEN)
        entry = self.kv_norm((kv * gate.softmax(dim=2)).sum(dim=2))
        return rotate(entry, torch.arange(count, device=h.device)[None] * self.ratio, self.frequencies)

    def with_group_before(self, rows: Tensor, absent: float) -> Tensor:
        """The first half of the channels is for the next group, the second for the own one."""
        before = F.pad(rows[:, :-1, :, : self.width], (0, 0, 0, 0, 1, 0), value=absent)
        return torch.cat((before, rows[..., self.width :]), dim=2)


class Indexer(Compressor):
    def __init__(self, config: Config) -> None:
        super().__init__(config, 4, config.index_head_dim)
        self.heads = config.index_n_heads
        self.q_b_proj = linear(config.q_lora_rank, self.heads * self.width)
        self.scorer = nn.Module()
        self.scorer.weights_proj = linear(config.hidden_size, self.heads)
        self.scale = self.width**-0.5 * self.heads**-0.5

    def forward(self, h: Tensor, q_r: Tensor) -> Tensor:
        keys = self.entries(h)
        q = self.q_b_proj(q_r).unflatten(-1, (self.heads, self.width))
        q = rotate(q, torch.arange(h.shape[1], device=h.device)[None, :, None], self.frequencies)
        dots = torch.matmul(q.flatten(1, 2), keys.transpose(1, 2)).unflatten(1, (h.shape[1], self.heads))
        weights = self.scorer.weights_proj(h).float() * self.scale
        return (F.relu(dots.float()) * weights[..., None]).sum(dim=2)


class SparseCompressor(Compressor):
    def __init__(self, config: Config) -> None:
        super().__init__(config, 4, config.head_dim)
        self.indexer = Indexer(config)


class GroupedLinear(nn.Module):
    def __init__(self, fan_in: int, fan_out: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.randn(groups * fan_out, fan_in) * fan_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:  # [..., groups, fan_in] -> [..., groups * fan_out]
        parts = self.weight.chunk(self.groups)
        return torch.cat([F.linear(x[..., g, :], parts[g]) for g in range(self.groups)], dim=-1)


class Attention(nn.Module):
    """`project` and `output` are per token, `forward` mixes positions."""

    def __init__(self, config: Config, ratio: int) -> None:
        super().__init__()
        self.ratio, self.heads, self.width = ratio, config.num_attention_heads, config.head_dim
        self.window, self.topk = config.sliding_window, config.index_topk
        self.eps, self.groups = config.rms_norm_eps, config.o_groups
        d = config.hidden_size
        self.q_a_proj = linear(d, config.q_lora_rank)
        self.q_a_norm = RMSNorm(config.q_lora_rank, self.eps)
        self.q_b_proj = linear(config.q_lora_rank, self.heads * self.width)
        self.kv_proj = linear(d, self.width)
        self.kv_norm = RMSNorm(self.width, self.eps)
        self.o_a_proj = GroupedLinear(self.heads * self.width // self.groups, config.o_lora_rank, self.groups)
        self.o_b_proj = linear(self.groups * config.o_lora_rank, d, 0.5)
        self.sinks = nn.Parameter(torch.zeros(self.heads))
        if ratio:
            self.compressor = (
                SparseCompressor(config) if ratio == 4 else Compressor(config, ratio, self.width)
            )
        frequencies = rope_frequencies(config, compressed=bool(ratio))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def project(self, h: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_r = self.q_a_norm(self.q_a_proj(h))
        q = rms(self.q_b_proj(q_r).unflatten(-1, (self.heads, self.width)), self.eps)
        q = rotate(q, at[..., None], self.frequencies)
        kv = rotate(self.kv_norm(self.kv_proj(h)), at, self.frequencies)
        return q_r, q.to(h.dtype), kv.to(h.dtype)

    def output(self, o: Tensor, at: Tensor) -> Tensor:
        o = rotate(o, at[..., None], self.frequencies, -1).to(o.dtype)
        return self.o_b_proj(self.o_a_proj(o.flatten(-2).unflatten(-1, (self.groups, -1))))

    def forward(self, h: Tensor, q_r: Tensor, q: Tensor, kv: Tensor, sparse: bool) -> tuple[Tensor, Tensor]:
        """[B,S,H,D], and the indexer's loss (zero where there is no indexer)."""
        batch, length, w = *kv.shape[:2], self.window
        blocks = kv.unflatten(1, (-1, w))
        near = torch.cat((F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks), dim=2)  # [B, S/W, 2W, D]
        rows = q.reshape(batch, -1, w * self.heads, self.width)
        logits = torch.matmul(rows, near.mT).float().reshape(batch, length, self.heads, 2 * w)
        query = torch.arange(length, device=kv.device)[:, None]
        key = query - query % w - w + torch.arange(2 * w, device=kv.device)
        seen = (key >= 0) & (key > query - w) & (key <= query)
        logits = (logits * self.width**-0.5).masked_fill(~seen[:, None], HIDDEN)
        sink = self.sinks.float()[:, None].expand(batch, length, -1, 1)
        loss = logits.new_zeros(())
        if self.ratio:
            entries, far, loss = self.far(h, q_r, q, torch.cat((sink, logits), dim=-1).detach(), sparse)
            logits = torch.cat((logits, far), dim=-1)
        p = torch.cat((logits, sink), dim=-1).softmax(dim=-1).to(kv.dtype)
        o = torch.matmul(p[..., : 2 * w].reshape(*rows.shape[:3], 2 * w), near).reshape(q.shape)
        if self.ratio:
            o = o + torch.matmul(p[..., 2 * w : -1].flatten(1, 2), entries).reshape(q.shape)
        return o, loss

    def far(
        self, h: Tensor, q_r: Tensor, q: Tensor, others: Tensor, sparse: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The compressed entries, their logits, and the indexer's loss. `others`: every other logit."""
        entries = self.compressor.entries(h).to(q.dtype)
        length, count = h.shape[1], entries.shape[1]
        logits = torch.matmul(q.flatten(1, 2), entries.mT).float().unflatten(1, (length, self.heads))
        known = (torch.arange(length, device=h.device)[:, None] + 1) // self.ratio
        visible = torch.arange(count, device=h.device) < known  # [S,T]
        logits = (logits * self.width**-0.5).masked_fill(~visible[:, None], HIDDEN)
        if self.ratio != 4:
            return entries, logits, logits.new_zeros(())
        scores = self.compressor.indexer(h.detach(), q_r.detach()).masked_fill(~visible, HIDDEN)
        loss = index_loss(scores, torch.cat((others, logits.detach()), dim=-1))
        if sparse and count > self.topk:
            # equal scores (sums of ReLUs are often 0): the lower index wins, the rule of the cache
            best = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., : self.topk]
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
            logits = logits.masked_fill(~(chosen & visible)[:, :, None], HIDDEN)
        return entries, logits, loss


def index_loss(scores: Tensor, logits: Tensor) -> Tensor:
    """KL from the head-summed attention over all entries, the last of `logits`, to the indexer's softmax.

    A query counts by the attention mass it gives to entries: most give little, and what they would
    pick does not matter.
    """
    p = logits.softmax(dim=-1)[..., -scores.shape[-1] :].sum(dim=2)
    mass = p.sum(dim=-1)
    target = p / (mass[..., None] + 1e-9)
    kl = (target * ((target + 1e-9).log() - scores.log_softmax(dim=-1))).sum(dim=-1)
    return (kl * mass).sum() / (mass.sum() + 1e-6)


class HyperConnection(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        n, self.config = config.hc_mult, config
        self.fn = nn.Parameter(torch.randn((2 + n) * n, n * config.hidden_size) * 0.02)
        mix = torch.cat((torch.randn(n) * 0.5 - 1.0, torch.randn(n) * 0.5, (torch.eye(n) * 3.0).flatten()))
        self.base = nn.Parameter(mix)
        self.scale = nn.Parameter(torch.full((3,), 0.3))

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [T,n,d]
        n = self.config.hc_mult
        with torch.autocast(streams.device.type, enabled=False):
            f = F.linear(rms(streams.flatten(1), self.config.rms_norm_eps), self.fn)
            pre, post, mix = f.split((n, n, n * n), dim=-1)
            pre_base, post_base, mix_base = self.base.split((n, n, n * n))
            pre = torch.sigmoid(pre * self.scale[0] + pre_base) + self.config.hc_eps
            post = 2 * torch.sigmoid(post * self.scale[1] + post_base)
            mix = (mix * self.scale[2] + mix_base).reshape(-1, n, n)
            mix = sinkhorn(mix, self.config.hc_sinkhorn_iters, self.config.hc_eps)
            return (pre[..., None] * streams).sum(dim=1), post, mix


def spread(post: Tensor, mix: Tensor, streams: Tensor, y: Tensor) -> Tensor:
    mixed = (mix[..., None] * streams[:, :, None]).sum(dim=1)  # the sum runs over the FIRST index of mix
    return post[..., None] * y.float()[:, None] + mixed


def head_mix(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, config: Config) -> Tensor:
    with torch.autocast(streams.device.type, enabled=False):
        f = F.linear(rms(streams.flatten(1), config.rms_norm_eps), fn)
        return ((torch.sigmoid(f * scale + base) + config.hc_eps)[..., None] * streams).sum(dim=1)


class Router(nn.Module):
    def __init__(self, config: Config, hashed: bool) -> None:
        super().__init__()
        self.hashed, self.experts = hashed, config.n_routed_experts
        self.topk, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.randn(self.experts, config.hidden_size) * config.hidden_size**-0.5)
        if hashed:
            table = torch.stack([torch.randperm(self.experts)[: self.topk] for _ in range(config.vocab_size)])
            self.register_buffer("tid2eid", table)
        else:
            self.register_buffer("e_score_correction_bias", torch.zeros(self.experts))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Weight of every expert for every token, [T,E]; zero where not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            score = F.softplus(F.linear(x.float(), self.weight)).sqrt()
            if self.hashed:
                chosen = self.tid2eid[ids]
            else:
                chosen = (score + self.e_score_correction_bias).topk(self.topk, dim=-1).indices
            experts = torch.arange(self.experts, device=x.device)
            kept = score * (chosen[..., None] == experts).any(dim=-2)
            return kept / (kept.sum(dim=-1, keepdim=True) + 1e-20) * self.scaling


class MoE(nn.Module):
    def __init__(self, config: Config, hashed: bool) -> None:
        super().__init__()
        d, f, e = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self.limit, self.width = config.swiglu_limit, f
        self.gate = Router(config, hashed)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(e, 2 * f, d) * d**-0.5)
        self.experts.down_proj = nn.Parameter(torch.randn(e, d, f) * 0.5 * f**-0.5)
        self.shared_experts = nn.Module()
        self.shared_experts.gate_proj = linear(d, f)
        self.shared_experts.up_proj = linear(d, f)
        self.shared_experts.down_proj = linear(f, d, 0.5)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.gate(x, ids)
        load = (weights.detach() > 0).float().mean(dim=0)
        weights = F.pad(weights, (0, 1), value=1.0)  # the shared expert: one more, with weight 1
        shared = self.shared_experts
        gate_up = torch.cat(
            (self.experts.gate_up_proj.flatten(0, 1), shared.gate_proj.weight, shared.up_proj.weight)
        )
        down = torch.cat((self.experts.down_proj.transpose(0, 1).flatten(1), shared.down_proj.weight), dim=1)
        gate, up = F.linear(x, gate_up).unflatten(-1, (-1, 2, self.width)).unbind(-2)
        inner = F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)
        inner = inner * weights.to(gate.dtype)[..., None]
        return F.linear(inner.flatten(-2), down), load


class Block(nn.Module):
    def __init__(self, config: Config, ratio: int, hashed: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config, ratio)
        self.mlp = MoE(config, hashed)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_hc = HyperConnection(config)
        self.ffn_hc = HyperConnection(config)

    def before(self, streams: Tensor, at: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, post, mix = self.attn_hc(streams)
        h = self.input_layernorm(x).to(dtype)
        return post, mix, h, *self.self_attn.project(h, at)

    def after(
        self, streams: Tensor, post: Tensor, mix: Tensor, o: Tensor, at: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        streams = spread(post, mix, streams, self.self_attn.output(o, at))
        x, post, mix = self.ffn_hc(streams)
        y, load = self.mlp(self.post_attention_layernorm(x).to(o.dtype), ids)
        return spread(post, mix, streams, y), load

    def forward(self, streams: Tensor, ids: Tensor, sparse: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Streams are [T,n,d], T = B * S: all but the attention is per token, so compiled once for all."""
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
        at = torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0])
        post, mix, *rows = self.before(streams, at, dtype)
        o, loss = self.self_attn(*(x.unflatten(0, ids.shape) for x in rows), sparse)
        streams, load = self.after(streams, post, mix, o.flatten(0, 1), at, ids.flatten())
        return streams, loss, load


class Mtp(Block):
    def __init__(self, config: Config) -> None:
        super().__init__(config, 0, False)
        d, n = config.hidden_size, config.hc_mult
        self.enorm, self.hnorm, self.norm = (RMSNorm(d, config.rms_norm_eps) for _ in range(3))
        self.e_proj, self.h_proj = linear(d, d), linear(d, d)
        self.hc_head_fn = nn.Parameter(torch.randn(n, n * d) * 0.02)
        self.hc_head_base = nn.Parameter(torch.full((n,), -1.0))
        self.hc_head_scale = nn.Parameter(torch.ones(1))


class HyperHead(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        n = config.hc_mult
        self.hc_fn = nn.Parameter(torch.randn(n, n * config.hidden_size) * 0.02)
        self.hc_base = nn.Parameter(torch.full((n,), -1.0))
        self.hc_scale = nn.Parameter(torch.ones(1))


class TinyV4(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.2)
        self.model.layers = nn.ModuleList(
            Block(config, ratio, i < config.num_hash_layers) for i, ratio in enumerate(config.compress_ratios)
        )
        self.model.hc_head = HyperHead(config)
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = linear(config.hidden_size, config.vocab_size, 0.3)
        self.mtp = nn.ModuleList([Mtp(config)])

    def forward(self, ids: Tensor, sparse: bool) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Normed hidden states of the model and of the MTP head, index loss, expert loads."""
        config, model, mtp = self.config, self.model, self.mtp[0]
        embedded = model.embed_tokens(ids)
        streams = embedded.flatten(0, 1)[:, None].expand(-1, config.hc_mult, -1).contiguous()
        loss, loads = 0.0, []
        for layer in model.layers:
            streams, index, load = layer(streams, ids, sparse)
            loss, loads = loss + index, [*loads, load]
        head = model.hc_head
        hidden = model.norm(head_mix(streams, head.hc_fn, head.hc_base, head.hc_scale, config))
        following = F.pad(embedded[:, 1:], (0, 0, 0, 1)).flatten(
            0, 1
        )  # the last has none: no loss looks at it
        drafts = mtp.h_proj(mtp.hnorm(streams)).float() + mtp.e_proj(mtp.enorm(following)).float()[:, None]
        drafts, _, load = mtp(drafts, ids, sparse)
        drafts = mtp.norm(head_mix(drafts, mtp.hc_head_fn, mtp.hc_head_base, mtp.hc_head_scale, config))
        return hidden.unflatten(0, ids.shape), drafts.unflatten(0, ids.shape), loss, [*loads, load]

    def score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Per token, [T]: the loss, and whether the arg-max is right."""
        logits = self.lm_head(hidden).float()
        return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets
