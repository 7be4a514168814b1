"""Goal: Qwen3 on CUDA is that of `transformers`, and no bit of it depends on cuts, company, tiers, recordings
or guesses. Method: logits of small random models, dense and with experts, in Triton's interpreter and on a
GPU; then whole engines on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.drive import Always, make_ask, run, tokens_of, words
from tests.kernels.devices import every_device, on_gpu
from tests.models.qwen3 import (
    make_moe_reference,
    make_reference,
    random_tokens,
    reference_logits,
    write_qwen3,
)
from tests.models.spans import one_pool
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.kernels.choice import make_kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models import graphs
from tiercel.models.base import DRAWN_LAST
from tiercel.models.frame import Frame
from tiercel.models.qwen3.config import Qwen3Config, declare
from tiercel.models.qwen3.model import build
from tiercel.verify import verify

PAGE, MIB = 32, 2**20
LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16, "head_dim": 128}
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
KINDS = {"dense": make_reference, "experts": make_moe_reference}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(
    reference: Any, device: str, format: str, compute: str, rings: int = 3
) -> tuple[Frame, DeviceMemory]:
    config, kernels = reference.config.to_dict(), make_kernels("cuda", device, compute)
    memory = DeviceMemory(declare(config, PAGE, format), pages=60, tails=0, device=device)
    memory.flat_pages.fill_(255)  # NaN: what was not written must not be read
    own, weights = Qwen3Config.from_hf(config), dict[str, Tensor]()
    for name, weight in reference.state_dict().items():
        wide = weight.dim() < 2
        weights[name] = weight.to(device, torch.float32 if wide else kernels.dtype)
    return build(own, weights, memory, rings, kernels), memory


def cut(model: Frame, tokens: Tensor, cuts: list[int], pages: Tensor, ring: int = 1) -> Tensor:
    found, start = [], 0
    for end in cuts:
        found.append(
            model.forward([one_pool(tokens[start:end], start, pages, ring)], range(end - start)).cpu()
        )
        start = end
    return torch.cat(found)


@every_device
@every_kind
def test_it_is_the_model_of_transformers(kind: str, device: str) -> None:
    small = {} if device == "cuda" else {**SMALL, "mlp_only_layers": [1]} if kind == "experts" else SMALL
    reference = KINDS[kind](**small)
    tokens, pages = random_tokens(300 if device == "cuda" else 37), torch.randperm(60)[:10]
    model, _ = make(reference, device, "fp32", "fp32")
    cuts = [17, 18, len(tokens)]
    ours, theirs = cut(model, tokens, cuts, pages), reference_logits(reference, tokens)
    apart = ours.log_softmax(-1) - theirs.log_softmax(-1)
    assert apart.abs().max() < 1e-4


@pytest.mark.parametrize("device", [on_gpu])
@every_kind
@pytest.mark.parametrize(("format", "compute"), [("fp32", "fp32"), ("bf16", "bf16")])
def test_no_bit_depends_on_the_cut_or_the_batch(device: str, kind: str, format: str, compute: str) -> None:
    reference, length, count = KINDS[kind](**LARGE), 700, 20
    texts = [(random_tokens(length) + i) % 256 for i in range(count)]
    pages = torch.randperm(60)[:22]
    model, _ = make(reference, device, format, compute)
    whole = cut(model, texts[0], [length], pages)
    assert whole.isfinite().all()
    cuts = [1, 130, 131, 132, 133, 300, 511, 512, 640, *range(641, length + 1)]
    assert torch.equal(cut(make(reference, device, format, compute)[0], texts[0], cuts, pages), whole)
    model, _ = make(reference, device, format, compute, rings=count)
    spans = [one_pool(each[:60], 0, torch.tensor([i, 20 + i]), i) for i, each in enumerate(texts)]
    beside = model.forward(spans, range(60 * count)).cpu()
    assert torch.equal(beside[:60], whole[:60])
    assert torch.equal(model.forward(spans[::-1], range(60 * count))[-60:].cpu(), whole[:60])


@pytest.mark.parametrize("device", [on_gpu])
@every_kind
def test_a_recorded_forward_is_the_forward(device: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "TOKENS", (2, 16, 64))
    reference, tokens = KINDS[kind](**LARGE), random_tokens(400)
    pages, drawn = torch.randperm(60)[:14], torch.tensor([DRAWN_LAST])
    both = [make(reference, device, "bf16", "bf16") for _ in range(2)]
    both[1][0].warm_up(60 * PAGE)
    seen = []
    for model, memory in both:
        found = [model.forward([one_pool(tokens[:125], 0, pages, 2)]).clone()]
        for start in range(125, 135):
            logits = model.forward([one_pool(drawn, start, pages, 2), one_pool(tokens[:3], 0, pages[8:], 0)])
            found += [logits.clone(), model.draw(logits, [2, 0], None).clone()]
        seen.append([*found, memory.flat_pages.clone()])
    assert all(map(torch.equal, *seen))


# Whole engines


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("models")
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    return {
        "dense": str(write_qwen3(root / "dense", head_dim=32)),
        "experts": str(write_qwen3(root / "experts", moe=True, head_dim=32)),
        "small": str(write_qwen3(root / "small", **small)),
        "tiny-v4": "tiny-v4",
    }


@pytest.mark.parametrize("device", [on_gpu])
@every_kind
def test_no_tier_changes_a_bit(tmp_path: Path, folders: dict[str, str], kind: str, device: str) -> None:
    config = EngineConfig(CacheConfig(device_pages=1, host_bytes=64 * MIB), running_max=8)
    build = Build(folders[kind], page_tokens=PAGE, device_bytes=16 * MIB, device=device)
    report = verify(build, config, tmp_path)
    assert report.holds(kl=0.0, dlogprob=0.0), report


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("dense", "small"),
        ("experts", "tiny-v4"),
        ("tiny-v4", "small"),
        ("tiny-v4", "tiny-v4"),
        ("dense", None),
    ],
)
def test_guesses_change_no_bit_of_an_answer(
    folders: dict[str, str], target: str, draft: str | None, device: str
) -> None:
    """Of a draft in a folder, or of the text so far; asked twice, the second time from the device tier."""
    texts = [words(60 + 37 * i, i % 3) for i in range(8)]
    asks = [make_ask(str(i), text, 24, logprobs=0 if i % 3 else None) for i, text in enumerate(texts)]
    found, guesser = [], {"speculate": "ngram"} if draft is None else {}
    for guessing in (False, True):
        options = guesser if guessing else {"speculate": "off"}
        config = EngineConfig(running_max=8, draft_tokens_max=3, **options)  # type: ignore[arg-type]
        folder = folders[draft] if guessing and draft else None
        engine, _ = open_engine(
            Build(folders[target], page_tokens=128, device_bytes=64 * MIB, device=device, draft=folder),
            config,
        )
        if guessing:
            engine.scheduler.guessing.policy = Always(3)
        for _ in range(2):
            answers = run(engine, *asks, overlap="queued")
            found.append([(tokens_of(each), [out.logprob for out in each.tokens]) for each in answers])
        counters = engine.counters
        engine.cache.close()
    assert found[0] == found[1] == found[2] == found[3]
    assert counters["guesses"] > 0
    if target == draft:
        assert counters["guesses_accepted"] > 0.9 * counters["guesses"]
