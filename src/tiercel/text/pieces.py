"""The bytes of one token, for the decoders in use.

    ByteLevel                             every character stands for a byte                GPT-2, DeepSeek
    Replace, ByteFallback, Fuse, Strip    `▁` is a space, `<0x0A>` a byte                  Llama, Gemma
    Metaspace, perhaps ByteFallback       `▁` is a space, but not before the first word    SentencePiece

The bytes of a text are those of its tokens. Only the start of a whole text may lose a space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
