"""The MTP draft on CUDA. It does what `draft.py` does on a CPU; that file says what is kept where.

Every token makes its entry at once. Nothing waits for the device, and every shape follows from the shape of a
call: `follow` is part of a recorded forward, and `propose` is recorded itself, one graph for each guess.
`follow` takes the forward's own batch, each token `lag` positions earlier: the first tokens of a text, which
have no entries, are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tiercel.kernels.cuda.rings import keep, restore, row_before, write_tails
from tiercel.kernels.reference import Matrix
from tiercel.models.base import Span, Weights
from tiercel.models.deepseek_v4.cuda_rows import entries_of
from tiercel.models.deepseek_v4.draft import MtpLayer, modules_of
from tiercel.models.deepseek_v4.rows import Setup
from tiercel.models.flat import FlatBatch, Ints, Size, send
from tiercel.models.graphs import Recording
from tiercel.models.rotary import Rotary
from tiercel.spec.deepseek_v4 import HIDDEN

NOWHERE = -(2**20)
"""The start of a text that does not exist: its guesses stand before every text too."""


class Chain(NamedTuple):
    """The guesses so far of a call of `propose`."""

    tokens: Tensor
    """int64 [texts, 1 + guesses]: the token that was drawn last, and the guesses behind it."""
    x: Tensor
    """[texts, tokens of the last module's call, n, d]: the streams that it returned."""


class CudaModule(MtpLayer):
    """One MTP layer, and the streams beside which its next entries are made."""

    def __init__(self, setup: Setup, number: int, weights: Weights, rotary: Rotary) -> None:
        super().__init__(setup, number, weights, rotary)
        c = setup.config
        self._tails = entries_of(setup, HIDDEN, c.layers + number)
        self.ring_rows = setup.guesses_max + 1
        shape = setup.rings * self.ring_rows, c.hc_mult * c.hidden_size
        self._kept = torch.zeros(shape, device=setup.memory.device)
        """The streams beside the last tokens of each text: one more than there may be guesses, since any of
        them may be the last that is accepted."""

    def follow(self, batch: FlatBatch, x: Tensor, tokens: Tensor, *, read: bool) -> Tensor | None:
        """Make the entries of a call's tokens beside the streams x of the tokens before them. Returns this
        module's streams beside these tokens, if they are read."""
        rows, flat = x.flatten(1), batch.flat
        before = row_before(self._kept, rows, flat, self.ring_rows).view_as(x)
        write_tails((rows, rows), self._tails, batch.tails, self.ring_rows)
        keep(self._kept, rows, flat, batch.end, self.ring_rows)
        own = batch.behind(self.number + 1)
        if read:
            return self.run(own, before, tokens)
        self.layer.store(self.enter(before, tokens), self._turn(own), own)
        return None

    def run(self, batch: FlatBatch, x: Tensor, tokens: Tensor) -> Tensor:
        """The streams of tokens beside the streams of the tokens before them."""
        return self.layer(self.enter(x, tokens), tokens, self._turn(batch), batch)

    def _turn(self, batch: FlatBatch) -> tuple[Tensor, Tensor]:
        return self._rotary.at(batch.positions, batch.longest)

    def last(self, rings: Tensor, positions: Tensor) -> Tensor:
        """[texts, n, d]: the streams beside these positions, which are among the last of each text."""
        rows = self._kept[rings * self.ring_rows + positions % self.ring_rows]
        streams: Tensor = rows.to(self._k.dtype).unflatten(1, (self._config.hc_mult, -1))
        return streams

    def restore(self, moves: Tensor) -> None:
        restore(self._kept, self._tails, moves, self.ring_rows)
        own = moves.clone()
        own[:, 1] -= self.number + 1
        self.layer.attention.restore(own)


class CudaMtpDraft:
    """All MTP layers of a checkpoint. `weights` are all of the model's: embedding and head are shared."""

    def __init__(self, setup: Setup, weights: Weights, lm_head: Matrix, rotary: Rotary) -> None:
        """`rotary`: the one of the target's window layers."""
        count = modules_of(setup.memory.spec)
        self.modules = [CudaModule(setup, i, weights, rotary) for i in range(count)]
        self._k, self._lm_head, self._rotary = setup.kernels, lm_head, rotary
        self._rings, self._guesses_max, self._device = setup.rings, setup.guesses_max, setup.memory.device
        self._no_pages = torch.zeros(1, 1, dtype=torch.int32, device=self._device)
        """A draft's window lies in rings alone."""
        self._recordings: list[tuple[Tensor, Recording]] = []
        """Guesses [texts, most guesses] and what makes them, one column by each graph. Few texts first."""

    def follow(self, batch: FlatBatch, x: Tensor, tokens: Tensor) -> None:
        """Make the entries of the streams x [tokens, n, d] that the target computed."""
        streams: Tensor | None = x
        for module in self.modules:
            assert streams is not None
            streams = module.follow(batch, streams, tokens, read=module is not self.modules[-1])

    def restore(self, moves: Tensor) -> None:
        """Texts go on from tails. `moves`: see `kernels.cuda.rings.restore`."""
        for module in self.modules:
            module.restore(moves)

    @torch.inference_mode()
    def propose(self, spans: Sequence[Span], count: int) -> Tensor:
        """[spans, count] on the host: the guesses after each span, as `MtpDraft.propose`. All of them are
        queued; one copy waits for them."""
        assert count <= self._guesses_max, "a ring has a spare row for each guess"
        texts = len(spans)
        asked = np.array([(span.ring, span.start, int(span.tokens[0])) for span in spans], np.int32).T
        for guesses, recording in self._recordings:
            if texts <= len(guesses):
                recording.fill(_padded(asked, len(guesses)))
                for graph in recording.graphs[:count]:
                    graph.replay()
                return guesses[:texts, :count].cpu()
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
            x = module.last(rings, start - 1)[:, None]
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
