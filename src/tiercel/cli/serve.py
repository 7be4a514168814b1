"""`tiercel serve`: serves a model over HTTP. First it prints every choice it made."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tiercel.cli import options as o
from tiercel.cli.config_file import ConfigFile
from tiercel.cli.ending import ends_at_once
from tiercel.config import CacheConfig, is_loopback, parse_address
from tiercel.engine.config import HOST_MEMORY, Build, EngineConfig
from tiercel.errors import ConfigError, WeightsError
from tiercel.models.families import folder_of, name_of
from tiercel.models.hub import is_hub_name
from tiercel.models.wish import Choice
from tiercel.server.http.logs import start_logging
from tiercel.server.http.tenants import Tenants
from tiercel.server.options import ServerOptions
from tiercel.storage.open import shown, why_not

if TYPE_CHECKING:
    from tiercel.events import EventPublisher
    from tiercel.server.listen import Server

log = logging.getLogger("tiercel.server")

SWITCH_S = 0.0001
"""How long a thread may go on while others wait for Python's interpreter. The engine waits as long several
times in each step while a client's large body is read: tokens beside 16,000 messages took 18 times as long
with 0.5 ms, 5 times with 0.1 ms, 3.5 times with 0.02 ms. Nothing is lost where no thread waits."""


@o.with_settings(ServerOptions, Build, EngineConfig, CacheConfig, host_memory=HOST_MEMORY)
def serve(
    model: o.Model = o.MODEL,
    named: o.NamedModel = None,
    config: ConfigFile = None,  # noqa: ARG001 (it has set the defaults of the others)
    settings: Any = None,
) -> None:
    """Serve a model: OpenAI's API and SGLang's, on a tiered cache."""
    model = named or model
    build = o.made(Build, settings, model=model)
    engine_config = o.made(EngineConfig, settings, cache=o.made(CacheConfig, settings))
    options = o.made(ServerOptions, settings, loopback=is_loopback(settings["host"]))
    # The store of the command line may be attached again, unless it is a class.
    if build.store is not None and not why_not(build.store, [build.store]):
        options = replace(options, store_allow=(*options.store_allow, build.store))
    with ExitStack() as ending:
        with ends_at_once():
            ending.callback(start_logging(options.log_format, options.log_level).close)
            server, options, door = _start(build, engine_config, options, ending)
        _listen(server, options, door)


def _start(
    build: Build, config: EngineConfig, options: ServerOptions, ending: ExitStack
) -> tuple[Server, ServerOptions, socket.socket]:
    """All that can be opened and checked without the model comes first: an error there costs no minutes."""
    from tiercel.engine.sources import open_sources
    from tiercel.storage.open import open_peers

    if not is_hub_name(build.model) and not (folder := folder_of(build.model)).is_dir():
        raise WeightsError(folder, "is no folder")
    door = ending.enter_context(_bind(options.host, options.port))
    store = open_sources(build, config.cache)
    peers = open_peers(build.peer, key=build.share_key or "")
    options = replace(options, prefillers=tuple(peer.address for peer in peers.values()))
    if options.keys_file is not None:
        options = replace(options, tenants=Tenants(Path(options.keys_file)))
    publisher = _publisher(build, options, ending)

    from tiercel.peers.offering import open_listener, where
    from tiercel.replay.record import Recorder, open_trace
    from tiercel.replay.server import TracedServer
    from tiercel.server.http.traces import open_traces
    from tiercel.server.listen import Server, check_certificate

    check_certificate(options)
    trace = open_trace(options.trace) if options.trace is not None else None
    listener = None
    if build.share_pages is not None:
        listener = open_listener(build.share_pages)
        host, port = build.share_pages.rpartition(":")[0], listener.getsockname()[1]
        options = replace(options, pages_address=f"{host}:{port}")  # the host as requests will spell it
    traces = open_traces()
    if traces is not None:
        ending.callback(traces.close)

    from tiercel.engine.build import open_engine
    from tiercel.engine.service import EngineService

    engine, choices = open_engine(build, config, store)
    options = replace(options, model_path=str(folder_of(build.model).absolute()))
    if publisher is not None:
        engine.cache.watch(publisher)
    show([*choices, *_told(publisher), *_unread()], options)
    names = *options.model_names, name_of(build.model)
    service = EngineService(engine, names[0], ", ".join(map(shown, build.sources)), publisher)
    if trace is not None:
        recorder = Recorder(trace, TracedServer.of(names[0], engine.cache, engine.config))
        ending.callback(recorder.close)
        engine.scheduler.finished = recorder.ended
    ending.callback(service.close, 0.0)  # `_listen` has waited for running answers
    if listener is not None:
        at = parse_address("share_pages", options.pages_address or "")
        service.offer_pages(listener, at=at, key=build.share_key or "", mooncake=build.share_mooncake)
        say(f"offering host pages at {where(listener)}", options)
    if peers:
        service.pull_prompts(peers, build.prefill_wait_s)
    if options.tenants is not None:
        service.limit_tenants(options.tenants.cache_limits)
    return Server(service, options, traces), options, door


def _publisher(build: Build, options: ServerOptions, ending: ExitStack) -> EventPublisher | None:
    from tiercel.events import EventPublisher

    if options.kv_events is None:
        return None
    publisher = EventPublisher(
        options.kv_events, page_tokens=build.tokens_of_page, replay_endpoint=options.kv_events_replay
    )
    ending.callback(publisher.close)
    return publisher


def _told(publisher: EventPublisher | None) -> Iterator[Choice]:
    """The choices about where KV events go."""
    from tiercel.events import EVERYWHERE

    if publisher is None:
        return
    for what, address in (("KV events", publisher.endpoint), ("their replay", publisher.replay_endpoint)):
        if address is not None:
            how = "connects to" if publisher.connects and what == "KV events" else "bound"
            open_to_all = address.removeprefix("tcp://").rpartition(":")[0].strip("[]") in EVERYWHERE
            why = "EVERY interface: whoever connects reads token ids, without a key" if open_to_all else ""
            yield Choice(what, f"{how} {address}", why or "--kv-events")


def _unread() -> Iterator[Choice]:
    """A line only if a variable was set in vain."""
    if names := ", ".join(o.unread_variables(serve)):
        yield Choice("environment", names, "no option reads it")


def say(text: str, options: ServerOptions) -> None:
    """Print a text for people as it is, and for programs that read the log as a line of the log."""
    if options.log_format == "json":
        log.info("%s", text)
    else:
        typer.echo(text, err=True)


def show(choices: Sequence[Choice], options: ServerOptions) -> None:
    """Every choice that was made, with its reason."""
    if options.log_format == "json":
        log.info("starting", extra={"fields": {choice.what: choice.value for choice in choices}})
        return
    console = Console(stderr=True)
    table = Table(title="tiercel serve", show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")  # a long path is not cut
    for choice in choices:
        table.add_row(choice.what, escape(choice.value), f"[dim]{escape(choice.why)}[/dim]")
    Console(stderr=True, width=None if console.is_terminal else o.PIPE_WIDTH).print(table)


def _bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet: whether its port is free is known before weights are read. It is
    marked as TCP: only then asyncio sets TCP_NODELAY, without which small writes wait 40 ms."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((host, port))
    except OSError as error:
        door.close()
        raise _no_port(host, port, error) from error
    return door


def _no_port(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError("--port", port, f"can not listen on {host}: {error}")


def _listen(server: Server, options: ServerOptions, door: socket.socket) -> None:
    def end(*_: object) -> None:
        server.should_exit = True

    # A signal may come before uvicorn listens for it. And uvicorn stops on a signal and then raises it again:
    # it must not kill the process before the cleanup.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # what was loaded stays: the collector need not visit it again
    try:
        door.listen(2048)  # clients that connect before the server runs are queued, not refused
    except OSError as error:  # another server listens there since
        raise _no_port(options.host, options.port, error) from error
    scheme = "http" if options.tls_cert is None else "https"
    address = f"{scheme}://{options.host}:{door.getsockname()[1]}"
    say(f"listening on {address} (API at {address}/v1, calls at {address}/docs)", options)
    say(f"the cache at work: open {address}/ in a browser", options)
    server.run(sockets=[door])
