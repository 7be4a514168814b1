r"""Train tiny-v4.

    python train.py --work WORK_DIR --out OUT_DIR \
        --stages 256:64:300:dense,512:32:60:dense,1024:16:60:dense,2048:8:120:sparse

A stage is length:batch:seconds:mode. It ends by the clock, or earlier once nine answers in ten were right for
100 steps; the last stage gets the time that is left. Keep length * batch the same: what is compiled is
compiled once for it. `dense` lets CSA queries see every entry while the indexer learns from them; `sparse`
keeps the index_topk best, as in inference (the indexer's target stays the dense attention).
Loss = text + answers + 0.2 copies + 0.3 MTP + indexer KL. The checkpoint comes in parts under 16 MiB (ckpt.0,
ckpt.1, ...); `--resume DIR` reads the weights back. `--seed` fixes weights and data, not the number of steps.
"""

# ruff: noqa: T201
import argparse
import io
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from data import ANSWER, COPY, TEXT, Maker, Stream
from torch import Tensor

from model import STEPS, Config, TinyV4

PART_BYTES = 15 << 20
BALANCE_RATE = 1e-3  # router bias step per update, DeepSeek's auxiliary-loss-free balancing
MTP_WEIGHT = 0.3


def save(model: TinyV4, out: Path, record: dict[str, object]) -> None:
    buffer = io.BytesIO()
    state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
    torch.save({"model": state, "config": model.config, "record": record}, buffer)
    data = buffer.getvalue()
    for i, start in enumerate(range(0, len(data), PART_BYTES)):
        (out / f"ckpt.{i}").write_bytes(data[start : start + PART_BYTES])


def load(folder: Path) -> dict[str, object]:
    parts = sorted(folder.glob("ckpt.*"))
    return torch.load(
        io.BytesIO(b"".join(p.read_bytes() for p in parts)), map_location="cpu", weights_only=False
    )


def cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, head).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"), logits.argmax(
        -1
    ).flatten()


def mean_of(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


class Trainer:
    def __init__(self, model: TinyV4, device: str, compiled: bool) -> None:
        self.model, self.device = model.to(device), device
        self.cross_entropy = cross_entropy
        if compiled:
            torch._dynamo.config.recompile_limit = 64
            STEPS.update({name: torch.compile(step, dynamic=False) for name, step in STEPS.items()})
            self.cross_entropy = torch.compile(cross_entropy, dynamic=False)
        self.routers = [m for n, m in model.named_modules() if n.endswith("mlp.gate")]

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda")

    def losses(
        self, ids: Tensor, kinds: Tensor, sparse: bool
    ) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        with self.autocast():
            hidden, drafts, index, loads = self.model(ids, sparse)
            head = self.model.lm_head.weight
            next_loss, guess = self.cross_entropy(hidden[:, :-1], head, ids[:, 1:])
            draft_loss, _ = self.cross_entropy(drafts[:, :-2], head, ids[:, 2:])
        kind, kind2 = kinds[:, 1:].flatten(), kinds[:, 2:].flatten()
        text, answer, copy = (mean_of(next_loss, kind == k) for k in (TEXT, ANSWER, COPY))
        draft = mean_of(draft_loss, kind2 == TEXT) + 0.2 * mean_of(draft_loss, kind2 >= ANSWER)
        total = text + answer + 0.2 * copy + MTP_WEIGHT * draft + index
        right = (guess == ids[:, 1:].flatten()).float()
        parts = {"text": text, "ans": answer, "copy": copy, "draft": draft, "index": index}
        parts |= {"ans_acc": mean_of(right, kind == ANSWER), "copy_acc": mean_of(right, kind == COPY)}
        return total, {k: v.detach() for k, v in parts.items()}, loads

    def balance(self, loads: list[Tensor]) -> None:
        for router, load in zip(self.routers, loads, strict=True):
            if not router.hashed:
                router.e_score_correction_bias -= BALANCE_RATE * torch.sign(load - load.mean())


def groups(model: TinyV4, lr: float) -> list[dict[str, object]]:
    """Hyper-connection maps steer every stream from 4*d inputs: a tenth of the rate. Vectors do not decay."""
    kinds: dict[str, list[Tensor]] = {"matrix": [], "vector": [], "hyper": []}
    for name, p in model.named_parameters():
        hyper = "_hc." in name or "hc_" in name
        kinds[
            "hyper"
            if hyper and p.dim() == 2
            else "matrix"
            if p.dim() >= 2 and "position" not in name
            else "vector"
        ].append(p)
    return [
        {"params": kinds["matrix"], "lr": lr, "rate": 1.0, "weight_decay": 0.05},
        {"params": kinds["vector"], "lr": lr, "rate": 1.0, "weight_decay": 0.0},
        {"params": kinds["hyper"], "lr": lr, "rate": 0.1, "weight_decay": 0.0},
    ]


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def recall(trainer: Trainer, maker: Maker, length: int, questions: int, tokens_per_fact: int = 64) -> float:
    right, size = 0, max(1, 65536 // length)
    for start in range(0, questions, size):
        exams = [maker.exam(length, tokens_per_fact) for _ in range(min(size, questions - start))]
        with trainer.autocast():
            hidden = trainer.model(torch.tensor([e[0] for e in exams], device=trainer.device), True)[0][
                :, -2:
            ]
            guess = trainer.model.lm_head(hidden).argmax(-1).tolist()
        right += sum(g == e[1] for g, e in zip(guess, exams, strict=True))
    return right / questions


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def held_out(trainer: Trainer, maker: Maker, length: int, count: int) -> dict[str, float]:
    """Text loss (nats per token), MTP loss, and how often MTP's arg-max is the model's own next one."""
    sums, done = torch.zeros(3), 0
    starts = torch.linspace(0, len(maker.text) - length - 1, count).long().tolist()
    for begin in range(0, count, 16):
        ids = torch.stack(
            [torch.from_numpy(maker.text[s : s + length].astype("int64")) for s in starts[begin : begin + 16]]
        )
        ids = ids.to(trainer.device)
        with trainer.autocast():
            hidden, drafts, _, _ = trainer.model(ids, True)
            head = trainer.model.lm_head.weight
            loss, guess = cross_entropy(hidden[:, :-1], head, ids[:, 1:])
            draft_loss, draft = cross_entropy(drafts[:, :-2], head, ids[:, 2:])
        same = guess.unflatten(0, (len(ids), -1))[:, 1:].flatten() == draft
        sums += torch.stack((loss.mean(), draft_loss.mean(), same.float().mean())).cpu() * len(ids)
        done += len(ids)
    return dict(zip(("text_loss", "mtp_loss", "mtp_agreement"), (sums / done).tolist(), strict=True))


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("--work", type=Path, required=True)
    parse.add_argument("--out", type=Path, required=True)
    parse.add_argument("--stages", required=True)
    parse.add_argument("--resume", type=Path)
    parse.add_argument("--lr", type=float, default=2e-3)
    parse.add_argument("--warmup-steps", type=int, default=200)
    parse.add_argument(
        "--decay-share",
        type=float,
        default=0.0,
        help="share of all stage time, at the end, with falling rate",
    )
    parse.add_argument("--text-share", type=float, default=0.2)
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--workers", type=int, default=6)
    parse.add_argument("--eval-lengths", default="512,1024,2048,4096")
    parse.add_argument("--questions", type=int, default=256)
    arguments = parse.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = (arguments.out / "log.jsonl").open("a")

    def say(**row: object) -> None:
        line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    model = TinyV4(Config())
    if arguments.resume:
        model.load_state_dict(load(arguments.resume)["model"])
    trainer = Trainer(model, device, compiled=device == "cuda")
    optimizer = torch.optim.AdamW(
        groups(model, arguments.lr), betas=(0.9, 0.95), eps=1e-10, fused=device == "cuda"
    )
    stages = [
        (int(n), int(b), float(s), m == "sparse")
        for n, b, s, m in (x.split(":") for x in arguments.stages.split(","))
    ]
    whole, spent, step = sum(s[2] for s in stages), 0.0, 0
    maker = Maker(arguments.work, arguments.seed + 77, "held")
    for stage in stages:
        length, batch, seconds, sparse = stage
        stream = Stream(
            arguments.work, arguments.seed * 7919 + step + length, batch, length, arguments.text_share
        )
        loader = iter(
            torch.utils.data.DataLoader(
                stream, batch_size=None, num_workers=arguments.workers, pin_memory=device == "cuda"
            )
        )
        begun = mark = time.monotonic()
        since, saved, accuracies = 0, time.monotonic(), []
        last = stage is stages[-1]  # what the others left over is its time
        while (now := time.monotonic() - begun) < (whole - spent if last else seconds):
            share = (spent + now) / whole
            fall = min(1.0, (1 - share) / arguments.decay_share) if arguments.decay_share else 1.0
            for group in optimizer.param_groups:
                group["lr"] = (
                    arguments.lr
                    * group["rate"]
                    * min(1.0, (step + 1) / arguments.warmup_steps)
                    * max(fall, 0.02)
                )
            ids, kinds = (x.to(device, non_blocking=True) for x in next(loader))
            total, parts, loads = trainer.losses(ids, kinds, sparse)
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            trainer.balance(loads)
            accuracies.append(parts["ans_acc"])
            step, since = step + 1, since + 1
            if since == 1:  # compilation is not training time
                torch.cuda.synchronize() if device == "cuda" else None
                begun = time.monotonic()
            if since == 1 or since % 100 == 0:
                row = {k: float(v) for k, v in parts.items()}
                rate = batch * length * (1 if since == 1 else 100) / (time.monotonic() - mark)
                mark = time.monotonic()
                row["ans_mean"] = float(torch.stack(accuracies).mean())
                accuracies.clear()
                say(step=step, S=length, s=spent + now, tok_s=int(rate), norm=float(norm), **row)
                if row["ans_mean"] > 0.9 and not last and since > 1:
                    break
                assert row["text"] == row["text"], "the loss is not a number"
            if time.monotonic() - saved > 60:
                save(model, arguments.out, {"step": step})
                saved = time.monotonic()
        spent += time.monotonic() - begun
        say(
            step=step, stage=length, recall={n: recall(trainer, maker, n, 128) for n in (length // 2, length)}
        )
        del loader
    save(model, arguments.out, {"step": step})
    if arguments.eval_lengths:
        lengths = [int(n) for n in arguments.eval_lengths.split(",")]
        say(
            final={n: recall(trainer, maker, n, arguments.questions) for n in lengths},
            **held_out(trainer, maker, 1024, 64),
        )
    if device == "cuda":
        say(memory_gib=torch.cuda.max_memory_allocated() / 2**30)


if __name__ == "__main__":
    main()
