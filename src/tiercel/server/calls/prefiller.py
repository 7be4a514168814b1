"""Who computes a prompt for whom, as routers write it into requests and read it in answers (docs/routers.md).

    SGLang    bootstrap_host, bootstrap_port, bootstrap_room           the same for both servers
    vLLM      kv_transfer_params.do_remote_decode                      for the server that computes the prompt
              kv_transfer_params.do_remote_prefill, remote_host, …     for the server that goes on from there

All of them become an `Ask.prefiller`. It has an address that this server was started with, or its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field

from tiercel.asks.ask import Prefiller
from tiercel.config import parse_address
from tiercel.errors import ConfigError
from tiercel.server.http import known
from tiercel.server.http.body import Body, EachOf
from tiercel.server.http.errors import ApiError, conflict, refusal
from tiercel.server.options import ServerOptions

T = TypeVar("T")

Host = Annotated[str, Field(min_length=1, max_length=253)]
Port = Annotated[int, Field(ge=1, le=65535)]
Room = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class KvTransferParams(Body):
    """vLLM's. Which of the `remote_` fields are given depends on its connector."""

    known = known.KV_TRANSFER_PARAMS

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_host: Host | None = None
    remote_port: Port | None = None
    remote_bootstrap_addr: Name | None = None
    """The address in vLLM's Mooncake connector: `http://host:port`."""
    remote_request_id: Name | None = None
    transfer_id: Name | None = None


class BootstrapFields(Body):
    """SGLang's: one value, or one for each prompt. Its router sends null for a port that it was not told."""

    bootstrap_host: Host | EachOf[Host | None] | None = None
    bootstrap_port: Port | EachOf[Port | None] | None = None
    bootstrap_room: Room | EachOf[Room | None] | None = None


def by_bootstrap(fields: BootstrapFields, count: int, options: ServerOptions) -> list[Prefiller | None]:
    """The prefiller of each of `count` prompts."""
    hosts = each("bootstrap_host", fields.bootstrap_host, None, count)
    ports = each("bootstrap_port", fields.bootstrap_port, None, count)
    rooms = each("bootstrap_room", fields.bootstrap_room, None, count)
    if isinstance(fields.bootstrap_room, int):  # prompts with one room have the rooms that follow it
        rooms = [fields.bootstrap_room + index for index in range(count)]
    found: list[Prefiller | None] = []
    for host, port, room in zip(hosts, ports, rooms, strict=True):
        if host is None and port is None and room is None:
            found.append(None)
            continue
        if host is None:
            raise conflict("bootstrap_host", host, "is needed with bootstrap_port or bootstrap_room")
        address = _allowed("bootstrap_host", host, port, options)
        if room is None:
            raise conflict("bootstrap_room", room, "is needed with bootstrap_host")
        found.append(Prefiller(*address, str(room)))
    return found


def by_transfer(params: KvTransferParams | None, request_id: str, options: ServerOptions) -> Prefiller | None:
    """The prefiller for all prompts of a request."""
    if params is None or not (params.do_remote_prefill or params.do_remote_decode):
        return None
    if params.do_remote_prefill and params.do_remote_decode:
        raise conflict("kv_transfer_params.do_remote_decode", True, "not together with do_remote_prefill")
    if params.do_remote_decode:
        if options.pages_address is None:
            raise _refused(
                "kv_transfer_params.do_remote_decode", True, "this server does not share its pages"
            )
        return Prefiller(
            *parse_address("pages_address", options.pages_address), params.transfer_id or request_id
        )
    field, host, port = "kv_transfer_params.remote_host", params.remote_host, params.remote_port
    if params.remote_bootstrap_addr is not None:
        field, written = "kv_transfer_params.remote_bootstrap_addr", params.remote_bootstrap_addr
        try:
            host, port = parse_address(field, written.removeprefix("http://"))
        except ConfigError:
            raise refusal(field, written, "must be http://host:port", "not_an_address") from None
    if host is None:
        raise conflict(field, None, "is needed with do_remote_prefill")
    address = _allowed(field, host, port, options)
    return Prefiller(*address, params.transfer_id or params.remote_request_id or request_id)


def is_elsewhere(prefiller: Prefiller | None, options: ServerOptions) -> bool:
    """Whether another server computes the prompt."""
    own = None if options.pages_address is None else parse_address("pages_address", options.pages_address)
    return prefiller is not None and (prefiller.host, prefiller.port) != own


def transfer_params(prefiller: Prefiller) -> dict[str, Any]:
    """Fields in the answer of the server that computed the prompt: vLLM's proxies put them into the request
    for the other server. Pages are found by their keys, so there are no ids of blocks."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"{prefiller.host}:{prefiller.port}",
        "remote_host": prefiller.host,
        "remote_port": prefiller.port,
        "remote_request_id": prefiller.room,
        "remote_block_ids": [],
    }


def each(field: str, value: T | Sequence[T] | None, default: T, count: int) -> list[T]:
    """One value for each prompt."""
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count  # type: ignore[list-item]
    if len(value) != count:
        raise conflict(field, value, f"has {len(value)} values for {count} prompts")
    return value


def _allowed(field: str, host: str, port: int | None, options: ServerOptions) -> tuple[str, int]:
    """The address, if this server was started with it. Names are compared, not looked up: so a request can
    not make this server connect to any other."""
    own = () if options.pages_address is None else (options.pages_address,)
    addresses = [parse_address("prefillers", each) for each in (*options.prefillers, *own)]
    if not addresses:
        raise _refused(field, host, "this server was started without peers")
    fitting = [one for one in addresses if one[0] == host.strip("[]") and port in (None, one[1])]
    if not fitting:
        address = host if port is None else f"{host}:{port}"
        raise _refused(field, address, "is not a peer that this server was started with")
    if len(fitting) > 1:
        raise _refused(field, host, "is the host of several peers: a port is needed")
    return fitting[0]


def _refused(field: str, value: object, why: str) -> ApiError:
    return refusal(field, value, why, code="no_such_peer")
