"""URLs of stores without their passwords: for answers, errors and logs."""

from __future__ import annotations

import re
from urllib.parse import unquote

HIDDEN = "***"
"""Replaces a password."""

_SECRET_FIELD = re.compile(r"(?<=[?&])([^=&#]*(?:pass|secret|token|key)[^=&#]*=)([^&#]+)", re.IGNORECASE)


def hide(text: str, url: str) -> str:
    """Remove the passwords of a URL from a text, in their escaped and their plain form."""
    for secret in sorted(_secrets(url), key=len, reverse=True):
        for spelled in (secret, unquote(secret)):
            text = text.replace(spelled, HIDDEN)
    return text


def _secrets(url: str) -> set[str]:
    """The passwords of a URL: user:…@host, ?password=…

    A password with a slash, or another character that should have been escaped, is found as well.
    """
    place = url.partition("://")[2]
    front, at, _ = place.rpartition("@")
    name, colon, password = front.partition(":")
    inside = at and colon and not re.search(r"[/?#]", name) and not re.match(r"\d+[/?#]", password)
    fields = {value for _, value in _SECRET_FIELD.findall(url)}
    return fields | ({password} if inside and password else set())
