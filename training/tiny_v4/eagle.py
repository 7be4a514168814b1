"""Train the EAGLE head of tiny-v4: one layer of full attention that drafts from the model's last streams.

    python eagle.py WORK_DIR OUT.safetensors [--stages 1024:16:240,4096:4:60] [--device cuda] [--start HEAD]

WORK_DIR is what `corpus.py WORK_DIR FOLDER` made with the tokenizer of the model folder. A stage is
length:batch:seconds. The model does not change. The head learns the model's distribution and its best token
at every position, and the hidden state that `lm_head` reads; the text is given. Answers of recall
conversations count once more.

It is unrolled as it drafts: step 0 reads what the model computed, step s the head's own answers of step
s - 1, and sees its own entries of the last s positions and the entries of step 0 before them.

    position       …   j-3   j-2   j-1    j          the query of step 2 at position j sees
    entries of          0     0     1     2          (step that made the entry)

OUT is written every minute and at the end; the accept lengths that are logged are measured with the package
itself, on a CPU (`benchmarks/speculate.py`).
"""

# ruff: noqa: T201
import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from data import ANSWER, Stream
from export import load_model
from measure import autocast
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train import WORKERS, mean_of, say

from model import Config, RMSNorm, TinyV4, head_mix, linear

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "src" / "tiercel" / "models" / "tiny_v4"
HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 1, 64, 512  # 1.9 MB as bf16; the limit is 2
STEPS, STEP_WEIGHT = 3, 0.8  # a later guess counts less: it is reached less often
HIDDEN_WEIGHT = 0.1
ANSWER_WEIGHT = 0.5  # answers are few tokens, and no text teaches to look them up
STAGES = "1024:16:240,4096:4:60"
RATE, WARMUP_STEPS, DECAY_SHARE, RATE_FLOOR = 2e-3, 100, 0.5, 0.02
TEXT_SHARE = 0.6
SAVE_EVERY_S, MEASURE_EVERY_S = 60, 60
MASKED = -1e30


def rotate_halves(x: Tensor, theta: float) -> Tensor:
    """x [batch, tokens, heads, dim]: channel i turns with channel i + dim / 2, as in Qwen3."""
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, device=x.device).double() / half)
    angle = (torch.arange(x.shape[1], device=x.device)[:, None] * frequencies).float()[:, None]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().split(half, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def later(x: Tensor, by: int = 1) -> Tensor:
    """x [batch, tokens, …]: every position has the value of `by` positions before; zeros at the start."""
    padding = (0, 0) * (x.dim() - 2)
    return F.pad(x, (*padding, by, 0))[:, : x.shape[1]]


class SelfAttention(nn.Module):
    """Grouped-query attention over the entries of several steps."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d, self.theta = config.hidden_size, config.rope_theta
        self.q_proj, self.o_proj = linear(d, HEADS * HEAD_DIM), linear(HEADS * HEAD_DIM, d, 0.5)
        self.k_proj, self.v_proj = linear(d, KV_HEADS * HEAD_DIM), linear(d, KV_HEADS * HEAD_DIM)
        self.q_norm, self.k_norm = (RMSNorm(HEAD_DIM, config.rms_norm_eps) for _ in range(2))

    def forward(self, h: Tensor, made: list[tuple[Tensor, Tensor]]) -> Tensor:
        """`made`: (keys, values) of the steps before this one. Those of this step are added to it."""
        q, k, v = (p(h).unflatten(-1, (-1, HEAD_DIM)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q = rotate_halves(self.q_norm(q), self.theta).to(v.dtype)
        k = rotate_halves(self.k_norm(k), self.theta).to(v.dtype)
        wide = HEADS // KV_HEADS
        made.append((k.repeat_interleave(wide, 2), v.repeat_interleave(wide, 2)))
        step, length = len(made) - 1, h.shape[1]
        keys, values = made[0]
        at = torch.arange(length, device=h.device)
        seen = at <= at[:, None] - step
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys).float().masked_fill(~seen, MASKED)
        own = [(later(k, step - i), later(v, step - i)) for i, (k, v) in enumerate(made) if i]
        ahead = [(q * k).sum(-1).float().transpose(1, 2)[..., None] for k, _ in own]
        p = (torch.cat([scores, *ahead], -1) * HEAD_DIM**-0.5).softmax(-1).to(v.dtype)
        out = torch.einsum("bhqk,bkhd->bqhd", p[..., :length], values)
        for i, (_, v) in enumerate(own):
            out = out + p[..., length + i].transpose(1, 2)[..., None] * v
        return self.o_proj(out.flatten(-2))


class Mlp(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(d, INNER), linear(d, INNER)
        self.down_proj = linear(INNER, d, 0.5)

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Head(nn.Module):
    """Parameter names are those of the file. `streams_proj` makes of a token's streams what its successor's
    entry reads: all streams tell which token it was, their mean or the hidden state hardly do."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d, wide, eps = config.hidden_size, config.hc_mult * config.hidden_size, config.rms_norm_eps
        self.streams_norm, self.streams_proj = RMSNorm(wide, eps), linear(wide, d)
        self.enorm, self.hnorm, self.norm = (RMSNorm(d, eps) for _ in range(3))
        self.fc = linear(2 * d, d)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.self_attn, self.mlp = SelfAttention(config), Mlp(d)

    def forward(self, streams: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """What `lm_head` reads, of each step [batch, tokens, d]."""
        before, embedded = self.streams_proj(self.streams_norm(streams)), self.enorm(embedded)
        made, answers = list[tuple[Tensor, Tensor]](), []
        for _ in range(steps):
            x = self.fc(torch.cat((embedded, self.hnorm(later(before))), -1)).float()
            x = x + self.self_attn(self.input_layernorm(x), made)
            before = x + self.mlp(self.post_attention_layernorm(x))
            answers.append(self.norm(before))
        return answers

    def save(self, path: Path) -> None:
        """Matrices bf16, norms fp32."""
        state = {k: v.detach().cpu() for k, v in self.state_dict().items()}
        state = {k: v.to(torch.bfloat16 if v.dim() > 1 else torch.float32) for k, v in state.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f"{path.name}.new")
        save_file(state, written, metadata={"format": "pt"})
        written.chmod(0o644)
        written.replace(path)


@torch.no_grad()
def run_model(model: TinyV4, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(streams after the last layer, flat; embeddings; the hidden states that `lm_head` reads)"""
    config, inner = model.config, model.model
    embedded = inner.embed_tokens(ids)
    streams = embedded.flatten(0, 1)[:, None].expand(-1, config.hc_mult, -1).contiguous()
    for layer in inner.layers:
        streams, _, _ = layer(streams, ids, True)
    head = inner.hc_head
    hidden = inner.norm(head_mix(streams, head.hc_fn, head.hc_base, head.hc_scale, config))
    return streams.flatten(1).unflatten(0, ids.shape), embedded, hidden.unflatten(0, ids.shape)


def losses(model: TinyV4, head: Head, ids: Tensor, kinds: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    with autocast(ids.device.type):
        streams, embedded, hidden = run_model(model, ids)
        wanted = model.lm_head(hidden).float()
        answers = head(streams, embedded, STEPS)
    p, best = wanted.softmax(-1), wanted.argmax(-1)
    answers_ahead = F.pad(kinds[:, 1:], (0, 1)) == ANSWER
    total, parts = wanted.new_zeros(()), {}
    for step, answer in enumerate(answers):
        with autocast(ids.device.type):
            logits = model.lm_head(answer).float()
        own = slice(step, None)  # before it, a step has nothing of its own to read
        log_q, asked = logits[:, own].log_softmax(-1), answers_ahead[:, own]
        spread = -(p[:, own] * log_q).sum(-1)
        sharp = F.nll_loss(log_q.mT, best[:, own], reduction="none")
        near = F.smooth_l1_loss(answer[:, own].float(), hidden[:, own].float())
        each = 0.5 * spread + 0.5 * sharp
        answered = ANSWER_WEIGHT * mean_of(each, asked)
        total = total + STEP_WEIGHT**step * (each.mean() + answered + HIDDEN_WEIGHT * near)
        right = (logits[:, own].argmax(-1) == best[:, own]).float().detach()
        parts |= {f"right_{step}": right.mean(), f"answer_{step}": mean_of(right, asked)}
    return total, {"loss": total.detach(), **parts}


def groups(head: Head) -> list[dict[str, object]]:
    matrices, vectors = ([p for p in head.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    return [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]


class Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = a = arguments
        self.model = load_model(a.folder).to(a.device).requires_grad_(False)
        self.head = Head(self.model.config).to(a.device)
        self.head.norm.load_state_dict(self.model.model.norm.state_dict())  # `lm_head` knows its scale
        if a.start is not None:
            self.head.load_state_dict({k: v.float() for k, v in load_file(a.start).items()})
        self.optimizer = torch.optim.AdamW(groups(self.head), lr=RATE, betas=(0.9, 0.95))
        self.stages = [tuple(map(float, stage.split(":"))) for stage in a.stages.split(",")]
        self.seconds = sum(seconds for _, _, seconds in self.stages)
        self.spent, self.steps, self.tokens = 0.0, 0, 0
        self.saved = self.measured = 0.0
        self.paused = 0.0

    def stage(self, length: int, batch: int, end: float) -> None:
        a = self.arguments
        stream = Stream(a.work, a.seed * 7919 + length, batch, length, TEXT_SHARE)
        workers = WORKERS if a.device == "cuda" else 0
        batches = iter(torch.utils.data.DataLoader(stream, batch_size=None, num_workers=workers))
        begun, spent, sums = time.monotonic(), self.spent, dict[str, Tensor]()
        self.paused = 0.0
        while self.spent < end:
            parts = self.update(*(each.to(a.device) for each in next(batches)))
            sums = {k: sums.get(k, 0) + v for k, v in parts.items()}
            self.steps, self.tokens = self.steps + 1, self.tokens + batch * length
            if self.steps % a.log_steps == 0:
                means = {k: float(v) / a.log_steps for k, v in sums.items()}
                assert math.isfinite(means["loss"]), "the loss is not a number"
                say(step=self.steps, length=length, s=self.spent, tokens=self.tokens, **means)
                sums = {}
                self.save_and_measure()
            self.spent = spent + time.monotonic() - begun - self.paused

    def update(self, ids: Tensor, kinds: Tensor) -> dict[str, Tensor]:
        fall = max(RATE_FLOOR, min(1.0, (1 - self.spent / self.seconds) / DECAY_SHARE))
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * fall * min(1.0, (self.steps + 1) / WARMUP_STEPS)
        self.optimizer.zero_grad(set_to_none=True)
        total, parts = losses(self.model, self.head, ids, kinds)
        total.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        return parts

    def save_and_measure(self, *, last: bool = False) -> None:
        """Neither is training time."""
        begun = time.monotonic()
        if last or self.spent - self.saved >= SAVE_EVERY_S:
            self.saved = self.spent
            self.head.save(self.arguments.out)
        if self.arguments.measure and (last or self.spent - self.measured >= MEASURE_EVERY_S):
            self.measured = self.spent
            self.head.save(self.arguments.out)
            say(step=self.steps, accept_length=accept_lengths(self.arguments.folder, self.arguments.out))
        self.paused += time.monotonic() - begun


def accept_lengths(folder: Path, out: Path) -> dict[str, list[float]]:
    """For 1, 2, 3, 4 guesses on each kind of text, with the package itself."""
    for path in (str(ROOT), str(ROOT / "src")):  # this package, not one that is installed
        if path not in sys.path:
            sys.path.insert(0, path)
    from benchmarks.speculate import Drafting, accept_length  # here: a smoke run works without it

    drafting = Drafting("eagle", folder, head=out, texts=8)
    return {
        kind: [round(each, 2) for each in accept_length(drafting, kind)]
        for kind in ("text", "recall", "code")
    }


def check_tokenizer(work: Path, folder: Path) -> None:
    """The tokens must be those of the model: `corpus.py WORK_DIR` alone trains a tokenizer of its own."""
    if (work / "tokenizer.json").read_bytes() != (folder / "tokenizer.json").read_bytes():
        raise SystemExit(
            f"{work} has tokens of another tokenizer than {folder}: make it with corpus.py {work} {folder}"
        )


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("work", type=Path)
    parse.add_argument("out", type=Path)
    parse.add_argument("--folder", type=Path, default=FOLDER)
    parse.add_argument("--stages", default=STAGES)
    parse.add_argument("--start", type=Path, help="a head to go on from")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parse.add_argument("--log-steps", type=int, default=100)
    parse.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True)
    arguments = parse.parse_args()
    check_tokenizer(arguments.work, arguments.folder)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    run, end = Run(arguments), 0.0
    size = sum(p.numel() * (2 if p.dim() > 1 else 4) for p in run.head.parameters())
    print(
        json.dumps({"parameters": sum(p.numel() for p in run.head.parameters()), "bytes": size}), flush=True
    )
    for length, batch, seconds in run.stages:
        end += seconds
        run.stage(int(length), int(batch), end)
    run.save_and_measure(last=True)
    say(steps=run.steps, tokens=run.tokens, seconds=run.spent)


if __name__ == "__main__":
    main()
