"""A lower bound for the tokens of a text, from its length alone: a text that is too long is not encoded.

A token covers at most as many bytes as the longest token has. This holds only if no step of the tokenizer
drops text, so every step is checked. If one may drop text (a normalizer that strips, unknown words), there is
no bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiercel.text.pieces import BYTES

NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
NORMAL_SHRINKS = 4
"""A normal form shrinks a text to a quarter of its bytes at worst: mathematical A (4 bytes) to A (1)."""
KEEPING = ("ByteLevel", "Metaspace", "Digits")
"""Pre-tokenizers that drop nothing."""


def bytes_per_token_most(tokenizer: Mapping[str, Any], token_bytes: Sequence[int]) -> int | None:
    """How many bytes of text one token covers at most; None: there is no bound.

    `tokenizer` is the content of tokenizer.json, `token_bytes` the length of every token.
    """
    shrinks = _shrinks(tokenizer.get("normalizer"))
    stripping = any(each.get("lstrip") or each.get("rstrip") for each in tokenizer.get("added_tokens", ()))
    if shrinks is None or stripping or not _keeps(tokenizer.get("pre_tokenizer")):
        return None
    return shrinks * max(token_bytes) if _knows_every_byte(tokenizer["model"]) else None


def _shrinks(step: Mapping[str, Any] | None) -> int | None:
    match step:
        case None | {"type": "Prepend"}:
            return 1
        case {"type": "Sequence", "normalizers": list(steps)}:
            every = [_shrinks(each) for each in steps]
            return None if None in every else max((each or 1 for each in every), default=1)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new.encode()) >= len(old.encode()) else None
        case {"type": kind} if kind in NORMAL_FORMS:
            return NORMAL_SHRINKS
    return None


def _keeps(step: Mapping[str, Any] | None) -> bool:
    match step:
        case None:
            return True
        case {"type": "Sequence", "pretokenizers": list(steps)}:
            return all(map(_keeps, steps))
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
    return step["type"] in KEEPING


def _knows_every_byte(model: Mapping[str, Any]) -> bool:
    """Whether every text has tokens. If not, an unknown word of any length may be one token."""
    match model:
        case {"type": "BPE", "vocab": vocab} if all(char in vocab for char in BYTES):
            return True
        case {"type": "BPE" | "Unigram", "byte_fallback": True}:
            return True
    return False
