"""The bytes of one token, for the decoders in use; and how many bytes of text a token covers at most.

    ByteLevel                             every character stands for a byte                GPT-2, DeepSeek
    Replace, ByteFallback, Fuse, Strip    `▁` is a space, `<0x0A>` a byte                  Llama, Gemma
    Metaspace, perhaps ByteFallback       `▁` is a space, but not before the first word    SentencePiece

The bytes of a text are those of its tokens. Only the start of a whole text may lose a space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercel.errors import WeightsError

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + rank): byte for rank, byte in enumerate(sorted({*range(0x100)} - {*PRINTABLE}))
}
"""The alphabet of byte-level BPE, from GPT-2: one printable character for every byte."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """The decoder of a tokenizer.json, for one token at a time."""

    def __init__(self, file: Path, decoder: Mapping[str, Any] | None) -> None:
        if decoder is None:
            raise WeightsError(file, "has no decoder: tokens can not be turned into text")
        self._byte_level = self._byte_fallback = False
        self._replaced: list[tuple[str, str]] = []
        self._first_without = ""
        """The string that the first token of a whole text loses."""
        self._strip = 0
        """How many leading spaces a whole text loses at most."""
        steps = decoder.get("decoders", [decoder])
        fused = False
        for step in steps:
            match step:
                case {"type": "ByteLevel"} if len(steps) == 1:
                    self._byte_level = True
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    self._replaced.append((old, new))
                case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": str(scheme)}:
                    self._replaced.append((old, " "))
                    self._first_without = "" if scheme == "never" else old
                case {"type": "Strip", "content": " ", "start": int(count), "stop": 0} if fused:
                    self._strip = count
                case _:
                    raise WeightsError(file, f"has a decoder that can not be streamed exactly: {step}")

    def of(self, name: str) -> bytes:
        """The bytes of a token inside a text."""
        if self._byte_level:  # added tokens may have characters outside the alphabet
            spelled = all(char in BYTES for char in name)
            return bytes(BYTES[char] for char in name) if spelled else name.encode()
        if self._byte_fallback and (byte := BYTE_TOKEN.fullmatch(name)):
            return bytes.fromhex(byte[1])
        for old, new in self._replaced:
            name = name.replace(old, new)
        return name.encode()

    def of_first(self, name: str) -> bytes:
        """The bytes of the first token of a whole text."""
        return self.of(name.replace(self._first_without, "") if self._first_without else name)

    def whole(self, text: str) -> str:
        """A whole text without the leading spaces that its tokenizer adds."""
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self._strip) :]


def without_prefix(step: Any) -> Any:
    """A normalizer or a pre-tokenizer of a tokenizer.json, changed to put no space before a text."""
    match step:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return {**step, "prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return {**step, "add_prefix_space": False}
        case {"type": "Sequence"}:
            name = "normalizers" if "normalizers" in step else "pretokenizers"
            return {**step, name: [each for each in map(without_prefix, step[name]) if each is not None]}
    return step


# A lower bound for the tokens of a text, from its length alone: a text that is too long is not encoded. The
# bound holds only if no step of the tokenizer drops text, so every step is checked. If a step may drop text
# (a normalizer that strips, unknown words), there is no bound.

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
