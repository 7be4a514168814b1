"""Whose numbers a cache holds. How their bytes lie is another question: `CacheSpec.form`.

Page keys begin with it. So all stages and ranks of one model, and all machines that serve it, agree on the
key of a page, wherever the model's folder is; and a model whose numbers are others never finds a page of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass
from functools import cached_property

BITS, NUMBERS = SHARES = ("bits", "numbers")


@dataclass(frozen=True)
class Identity:
    """What every cached number depends on, besides the text and its namespace. Digests or names, all text."""

    weights: str
    """Every bit of them."""
    arithmetic: str = ""
    """What is computed: the configuration as far as the model reads it, the model's own source, and how
    entries are rounded when they are kept, because the layers behind read them."""
    kernels: str = ""
    """Who computed it, as far as a last bit may depend on that. Empty: it does not matter who."""

    @property
    def share(self) -> str:
        """`bits`: only with those who get the same bits. `numbers`: with all kernels of this arithmetic."""
        return BITS if self.kernels else NUMBERS

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(astuple(self)).encode()).digest()
