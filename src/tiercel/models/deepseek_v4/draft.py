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
streams are read.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from tiercel.spec.deepseek_v4 import HIDDEN, WINDOW

NO_PAGES = torch.empty(0, dtype=torch.int64)
"""A draft's window lies in rings alone."""


MERGED_MOST = 8
"""Up to this many tokens of a text without entries go through a layer together with the token that is guessed
after. More tokens make entries only, which is less to compute."""


class Call:
    """The spans of one call, and where their streams are."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.lengths = np.array([len(span.tokens) for span in spans])
        self.starts = np.array([span.start for span in spans])
        self.rings = np.array([span.ring for span in spans])
        self.ends, self.first = self.starts + self.lengths, self.lengths.cumsum() - self.lengths

    def kept(self, ring_rows: int) -> tuple[Tensor, Tensor]:
        """(flat tokens, ring rows): what rings remember of this call."""
        positions = np.arange(self.lengths.sum()) + (self.starts - self.first).repeat(self.lengths)
        kept = (positions >= (self.ends - ring_rows).repeat(self.lengths)).nonzero()[0]
        rows = self.rings.repeat(self.lengths)[kept] * ring_rows + positions[kept] % ring_rows
        return torch.from_numpy(kept), torch.from_numpy(rows)

    def tails(self) -> list[tuple[int, int]]:
        """(flat token before the boundary, place)"""
        each = zip(self.spans, self.first.tolist(), strict=True)
        return [(at + b - span.start - 1, place) for span, at in each for b, place in span.tails.items()]


class MtpLayer:
    """One MTP layer: its parameters, and what it computes for each token."""

    def __init__(self, setup: Setup, number: int, weights: Weights, rotary: Rotary) -> None:
        self._config, self._k, self.number = setup.config, setup.kernels, number
        c, k = setup.config, setup.kernels
        w = part_of(weights, f"{DRAFT}{number}.")
        self._norms = [w["enorm.weight"], w["hnorm.weight"]]
        self._projections = [k.pack(w[f"{name}.weight"]) for name in ("e_proj", "h_proj")]
        self._head = site_of(c, k, part_of(w, "hc_head.hc_"), w["norm.weight"])
        self._embedding, self._rotary = weights["model.embed_tokens.weight"], rotary
        self.layer = Layer(setup, c.layers + number, w, rotary)

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
    """An MTP layer on a CPU, and what its next entries are made of: for the last tokens of each text the
    token and the target's streams, in rings, by position as in `Rings`.

    The entries of the last module are read only when it guesses or a tail is written. Until then its tokens
    make none: a token that waits takes a row in a ring, and many make their entries together.
    """

    def __init__(self, setup: Setup, number: int, weights: Weights, rotary: Rotary) -> None:
        super().__init__(setup, number, weights, rotary)
        c = setup.config
        self._rings, self._lag = setup.rings, number + 1
        self._tails = setup.rows(HIDDEN, c.layers + number)
        self._back = rows_before(c.window)
        """How many tokens before the next one have entries that are read."""
        window = setup.memory.stream(WINDOW, c.layers + number)
        self._in_tail = window.entries_per_row(setup.memory.spec.page_tokens)
        self.ring_rows = self._back + setup.guesses_max + 1
        rows, device = setup.rings * self.ring_rows, setup.memory.device
        self._streams = torch.zeros(rows, c.hc_mult, c.hidden_size, device=device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._made = np.zeros(setup.rings, np.int64)
        """For each ring: tokens before this position have made all entries that are still read."""

    def keep(self, call: Call, x: Tensor, tokens: Tensor) -> None:
        """Remember the streams x of a call's tokens, in rings and tails. Entries are made when they are
        read."""
        self._made[call.rings] = np.minimum(self._made[call.rings], call.starts)
        if any(span.tails for span in call.spans):
            self._write_tails(call, x, tokens)
        self._remember(call, x, tokens)

    def _remember(self, call: Call, x: Tensor, tokens: Tensor) -> None:
        kept, rows = call.kept(self.ring_rows)
        self._streams[rows], self._tokens[rows] = x[kept], tokens[kept]

    def _write_tails(self, call: Call, x: Tensor, tokens: Tensor) -> None:
        """Make the entries that the tails of a call hold, and write them."""
        self._write_hidden(call, x)
        chosen = np.array([bool(span.tails) for span in call.spans])
        self.catch_up(call.rings[chosen], call.starts[chosen])
        spans, there = list[Span](), list[Ints]()
        before = self._before(call, x)
        for span, first in zip(call.spans, call.first.tolist(), strict=True):
            if not span.tails:
                continue
            end = max(span.tails)
            start = max(self._lag, min(span.tails) - self._in_tail, span.start)
            if start < end:
                tails = {boundary - self._lag: place for boundary, place in span.tails.items()}
                own = span.tokens[start - span.start : end - span.start]
                spans.append(Span(own, start - self._lag, NO_PAGES, span.ring, tails))
                there.append(np.arange(first + start - span.start, first + end - span.start))
            self._made[span.ring] = end
        if spans:
            rows = torch.from_numpy(np.concatenate(there))
            self._store(spans, before[rows], tokens[rows])

    def follow(self, call: Call, x: Tensor, tokens: Tensor) -> Tensor:
        """Make the entries of a call's tokens beside the streams x of the tokens before them. Returns this
        module's streams beside these tokens: the next module reads them."""
        before, streams = self._before(call, x), torch.zeros_like(x)
        spans, chosen = list[Span](), np.zeros(len(x), np.bool_)
        for span, first in zip(call.spans, call.first.tolist(), strict=True):
            drop = max(0, self._lag - span.start)  # the first tokens of a text have no streams before them
            tails = {boundary - self._lag: place for boundary, place in span.tails.items()}
            if drop < len(span.tokens):
                spans.append(
                    Span(span.tokens[drop:], span.start - self._lag + drop, NO_PAGES, span.ring, tails)
                )
                chosen[first + drop : first + len(span.tokens)] = True
        if spans:
            there = torch.from_numpy(chosen)
            streams[there] = self.run(spans, before[there], tokens[there])
        self._write_hidden(call, x)
        self._remember(call, x, tokens)
        self._made[call.rings] = call.ends
        return streams

    def _write_hidden(self, call: Call, x: Tensor) -> None:
        for token, place in call.tails():
            self._tails.write_row(place, self._tails.codec.encode(x[token].flatten()[None]))

    def _before(self, call: Call, x: Tensor) -> Tensor:
        """The streams of the token before each token of a call."""
        before = torch.cat([x[:1], x[:-1]])
        rows = call.rings * self.ring_rows + (call.starts - 1) % self.ring_rows
        before[torch.from_numpy(call.first)] = self._streams[torch.from_numpy(rows)]
        return before

    def _waiting(self, rings: Ints, ends: Ints) -> Ints:
        """The first token of each text that has to make its entry: earlier entries are not read."""
        return np.maximum(np.minimum(self._made[rings], ends), np.maximum(ends - self._back, 0))

    def catch_up(self, rings: Ints, ends: Ints) -> None:
        """Make the entries of the tokens before `ends`, as far as these are read."""
        firsts = np.maximum(self._waiting(rings, ends), self._lag)
        chosen = firsts < ends
        if chosen.any():
            self._store(*self._ring_spans(rings[chosen], firsts[chosen], ends[chosen]))
        self._made[rings] = ends

    def go_on(self, rings: Ints, ends: Ints, x: Tensor, tokens: Tensor) -> Tensor:
        """The streams of `tokens` [texts, n], at positions from `ends` on, beside the streams of the tokens
        before them: for the first token from the ring, for the others x [texts, n - 1, …]. Tokens that wait
        make their entries too. Streams before a text are zeros."""
        texts, count = tokens.shape
        positions = ends[:, None] + np.arange(count)
        rows = torch.from_numpy(rings[:, None] * self.ring_rows + positions % self.ring_rows)
        self._tokens[rows] = tokens
        if count > 1:
            self._streams[rows[:, :-1]] = x
        firsts = self._waiting(rings, ends)
        if (ends - firsts).max() > MERGED_MOST:
            self.catch_up(rings, ends)
            firsts = ends
        self._made[rings] = ends
        firsts, upto = np.maximum(firsts, self._lag), ends + count
        there = firsts < upto
        streams = self._streams.new_zeros(texts, count, *self._streams.shape[1:])
        if not there.any():
            return streams
        made = self.run(*self._ring_spans(rings[there], firsts[there], upto[there]))
        behind = (upto - firsts)[there].cumsum()
        if (upto - firsts >= count).all():
            return made[torch.from_numpy(behind[:, None] - count + np.arange(count))]
        lengths = np.minimum(upto - firsts, count)
        for i, end in zip(there.nonzero()[0].tolist(), behind.tolist(), strict=True):
            streams[i, count - lengths[i] :] = made[end - lengths[i] : end]
        return streams

    def _ring_spans(self, rings: Ints, firsts: Ints, ends: Ints) -> tuple[list[Span], Tensor, Tensor]:
        """Tokens firsts … ends - 1 of texts, from the rings: spans, streams before them, tokens."""
        lengths = ends - firsts
        positions = np.arange(lengths.sum()) + (firsts - lengths.cumsum() + lengths).repeat(lengths)
        of_ring = rings.repeat(lengths) * self.ring_rows
        tokens = self._tokens[torch.from_numpy(of_ring + positions % self.ring_rows)]
        streams = self._streams[torch.from_numpy(of_ring + (positions - 1) % self.ring_rows)]
        each = zip(tokens.split(lengths.tolist()), firsts.tolist(), rings.tolist(), strict=True)
        spans = [Span(own, first - self._lag, NO_PAGES, ring) for own, first, ring in each]
        return spans, streams, tokens

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
        self.layer.attention.restore(ring, place, boundary - self._lag)
        row = ring * self.ring_rows + (boundary - 1) % self.ring_rows
        self._streams[row] = self._tails.codec.decode(self._tails.read_row(place)).view_as(self._streams[row])
        self._made[ring] = boundary


def modules_of(spec: CacheSpec) -> int:
    """How many MTP layers a declaration has."""
    for stream in spec.streams:
        if stream.draft and stream.role == HIDDEN:
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
        self._lm_head, self._guesses_max = lm_head, setup.guesses_max

    def follow(self, spans: Sequence[Span], x: Tensor, tokens: Tensor) -> None:
        """The target computed the streams x [tokens, n, d]."""
        call = Call(spans)
        for module in self.modules[:-1]:
            x = module.follow(call, x, tokens)
        self.modules[-1].keep(call, x, tokens)

    @torch.inference_mode()
    def propose(self, spans: Sequence[Span], count: int) -> Tensor:
        """[spans, count]: the guesses after each span. A span has one token: the one that was drawn last and
        that the target has not computed.

        The entries of guesses lie in spare rows of the rings. `follow` writes these positions again.
        """
        assert count <= self._guesses_max, "a ring has a spare row for each guess"
        starts = np.array([span.start for span in spans])
        rings = np.array([span.ring for span in spans])
        tokens = torch.from_numpy(np.array([int(span.tokens[0]) for span in spans]))[:, None]
        x = newest = torch.empty(len(spans), 0, device=tokens.device)
        for j in range(count):
            module = self.modules[min(j, len(self.modules) - 1)]
            if j < len(self.modules):
                x = module.go_on(rings, starts, x, tokens)
            else:
                x = self._chain(module, rings, starts + j, newest, tokens[:, -1])
            newest = x[:, -1].contiguous()
            best = greedy(module.logits(newest, self._lm_head)).clamp(min=0)
            tokens = torch.cat([tokens, best[:, None]], 1)
        return tokens[:, 1:]

    def _chain(self, module: Module, rings: Ints, positions: Ints, x: Tensor, tokens: Tensor) -> Tensor:
        """The last module goes on from its own streams, by one token for each text."""
        starts, numbers = (positions - module.number - 1).tolist(), tokens.numpy()
        spans = [Span(numbers[i : i + 1], starts[i], NO_PAGES, ring) for i, ring in enumerate(rings.tolist())]
        return module.run(spans, x, tokens)[:, None]

    @torch.inference_mode()
    def restore(self, ring: int, place: int, boundary: int) -> None:
        for module in self.modules:
            module.restore(ring, place, boundary)


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
