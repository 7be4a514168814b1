"""The MTP draft: guesses the tokens after next from what the target has just computed.

    target      X₀    X₁    X₂    X₃  …      streams after the last layer, before they are collapsed
    tokens         t₁    t₂    t₃    t₄ …    each beside the streams of the token before it
    module 0       e₀    e₁    e₂    e₃ …    window entries, and streams Y₁ Y₂ Y₃ Y₄ for module 1
    module 1             e₀    e₁    e₂ …    made of Y₁ beside t₂, …

Most models have one module. Module j guesses token j + 1 after the last one; guesses after those of the last
module are chained: the module goes on from its own streams.

Entry i of module j needs token i + 1 + j. It belongs to that token, the newest it has seen: at a boundary b
the tail holds the entries up to b - 2 - j, which no token outside the page has touched, and the streams
beside token b - 1, from which the next entry is made.

An entry needs the input of its module only, so a module computes its attention and experts only where its
streams are read. On a device each token makes its entry at once: nothing may wait there, `follow` is part of
a recorded forward, and `propose` is recorded itself, one graph for each guess. On a CPU the tokens of the
last module wait (`Waiting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.errors import SpecError
from tiercel.kernels.reference import Matrix
from tiercel.models.base import Span, Weights, part_of
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.hyper import hyper_of, site_of
from tiercel.models.deepseek_v4.layer import Layer
from tiercel.models.deepseek_v4.rows import Setup
from tiercel.models.deepseek_v4.weights import DRAFT, parameters
from tiercel.models.flat import FlatBatch, Ints, Size, numbers_of, send
from tiercel.models.graphs import Recording
from tiercel.models.rotary import Rotary
from tiercel.models.rows import entries_of, rows_before
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.deepseek_v4 import HIDDEN, WINDOW

NO_PAGES = torch.empty(1, 0, dtype=torch.int64)
"""A draft's window lies in rings alone."""

NOWHERE = -(2**20)
"""The start of a text that does not exist: its guesses stand before every text too."""


class Module:
    """One MTP layer, and the streams beside which its next entries are made."""

    def __init__(self, setup: Setup, number: int, weights: Weights, rotary: Rotary, *, back: int = 0) -> None:
        """`back`: how many streams more are kept of each text than guesses may refuse."""
        c, k, self.number = setup.config, setup.kernels, number
        self._config, self._k, self._hyper, self._rotary = c, k, hyper_of(k), rotary
        w = part_of(weights, f"{DRAFT}{number}.")
        self._norms = [w["enorm.weight"], w["hnorm.weight"]]
        self._projections = [k.pack(w[f"{name}.weight"]) for name in ("e_proj", "h_proj")]
        self._head = site_of(c, k, part_of(w, "hc_head.hc_"), w["norm.weight"])
        self._embedding = weights["model.embed_tokens.weight"]
        self.layer = Layer(setup, c.layers + number, w, rotary)
        self.lag = number + 1
        self._tails = entries_of(setup.memory, HIDDEN, c.layers + number)
        self.ring_rows = back + setup.guesses_max + 1
        shape = setup.rings * self.ring_rows, c.hc_mult * c.hidden_size
        self.kept = torch.zeros(shape, device=setup.memory.device)
        """The streams beside the last tokens of each text. Any guess may be the last that is accepted."""

    def enter(self, x: Tensor, tokens: Tensor) -> Tensor:
        """What the layer reads: tokens beside the streams x of the tokens before them."""
        eps, k = self._config.rms_norm_eps, self._k
        embedded = k.norm(self._embedding[tokens], self._norms[0], eps)
        x = k.linear(k.norm(x.flatten(0, 1), self._norms[1], eps), self._projections[1])
        streams: Tensor = x.unflatten(0, (len(tokens), -1))
        return streams + k.linear(embedded, self._projections[0])[:, None, :]

    def follow(self, batch: FlatBatch, x: Tensor, tokens: Tensor, *, read: bool) -> Tensor | None:
        """Make the entries of a call's tokens beside the streams x of the tokens before them. Returns this
        module's streams beside these tokens, if they are read."""
        before = self.before(batch, x)
        self.remember(batch, x)
        own = batch.behind(self.lag)
        if read:
            return self.run(own, before, tokens)
        self.store(own, before, tokens)
        return None

    def before(self, batch: FlatBatch, x: Tensor) -> Tensor:
        """The streams beside the token before each token of a call."""
        return self._k.row_before(self.kept, x.flatten(1), batch.flat, self.ring_rows).view_as(x)

    def remember(self, batch: FlatBatch, x: Tensor) -> None:
        """Keep the streams of a call in rings and tails."""
        rows = x.flatten(1)
        self._k.write_tails((rows, rows), self._tails, batch.tails, self.ring_rows)
        self._k.keep(self.kept, rows, batch.flat, batch.end, self.ring_rows)

    def run(self, batch: FlatBatch, x: Tensor, tokens: Tensor) -> Tensor:
        """The streams of tokens beside the streams of the tokens before them."""
        return self.layer(self.enter(x, tokens), tokens, self._rotation(batch), batch)

    def store(self, batch: FlatBatch, x: Tensor, tokens: Tensor) -> None:
        """Make the same entries as `run`."""
        self.layer.store(self.enter(x, tokens), self._rotation(batch), batch)

    def _rotation(self, batch: FlatBatch) -> tuple[Tensor, Tensor]:
        return self._rotary.at(batch.positions, batch.longest)

    def logits(self, x: Tensor, lm_head: Matrix) -> Tensor:
        return self._k.linear(self._hyper.head(x, self._head), lm_head, wide=True)

    def last(self, rows: Tensor) -> Tensor:
        """[n, streams, d] of these rows of rings."""
        streams: Tensor = self.kept[rows].to(self._k.dtype).unflatten(1, (self._config.hc_mult, -1))
        return streams

    def restore(self, moves: Tensor) -> None:
        self._k.restore(self.kept, self._tails, moves, self.ring_rows)
        own = moves.clone()
        own[:, 1] -= self.lag
        self.layer.attention.restore(own)


class Waiting:
    """The last module on a CPU. Its entries are read only when it guesses or a tail is written. Until then
    its tokens make none: a token that waits takes a row in a ring, and many make their entries together."""

    def __init__(self, setup: Setup, number: int, weights: Weights, rotary: Rotary) -> None:
        c = setup.config
        self._back = rows_before(c.window)
        """How many tokens before the next one have entries that are read."""
        self.module = Module(setup, number, weights, rotary, back=self._back)
        self._k, self._rings = setup.kernels, setup.rings
        window = setup.memory.stream(WINDOW, c.layers + number)
        self._in_tail = window.entries_per_row(setup.memory.spec.page_tokens)
        self._tokens = torch.zeros(setup.rings * self.module.ring_rows, 1)
        """The tokens in the rings: int32 as fp32, because rings keep fp32."""
        self._made = np.zeros(setup.rings, np.int64)
        """For each ring: tokens before this position have made all entries that are still read."""

    def follow(self, batch: FlatBatch, x: Tensor, tokens: Tensor) -> None:
        """Remember the streams x of a call's tokens. Entries are made when they are read."""
        rings, flat = batch.rings.numpy(), batch.flat
        self._made[rings] = np.minimum(self._made[rings], flat.start.numpy())
        if len(batch.tails):
            self._store_tails(batch, x, tokens)
        self.module.remember(batch, x)
        numbers = tokens.int().view(torch.float32)[:, None]
        self._k.keep(self._tokens, numbers, flat, batch.end, self.module.ring_rows)

    def _store_tails(self, batch: FlatBatch, x: Tensor, tokens: Tensor) -> None:
        """Make the entries that the tails of a call hold, and write them."""
        lag, texts = self.module.lag, dict[int, tuple[int, int, dict[int, int]]]()
        for place, boundary, ring, start, first in batch.tails.tolist():
            texts.setdefault(ring, (start, first, {}))[2][boundary] = place
        self.catch_up(np.array(list(texts)), np.array([start for start, *_ in texts.values()]))
        spans, there = list[Span](), list[npt.NDArray[np.int64]]()
        for ring, (start, first, tails) in texts.items():
            end, begin = max(tails), max(lag, min(tails) - self._in_tail, start)
            if begin < end:
                numbers = np.arange(first + begin - start, first + end - start, dtype=np.int64)
                moved = {boundary - lag: place for boundary, place in tails.items()}
                spans.append(Span(tokens[numbers], begin - lag, NO_PAGES, ring, moved))
                there.append(numbers)
            self._made[ring] = end
        if spans:
            rows = torch.from_numpy(np.concatenate(there))
            self._store(spans, self.module.before(batch, x)[rows], tokens[rows])

    def catch_up(self, rings: Ints, ends: Ints) -> None:
        """Make the entries of the tokens before `ends`, as far as these are read."""
        firsts = np.maximum(
            np.minimum(self._made[rings], ends), np.maximum(ends - self._back, self.module.lag)
        )
        waits, self._made[rings] = firsts < ends, ends
        if not waits.any():
            return
        rings, firsts, lengths = rings[waits], firsts[waits], (ends - firsts)[waits]
        positions = np.arange(lengths.sum()) + (firsts - lengths.cumsum() + lengths).repeat(lengths)
        rows, ring_rows = rings.repeat(lengths) * self.module.ring_rows, self.module.ring_rows
        tokens = self._tokens.view(torch.int32)[torch.from_numpy(rows + positions % ring_rows), 0]
        x = self.module.last(torch.from_numpy(rows + (positions - 1) % ring_rows))
        each = zip(tokens.split(lengths.tolist()), firsts.tolist(), rings.tolist(), strict=True)
        self._store(
            [Span(own, first - self.module.lag, NO_PAGES, ring) for own, first, ring in each], x, tokens
        )

    def _store(self, spans: Sequence[Span], x: Tensor, tokens: Tensor) -> None:
        numbers = numbers_of(spans, (), self._rings)
        whole = torch.from_numpy(numbers.padded(numbers.size))
        self.module.store(FlatBatch(whole, numbers.size, NO_PAGES.int()[None]), x, tokens)

    def restore(self, moves: Tensor) -> None:
        self.module.restore(moves)
        self._made[moves[:, 2].numpy()] = moves[:, 1].numpy()


def modules_of(spec: CacheSpec) -> int:
    """How many MTP layers a declaration has."""
    for stream in spec.streams:
        if stream.draft and stream.role == HIDDEN:
            return len(stream.layers)
    why = "has no stream `hidden`, without which a draft can not go on: deepseek_v4_mtp(hidden=True)"
    raise SpecError("draft", spec.model, why)


class Chain(NamedTuple):
    """The guesses so far of a call of `propose`."""

    tokens: Tensor
    """int64 [texts, 1 + guesses]: the token that was drawn last, and the guesses behind it."""
    x: Tensor
    """[texts, tokens of the last module's call, n, d]: the streams that it returned."""


class MtpDraft:
    """All MTP layers of a checkpoint. `weights` are all of the model's: embedding and head are shared."""

    def __init__(self, setup: Setup, weights: Weights, lm_head: Matrix, rotary: Rotary) -> None:
        """`rotary`: the one of the target's window layers."""
        last = modules_of(setup.memory.spec) - 1
        self.modules = [Module(setup, i, weights, rotary) for i in range(last)]
        self._waiting: Waiting | None = None
        if setup.kernels.QUEUES:
            self.modules.append(Module(setup, last, weights, rotary))
        else:
            self._waiting = Waiting(setup, last, weights, rotary)
            self.modules.append(self._waiting.module)
        self._k, self._lm_head, self._rotary = setup.kernels, lm_head, rotary
        self._rings, self._guesses_max, self._device = setup.rings, setup.guesses_max, setup.memory.device
        self._no_pages = torch.zeros(1, 1, 1, dtype=torch.int32, device=self._device)
        self._recordings: list[tuple[Tensor, Recording]] = []
        """Guesses [texts, most guesses] and what makes them, one column by each graph. Few texts first."""

    @torch.inference_mode()
    def follow(self, batch: FlatBatch, x: Tensor, tokens: Tensor) -> None:
        """Make the entries of the streams x [tokens, n, d] that the target computed."""
        streams: Tensor | None = x
        for module in self.modules:
            assert streams is not None
            read = module is not self.modules[-1]
            if not read and self._waiting is not None:
                self._waiting.follow(batch, streams, tokens)
            else:
                streams = module.follow(batch, streams, tokens, read=read)

    @torch.inference_mode()
    def restore(self, moves: Tensor) -> None:
        """Texts go on from tails. `moves`: see `kernels.reference.rows.restore`."""
        for module in self.modules[:-1]:
            module.restore(moves)
        (self._waiting or self.modules[-1]).restore(moves)

    @torch.inference_mode()
    def propose(self, spans: Sequence[Span], count: int) -> Tensor:
        """[spans, count] on the host: the guesses after each span. A span has one token: the one that was
        drawn last and that the target has not computed.

        The entries of guesses lie in spare rows of the rings. `follow` writes these positions again. All
        guesses are queued; one copy waits for them.
        """
        assert count <= self._guesses_max, "a ring has a spare row for each guess"
        texts = len(spans)
        asked = np.array([(span.ring, span.start, int(span.tokens[0])) for span in spans], np.int32).T
        for guesses, recording in self._recordings:
            if texts <= len(guesses):
                recording.fill(_padded(asked, len(guesses)))
                for graph in recording.graphs[:count]:
                    graph.replay()
                return guesses[:texts, :count].cpu()
        if self._waiting is not None:
            self._waiting.catch_up(asked[0], asked[1])
        self._rotary.table(int(asked[1].max()) + count)
        numbers = send(asked.ravel(), self._device)
        guesses = torch.empty(texts, count, dtype=torch.int64, device=self._device)
        chain: Chain | None = None
        for i in range(count):
            chain = self._guess(i, numbers, guesses, chain)
        return guesses.cpu()

    def _guess(self, i: int, numbers: Tensor, guesses: Tensor, chain: Chain | None) -> Chain:
        """Write guess i of every text. numbers int32 [3 · texts]: the ring of each text, the position of its
        last token, that token."""
        rings, start, token = numbers.view(3, -1)
        tokens = token.long()[:, None] if chain is None else chain.tokens
        if i < len(self.modules):  # all tokens since the last call, beside the streams of the module before
            module, begin, asked = self.modules[i], start - 1 - i, tokens
            x = module.last(rings * module.ring_rows + (start - 1) % module.ring_rows)[:, None]
            x = x if chain is None else torch.cat([x, chain.x], 1)
        else:
            assert chain is not None
            module, begin, asked = self.modules[-1], start + i - len(self.modules), tokens[:, -1:]
            x = chain.x[:, -1:]
        batch = self._batch(rings, begin, asked)
        x = module.run(batch, x.flatten(0, 1), asked.flatten())
        x = x.masked_fill((batch.positions < 0)[:, None, None], 0.0).unflatten(0, asked.shape)
        best = self._k.greedy(module.logits(x[:, -1].contiguous(), self._lm_head)).clamp(min=0)
        guesses[:, i] = best
        return Chain(torch.cat([tokens, best[:, None]], 1), x)

    def _batch(self, rings: Tensor, start: Tensor, tokens: Tensor) -> FlatBatch:
        """One span of each text, from position `start` on. What stands before the text is padding."""
        texts, count = tokens.shape
        first = torch.arange(texts, dtype=torch.int32, device=self._device) * count
        position = start[:, None] + torch.arange(count, dtype=torch.int32, device=self._device)
        own = torch.stack([start, first, rings, start + count, start])[:, :, None].expand(5, texts, count)
        of_tokens = [position.clamp(min=-1)[None], own, tokens.int()[None]]
        return FlatBatch(torch.cat(of_tokens).flatten(), Size(texts * count, 0, 0, 0), self._no_pages)

    @torch.inference_mode()
    def record(self, memory: tuple[Any, torch.cuda.Stream]) -> None:
        """Record guesses for a few numbers of texts. They share `memory` with other recordings: only one runs
        at a time. Required: all that is read was made for the longest text."""
        sizes = [self._rings]
        while sizes[-1] > 1:
            sizes.append(1 << (sizes[-1] - 1).bit_length() - 1)
        for texts in sizes if self._guesses_max else ():  # the most first: others use the same memory
            numbers = send(_padded(np.empty((3, 0), np.int32), texts), self._device).clone()
            guesses = torch.zeros(texts, self._guesses_max, dtype=torch.int64, device=self._device)
            calls = [partial(self._guess, i, numbers, guesses) for i in range(self._guesses_max)]
            chain = None
            for call in calls:  # compiles kernels
                chain = call(chain)
            self._recordings.insert(0, (guesses, Recording(numbers, calls, *memory)))


def _padded(asked: Ints, texts: int) -> Ints:
    """[3, texts or fewer] → all numbers in a row, padded to `texts`."""
    numbers = np.zeros((3, texts), np.int32)
    numbers[1], numbers[:, : asked.shape[1]] = NOWHERE, asked
    return numbers.ravel()


def products_of(config: V4Config) -> tuple[int, int]:
    """Multiplications of a token in the target, and of a guess in its MTP layer."""
    target = guess = config.vocab_size * config.hidden_size
    for name, each in parameters(config).items():
        products = prod(each.shape) * (len(each.shape) > 1 and not each.integer)
        if "mlp.experts." in name:
            products = products * config.experts_per_token // config.experts
        if name.startswith("model.layers."):
            target += products
        elif name.startswith(f"{DRAFT}0."):
            guess += products * (config.hc_mult if name.endswith("h_proj.weight") else 1)
    return target, guess
