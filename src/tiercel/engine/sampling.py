"""From a row of logits to a token: one `Sampler` per request, on the CPU.

    logits ─ penalties ─ bias ─ grammar ─ min_tokens ─┬─ temperature 0 ────────────────────── the best token
                                                      └─ ÷ temperature ─ top_k ─ top_p ─ min_p ─── one draw

What is drawn depends on the row, the request's own tokens, its seed and the index of the token in its
output; on nothing that shares the batch. So a request that was preempted goes on as if it had not been.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.asks.ask import Sampling, TokenOut
from tiercel.errors import LogitsError
from tiercel.kernels.draw import Draw, Mask, Row, largest, mask_row, sample_row, weights_of
from tiercel.text.grammar import Matcher

TEMPERATURE_LEAST, TEMPERATURE_MOST = 1e-6, 1e30
"""A temperature below the first counts as 0, as in SGLang. At the second all fp32 logits become equal."""
LOGIT_MOST = 1e38
"""The bound of a penalized logit. The difference of two such logits is still a finite fp32."""
GREEDY = Draw(sharpness=0.0)


class Sampler:
    """Draws one request's tokens, and remembers them.

    Two samplers with equal settings, prompt and output draw equal tokens. A missing seed counts as 0: `Task`
    gives each ask without a seed its own.

    One draw, ms, of 4,096 and of 129,280 tokens: greedy 0.02 and 0.07, plain 0.10 and 1.0 to 1.2, top_k 50
    0.14 and 0.7, top_p 0.95 0.2 and 1.4 to 9 (a flat row: more to sort); 5 logprobs 0.15 and 1.5 more.
    Two shared Neoverse N1 cores, numpy 2.4, torch 2.13, 2026-11-15.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        vocab_size: int,
        output: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """`matcher`: the sampling's grammar, at the start of an answer."""
        self.sampling, self.vocab_size, self.matcher = sampling, vocab_size, matcher
        self.seed = sampling.seed or 0
        self.greedy = sampling.temperature < TEMPERATURE_LEAST
        self._sharpness = 1.0 / min(max(sampling.temperature, TEMPERATURE_LEAST), TEMPERATURE_MOST)
        self._index = 0
        # Each array is made only if a setting needs it: a plain request pays nothing.
        self._seen: NDArray[np.bool_] | None = None
        if sampling.repetition_penalty != 1.0:
            self._seen = np.bincount(np.asarray(prompt, np.int64), minlength=vocab_size) > 0
        asked = sampling.presence_penalty or sampling.frequency_penalty
        self._less = np.zeros(vocab_size, np.float32) if asked else None
        self._counts: Counter[int] = Counter()
        self._biased = np.fromiter(sampling.logit_bias.keys(), np.int64)
        self._bias = np.fromiter(sampling.logit_bias.values(), np.float32)
        self._ends = np.fromiter(sampling.stop_tokens if sampling.min_tokens else (), np.int64)
        self.raw = self._seen is None and self._less is None and not len(self._biased) and not len(self._ends)
        """Whether tokens are drawn from the logits as they are, or as a mask leaves them: a caller that has
        drawn one with `how` need not call `draw`."""
        self.queued = self.raw and sampling.logprobs is None
        """Whether nothing else is done with the logits: then they need not come to the host."""
        self.plain = self.queued and self.greedy and matcher is None
        for token in output:
            self._remember(token)

    def draw(self, logits: Tensor, mask: Mask | None = None) -> TokenOut:
        """The next token. `logits` is this request's row, fp32; it is not changed. `mask`: what the grammar
        allows."""
        assert logits.shape == (self.vocab_size,) and logits.dtype == torch.float32
        raw: Row = logits.detach().cpu().numpy()
        row = self._adjusted(raw, mask)
        best = int(row.argmax())  # the lowest id of the best: numpy promises the first
        if not math.isfinite(row[best]):  # argmax finds any nan and +inf there is
            raise LogitsError(f"the best of {self.vocab_size} logits is {row[best]}, token {best}")
        token = best if self.greedy else sample_row(row, row[best], self.how(self._index))
        return self.take(token, raw)

    def how(self, index: int) -> Draw:
        """How the token at `index` of the output is drawn."""
        if self.greedy:
            return GREEDY
        own = self.sampling
        return Draw(self._sharpness, own.top_k, own.top_p, own.min_p, uniform(self.seed, index))

    def take(self, token: int, raw: Row | None) -> TokenOut:
        """A token was drawn from row `raw`, which may be missing if no logprobs are wanted."""
        top = self.sampling.logprobs
        out = TokenOut(token) if top is None or raw is None else _scored(raw, token, top)
        self._remember(token)
        return out

    def _adjusted(self, raw: Row, mask: Mask | None) -> Row:
        """The row after penalties, bias, grammar and `min_tokens`: the same array if there are none."""
        if self.raw:
            return raw if mask is None else mask_row(raw, mask)
        row = raw.copy()
        if self._seen is not None:
            seen = np.flatnonzero(self._seen)
            values, penalty = row[seen].astype(np.float64), self.sampling.repetition_penalty
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / penalty, values * penalty)
            row[seen] = np.clip(values, -LOGIT_MOST, LOGIT_MOST)
        if self._less is not None:
            row -= self._less
        row[self._biased] += self._bias
        if mask is not None:
            row = mask_row(row, mask)
        if self._index < self.sampling.min_tokens:
            ends = row[self._ends]
            row[self._ends] = -np.inf
            if mask is not None and row.max() == -np.inf:  # the grammar leaves nothing but the end
                row[self._ends] = ends
        return row

    def _remember(self, token: int) -> None:
        self._index += 1
        if self.matcher is not None:
            self.matcher.take(token)
        if self._seen is not None:
            self._seen[token] = True
        if self._less is not None:
            self._counts[token] += 1
            once, each = self.sampling.presence_penalty, self.sampling.frequency_penalty
            self._less[token] = once + each * self._counts[token]


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenOut]:
    """The logprob of `tokens[i]` in row i: the same bits that `Sampler.draw` reports for that row."""
    assert logits.ndim == 2 and len(logits) == len(tokens) and logits.dtype == torch.float32
    return [
        _scored(row, token, top) for row, token in zip(logits.detach().cpu().numpy(), tokens, strict=True)
    ]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the token at `index`. It is a hash, so there is no state to restore."""
    key = seed.to_bytes(8, "little", signed=True)
    digest = blake2b(index.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _scored(raw: Row, token: int, top: int) -> TokenOut:
    """Log-softmax of one row of raw logits. It is computed row by row, so it does not depend on the batch."""
    best = raw.max()
    if not math.isfinite(best):
        raise LogitsError(f"the best of {len(raw)} logits is {best}")
    log_sum = float(best) + math.log(weights_of(raw, best).sum(dtype=np.float64))
    ranked = largest(raw, min(top, len(raw))) if top else np.empty(0, np.int64)
    ranked = ranked[np.argsort(-raw[ranked], kind="stable")]
    named = tuple((int(each), float(raw[each]) - log_sum) for each in ranked)
    return TokenOut(token, float(raw[token]) - log_sum, named)
