"""The prefix-sharing workload that the figures of other caches in the README were measured on.

10,000 requests of about 2,000 tokens: 20 system prompts of 512 tokens; 400 documents of 768 tokens, each
bound to one system prompt, Zipf-popular; unique ends of 400 to 1,100 tokens. A third of the requests are
follow-up turns that extend an earlier one by 100 to 500 tokens. The order of the random draws is part of the
workload: it must stay as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def make(n: int = 10_000, seed: int = 0, vocab: int = 128_000) -> list[npt.NDArray[Any]]:
    r = np.random.default_rng(seed)
    systems = [r.integers(0, vocab, 512) for _ in range(20)]
    documents = [r.integers(0, vocab, 768) for _ in range(400)]
    system_of = r.integers(0, 20, 400)
    popularity = 1.0 / np.arange(1, 401) ** 0.9
    popularity /= popularity.sum()
    requests: list[npt.NDArray[Any]] = []
    live: list[npt.NDArray[Any]] = []
    for _ in range(n):
        if live and r.random() < 0.33:
            j = int(r.integers(max(0, len(live) - 200), len(live)))
            live[j] = tokens = np.concatenate([live[j], r.integers(0, vocab, int(r.integers(100, 500)))])[
                :4096
            ]
        else:
            d = int(r.choice(400, p=popularity))
            own = r.integers(0, vocab, int(r.integers(400, 1100)))
            tokens = np.concatenate([systems[system_of[d]], documents[d], own])
            live.append(tokens)
        requests.append(tokens.astype(np.int64))
    return requests
