"""The figures of the model card, of the bytes in a folder.

    python measure.py WORK_DIR FOLDER [--questions N] [--lengths N,N]

Recall: the share of exams answered with exactly the right key and value, top-k selection in place. Loss in
nats per token on held-out text; MTP agreement: how often the MTP arg-max is the model's own (teacher-forced).
The bytes are widened to fp32; with CUDA the model also runs under bf16 autocast.
"""

# ruff: noqa: T201
import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from data import Exam, Maker
from export import load_model
from torch import Tensor

from model import TinyV4

SEED = 77
PIECES, PIECE_TOKENS = 64, 1024
TOKENS_AT_ONCE = {"cuda": 65536, "cpu": 4096}


def autocast(device: str, enabled: bool = True) -> torch.autocast:
    return torch.autocast(device, dtype=torch.bfloat16, enabled=enabled and device == "cuda")


@torch.no_grad()
def recall(model: TinyV4, exams: list[Exam]) -> float:
    device = model.lm_head.weight.device
    right, size = 0, max(1, TOKENS_AT_ONCE[device.type] // len(exams[0].ids))
    for start in range(0, len(exams), size):
        some = exams[start : start + size]
        hidden = model(torch.tensor([e.ids for e in some], device=device), sparse=True)[0]
        said = model.lm_head(hidden[:, -2:]).argmax(-1).tolist()
        right += sum(s == e.answer for s, e in zip(said, some, strict=True))
    return right / len(exams)


@torch.no_grad()
def held_out(model: TinyV4, text: Tensor) -> dict[str, float]:
    sums = torch.zeros(3)
    starts = torch.linspace(0, len(text) - PIECE_TOKENS, PIECES).long()
    for some in starts.split(4):
        ids = torch.stack([text[s : s + PIECE_TOKENS] for s in some]).to(model.lm_head.weight.device)
        hidden, drafts, _, _ = model(ids, sparse=True)
        logits, draft_logits = model.lm_head(hidden).float(), model.lm_head(drafts).float()
        loss = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:])
        draft_loss = F.cross_entropy(draft_logits[:, :-2].mT, ids[:, 2:])
        same = (logits.argmax(-1)[:, 1:-1] == draft_logits.argmax(-1)[:, :-2]).float().mean()
        sums += torch.stack((loss, draft_loss, same)).cpu() * len(some)
    return dict(zip(("text_loss", "mtp_loss", "mtp_agreement"), (sums / PIECES).tolist(), strict=True))


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("work", type=Path)
    parse.add_argument("folder", type=Path)
    parse.add_argument("--questions", type=int, default=512)
    parse.add_argument("--lengths", default="512,1024,2048,4096")
    arguments = parse.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    maker = Maker(arguments.work, SEED, "held")
    model = load_model(arguments.folder).to(device)
    exams = {
        n: [maker.exam(n) for _ in range(arguments.questions)] for n in map(int, arguments.lengths.split(","))
    }
    text = torch.from_numpy(maker.text.astype("int64"))
    print(json.dumps({"questions": arguments.questions, "bytes_per_token": maker.bytes_per_token()}))
    for precision in ("bf16", "fp32")[device == "cpu" :]:
        with autocast(device, precision == "bf16"):
            scores = {n: recall(model, e) for n, e in exams.items()}
            print(json.dumps({"precision": precision, "recall": scores, **held_out(model, text)}), flush=True)


if __name__ == "__main__":
    main()
