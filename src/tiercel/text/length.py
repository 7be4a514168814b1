"""How many tokens a text has at least, known from its length alone: what can not fit is not encoded to see.

A token covers at most as many bytes of a text as the longest token has. That is true only if nothing of the
text is lost before it becomes tokens, so every step of the tokenizer is looked at; where one may lose some of
it (a normalizer that strips, words that are unknown), there is no such bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiercel.text.pieces import BYTES

NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
NORMAL_SHRINKS = 4
"""They make of one character another of a quarter of its bytes at most: a mathematical A of 4 is a plain A of
1, a Hangul syllable of 3 was 9."""
KEEPING = ("ByteLevel", "Metaspace", "Digits")
"""Steps before the model that lose nothing."""


def bytes_per_token_most(tokenizer: Mapping[str, Any], token_bytes: Sequence[int]) -> int | None:
    """So many bytes of a text one token stands for at most; None: nobody can say.

    `tokenizer` is what tokenizer.json says, `token_bytes` the length of every token.
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
    """Whether there is no text it has no tokens for: the unknown may be one token however long it is."""
    match model:
        case {"type": "BPE", "vocab": vocab} if all(char in vocab for char in BYTES):
            return True
        case {"type": "BPE" | "Unigram", "byte_fallback": True}:
            return True
    return False
