"""What `tiercel replay` and `tiercel plan` share: their options, the traffic, and how it is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tiercel.cli.spec import declared_by
from tiercel.config import CacheConfig, check_settings, parse_bytes, setting
from tiercel.errors import ConfigError
from tiercel.models.families import FOLDERS

if TYPE_CHECKING:
    from tiercel.replay.report import Report
    from tiercel.replay.run import Serving
    from tiercel.replay.server import TracedServer
    from tiercel.replay.sizes import Sizes
    from tiercel.replay.trace import Trace
    from tiercel.spec.cache_spec import CacheSpec

WITHOUT = ("host_memory", "evict", "layout", "copier", "huge_pages", "store_timeout_s", "sparse")
"""Settings of the cache that have options of their own here, or that change nothing without bytes."""

MODEL = "deepseek-v4-flash"
DEVICE_MEMORY = "20GiB"
HOST_MEMORY = "200GiB"
OWN_DRAFT = "mtp"
TRACES = "the trace's, or"
"""How the help begins to tell a default that a server's trace may name."""

Files = Annotated[list[str], typer.Argument(metavar="TRACE...", help="Recorded traffic: docs/replay.md.")]
Sparse = Annotated[
    bool | None,
    typer.Option(
        "--sparse/--whole",
        help="Selected entries stay on the host where the device has no room.",
        show_default=f"{TRACES} whole",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Plot = Annotated[str | None, typer.Option("--plot", help="Draw a picture: out.svg, out.png, …")]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options of both commands. None: what the trace tells of the server that wrote it, or else the default
    that the help names."""

    model: str | None = setting(
        None,
        "As MODEL of `tiercel spec`.",
        otherwise=f"{TRACES} {MODEL}",
    )
    page_tokens: int | None = setting(None, "Tokens in one page.", least=1, otherwise=f"{TRACES} the model's")
    format: str | None = setting(
        None, "Element format, such as fp8 or bf16.", otherwise=f"{TRACES} the model's"
    )
    draft: str | None = setting(
        None, "What guesses, as its entries take room: a model, or mtp.", otherwise=f"{TRACES} none"
    )
    batch: int | None = setting(
        None, "Requests that run at the same time.", least=1, otherwise=f"{TRACES} 64"
    )
    step_tokens: int | None = setting(None, "Tokens of one step.", least=1, otherwise=f"{TRACES} 8192")
    context_tokens: int | None = setting(
        None, "Tokens of the longest text.", least=1, otherwise=f"{TRACES} what fits on the device"
    )
    stages: int = setting(1, "Stages of layers. Each has the device memory that is named.", least=1)
    one_at_a_time: bool = setting(False, "No request overlaps another one.", flag="--one-at-a-time")
    prefill_rate: float | None = setting(
        None, "Prompt tokens computed per second.", otherwise=f"{TRACES} 15000"
    )
    token_time: float | None = setting(
        None, "Seconds from token to token of running answers.", otherwise=f"{TRACES} 0.015"
    )
    link_rate: str = setting("55GB", "Bytes per second between host and device.")
    store_rate: str = setting("3GB", "Bytes per second that the store reads, and writes.")
    session_every: float = setting(0.0, "Each further file begins so many seconds later.")
    requests: int | None = setting(None, "Only the first requests.", least=1, otherwise="all")
    text_tokens: int | None = setting(
        None, "Tell how many texts of so many tokens fit.", least=1, otherwise="the longest of the trace"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if not 0 <= self.session_every < 1e9:
            raise ConfigError("--session-every", self.session_every, "must be seconds")


@dataclass(frozen=True)
class Traffic:
    """Recorded requests, and what they are replayed with."""

    trace: Trace
    spec: CacheSpec
    server: TracedServer
    """What the trace tells of the server that wrote it."""
    why: str
    """Who named the model."""
    sparse: bool

    def __str__(self) -> str:
        return f"model {self.spec.model}, pages of {self.spec.page_tokens} tokens ({self.why})"

    def device_of(self, memory: str | None, stages: int) -> Sizes:
        """The device memory that is named; or else that of the server, split as it was there."""
        from tiercel.replay.sizes import Sizes

        places, of_server = self.server.places, self.server.spec
        if memory is not None or places is None or stages > 1 or of_server != self.replayed:
            return Sizes(parse_bytes(memory or DEVICE_MEMORY, "--device-memory"))
        size = places.device_pages * self.spec.frame_bytes + places.staging_tails * self.spec.tail_bytes
        return Sizes(size, places=places)

    @property
    def replayed(self) -> CacheSpec:
        """The declaration where there is host memory."""
        return self.spec.apart if self.sparse else self.spec


def opened(files: list[str], asked: Asked, *, sparse: bool | None) -> Traffic:
    """The trace in pages of the model: the one that is asked for, or that the trace names."""
    from dataclasses import replace

    from tiercel.replay.formats import read_trace, servers_of
    from tiercel.replay.server import TracedServer

    servers = servers_of(files)
    spec, why = _declared(servers, asked)
    if sparse is None:
        sparse = bool(servers and servers[-1].spec and servers[-1].spec.second and spec.apart.selective)
    elif sparse and not spec.apart.selective:
        raise ConfigError("--sparse", "on", f"{spec.model} selects no entries that may stay on the host")
    trace = read_trace(files, spec.page_tokens, session_every_s=asked.session_every)
    if asked.requests is not None:
        trace = replace(trace, requests=trace.requests[: asked.requests])
    return Traffic(trace, spec, servers[-1] if servers else TracedServer("", spec.page_tokens), why, sparse)


def _declared(servers: list[TracedServer], asked: Asked) -> tuple[CacheSpec, str]:
    """What is cached of a token, and who said so."""
    from dataclasses import replace

    from tiercel.spec import PRESETS

    server, model, why = servers[-1] if servers else None, asked.model, "--model"
    if model is None and server is None:
        model, why = MODEL, "by default: the trace names no model"
    elif model is None and server is not None:
        why = "the trace names them"
        others = [each for each in servers if (each.model, each.spec) != (server.model, server.spec)]
        if others:
            raise ConfigError(
                "--model", None, f"the trace names {others[-1].model} and {server.model}: choose"
            )
        if server.spec is not None and asked.format is None and asked.draft is None:
            spec = replace(server.spec, second=())
            return replace(spec, page_tokens=asked.page_tokens or spec.page_tokens), why
        model = next((name for name in (*PRESETS, *FOLDERS) if name == server.model.lower()), None)
        if model is None:
            raise ConfigError(
                "--model",
                None,
                f"the trace names {server.model!r}, which is no preset: say which model it is",
            )
    assert model is not None
    page_tokens = asked.page_tokens or (None if server is None else server.page_tokens)
    spec = declared_by(model, page_tokens, asked.format, asked.draft == OWN_DRAFT)
    if asked.draft is not None and asked.draft != OWN_DRAFT:
        spec = spec.with_draft(declared_by(asked.draft, spec.page_tokens, None))
    return spec, why


def served(traffic: Traffic, asked: Asked, cache: CacheConfig) -> Serving:
    """What is not asked for is as it was on the server that wrote the trace, if the trace tells."""
    from dataclasses import replace

    from tiercel.replay.run import Rates, Serving

    server, usual = traffic.server, Serving()
    store_bytes_s = parse_bytes(asked.store_rate, "--store-rate")
    rates = Rates(
        link_bytes_s=parse_bytes(asked.link_rate, "--link-rate"),
        store_read_bytes_s=store_bytes_s,
        store_write_bytes_s=store_bytes_s,
    ).measured(traffic.trace)
    given = {"prefill_tokens_s": asked.prefill_rate, "token_s": asked.token_time}
    return Serving(
        replace(rates, **{name: value for name, value in given.items() if value is not None}),
        asked.batch or server.running_max or usual.batch,
        asked.one_at_a_time,
        asked.step_tokens or server.step_tokens or usual.step_tokens,
        asked.context_tokens or server.context_tokens,
        asked.stages,
        cache=cache,
    )


def overload(report: Report) -> str:
    """Empty: one device bears the traffic."""
    if report.devices == 1:
        return ""
    return (
        f"overloaded: this trace needs about {report.devices} devices. One computes for "
        f"{report.busy_s:,.0f} s what comes in {report.arrivals_s:,.0f} s"
    )
