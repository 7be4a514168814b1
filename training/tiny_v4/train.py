"""Train tiny-v4. The defaults are the recipe of the shipped weights.

    python train.py WORK_DIR FOLDER [--stages 256:64:60:dense,4096:4:60:sparse] [--seed N]

A stage is length:batch:seconds:mode. `dense` lets CSA queries see every entry while the indexer learns from
them; it ends by the clock, or earlier once nine answers in ten were right for 100 steps. `sparse` keeps the
index_topk best, as in inference (the indexer's target stays the dense attention); it ends by the clock, and
the last stage gets the time that is left. Keep length * batch the same: what is compiled is compiled once for
it. Loss = text + answers + 0.2 copies + 0.3 MTP + indexer KL. FOLDER is written every minute and at the end.
`--seed` fixes weights and data; the number of steps is the clock's.
"""

# ruff: noqa: T201
import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from data import ANSWER, COPY, TEXT, Maker, Stream
from export import export_model, export_tokenizer
from measure import autocast, recall
from torch import Tensor

from model import Block, Config, TinyV4

STAGES = "256:64:40:dense,512:32:20:dense,1024:16:20:dense,1024:16:220:sparse,4096:4:120:sparse"
RATE, WARMUP_STEPS = 2e-3, 200
DECAY_SHARE, RATE_FLOOR = 0.4, 0.02  # over the last 40 % of the time the rate falls to 2 %
TEXT_SHARE = 0.4  # sequences of plain text; the others are conversations, with text between the facts
BALANCE_RATE = 1e-3  # router bias step per update, DeepSeek's auxiliary-loss-free balancing
MTP_WEIGHT, COPY_WEIGHT = 0.3, 0.2
RECORDED_CALL = 4  # three calls as they are, for what is compiled or allocated on first use
ENOUGH_RIGHT = 0.9
WORKERS = max(0, (os.cpu_count() or 1) - 2)


@dataclass(frozen=True)
class Stage:
    length: int
    batch: int
    seconds: float
    sparse: bool

    @classmethod
    def parse(cls, text: str) -> "Stage":
        length, batch, seconds, mode = text.split(":")
        return cls(int(length), int(batch), float(seconds), {"dense": False, "sparse": True}[mode])


def say(**row: object) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def mean_of(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def ahead(x: Tensor, steps: int) -> Tensor:
    """Every token's later one, [T]; 0 (as a kind: unscored) where there is none."""
    return F.pad(x[:, steps:], (0, steps)).flatten()


class Update:
    """One optimizer step on batches of one shape.

    On CUDA it is recorded once and then replayed: it is some thousand small kernels, and launching them
    one by one takes longer than running them.
    """

    def __init__(self, model: TinyV4, optimizer: torch.optim.Optimizer, sparse: bool) -> None:
        self.model, self.optimizer, self.sparse = model, optimizer, sparse
        self.device = model.lm_head.weight.device.type
        self.routers = [b.mlp.gate for b in (*model.model.layers, *model.mtp)]
        self.calls, self.graph = 0, None

    def __call__(self, *batch: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.device != "cuda" or self.calls < RECORDED_CALL:
            return self.step(*(x.to(self.device) for x in batch))
        if self.graph is None:
            self.inputs, self.graph = [x.to(self.device) for x in batch], torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.outputs = self.step(*self.inputs)
        for place, fresh in zip(self.inputs, batch, strict=True):
            place.copy_(fresh)
        self.graph.replay()
        return self.outputs

    def step(self, ids: Tensor, kinds: Tensor) -> dict[str, Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        total, parts, loads = self.losses(ids, kinds)
        total.backward()
        parts["norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        for router, load in zip(self.routers, loads, strict=True):
            if not router.hashed:
                router.e_score_correction_bias -= BALANCE_RATE * torch.sign(load - load.mean())
        return {k: v.detach() for k, v in parts.items()}

    def losses(self, ids: Tensor, kinds: Tensor) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        with autocast(self.device):
            hidden, drafts, index, loads = self.model(ids, self.sparse)
            loss, right = self.model.score(hidden.flatten(0, 1), ahead(ids, 1))
            draft_loss, _ = self.model.score(drafts.flatten(0, 1), ahead(ids, 2))
        kind, kind2 = ahead(kinds, 1), ahead(kinds, 2)
        text, answer, copy = (mean_of(loss, kind == k) for k in (TEXT, ANSWER, COPY))
        draft = mean_of(draft_loss, kind2 == TEXT) + COPY_WEIGHT * mean_of(draft_loss, kind2 >= ANSWER)
        parts = {"text": text, "answer": answer, "copy": copy, "draft": draft, "index": index}
        parts |= {"right": mean_of(right, kind == ANSWER), "copied": mean_of(right, kind == COPY)}
        return text + answer + COPY_WEIGHT * copy + MTP_WEIGHT * draft + index, parts, loads


def groups(model: TinyV4) -> list[dict[str, object]]:
    """Hyper-connection maps steer every stream from 4*d inputs: a tenth of the rate. Vectors do not decay."""
    vectors, hyper, matrices = [], [], []
    for name, p in model.named_parameters():
        vector = p.dim() < 2 or "position_bias" in name
        (vectors if vector else hyper if "hc" in name else matrices).append(p)

    def group(params: list[Tensor], share: float, decay: float) -> dict[str, object]:
        rate = torch.zeros((), device=params[0].device)
        return {"params": params, "lr": rate, "share": share, "weight_decay": decay}

    return [group(matrices, 1.0, 0.05), group(vectors, 1.0, 0.0), group(hyper, 0.1, 0.0)]


class Run:
    """The curriculum: the model, its optimizer, and how far they are."""

    def __init__(self, model: TinyV4, arguments: argparse.Namespace) -> None:
        self.model, self.arguments = model, arguments
        device = model.lm_head.weight.device.type
        self.optimizer = torch.optim.AdamW(
            groups(model), betas=(0.9, 0.95), eps=1e-10, fused=True, capturable=device == "cuda"
        )
        self.stages = [Stage.parse(s) for s in arguments.stages.split(",")]
        self.seconds = sum(s.seconds for s in self.stages)
        self.spent, self.steps, self.tokens, self.saved = 0.0, 0, 0, time.monotonic()

    def set_rate(self, seconds: float) -> None:
        fall = max(RATE_FLOOR, min(1.0, (1 - seconds / self.seconds) / DECAY_SHARE))
        for group in self.optimizer.param_groups:
            group["lr"].fill_(RATE * group["share"] * fall * min(1.0, (self.steps + 1) / WARMUP_STEPS))

    def stage(self, stage: Stage) -> None:
        a, last = self.arguments, stage is self.stages[-1]
        stream = Stream(
            a.work, a.seed * 7919 + self.steps + stage.length, stage.batch, stage.length, TEXT_SHARE
        )
        batches = iter(torch.utils.data.DataLoader(stream, batch_size=None, num_workers=WORKERS))
        update = Update(self.model, self.optimizer, stage.sparse)
        end = self.seconds if last else self.spent + stage.seconds
        begun, spent, right = time.monotonic(), self.spent, 0.0
        while self.spent < end:
            self.set_rate(self.spent)
            parts = update(*next(batches))
            right = right + parts["right"]
            self.steps, self.tokens = self.steps + 1, self.tokens + stage.batch * stage.length
            if update.calls <= RECORDED_CALL:  # compilation is not training time
                float(parts["text"])
                begun = time.monotonic()
            self.spent = spent + time.monotonic() - begun
            if update.calls % 100 == 0:
                row = {k: float(v) for k, v in parts.items()} | {"right": float(right) / 100}
                rate = int((update.calls - RECORDED_CALL) * stage.batch * stage.length / (self.spent - spent))
                say(step=self.steps, length=stage.length, s=self.spent, tokens_per_s=rate, **row)
                assert math.isfinite(row["text"]), "the loss is not a number"
                right = 0.0
                self.save(every=60)
                if row["right"] > ENOUGH_RIGHT and not stage.sparse:
                    break
        self.recall(stage.length)

    def recall(self, length: int) -> None:
        maker = Maker(self.arguments.work, 1, "held")
        with torch.compiler.set_stance("force_eager"), autocast(self.model.lm_head.weight.device.type):
            scores = {
                n: recall(self.model, [maker.exam(n) for _ in range(128)]) for n in (length // 2, length)
            }
        say(step=self.steps, tokens=self.tokens, recall=scores)

    def save(self, every: float = 0.0) -> None:
        if time.monotonic() - self.saved >= every:
            export_model(self.model, self.arguments.folder, torch.bfloat16)
            self.saved = time.monotonic()


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("work", type=Path)
    parse.add_argument("folder", type=Path)
    parse.add_argument("--stages", default=STAGES)
    parse.add_argument("--seed", type=int, default=0)
    arguments = parse.parse_args()
    torch.manual_seed(arguments.seed)
    model = TinyV4(Config())
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
        torch.cuda.set_stream(torch.cuda.Stream())  # the default one can not be recorded
        per_token = Block.before, Block.after, TinyV4.score
        Block.before, Block.after, TinyV4.score = (torch.compile(f, dynamic=False) for f in per_token)
        model.cuda()
    export_tokenizer(arguments.work, arguments.folder)
    run = Run(model, arguments)
    for stage in run.stages:
        run.stage(stage)
    run.save()
    say(steps=run.steps, tokens=run.tokens, seconds=run.spent)


if __name__ == "__main__":
    main()
