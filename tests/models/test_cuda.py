"""Goal: V4 on the CUDA kernels is V4, and no bit depends on how a text is cut or what is computed beside it.
Method: logits against those of the plain kernels on the same weights. In Triton's interpreter with few tokens
and small dimensions; on a GPU with more of both, where bits are compared too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.devices import every_device, on_gpu
from tests.models.folders import make_config
from tests.models.spans import one_pool
from tiercel.kernels.choice import make_kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models import graphs
from tiercel.models.base import DRAWN_LAST, Span
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.model import build
from tiercel.models.deepseek_v4.weights import WEIGHTS
from tiercel.models.flat import FlatBatch, Size, numbers_of, send
from tiercel.spec import deepseek_v4

PAGE = 128
CONFIG = make_config(
    num_hidden_layers=3,
    compress_ratios=[0, 4, 128, 0],
    num_hash_layers=1,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=16,
    o_lora_rank=16,
    index_n_heads=4,
    index_head_dim=16,
    moe_intermediate_size=16,
    hc_sinkhorn_iters=3,
)
LARGE = make_config(
    vocab_size=512,
    hidden_size=512,
    num_hidden_layers=5,
    compress_ratios=[0, 4, 128, 4, 128, 0],
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=256,
    o_groups=8,
    o_lora_rank=128,
    sliding_window=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=64,
    n_routed_experts=8,
    num_experts_per_tok=6,
    moe_intermediate_size=256,
)


def make(
    kernels: str,
    device: str,
    format: str = "fp32",
    compute: str = "auto",
    config=CONFIG,
    rings: int = 3,
    guesses_max: int = 0,
    second: tuple[str, ...] = (),
):
    own, set_ = V4Config.from_hf(config), make_kernels(kernels, device, compute)
    weights = {
        name: weight.to(device, set_.dtype) if weight.dtype == torch.bfloat16 else weight.to(device)
        for name, weight in WEIGHTS.random(own, 3, torch.bfloat16).read().items()
    }
    spec = replace(deepseek_v4(config, PAGE, format), second=second)
    memory = DeviceMemory(spec, pages=40, tails=6, device=device)
    return build(own, weights, memory, rings, set_, guesses_max), memory


def texts(vocab: int, *lengths: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (length,), generator=chance) for length in lengths]


def bytes_of(memory: DeviceMemory) -> list[Tensor]:
    streams = memory.spec.streams
    return [memory.view(stream.name, layer) for stream in streams for layer in stream.layers]


def kl(ours: Tensor, theirs: Tensor) -> float:
    a, b = (each.cpu().double().log_softmax(-1) for each in (theirs, ours))
    return float((a.exp() * (a - b)).sum(-1).max())


@every_device
@pytest.mark.parametrize(("format", "compute", "most"), [("fp32", "fp32", 1e-7), ("fp8", "bf16", 0.01)])
def test_the_model_is_the_one_of_the_plain_kernels(
    device: str, format: str, compute: str, most: float
) -> None:
    """Two texts in one call, one of which ends a page and its tail; then more of both, and a third text.

    With bf16 there is nothing to choose: all experts are asked, all entries are read. Otherwise a rounded bit
    now and then makes the choice another one, and a row's KL is up to 0.08 then, on a GPU and interpreted.
    """
    config = CONFIG if compute == "fp32" else {**CONFIG, "num_experts_per_tok": 3, "index_topk": 64}
    first, second = texts(24, 11, 6)
    pages = torch.tensor([4, 9]), torch.tensor([7])
    logits = {}
    for kernels, numbers in (("reference", "auto"), ("cuda", compute)):
        model, memory = make(kernels, device if kernels == "cuda" else "cpu", format, numbers, config)
        both = model.forward(
            [one_pool(first[:9], 120, pages[0], 2, {128: 5}), one_pool(second[:5], 0, pages[1], 0)], range(14)
        )
        model.resume(1, [(128, 5)])  # a third text goes on from that tail
        after = model.forward(
            [
                one_pool(second[5:], 5, pages[1], 0),
                one_pool(first[9:10], 129, pages[0], 2),
                one_pool(first[8:10], 128, pages[0], 1, write_from=128),
            ],
            range(4),
        )
        logits[kernels] = torch.cat([both, after]).cpu()
    assert logits["cuda"].dtype == torch.float32 and kl(logits["cuda"], logits["reference"]) < most
    if compute == "fp32":
        assert torch.equal(logits["cuda"].argmax(-1), logits["reference"].argmax(-1))
    torch.testing.assert_close(
        logits["cuda"][-1], logits["cuda"][15], rtol=0, atol=1e-4 if compute == "fp32" else 0.1
    )


@every_device
def test_two_pools_give_the_bits_of_one(device: str) -> None:
    """A page's entries lie in units and bodies of other frames: the same logits. On a GPU also recorded."""
    (tokens,), found = texts(24, 10), []
    units = torch.tensor([[4, 9], [7, 3]])
    for second, pages in (((), units[:1]), (("c128",), units), (("c4", "c4_index"), units)):
        model, _ = make("cuda", device, "fp8", second=second)
        model.warm_up(2 * PAGE)
        model.forward([Span(tokens[:8], 124, pages, 1)])
        found.append(model.forward([Span(tokens[8:], 132, pages, 1)], range(2)).clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@every_device
def test_refused_guesses_leave_no_trace(device: str) -> None:
    """Tokens one by one over the end of a page, with and without wrong tokens behind them: the same logits,
    and the same bytes in the page and the tail."""
    (text,), pages = texts(24, 5), torch.tensor([4, 9])
    (plain, its_memory), (guessing, memory) = make("cuda", device), make("cuda", device, guesses_max=1)
    for model in (plain, guessing):
        model.forward([one_pool(text[:1], 126, pages, 1)])
    for i in (1, 2):
        at, tails = 126 + i, {128: 5}
        own = {b: place for b, place in tails.items() if at < b <= at + 1}
        expected = plain.forward([one_pool(text[i : i + 1], at, pages, 1, own)])
        tokens = torch.cat([text[i : i + 1], (text[i + 1 : i + 2] + 5) % 24])
        own = {b: place for b, place in tails.items() if at < b <= at + 2}
        logits = guessing.forward([one_pool(tokens, at, pages, 1, own)], range(2))
        assert torch.equal(logits[0], expected[0])
    for stream in memory.spec.streams:
        place = 4 if stream in memory.spec.page_streams else 5
        for layer in stream.layers:
            ours, theirs = (each.view(stream.name, layer)[place] for each in (memory, its_memory))
            assert torch.equal(ours, theirs), stream.name


def spans_of(tokens: Sequence[Tensor], pages: Sequence[Tensor]) -> list[tuple[list[Span], list[int] | None]]:
    """Calls of a few tokens: two texts begin, one writes a tail, both go on with what was drawn for them, and
    a third one begins beside them."""
    drawn = torch.tensor([DRAWN_LAST])
    first = one_pool(tokens[0][:2], 127, pages[0], 2, {128: 5})
    return [
        ([first, one_pool(tokens[1][:1], 0, pages[1], 0)], None),
        ([one_pool(drawn, 129, pages[0], 2), one_pool(drawn, 1, pages[1], 0)], None),
        ([one_pool(tokens[1][:2], 0, pages[2], 1), one_pool(drawn, 130, pages[0], 2)], [1, 2]),
    ]


@every_device
def test_padding_changes_nothing(device: str) -> None:
    """The sections of a recorded forward on padded numbers, against a plain forward: logits, what is drawn,
    and every byte of pages, tails and rings."""
    tokens, pages = texts(24, 2, 2), (torch.tensor([4, 9]), torch.tensor([7]), torch.tensor([1]))
    (plain, its_memory), (padded, memory) = make("cuda", device), make("cuda", device)
    for spans, rows in spans_of(tokens, pages):
        logits = plain.forward(spans, rows)
        best = plain.draw(logits[-2:] if rows else logits, [span.ring for span in spans], None)
        numbers = numbers_of(spans, rows, 3)
        padded.tables.send(spans)
        size = Size(4, 3, 2, 1024)
        batch = FlatBatch(send(numbers.padded(size), memory.device), size, padded.tables.table)
        answer: Any = None
        with torch.inference_mode():
            for section in padded.sections():
                answer = section.run(batch, answer)
        assert torch.equal(answer.logits[: len(logits)], logits)
        assert torch.equal(answer.best[: len(logits)][-2:], best) and torch.equal(
            padded.last[:3], plain.last[:3]
        )
    assert all(map(torch.equal, bytes_of(memory), bytes_of(its_memory)))
    assert len(padded.sections()) > 1


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_recorded_forward_is_the_forward(
    device: str, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "TOKENS", (2, 16, 64))
    tokens = texts(512, 300, 300)
    pages = torch.randperm(40).split([4, 4, 4, 28])[:3]
    both = [make("cuda", device, "fp8", compute, LARGE) for _ in range(2)]
    both[1][0].warm_up(40 * PAGE)
    seen = []
    for model, memory in both:
        waited: list[int] = []
        found = [model.forward([one_pool(tokens[0][:125], 0, pages[0], 2)], None, waited.append).clone()]
        for spans, rows in spans_of(tokens, pages):
            logits = model.forward(spans, rows, waited.append)
            found.append(logits.clone())
            if rows is None:
                found.append(model.draw(logits, [span.ring for span in spans], None).clone())
        model.resume(1, [(128, 5)])
        found.append(model.forward([one_pool(tokens[0][:2], 128, pages[0], 1)]).clone())
        found += [each.clone() for each in bytes_of(memory)]
        seen.append(found)
        assert waited[-1] == model.stage.end - 1
    assert len(seen[0]) == len(seen[1]) and all(map(torch.equal, *seen))


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_no_bit_depends_on_the_cut_or_the_batch(device: str, compute: str, format: str) -> None:
    length, count = 700, 24
    tokens = texts(512, *[length] * count)
    pages = torch.randperm(40)[:6], torch.randperm(40)[:6]

    def run(cuts: list[int]) -> Tensor:
        model, _ = make("cuda", device, format, compute, LARGE)
        found, start = [], 0
        for end in cuts:
            found.append(
                model.forward([one_pool(tokens[0][start:end], start, pages[0], 1)], range(end - start))
            )
            start = end
        return torch.cat(found)

    whole = run([length])
    assert whole.isfinite().all()
    assert torch.equal(run([1, 130, 131, 132, 133, 300, 511, 512, 640, *range(641, length + 1)]), whole)
    model, _ = make("cuda", device, format, compute, LARGE, rings=count)
    table = torch.arange(count + 6)
    spans = [one_pool(each[:40], 0, table[i : i + 1], i) for i, each in enumerate(tokens)]
    beside = model.forward(spans, range(40 * count))
    assert torch.equal(beside[:40], whole[:40])
    assert torch.equal(model.forward(spans[::-1], range(40 * count))[-40:], whole[:40])
