"""How many bytes a spec takes and how many tokens a given memory holds: the figures of `tiercel spec`."""

from __future__ import annotations

from typing import Any

from tiercel.errors import ConfigError
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.stream import Keep, State, Stream, Window
from tiercel.types import Kind

Figures = dict[str, Any]


def capacity_of(
    spec: CacheSpec, *, device_bytes: int | None = None, host_bytes: int | None = None
) -> Figures:
    """Everything as JSON writes it. `device` and `host` are None if their memory was not given.

    A tail takes whole places.
    """
    return {
        "model": spec.model,
        "form": spec.form.hex(),
        "page_tokens": spec.page_tokens,
        "streams": [_size(spec, stream) for stream in spec.streams],
        "bytes_per_page": spec.page_bytes,
        "bytes_per_tail": spec.tail_bytes,
        "bytes_per_token": spec.page_bytes // spec.page_tokens,
        "pages_per_window": spec.pages_per_window,
        "replay_tokens": spec.replay_tokens,
        "device": _fit(spec, "device_bytes", device_bytes, spec.units_per_tail * spec.unit_bytes),
        "host": _fit(spec, "host_bytes", host_bytes, spec.places_per_tail * spec.place_bytes),
    }


def _size(spec: CacheSpec, stream: Stream) -> Figures:
    """One stream over all its layers. It is in pages or in tails: the other size is 0. `bytes_per_token` is
    what each token of a long text adds, in whole bytes; tails do not grow with the text."""
    in_page, size = stream.kind is Kind.PAGE, spec.bytes_of(stream)
    return {
        "name": stream.name,
        "keep": _keep_text(stream.keep),
        "layers": len(stream.layers),
        "selected": stream.selected,
        "tokens_per_entry": stream.tokens_per_entry,
        "bytes_per_row": spec.row_bytes(stream),
        "bytes_per_page": size if in_page else 0,
        "bytes_per_tail": 0 if in_page else size,
        "bytes_per_token": size // spec.page_tokens if in_page else 0,
    }


def _keep_text(keep: Keep) -> str:
    match keep:
        case Window(tokens):
            return f"window {tokens}"
        case State(entries):
            return f"state {entries}"
    return "prefix"


def _fit(spec: CacheSpec, field: str, memory: int | None, tail_bytes: int) -> Figures | None:
    """What one memory holds if it holds only pages, or only tails. A spec without pages has 0 pages, and one
    without tails 0 tails."""
    if memory is None:
        return None
    if memory < 0:
        raise ConfigError(field, memory, "must not be negative")
    pages = memory // spec.page_bytes if spec.page_bytes else 0
    tails = memory // tail_bytes if tail_bytes else 0
    return {"bytes": memory, "pages": pages, "tokens": pages * spec.page_tokens, "tails": tails}
