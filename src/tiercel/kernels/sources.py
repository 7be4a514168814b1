"""Digests of source files, and of everything else that the results of a program depend on."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path


def digest_of(*words: str, files: Iterable[Path] = ()) -> str:
    """A digest of the words and of the files' content. The files' paths do not matter."""
    whole = hashlib.sha256()
    for part in (*(word.encode() for word in words), *(file.read_bytes() for file in sorted(files))):
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


def host_words() -> tuple[str, ...]:
    """What the last bit of a result may depend on besides the source: vector unit, torch's build, libm."""
    import torch

    return platform.machine(), " ".join(platform.libc_ver()), torch.__config__.show()
