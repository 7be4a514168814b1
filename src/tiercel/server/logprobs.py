"""Logprobs in four forms: chat, completions, vLLM's for prompts, SGLang's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from tiercel.engine.ask import TokenOut
from tiercel.text.text import Text

LEAST = -9999.0
"""OpenAI's value for a token with probability 0: JSON has no infinity."""

Triple = tuple[float | None, int, str | None]
"""SGLang's form: logprob, token, and its text if requested."""


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)


def of_chat(text: Text, tokens: Iterable[TokenOut], top: int) -> dict[str, Any]:
    content = [
        _named(text, out.token, out.logprob)
        | {"top_logprobs": [_named(text, *each) for each in out.top[:top]]}
        for out in tokens
    ]
    return {"content": content, "refusal": None}


def _named(text: Text, token: int, logprob: float | None) -> dict[str, Any]:
    raw = text.piece_bytes(token)
    return {"token": text.piece(token), "logprob": finite(logprob or 0.0), "bytes": list(raw)}


def of_completion(text: Text, tokens: Sequence[TokenOut], top: int, offset: int) -> dict[str, Any]:
    """`offset`: where the first token begins in the text of the choice."""
    pieces = [text.piece(out.token) for out in tokens]
    return {
        "tokens": pieces,
        "token_logprobs": [finite(out.logprob) for out in tokens],
        "top_logprobs": [_best(text, out, top) for out in tokens],
        "text_offset": list(accumulate(map(len, pieces), initial=offset))[:-1],
    }


def _best(text: Text, out: TokenOut, top: int) -> dict[str, float | None] | None:
    """The best tokens and the token itself, by text. If two have the same text, the better one is kept."""
    if out.logprob is None:
        return None
    best: dict[str, float | None] = {}
    for token, logprob in sorted((*out.top[:top], (out.token, out.logprob)), key=lambda each: -each[1]):
        best.setdefault(text.piece(token), finite(logprob))
    return best


def of_prompt(text: Text, tokens: Iterable[TokenOut], top: int) -> list[dict[str, Any] | None]:
    """By token id. Only the best tokens have a rank."""
    return [None if out.logprob is None else _by_token(text, out, out.logprob, top) for out in tokens]


def _by_token(text: Text, out: TokenOut, logprob: float, top: int) -> dict[str, Any]:
    ranks = {token: rank for rank, (token, _) in enumerate(out.top, start=1)}
    chosen = {out.token: logprob} | dict(out.top[:top])
    return {
        str(token): {"logprob": finite(value), "rank": ranks.get(token), "decoded_token": text.piece(token)}
        for token, value in chosen.items()
    }


def triples(text: Text | None, tokens: Iterable[TokenOut]) -> list[Triple]:
    """`text` None: the triples have no text."""
    return [_triple(text, out.token, out.logprob) for out in tokens]


def top_triples(text: Text | None, tokens: Iterable[TokenOut], top: int) -> list[list[Triple] | None]:
    return [
        None if out.logprob is None else [_triple(text, *each) for each in out.top[:top]] for out in tokens
    ]


def _triple(text: Text | None, token: int, logprob: float | None) -> Triple:
    return finite(logprob), token, text.piece(token) if text else None
