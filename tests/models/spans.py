"""Spans of texts on a device with one pool."""

from __future__ import annotations

from torch import Tensor

from tiercel.models.base import Span


def one_pool(tokens, start: int, pages: Tensor, *rest, **options) -> Span:
    """A span whose page table is one row."""
    return Span(tokens, start, pages[None] if pages.dim() == 1 else pages, *rest, **options)
