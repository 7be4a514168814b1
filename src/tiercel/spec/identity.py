"""Whose numbers a cache holds. How their bytes lie is another question: `CacheSpec.form`.

Page keys begin with the identity. So all stages, ranks and machines that serve one model agree on the key of
a page, wherever the model's folder is; and a model with other numbers never finds these pages.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass
from functools import cached_property

BITS, NUMBERS = SHARES = ("bits", "numbers")


@dataclass(frozen=True)
class Identity:
    """What every cached number depends on, besides the text and its namespace: digests or names."""

    weights: str
    """Every bit of the weights."""
    arithmetic: str = ""
    """What is computed: the configuration as far as the model reads it, what the source of the model says,
    and the format of entries, because later layers read the rounded entries."""
    kernels: str = ""
    """Which kernels computed it, as far as a last bit may depend on that. Empty: any."""

    @property
    def share(self) -> str:
        """Who shares pages. `bits`: equal kernels. `numbers`: all kernels of this arithmetic."""
        return BITS if self.kernels else NUMBERS

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(astuple(self)).encode()).digest()
