"""`tiercel serve`: serves a model over HTTP. First it prints every choice it made."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tiercel.cli import options as o
from tiercel.config import CacheConfig
from tiercel.engine.config import Build, EngineConfig
from tiercel.errors import ConfigError
from tiercel.models.families import EMBEDDED, folder_of
from tiercel.storage.allow import why_not

if TYPE_CHECKING:
    from tiercel.engine.build import Choice
    from tiercel.engine.engine import Engine
    from tiercel.engine.service import EngineService
    from tiercel.events import EventPublisher
    from tiercel.server.options import ServerOptions

WIDTH = 120


Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)]
StoreAllow = Annotated[
    list[str] | None,
    typer.Option(
        help="Stores that PUT /v1/cache/store may attach: file:///folder, redis://host. Repeatable."
    ),
]
KvEvents = Annotated[str | None, typer.Option(help="Publish cache events for routers: tcp://*:5557")]
KvEventsReplay = Annotated[
    str | None, typer.Option(help="Address where routers get missed events: tcp://*:5558")
]
ApiKey = Annotated[
    list[str] | None, typer.Option(help="A key that clients must send. Repeatable.", envvar="TIERCEL_API_KEY")
]
AdminKey = Annotated[
    str | None,
    typer.Option(
        help="The key for admin calls. Without it, --api-key opens them.", envvar="TIERCEL_ADMIN_KEY"
    ),
]
ServedModelName = Annotated[
    list[str] | None, typer.Option(help="A name of the model for clients. Repeatable.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse requests with unknown fields.")]
PriorityMax = Annotated[
    int, typer.Option(help="Requests may set a priority from -N to N; 0: they may not.", min=0)
]
ConnectionsMax = Annotated[
    int, typer.Option(help="Open connections; beyond that the one idle for longest is closed.", min=1)
]
ShutdownS = Annotated[int, typer.Option(help="Seconds for running answers at shutdown.", min=0)]


@o.with_settings(Build, EngineConfig, CacheConfig, host_memory=o.HOST_MEMORY)
def serve(  # noqa: PLR0913 - a command has as many arguments as options
    model: o.Model = o.MODEL,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    store_allow: StoreAllow = None,
    kv_events: KvEvents = None,
    kv_events_replay: KvEventsReplay = None,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    served_model_name: ServedModelName = None,
    strict: Strict = False,
    priority_max: PriorityMax = 0,
    connections_max: ConnectionsMax = 1000,
    shutdown_s: ShutdownS = 10,
    settings: Any = None,
) -> None:
    """Serve a model: OpenAI's API and SGLang's, on a tiered cache."""
    from tiercel.engine.build import open_engine
    from tiercel.engine.service import EngineService
    from tiercel.server.keys import is_loopback
    from tiercel.server.options import ServerOptions

    build = o.made(Build, settings, model=model)
    config = o.made(EngineConfig, settings, cache=o.made(CacheConfig, settings))
    engine, choices = open_engine(build, config)
    with ExitStack() as ending:
        publisher = _publisher(engine, kv_events, kv_events_replay, ending)
        show(choices)
        folder = folder_of(model).absolute()
        names = served_model_name or [model if model == EMBEDDED else folder.name]
        service = EngineService(engine, names[0], build.store, publisher)
        ending.callback(service.close, 0.0)  # `_listen` has waited for running answers
        options = ServerOptions(
            api_key=tuple(api_key or ()),
            admin_key=admin_key,
            loopback=is_loopback(host),
            store_allow=(*(store_allow or ()), *_named(build.store)),
            model_names=tuple(names[1:]),
            model_path=str(folder),
            strict=strict,
            priority_max=priority_max,
            connections_max=connections_max,
        )
        _listen(service, host, port, options, shutdown_s)


def _publisher(
    engine: Engine, endpoint: str | None, replay_endpoint: str | None, ending: ExitStack
) -> EventPublisher | None:
    from tiercel.events import EventPublisher

    if endpoint is None:
        return None
    publisher = EventPublisher(endpoint, page_tokens=engine.page_tokens, replay_endpoint=replay_endpoint)
    ending.callback(publisher.close)
    engine.cache.watch(publisher)
    return publisher


def show(choices: Sequence[Choice]) -> None:
    console = Console(stderr=True)
    table = Table(title="tiercel serve", show_header=False)
    for choice in choices:
        table.add_row(choice.what, choice.value, f"[dim]{choice.why}[/dim]")
    Console(stderr=True, width=None if console.is_terminal else WIDTH).print(table)


def _named(store: str | None) -> list[str]:
    """The store of the command line may be attached again, unless it is a class."""
    return [] if store is None or why_not(store, [store]) else [store]


def _bind(host: str, port: int) -> socket.socket:
    """A socket marked as TCP: only then asyncio sets TCP_NODELAY, without which small writes wait 40 ms."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # clients that connect before the server runs are queued, not refused
    except OSError as error:
        listener.close()
        raise ConfigError("--port", port, f"can not listen on {host}: {error}") from error
    return listener


def _listen(service: EngineService, host: str, port: int, options: ServerOptions, shutdown_s: int) -> None:
    from tiercel.server.listen import Server

    server = Server(service, options, shutdown_s=shutdown_s, host=host, port=port)
    # uvicorn stops on a signal and then raises it again; it must not kill the process before the cleanup.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    listener = _bind(host, port)
    address = f"http://{host}:{listener.getsockname()[1]}"
    typer.echo(f"listening on {address} (API at {address}/v1, calls at {address}/docs)", err=True)
    server.run(sockets=[listener])
