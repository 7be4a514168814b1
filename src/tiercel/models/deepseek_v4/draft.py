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

An entry needs the input of its module only, so a module computes its attention and experts only where
somebody reads its streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from tiercel.errors import SpecError
from tiercel.kernels.reference import Matrix, greedy
from tiercel.models.base import Span, Weights, part_of
from tiercel.models.batch import Batch, Ints, rows_before
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.layer import Layer, site_of
from tiercel.models.deepseek_v4.rows import Setup
from tiercel.models.deepseek_v4.weights import DRAFT, parameters
from tiercel.models.rotary import Rotary
from tiercel.spec.cache_spec import CacheSpec

NO_PAGES = torch.empty(0, dtype=torch.int64)
"""A draft's window lies in rings alone."""


class Call:
    """The spans of one call: where the streams before each token are, and which streams rings remember."""

    def __init__(self, spans: Sequence[Span], ring_rows: int) -> None:
        lengths = np.array([len(span.tokens) for span in spans])
        starts, rings = np.array([span.start for span in spans]), np.array([span.ring for span in spans])
        first = lengths.cumsum() - lengths
        self.spans = spans
        self.positions: Ints = np.arange(lengths.sum()) + (starts - first).repeat(lengths)
        self.first, self.before = map(torch.from_numpy, (first, rings * ring_rows + (starts - 1) % ring_rows))
        kept = (self.positions >= (starts + lengths - ring_rows).repeat(lengths)).nonzero()[0]
        rows = rings.repeat(lengths)[kept] * ring_rows + self.positions[kept] % ring_rows
        self.kept, self.rows = torch.from_numpy(kept), torch.from_numpy(rows)
        tails = zip(spans, first.tolist(), strict=True)
        self.tails = [
            (at + b - span.start - 1, place) for span, at in tails for b, place in span.tails.items()
        ]
        """(flat token before the boundary, place)"""


class MtpLayer:
    """One MTP layer: its parameters, and what they compute of each token."""

    def __init__(self, setup: Setup, number: int, weights: Weights, rotary: Rotary) -> None:
        self._config, self._k, self.number = setup.config, setup.kernels, number
        c, k = setup.config, setup.kernels
        w = part_of(weights, f"{DRAFT}{number}.")
        self._norms = [w["enorm.weight"], w["hnorm.weight"]]
        self._projections = [k.pack(w[f"{name}.weight"]) for name in ("e_proj", "h_proj")]
        self._head = site_of(c, k, part_of(w, "hc_head.hc_"), w["norm.weight"])
        self._embedding, self._rotary = weights["model.embed_tokens.weight"], rotary
        self.layer = Layer(setup, c.layers + number, w, rotary)
        self.ring_rows = setup.guesses_max + 1

    def enter(self, x: Tensor, tokens: Tensor) -> Tensor:
        """What the layer reads: tokens beside the streams x of the tokens before them."""
        eps, k = self._config.rms_norm_eps, self._k
        embedded = k.norm(self._embedding[tokens], self._norms[0], eps)
        x = k.linear(k.norm(x.flatten(0, 1), self._norms[1], eps), self._projections[1])
        streams: Tensor = x.unflatten(0, (len(tokens), -1))
        return streams + k.linear(embedded, self._projections[0])[:, None, :]

    def logits(self, x: Tensor, lm_head: Matrix) -> Tensor:
        return self._k.linear(self._k.hyper_head(x, self._head), lm_head, wide=True)


class Module(MtpLayer):
    """An MTP layer on a CPU, and the streams beside which its next entries are made."""

    def __init__(self, setup: Setup, number: int, weights: Weights, rotary: Rotary) -> None:
        super().__init__(setup, number, weights, rotary)
        c, spec = setup.config, setup.memory.spec
        self._rings = setup.rings
        self._tails = setup.rows("draft_hidden", c.layers + number)
        self._kept = rows_before(c.window) + setup.guesses_max
        self._in_tail = spec.stream("draft_window").entries_per_row(spec.page_tokens)
        shape = setup.rings * self.ring_rows, c.hc_mult, c.hidden_size
        self.last = torch.zeros(shape, device=setup.memory.device)
        """The streams beside the last tokens of each text, in rows by position as in `Rings`: one more than
        there may be guesses, since any of them may be the last that is accepted."""

    def follow(self, call: Call, x: Tensor, tokens: Tensor, *, read: bool) -> Tensor | None:
        """Make the entries of a call's tokens beside the streams x of the tokens before them. Answers this
        module's streams beside these tokens, if they are read."""
        before = torch.cat([x[:1], x[:-1]])
        before[call.first] = self.last[call.before]
        self.last[call.rows] = x[call.kept]
        for token, place in call.tails:
            self._tails.write_row(place, self._tails.codec.encode(x[token].flatten()[None]))
        spans, chosen, lag = list[Span](), np.zeros(len(call.positions), np.bool_), self.number + 1
        for span, first in zip(call.spans, call.first.tolist(), strict=True):
            start = span.start - lag
            drop = max(0, -start)  # the first tokens of a text have no streams before them
            tails = {boundary - lag: place for boundary, place in span.tails.items()}
            if not read:
                drop = max(drop, self._needed(start + len(span.tokens), tails) - start)
            if drop < len(span.tokens):
                spans.append(Span(span.tokens[drop:], start + drop, NO_PAGES, span.ring, tails))
                chosen[first + drop : first + len(span.tokens)] = True
        if not spans:
            return x if read else None
        there = torch.from_numpy(chosen)
        if not read:
            self._store(spans, before[there], tokens[there])
            return None
        streams = torch.zeros_like(x)
        streams[there] = self.run(spans, before[there], tokens[there])
        return streams

    def _needed(self, end: int, tails: Iterable[int]) -> int:
        """The first entry that the ring keeps of a span with this end, or that a tail has."""
        return min([end - self._kept, *(boundary - self._in_tail for boundary in tails)])

    def run(self, spans: Sequence[Span], x: Tensor, tokens: Tensor) -> Tensor:
        """The streams of tokens beside the streams of the tokens before them."""
        batch = Batch(spans, self._rings, x.device)
        return self.layer(self.enter(x, tokens), tokens, self._turn(batch), batch)

    def _store(self, spans: Sequence[Span], x: Tensor, tokens: Tensor) -> None:
        batch = Batch(spans, self._rings, x.device)
        self.layer.store(self.enter(x, tokens), self._turn(batch), batch)

    def _turn(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._rotary.at(batch.positions, batch.longest)

    def restore(self, ring: int, place: int, boundary: int) -> None:
        self.layer.attention.restore(ring, place, boundary - 1 - self.number)
        row = ring * self.ring_rows + (boundary - 1) % self.ring_rows
        self.last[row] = self._tails.codec.decode(self._tails.read_row(place)).view_as(self.last[row])


def modules_of(spec: CacheSpec) -> int:
    """How many MTP layers a declaration has."""
    for stream in spec.streams:
        if stream.name == "draft_hidden":
            return len(stream.layers)
    why = "has no stream `hidden`, without which a draft can not go on: deepseek_v4_mtp(hidden=True)"
    raise SpecError("draft", spec.model, why)


class MtpDraft:
    """All MTP layers of a checkpoint, on a CPU; `cuda_draft.py` has the same for CUDA. `weights` are all of
    the model's: embedding and head are shared."""

    def __init__(self, setup: Setup, weights: Weights, lm_head: Matrix) -> None:
        c, memory = setup.config, setup.memory
        rotary = Rotary(c.rope_main, c.rope_dim, memory.device)
        self.modules = [Module(setup, i, weights, rotary) for i in range(modules_of(memory.spec))]
        self._lm_head = lm_head

    def follow(self, spans: Sequence[Span], x: Tensor, tokens: Tensor) -> None:
        """Make the entries of the streams x [tokens, n, d] that the target computed."""
        call, last = Call(spans, self.modules[0].ring_rows), self.modules[-1]
        streams: Tensor | None = x
        for module in self.modules:
            assert streams is not None
            streams = module.follow(call, streams, tokens, read=module is not last)

    @torch.inference_mode()
    def propose(self, spans: Sequence[Span], count: int) -> Tensor:
        """[spans, count]: the guesses after each span. A span has one token: the one that was drawn last and
        that the target has not computed.

        The entries of guesses lie in spare rows of the rings. `follow` writes these positions again.
        """
        modules, last = self.modules, self.modules[-1]
        assert count < modules[0].ring_rows, "a ring has a spare row for each guess"
        texts, ring_rows = len(spans), last.ring_rows
        start = np.array([span.start for span in spans])
        rings = np.array([span.ring for span in spans])
        row = torch.from_numpy(rings * ring_rows + (start - 1) % ring_rows)
        tokens = torch.from_numpy(np.array([int(span.tokens[0]) for span in spans]))[:, None]
        x = last.last[:0]
        for j in range(count):
            if j < len(modules):  # all tokens since the last call, beside the streams of the module before
                module = modules[j]
                x = torch.cat([module.last[row][:, None], x.view(texts, j, *x.shape[1:])], 1).flatten(0, 1)
                x = self._run(module, rings, start - 1 - j, x, tokens)
            else:
                x = x.view(texts, -1, *x.shape[1:])[:, -1]
                x = self._run(last, rings, start + j - len(modules), x, tokens[:, -1:])
                module = last
            newest = x.view(texts, -1, *x.shape[1:])[:, -1]
            best = greedy(module.logits(newest, self._lm_head)).clamp(min=0)
            tokens = torch.cat([tokens, best[:, None]], 1)
        return tokens[:, 1:]

    def _run(self, module: Module, rings: Ints, start: Ints, x: Tensor, tokens: Tensor) -> Tensor:
        """One span of each text, from position `start` on. Entries before the text are left out."""
        count = tokens.shape[1]
        numbers = tokens.numpy()
        spans = [
            Span(own[max(0, -at) :], max(0, at), NO_PAGES, ring)
            for own, at, ring in zip(numbers, start.tolist(), rings.tolist(), strict=True)
        ]
        if start.min() >= 0:
            return module.run(spans, x, tokens.flatten())
        there = torch.from_numpy((start[:, None] + np.arange(count) >= 0).ravel())
        streams = torch.zeros_like(x)
        streams[there] = module.run(spans, x[there], tokens.flatten()[there])
        return streams

    @torch.inference_mode()
    def restore(self, ring: int, place: int, boundary: int) -> None:
        for module in self.modules:
            module.restore(ring, place, boundary)


READ_TO_FOLLOW = ("h_proj.weight", "e_proj.weight", "self_attn.kv_proj.weight", "attn_hc.fn")
"""The matrices that the last module's entries need."""


def products_to_follow(config: V4Config) -> tuple[int, int]:
    """(of the target, of its MTP layers) for each token, whether or not guesses are made."""
    target, draft = config.vocab_size * config.hidden_size, 0
    for name, each in parameters(config).items():
        products = prod(each.shape) * (len(each.shape) > 1 and not each.integer)
        if "mlp.experts." in name:
            products = products * config.experts_per_token // config.experts
        if name.startswith("model.layers."):
            target += products
        elif name.startswith(DRAFT):
            last = name.startswith(f"{DRAFT}{config.mtp_layers - 1}.")
            if not last or name.endswith(READ_TO_FOLLOW):
                draft += products * (config.hc_mult if name.endswith("h_proj.weight") else 1)
    return target, draft
