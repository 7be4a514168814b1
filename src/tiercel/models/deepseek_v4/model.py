"""DeepSeek V4 on cached pages: takes spans, reads and writes device pages and recent rows, returns logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels, make_kernels
from tiercel.kernels.draw import Draw
from tiercel.kernels.reference import CosSin, Matrix
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import DRAWN_LAST, BeforeLayer, Draft, Span, Weights, at_once, part_of
from tiercel.models.batch import Batch
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.draft import MtpDraft, products_of
from tiercel.models.deepseek_v4.layer import Layer, site_of
from tiercel.models.deepseek_v4.rows import Setup
from tiercel.models.deepseek_v4.weights import draft_names, has_mtp, load_weights
from tiercel.models.families import DraftOffer, Family
from tiercel.models.flat import FlatBatch, PageTables, numbers_of, send
from tiercel.models.graphs import Graphs, Section
from tiercel.models.rotary import Rotary
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.deepseek_v4 import deepseek_v4, deepseek_v4_mtp

if TYPE_CHECKING:
    from tiercel.models.deepseek_v4.cuda_draft import CudaMtpDraft


class Hidden(NamedTuple):
    """The state between two layers."""

    x: Tensor
    """The streams [tokens, n, d]."""
    tokens: Tensor
    rotations: list[CosSin]


class Recorded(NamedTuple):
    """What a recorded forward leaves."""

    logits: Tensor
    best: Tensor


class DeepseekV4:
    """The whole model for up to `rings` running requests. It knows nothing of scheduling."""

    def __init__(  # noqa: PLR0913
        self,
        config: V4Config,
        weights: Weights,
        memory: DeviceMemory,
        rings: int,
        kernels: Kernels | None = None,
        guesses_max: int = 0,
    ) -> None:
        self.config, self.vocab_size = config, config.vocab_size
        self.kernels = k = kernels or make_kernels(device=str(memory.device), offered=FAMILY.kernels)
        self._setup = setup = Setup(config, k, memory, rings, guesses_max)
        self._embedding = weights["model.embed_tokens.weight"]
        self.last = torch.zeros(rings + 1, dtype=torch.int64, device=memory.device)
        """One more than there are rings, for tokens drawn for no text."""
        self._lm_head = k.pack(weights["lm_head.weight"])
        head = part_of(weights, "model.hc_head.hc_")
        self._head = site_of(config, k, head, weights["model.norm.weight"])
        ropes = config.rope_main, config.rope_compress
        self._rotaries = [Rotary(rope, config.rope_dim, memory.device) for rope in ropes]
        self.layers = [
            Layer(setup, i, part_of(weights, f"model.layers.{i}."), self._rotaries[ratio > 0])
            for i, ratio in enumerate(config.ratios)
        ]
        self.draft = _make_draft(setup, weights, self._lm_head, self._rotaries[0])
        """It exists if the cache declaration has the draft's streams; then it follows every call."""
        self._tables: PageTables | None = None
        self._graphs: Graphs | None = None
        self._recorded: Recorded | None = None
        """What the last forward left, if it was a recorded one."""
        if k.NAME == "cuda":  # kernels read page tables on the device
            self._tables = PageTables(rings, memory.device)

    def warm_up(self, longest: int) -> None:
        """Record forwards and resumptions as CUDA graphs, where kernels run on a GPU. What they read is made
        for the longest text now, because it must not move."""
        if self._tables is None or self.last.device.type != "cuda":
            return
        spec = self._setup.memory.spec
        self._tables.make_room(-(-longest // spec.page_tokens))
        table, rings, guesses_max = self._tables.table, self._setup.rings, self._setup.guesses_max
        for rotary in self._rotaries:  # guesses may stand behind the end of the longest text
            rotary.table(table.shape[1] * spec.page_tokens + guesses_max)
        rows = rings * 2 if guesses_max else rings  # one guess for each text, or more for some
        self._graphs = Graphs(self._sections(spec), self._restore, table, spec.page_tokens, rows)
        if self.draft is not None:
            cast("CudaMtpDraft", self.draft).record(self._graphs.memory)

    def _sections(self, spec: CacheSpec) -> list[Section]:
        """The layers in groups, as they are loaded. The first section begins, the last one returns logits.
        (What a draft reads is in tails, which come with the first layers.)"""
        groups, count = spec.layer_groups(), len(self.layers)

        def run(layers: range, batch: FlatBatch, state: Hidden | None) -> Hidden | Recorded:
            state = self._compute(layers, batch, state or self._begin(batch))
            return self._answer(batch, state) if layers[-1] == count - 1 else state

        firsts = [0, *(group[0] for group in groups[1:] if group[0] < count)]
        ranges = [range(*each) for each in zip(firsts, [*firsts[1:], count], strict=True)]
        return [Section(layers[-1], partial(run, layers)) for layers in ranges]

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], rows: Sequence[int] | None = None, before: BeforeLayer = at_once
    ) -> Tensor:
        """Logits of these flat tokens; None: the last token of each span."""
        if self._tables is None:
            batch = Batch(spans, self._setup.rings, self._embedding.device)
            state = self._compute(range(len(self.layers)), batch, self._begin(batch), before)
            if self.draft is not None:
                self.draft.follow(spans, state.x, state.tokens)
            wanted = batch.last if rows is None else torch.tensor(list(rows), dtype=torch.long, device="cpu")
            return self._logits(state.x, wanted)
        self._tables.send(spans)
        numbers = numbers_of(spans, rows, self._setup.rings)
        self._recorded = self._graphs.run(numbers, before) if self._graphs is not None else None
        if self._recorded is not None:
            self._recorded = Recorded(*(each[: numbers.size.rows] for each in self._recorded))
            return self._recorded.logits
        on_device = send(numbers.padded(numbers.size), self._embedding.device)
        flat = FlatBatch(on_device, numbers.size, self._tables.table)
        state = self._compute(range(len(self.layers)), flat, self._begin(flat), before)
        if self.draft is not None:
            self.draft.follow(flat, state.x, state.tokens)
        return self._logits(state.x, flat.rows)

    def _begin(self, batch: Batch | FlatBatch) -> Hidden:
        drawn = self.last[batch.rings].clamp(min=0)
        tokens = torch.where(batch.tokens == DRAWN_LAST, drawn, batch.tokens)
        rotations = [rotary.at(batch.positions, batch.longest) for rotary in self._rotaries]
        return Hidden(
            self._embedding[tokens][:, None, :].repeat(1, self.config.hc_mult, 1), tokens, rotations
        )

    def _compute(
        self, layers: range, batch: Batch | FlatBatch, state: Hidden, before: BeforeLayer = at_once
    ) -> Hidden:
        x, tokens, rotations = state
        for i in layers:
            before(i)
            x = self.layers[i](x, tokens, rotations[self.config.ratios[i] > 0], batch)
        return state._replace(x=x)

    def _logits(self, x: Tensor, rows: Tensor) -> Tensor:
        x = self.kernels.hyper_head(x[rows.to(x.device)], self._head)
        return self.kernels.linear(x, self._lm_head, wide=True)

    def _answer(self, batch: FlatBatch, state: Hidden) -> Recorded:
        if self.draft is not None:
            self.draft.follow(batch, state.x, state.tokens)
        logits = self._logits(state.x, batch.rows)
        best = self.kernels.greedy(logits)
        self.last[batch.row_rings] = best
        return Recorded(logits, best)

    def draw(
        self,
        logits: Tensor,
        rings: Sequence[int],
        draws: Sequence[Draw] | None,
        masks: npt.NDArray[np.int32] | None = None,
    ) -> Tensor:
        """A token of each row; it becomes `last` of the row's ring. A recorded forward has drawn the best
        tokens already."""
        if masks is not None:
            logits = self.kernels.masked(logits, send(masks, logits.device))
        if self._recorded is not None and logits is self._recorded.logits:
            tokens = self._recorded.best
            if draws is None:
                return tokens
        else:
            tokens = self.kernels.greedy(logits)
        if draws is None:
            to = send(np.array(rings, np.int32), tokens.device)
        else:
            sent = send(np.column_stack([draws, rings]), tokens.device)
            tokens, to = self.kernels.sample(logits, sent, tokens), sent[:, -1].long()
        self.last[to] = tokens
        return tokens

    def resume(self, ring: int, tails: Sequence[tuple[int, int]]) -> None:
        """A text goes on from the tails at (boundary, place), the earliest first."""
        if self._tables is not None:
            for boundary, place in tails:
                tail = np.array([place, boundary, ring], np.int32)
                if self._graphs is None:
                    self._restore(send(tail, self.last.device))
                else:
                    self._graphs.resume(tail)
            return
        for boundary, place in tails:
            for layer in self.layers:
                layer.attention.restore(ring, place, boundary)
            if self.draft is not None:
                self.draft.restore(ring, place, boundary)

    def _restore(self, tail: Tensor) -> None:
        for layer in self.layers:
            layer.attention.restore(tail.view(1, -1))
        if self.draft is not None:
            self.draft.restore(tail.view(1, -1))


def _make_draft(setup: Setup, weights: Weights, lm_head: Matrix, rotary: Rotary) -> Draft | None:
    """The MTP draft, if the cache declaration has its streams."""
    if not any(stream.draft for stream in setup.memory.spec.streams):
        return None
    if setup.kernels.NAME != "cuda":
        return MtpDraft(setup, weights, lm_head)
    from tiercel.models.deepseek_v4.cuda_draft import CudaMtpDraft  # here: Triton takes a second to import

    return CudaMtpDraft(setup, weights, lm_head, rotary)


def draft_of(checkpoint: Checkpoint, config: V4Config) -> DraftOffer | None:
    """The MTP layers in a checkpoint."""
    if not has_mtp(checkpoint, config):
        return None
    target, guess = products_of(config)
    return DraftOffer(partial(deepseek_v4_mtp, checkpoint.config, hidden=True), guess / target)


FAMILY = Family(
    read=V4Config.from_hf,
    declare=partial(deepseek_v4, model="deepseek-v4"),
    load=load_weights,
    build=DeepseekV4,
    format="fp8",
    kernels=("native", "cuda", "reference"),
    draft=draft_of,
    draft_names=draft_names,
)
