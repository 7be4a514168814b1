"""How many bytes a spec takes and how many tokens a given memory holds. Arithmetic only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tiercel.errors import ConfigError
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.stream import Keep, Prefix, State, Stream, Window


@dataclass(frozen=True)
class StreamSize:
    """One stream over all its layers. A stream is in pages or in tails: the other size is 0."""

    name: str
    keep: str
    layers: int
    tokens_per_entry: int
    bytes_per_row: int
    bytes_per_page: int
    bytes_per_tail: int
    bytes_per_token: int
    """What each token of a long text adds, whole bytes. Tails do not grow with the text."""


@dataclass(frozen=True)
class Fit:
    """What one memory holds when it holds nothing else: so many pages, or so many tails, not both."""

    bytes: int
    pages: int
    tokens: int
    tails: int


@dataclass(frozen=True)
class Capacity:
    """The table of one spec. `device` and `host` are None when their memory was not given."""

    model: str
    form: str
    page_tokens: int
    streams: tuple[StreamSize, ...]
    bytes_per_page: int
    bytes_per_tail: int
    bytes_per_token: int
    pages_per_window: int
    replay_tokens: int | None
    device: Fit | None
    host: Fit | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def capacity_of(
    spec: CacheSpec, *, device_bytes: int | None = None, host_bytes: int | None = None
) -> Capacity:
    """Device memory has separate places for tails; on the host a tail takes whole pages."""
    host_tail_bytes = spec.host_pages_per_tail * spec.host_page_bytes
    return Capacity(
        model=spec.model,
        form=spec.form.hex(),
        page_tokens=spec.page_tokens,
        streams=tuple(_size(spec, stream) for stream in spec.streams),
        bytes_per_page=spec.page_bytes,
        bytes_per_tail=spec.tail_bytes,
        bytes_per_token=spec.page_bytes // spec.page_tokens,
        pages_per_window=spec.pages_per_window,
        replay_tokens=spec.replay_tokens,
        device=_fit(spec, "device_bytes", device_bytes, spec.tail_bytes),
        host=_fit(spec, "host_bytes", host_bytes, host_tail_bytes),
    )


def _size(spec: CacheSpec, stream: Stream) -> StreamSize:
    in_page = isinstance(stream.keep, Prefix)
    size = spec.bytes_of(stream)
    return StreamSize(
        name=stream.name,
        keep=_keep_text(stream.keep),
        layers=len(stream.layers),
        tokens_per_entry=stream.tokens_per_entry,
        bytes_per_row=spec.row_bytes(stream),
        bytes_per_page=size if in_page else 0,
        bytes_per_tail=0 if in_page else size,
        bytes_per_token=size // spec.page_tokens if in_page else 0,
    )


def _keep_text(keep: Keep) -> str:
    match keep:
        case Prefix():
            return "prefix"
        case Window(tokens):
            return f"window {tokens}"
        case State(entries):
            return f"state {entries}"


def _fit(spec: CacheSpec, field: str, memory: int | None, tail_bytes: int) -> Fit | None:
    """Pages without bytes, or tails without bytes, are counted as none: they need no memory."""
    if memory is None:
        return None
    if memory < 0:
        raise ConfigError(field, memory, "must not be negative")
    pages = memory // spec.page_bytes if spec.page_bytes else 0
    tails = memory // tail_bytes if tail_bytes else 0
    return Fit(bytes=memory, pages=pages, tokens=pages * spec.page_tokens, tails=tails)
