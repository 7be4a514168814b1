"""Names of pages. Pages with the same name hold the same bytes.

The key of a page is the SHA-256 of a seed and of every token from the start of the text to the page's end,
read off a running hash at each page boundary:

    seed ─ page 0 ─┬─ page 1 ─┬─ page 2 ─┬─ …          seed = identity, page size, namespace
                   ▼          ▼          ▼
                 key 0      key 1      key 2

So a key names its whole prefix: if a tree holds key i, it can hold it only below key i - 1. Each token is
hashed once, also when the text grows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tiercel.errors import TokenError
from tiercel.types import Namespace, PageKey

Tokens = Sequence[int] | npt.NDArray[Any]

_VERSION = b"tiercel key 2"


class KeyChain:
    """The keys of one text, extended as it grows. Tokens that do not fill a page yet wait in the chain.

    A page may stand for more than its tokens, such as images: `extend` takes bytes that name the rest.
    """

    counted = False
    """Whether what was reused of the text is counted: once, however often it begins again."""

    def __init__(
        self,
        identity: bytes,
        namespace: Namespace,
        page_tokens: int,
        *,
        keep_tokens: bool = False,
        owner: str = "",
    ) -> None:
        self.page_tokens = page_tokens
        self.owner = owner
        """The owner of the pages (`tree.owners`); no part of the keys. Empty: no owner."""
        self.keys: list[PageKey] = []
        self.texts: list[bytes] | None = [] if keep_tokens else None
        """The tokens of each page, for observers that want them."""
        self.tokens = 0
        if not (isinstance(namespace, tuple) and all(isinstance(word, str) for word in namespace)):
            raise TokenError("namespace", namespace, "must be a tuple of words")
        self._hash = _seeded(identity, page_tokens, namespace).copy()
        self._rest = b""
        self._extra: dict[int, bytes] = {}
        self._given: Sequence[PageKey] | None = None

    @classmethod
    def of_keys(cls, keys: Sequence[PageKey], page_tokens: int, *, owner: str = "") -> KeyChain:
        """A text whose pages have names already. `keys` are those of the text and of what may follow it; the
        caller may append to them before `extend`. Tokens are only counted: a full page has its key.

        Required: equal keys mean equal numbers of the same model.
        """
        chain = cls(b"", (), page_tokens, owner=owner)
        chain._given = keys
        return chain

    def extend(self, tokens: Tokens, *, extra: Mapping[int, bytes] | None = None) -> None:
        """Append tokens; bad ones are refused before anything changes. `extra`: what else pages stand for, by
        the number of the page in the text. It is part of the page's key, and of those after it."""
        if self._given is not None:
            if extra:
                raise TokenError("extra", min(extra), "is not for pages that have names already")
            pages = (self.tokens + len(tokens)) // self.page_tokens
            if pages > len(self._given):
                raise TokenError("tokens", len(tokens), f"fill {pages} pages; {len(self._given)} have names")
            self.tokens += len(tokens)
            self.keys += self._given[len(self.keys) : pages]
            return
        data = _token_bytes(tokens)
        if extra:
            late = min(extra)
            if late < len(self.keys):
                raise TokenError("extra", late, f"page {late} has its key already")
            self._extra |= extra
        self.tokens += len(data) // 4
        if self._rest:
            data = self._rest + data
        step = 4 * self.page_tokens
        full = len(data) - len(data) % step
        update, digest = self._hash.update, self._hash.digest
        add = cast(Callable[[bytes], None], self.keys.append)  # a call of PageKey() per page would cost 5 %
        for start in range(0, full, step):
            update(data[start : start + step])
            if self._extra and (more := self._extra.pop(len(self.keys), b"")):
                self._hash = hashlib.sha256(_parts(_VERSION + b" with more", digest(), more))
                update, digest = self._hash.update, self._hash.digest
            add(digest())
            if self.texts is not None:
                self.texts.append(data[start : start + step])
        self._rest = data[full:]


def _token_bytes(tokens: Tokens) -> bytes:
    """Tokens as little-endian uint32; a token that does not fit would make two texts share a key."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise TokenError("tokens", array.shape, "must be a flat list of token ids")
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        raise TokenError("tokens", array.dtype, "token ids are whole numbers")
    if int(np.bitwise_or.reduce(array)) >> 32:  # a bit above the 32nd, or a sign
        bad = int(array[(array < 0) | (array > 2**32 - 1)][0])
        raise TokenError("tokens", bad, "a token id lies between 0 and 2**32 - 1")
    return array.astype("<u4").tobytes()


@lru_cache(maxsize=1024)
def _seeded(identity: bytes, page_tokens: int, namespace: Namespace) -> hashlib._Hash:
    """A hash to copy from: most texts of a server share a few namespaces. Every part carries its length, so
    that no two namespaces run together; the number of words comes before them, so that no word is taken for
    tokens. (Without a namespace there is no number: such keys stay as they were.)"""
    version = _VERSION + b" of %d" % len(namespace) if namespace else _VERSION
    parts = [version, identity, page_tokens.to_bytes(4, "little"), *(word.encode() for word in namespace)]
    return hashlib.sha256(_parts(*parts))


def _parts(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)
