"""The server that wrote a trace: what it served, and how, as the first line of the trace says.

    {"tiercel_trace": 1, "model": …, "page_tokens": 256, "began_s": …, "spec": {…}, "step_tokens": …, …}

A replay takes all of it, unless the user says otherwise. Traces of older servers name the model and the page
size only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercel.engine.config import DevicePlaces, EngineConfig
from tiercel.errors import SpecError, TraceError
from tiercel.spec.cache_spec import CacheSpec

if TYPE_CHECKING:  # a trace is read without an engine
    from tiercel.cache import TieredCache

VERSION = 1


@dataclass(frozen=True)
class TracedServer:
    """None: the trace does not say."""

    model: str
    page_tokens: int
    spec: CacheSpec | None = None
    """The whole declaration, with the streams of a draft."""
    step_tokens: int | None = None
    context_tokens: int | None = None
    running_max: int | None = None
    places: DevicePlaces | None = None
    """What its device memory was split into."""
    host_bytes: int | None = None

    @staticmethod
    def of(model: str, cache: TieredCache, config: EngineConfig) -> TracedServer:
        """The server that an engine runs in. `config`: with all choices made."""
        from tiercel.engine.scheduler import STEP_TOKENS  # here: a trace is read without it

        sizes = cache.config
        return TracedServer(
            model,
            cache.spec.page_tokens,
            replace(cache.spec, model=model),
            config.step_tokens or STEP_TOKENS,
            config.context_tokens,
            config.running_max,
            DevicePlaces(sizes.device_pages, sizes.staging_tails, sizes.staged_pages),
            sizes.host_bytes,
        )

    def head(self) -> dict[str, Any]:
        """The first line of a trace. `from_head` is the inverse."""
        told = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}
        if self.spec is not None:
            told["spec"] = self.spec.to_dict()
            # What a declaration does not hold, as no byte of a page depends on it.
            told["second"] = self.spec.second
            told["drafts"] = [stream.name for stream in self.spec.streams if stream.draft]
        return {"tiercel_trace": VERSION, **told}

    @staticmethod
    def from_head(file: Path, line: int, head: Mapping[str, Any]) -> TracedServer:
        if head.get("tiercel_trace") != VERSION:
            raise TraceError(file, f"is of version {head.get('tiercel_trace')!r}, not {VERSION}", line)
        numbers = ("page_tokens", "step_tokens", "context_tokens", "running_max", "host_bytes")
        counts = {name: head[name] for name in numbers if name in head}
        for name, value in counts.items():
            least = 0 if name == "host_bytes" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise TraceError(file, f"{name} = {value!r}: must be a whole number", line)
        if not isinstance(head.get("model", ""), str):
            raise TraceError(file, f"model = {head['model']!r}: must be a name", line)
        if not counts.get("page_tokens"):
            raise TraceError(file, "has no page_tokens", line)
        try:
            spec = None if "spec" not in head else _spec_of(head)
            places = None if "places" not in head else DevicePlaces(*map(int, head["places"]))
        except (SpecError, TypeError, ValueError) as error:
            raise TraceError(file, f"its spec or its places can not be read: {error}", line) from error
        return TracedServer(head.get("model", ""), spec=spec, places=places, **counts)


def _spec_of(head: Mapping[str, Any]) -> CacheSpec:
    spec, drafts = CacheSpec.from_dict(head["spec"]), head.get("drafts", ())
    streams = tuple(replace(stream, draft=stream.name in drafts) for stream in spec.streams)
    return replace(spec, streams=streams, second=tuple(head.get("second", ())))
