"""Goal: the MTP draft on the CUDA kernels is the one of a CPU, and no bit of a guess depends on how a text
was cut, what is computed beside it, or where its beginning came from. Method: both drafts follow random
streams, as if a target had computed them, and guess; then the draft inside a model and an engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.drive import FOLDER, guess_with, make_ask, run, tokens_of
from tests.kernels.devices import every_device, on_gpu
from tests.models.folders import make_config
from tests.models.spans import one_pool
from tests.models.test_cuda import LARGE, bytes_of, kl, texts
from tests.models.test_fp8 import ROUND, load, make_folder
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.kernels.choice import make_kernels
from tiercel.kernels.entries import read_rows
from tiercel.memory.buffers import DeviceMemory
from tiercel.models import graphs
from tiercel.models.base import Span
from tiercel.models.beside import Beside
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.draft import MtpDraft, _padded
from tiercel.models.deepseek_v4.model import build
from tiercel.models.deepseek_v4.rows import Setup
from tiercel.models.deepseek_v4.weights import WEIGHTS
from tiercel.models.flat import FlatBatch, Size, numbers_of, send
from tiercel.models.rotary import Rotary
from tiercel.models.rows import entries_of
from tiercel.spec import deepseek_v4, deepseek_v4_mtp

PAGE, RINGS, VOCAB = 128, 3, 24
NO_PAGES = torch.empty(0, dtype=torch.int64)
CONFIG = make_config(
    num_hidden_layers=1,
    compress_ratios=[0, 0],
    num_hash_layers=1,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=16,
    o_lora_rank=16,
    moe_intermediate_size=16,
    num_experts_per_tok=3,
    hc_sinkhorn_iters=1,
)
"""All experts are asked: a rounded bit can not choose another one."""
TWO = {**CONFIG, "compress_ratios": [0, 0, 0], "num_nextn_predict_layers": 2}


class Drafted:
    """A draft without its target. `told`: the logits of the last guesses."""

    def __init__(
        self,
        kernels: str,
        device: str,
        format: str = "fp32",
        compute: str = "fp32",
        config: Mapping[str, Any] = CONFIG,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        own = V4Config.from_hf(config)
        set_ = make_kernels(kernels, device, compute if kernels == "cuda" else "auto")
        weights = weights or {
            name: weight.to(device, set_.dtype) if weight.dtype == torch.bfloat16 else weight.to(device)
            for name, weight in WEIGHTS.random(own, 3, torch.bfloat16, draft=True).read().items()
        }
        spec = deepseek_v4(config, PAGE, format).with_draft(
            deepseek_v4_mtp(config, PAGE, format, hidden=True)
        )
        self.memory = DeviceMemory(spec, pages=2, tails=4, device=device)
        setup = Setup(own, set_, self.memory, RINGS, Beside(self.memory.device), 3)
        lm_head = set_.pack(weights["lm_head.weight"])
        self.draft = MtpDraft(setup, weights, lm_head, Rotary(own.rope_main, own.rope_dim, device))
        self.dtype, self.device = set_.dtype, device
        self.told: list[Tensor] = []
        for module in self.draft.modules:
            module.logits = self._listen(module.logits)  # type: ignore[method-assign]

    def _listen(self, real: Any) -> Any:
        def logits(x: Tensor, lm_head: Any) -> Tensor:
            self.told.append(real(x, lm_head))
            return self.told[-1]

        return logits

    @torch.inference_mode()
    def follow(self, spans: Sequence[Span], x: Tensor, padding: int = 0) -> None:
        """x: the target's streams of the tokens of all spans. Padding has streams that are no numbers."""
        tokens = torch.cat([torch.as_tensor(span.tokens) for span in spans])
        numbers = numbers_of(spans, None, RINGS)
        size = Size(len(tokens) + padding, len(spans), len(numbers.tails) + padding, 1024)
        batch = FlatBatch(
            send(numbers.padded(size), torch.device(self.device)),
            size,
            torch.zeros(1, RINGS, 1, dtype=torch.int32, device=self.device),
        )
        x = torch.cat([x, torch.full((padding, *x.shape[1:]), float("nan"))])
        self.draft.follow(batch, x.to(self.device, self.dtype), batch.tokens.long())

    def restore(self, ring: int, place: int, boundary: int) -> None:
        moves = torch.tensor([[place, boundary, ring]], dtype=torch.int32, device=self.device)
        self.draft.restore(moves)

    def tail(self, place: int) -> dict[tuple[str, int], Tensor]:
        """The draft's part of a tail, by stream and layer."""
        streams = [each for each in self.memory.spec.streams if each.name.startswith("draft_")]
        return {
            (each.name, layer): self.memory.view(each.name, layer)[place].cpu()
            for each in streams
            for layer in each.layers
        }

    def propose(self, count: int, *texts: tuple[int, int, Tensor]) -> tuple[Tensor, Tensor]:
        """(guesses, the logits of each) after these texts: (ring, tokens that were computed, all tokens)."""
        self.told = []
        spans = [one_pool(tokens[at : at + 1], at, NO_PAGES, ring) for ring, at, tokens in texts]
        return self.draft.propose(spans, count), torch.stack(self.told, 1).cpu()


def text_of(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(tokens, the target's streams of each), numbers that bf16 has."""
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (length,), generator=chance)
    return tokens, torch.randn(length, 4, 32, generator=chance).bfloat16().float()


def decoded(memory: DeviceMemory, stream: str, tail: Tensor) -> Tensor:
    """The entries of one row of a tail, as numbers."""
    own = memory.spec.stream(stream)
    entries = entries_of(memory, own.role, own.layers[0])._replace(rows=tail[None])
    return read_rows(entries, torch.tensor([0]))


def span(text: tuple[Tensor, Tensor], start: int, end: int, ring: int = 0, tails: Any = None) -> Span:
    due = {b: place for b, place in (tails or {}).items() if start < b <= end}
    return one_pool(text[0][start:end], start, NO_PAGES, ring, due)


def test_a_batch_behind_another_is_that_of_earlier_spans() -> None:
    """One span is in the middle of its text, one begins it: what would be before the text is padding."""
    tokens, lag, batches = text_of(6)[0], 2, []
    for earlier in (0, lag):
        middle = one_pool(tokens[:4], 6 - earlier, NO_PAGES, 2, {8 - earlier: 3, 10 - earlier: 1})
        numbers = numbers_of([middle, one_pool(tokens[4:], -earlier, NO_PAGES, 1)], None, RINGS)
        size = numbers.size._replace(tokens=8, tails=3)
        table = torch.zeros(1, RINGS, 1, dtype=torch.int32)
        batches.append(FlatBatch(send(numbers.padded(size), torch.device("cpu")), size, table))
    own, expected = batches[0].behind(lag), batches[1]
    assert own.positions.tolist() == [4, 5, 6, 7, -1, -1, -1, -1] and own.flat.position is own.positions
    assert own.end[:6].equal(expected.end[:6]) and own.flat.start[:6].equal(expected.flat.start[:6])
    assert own.flat.first.equal(expected.flat.first) and own.rings.equal(expected.rings)
    assert own.tails[:2].equal(expected.tails[:2]) and own.tails[2, 0] == -1


@every_device
@pytest.mark.parametrize(
    ("config", "count", "format", "compute", "most"),
    [(TWO, 3, "fp32", "fp32", 1e-7), (CONFIG, 2, "fp8", "bf16", 0.01)],
    ids=["two layers, fp32", "one layer, bf16"],
)
def test_the_draft_is_the_one_of_the_plain_kernels(
    device: str, config: dict[str, Any], count: int, format: str, compute: str, most: float
) -> None:
    """Two texts in one call, one of which begins and one of which writes a tail; both guess, and so does one
    of which nothing was computed; the last guess is made from the draft's own streams. Then a text goes on
    from that tail."""
    (a, b), found = (text_of(132), text_of(4, seed=1)), {}
    for kernels in ("reference", "cuda"):
        drafted = Drafted(kernels, device if kernels == "cuda" else "cpu", format, compute, config)
        drafted.restore(2, 0, 124)  # a tail of zeros
        first = span(a, 124, 129, 2, {128: 3})
        drafted.follow([first, span(b, 0, 1)], torch.cat([a[1][124:129], b[1][:1]]))
        both = drafted.propose(count, (2, 129, a[0]), (0, 1, b[0]), (1, 0, b[0]))[1]
        drafted.restore(1, 3, 128)
        drafted.follow([span(a, 128, 129, 1), span(b, 1, 3)], torch.cat([a[1][128:129], b[1][1:3]]))
        after = drafted.propose(1, (1, 129, a[0]), (0, 3, b[0]))[1]
        same = torch.equal if kernels == "cuda" else partial(torch.allclose, atol=1e-4)  # bits of a batch
        assert same(after[0, 0], both[0, 0]), "from the tail as from the text that wrote it"
        found[kernels] = torch.cat([both.flatten(0, 1), after[:, 0]]), drafted.tail(3)
    (theirs, their_tail), (ours, our_tail) = found["reference"], found["cuda"]
    assert kl(ours, theirs) < most
    close = {"rtol": 0.13, "atol": 0.02} if compute == "bf16" else {"rtol": 1e-5, "atol": 1e-5}
    for (name, layer), own in our_tail.items():  # a rounded bit makes a number of e4m3 the next one, 1/8 more
        numbers = [decoded(drafted.memory, name, each) for each in (own, their_tail[name, layer])]
        torch.testing.assert_close(*numbers, **close)
    assert torch.equal(our_tail["draft_hidden", 1], their_tail["draft_hidden", 1]), "the target's own streams"


@every_device
def test_no_bit_of_a_guess_depends_on_cuts_company_padding_or_refused_guesses(device: str) -> None:
    """One text whole; and token by token with wrong tokens behind them, beside another text and padding, with
    guesses in between. The tail is the same, and so are the guesses that go on from it."""
    (tokens, x), other = text_of(140), text_of(20, seed=1)
    wrong = (tokens + 5) % VOCAB, x.flip(0)
    whole, cut = (Drafted("cuda", device) for _ in range(2))
    whole.follow([span((tokens, x), 122, 130, 0, {128: 3})], x[122:130])
    cut.follow([span((tokens, x), 122, 126, 2)], x[122:126])
    for i, start in enumerate(range(126, 130, 2)):  # two tokens are accepted, and two refused
        cut.propose(1, (2, start, tokens))
        mixed = [
            torch.cat([right[: start + 2], bad[start + 2 :]])
            for right, bad in zip((tokens, x), wrong, strict=True)
        ]
        own = span((mixed[0], mixed[1]), start, start + 4, 2, {128: 3})
        beside = span(other, 3 * i, 3 * i + 3, 1)
        cut.follow([beside, own], torch.cat([other[1][3 * i : 3 * i + 3], mixed[1][start : start + 4]]), 3)
    for (name, layer), tail in whole.tail(3).items():
        assert torch.equal(cut.tail(3)[name, layer], tail), name
    cut.restore(0, 3, 128)
    cut.follow([span((tokens, x), 128, 130)], x[128:130])
    guesses, expected = whole.propose(2, (0, 130, tokens))
    beside, logits = cut.propose(2, (2, 130, tokens), (1, 6, other[0]), (0, 130, tokens))
    assert torch.equal(logits[0], expected[0]) and torch.equal(logits[2], expected[0])
    assert torch.equal(beside[0], guesses[0]) and torch.equal(beside[2], guesses[0])
    assert not torch.equal(logits[1], expected[0])


@every_device
def test_a_draft_that_is_stored_as_fp8_is_the_dequantized_one(device: str, tmp_path: Path) -> None:
    """To the bit. A device guesses, too: up to 16 tokens, fp8 has tiles of its own, in which Triton's
    interpreter adds in an order of its own."""
    config = {**ROUND, "num_nextn_predict_layers": 1, "compress_ratios": [0, 4, 0]}
    folder, found = make_folder(tmp_path, config), []
    (tokens, _), chance = text_of(130), torch.Generator().manual_seed(2)
    x = torch.randn(130, 4, 128, generator=chance).bfloat16().float()
    for stays in (True, False):
        weights = load(folder, device, draft=True, fp8=stays)
        drafted = Drafted("cuda", device, "bf16", "bf16", config, weights)
        drafted.follow([span((tokens, x), 112, 129, 0, {128: 3})], x[112:129])
        found.append([*drafted.tail(3).values()])
        if device == "cuda":
            found[-1].append(drafted.propose(2, (0, 129, tokens))[1])
        kept = drafted.draft.modules[0].layer.attention._kv.data.dtype  # type: ignore[union-attr]
        assert kept == (torch.float8_e4m3fn if stays else torch.bfloat16)
    assert all(map(torch.equal, *found)) and found[0][0].any()


def make(device: str, format: str, compute: str, config: dict[str, Any], guesses_max: int = 3) -> Any:
    own, set_ = V4Config.from_hf(config), make_kernels("cuda", device, compute)
    weights = WEIGHTS.random(own, 3, set_.dtype, draft=True).read(device)
    draft = deepseek_v4_mtp(config, PAGE, format, hidden=True)
    spec = deepseek_v4(config, PAGE, format).with_draft(draft)
    memory = DeviceMemory(spec, pages=40, tails=6, device=device)
    return build(own, weights, memory, RINGS, set_, guesses_max), memory


@every_device
def test_padding_changes_nothing_of_a_model_with_a_draft(device: str) -> None:
    """The sections of a recorded forward on padded numbers, and a padded call for guesses."""
    tokens, pages = text_of(140)[0], torch.tensor([4, 9])
    (plain, its_memory), (padded, memory) = (make(device, "fp32", "fp32", CONFIG) for _ in range(2))
    spans = [one_pool(tokens[123:129], 123, pages, 2, {128: 5}), one_pool(tokens[:2], 0, pages, 0)]
    plain.forward(spans)
    padded.tables.send(spans)
    size = Size(11, 3, 4, 1024)
    numbers = send(numbers_of(spans, None, RINGS).padded(size), memory.device)
    batch, state = FlatBatch(numbers, size, padded.tables.table), None
    with torch.inference_mode():
        for section in padded.sections():
            state = section.run(batch, state)
    assert all(map(torch.equal, bytes_of(memory), bytes_of(its_memory)))
    asked = [one_pool(tokens[129:130], 129, pages, 2), one_pool(tokens[2:3], 2, pages, 0)]
    expected, draft, chain = plain.draft.propose(asked, 2), padded.draft, None
    guesses = torch.zeros(5, 2, dtype=torch.int64, device=device)
    numbers = _padded(np.array([[2, 0], [129, 2], tokens[[129, 2]].tolist()], np.int32), 5)
    with torch.inference_mode():
        for i in range(2):
            chain = draft._guess(i, send(numbers, memory.device), guesses, chain)
    assert torch.equal(guesses[:2].cpu(), expected)
    rings = [each.draft.modules[0].layer.attention._rows._kept.rows for each in (plain, padded)]
    assert torch.equal(*rings), "padding writes nothing"


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_what_is_recorded_is_what_is_launched(
    device: str, compute: str, modules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that begin, write tails, go on from them, and guess; one text and two at a time."""
    monkeypatch.setattr(graphs, "TOKENS", (2, 16, 64))
    config = {
        **LARGE,
        "num_nextn_predict_layers": modules,
        "compress_ratios": [0, 4, 128, 4, 128] + [0] * modules,
    }
    a, b = texts(512, 300, 300)
    pages = torch.arange(8).split(4)
    both = [make(device, "fp8", compute, config) for _ in range(2)]
    both[1][0].warm_up(40 * PAGE)
    assert len(both[1][0].draft._recordings) == 3 and not both[0][0].draft._recordings
    seen = []
    for model, memory in both:
        model.forward([one_pool(a[:120], 0, pages[0], 2), one_pool(b[:1], 0, pages[1], 0)])
        found = [model.draft.propose([one_pool(b[1:2], 1, pages[1], 0)], 3)]
        model.forward([one_pool(a[120:130], 120, pages[0], 2, {128: 5}), one_pool(b[1:6], 1, pages[1], 0)])
        asked = [one_pool(a[130:131], 130, pages[0], 2), one_pool(b[6:7], 6, pages[1], 0)]
        found += [model.draft.propose(asked, count) for count in (1, 3, 2)]
        model.resume(1, [(128, 5)])
        model.forward([one_pool(a[128:130], 128, pages[0], 1, write_from=128)])
        found.append(model.draft.propose([one_pool(a[130:131], 130, pages[0], 1)], 3))
        assert torch.equal(found[-1][0], found[2][0]), "from the tail as from the text"
        seen.append([*found, *(each.clone() for each in bytes_of(memory))])
    assert len(seen[0]) == len(seen[1]) and all(map(torch.equal, *seen))


class HalfRight:
    """Asks the draft, and then puts the right token in the place of some of its guesses."""

    def __init__(self, drafter: Any, texts: Sequence[list[int]]) -> None:
        self._drafter, self._texts, self.begin = drafter, texts, drafter.begin

    def guess(self, texts: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        made = self._drafter.guess(texts, counts)
        for text, own in zip(texts, made, strict=True):
            known = text.tokens.tolist()
            answer = next(each for each in self._texts if each[: len(known)] == known)[len(known) :]
            for i, right in enumerate(answer[: len(own)]):
                own[i] = right if (len(known) + i) % 2 else (right + 1) % VOCAB
        return made


@every_device
def test_answers_on_the_queued_loop_are_those_without_guesses(device: str, tmp_path: Path) -> None:
    """A folder whose weights come from a seed. Half of the guesses are right: texts go on from both kinds."""
    config = {**CONFIG, "random_weights": 3, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, tmp_path)
    build = Build(
        str(tmp_path),
        page_tokens=128,
        format="fp32",
        device=device,
        device_bytes=2**22,
        kernels="cuda",
        compute="fp32",
    )
    asks = [make_ask(str(i), text_of(3 + i, i)[0].tolist(), 4 - i, logprobs=None) for i in range(2)]
    found = []
    for speculate in ("off", "mtp"):
        settings = CacheConfig(device_pages=1, staging_tails=1)
        engine, _ = open_engine(
            build, EngineConfig(settings, running_max=2, speculate=speculate, draft_tokens_max=2)
        )
        if speculate == "mtp":
            texts = [[*ask.prompt, *answer] for ask, answer in zip(asks, found[0], strict=True)]
            runner: Any = engine.runner
            guess_with(engine, HalfRight(runner._drafter, texts), 2)
        found.append([tokens_of(each) for each in run(engine, *asks, overlap="queued")])
        counters = engine.counters
        engine.cache.close()
    assert found[0] == found[1] and [len(answer) for answer in found[0]] == [4, 3]
    assert counters["guesses"] > counters["guesses_accepted"] > 0
