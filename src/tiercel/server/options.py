"""Options of the server: addresses, keys, limits, time-outs. Checked once; every default has its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tiercel.config import check_settings, parse_address, setting
from tiercel.errors import ConfigError
from tiercel.server.http.logs import FORMATS, LEVELS
from tiercel.server.http.tenants import Tenants
from tiercel.storage.open import check_allow


@dataclass(frozen=True)
class ServerOptions:
    """The operator's choices. Settings with a help text are options of `tiercel serve`."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port; 0 takes a free one.", least=0, most=65535)
    store_allow: tuple[str, ...] = setting(
        (), "Stores that PUT /v1/cache/store may attach: file:///folder, redis://host. Repeatable."
    )
    """See `storage.open`. Empty: the server opens a store's files and connections with its own rights."""
    kv_events: str | None = setting(
        None, "Publish cache events for routers at this address of this machine: tcp://127.0.0.1:5557"
    )
    """`connect:tcp://host:port`: the other side listens. Events have token ids, and no key protects them."""
    kv_events_replay: str | None = setting(
        None, "Address where routers get missed events: tcp://127.0.0.1:5558"
    )
    api_key: tuple[str, ...] = setting((), "A key that clients must send. Repeatable.")
    """Clients must send one of these keys. Empty: no key is needed."""
    admin_key: str | None = setting(None, "The key for admin calls. Without it, --api-key opens them.")
    """Without any key, see `keys`."""
    keys_file: str | None = setting(
        None, "A TOML file of tenants: their keys and limits. SIGHUP reads it again."
    )
    """See `tenants`. Keys of --api-key belong to no tenant and have no limits."""
    cors_origin: tuple[str, ...] = setting(
        (), "A web page's origin that may call from a browser: https://app.example, or *. Repeatable."
    )
    """Empty: browsers let pages of other origins read nothing. Admin calls stay closed for them."""
    tls_cert: str | None = setting(None, "A PEM file with the certificate chain: serve HTTPS.")
    tls_key: str | None = setting(None, "A PEM file with the certificate's private key.")
    """SIGHUP reads both files again."""
    log_format: str = setting("text", "How the log is written.", one_of=FORMATS)
    log_level: str = setting("info", "Which lines are logged, from this level on.", one_of=LEVELS)
    access_log: bool = setting(True, "Log a line for every request.")
    trace: str | None = setting(None, "Append each request, without its text, to this file: see replay.")
    """For `tiercel replay` and `tiercel plan` (`replay.record`)."""
    model_names: tuple[str, ...] = setting(
        (), "A name of the model for clients. Repeatable.", option="served_model_name"
    )
    """The service's own name is always a name of the model, too."""
    strict: bool = setting(False, "Refuse requests with unknown fields.", flag="--strict")
    """False: they are ignored, as other servers do; the log and a header name them."""
    priority_max: int = setting(0, "Requests may set a priority from -N to N; 0: they may not.", least=0)
    """0: if every client may set a priority, every client does."""
    items_bytes_max: int = setting(
        64 << 20,
        "Memory for answers of /v1/responses, for later requests that refer to them; 0 keeps none.",
        least=0,
        memory=True,
        option="responses_memory",
    )
    """64 MiB: some ten thousand answers. See `items`."""
    connections_max: int = setting(
        1000, "Open connections; beyond that the one idle for longest is closed.", least=1
    )
    """Below the usual limit of open files."""
    shutdown_s: int = setting(10, "Seconds for running answers at shutdown.", least=0)

    loopback: bool = False
    """Whether only this machine can connect. False is the safe default."""
    model_path: str | None = None
    """The model's folder, for clients that load the tokenizer. None: only the name is known."""
    tenants: Tenants | None = None
    """The tenants that `keys_file` names."""
    prefillers: tuple[str, ...] = ()
    """Servers, as host:port, that a request may name as the one that computes its prompt. Empty: none."""
    pages_address: str | None = None
    """Where this server shares its pages: host:port. None: it does not."""
    body_bytes_max: int = setting(8 << 20, least=1)
    """8 MiB: a million tokens as numbers. A longer body is refused while it is read."""
    n_max: int = setting(16, least=1)
    """Answers to one prompt."""
    stop_max: int = setting(16, least=1)
    """Stop strings of one request. OpenAI allows 4; common test clients send more."""
    stop_chars_max: int = setting(256, least=1)
    """Characters of a stop string. An answer may hold back as many."""
    batch_max: int = setting(64, least=1)
    """Prompts in one call. More prompts need more calls, which queue fairly."""
    headers_s: float = setting(10.0, seconds=True)
    """Time from the connection, or a request's first byte, to the end of its headers: they fit one packet."""
    body_s: float = setting(60.0, seconds=True)
    """Time for the body: enough for the longest one at 1 Mbit/s."""
    idle_s: float = setting(75.0, seconds=True)
    """Time between two requests. Longer than the 60 s of most proxies, so that the proxy closes first."""
    write_s: float = setting(60.0, seconds=True)
    """How long a client may read nothing of its answer."""

    def __post_init__(self) -> None:
        check_settings(self)
        for name, keys in (("api_key", self.api_key), ("admin_key", (self.admin_key,))):
            if any(key is not None and (not key or key != key.strip()) for key in keys):
                raise ConfigError(name, "…", "must not be empty or begin or end with a blank")
        if (self.tls_cert is None) != (self.tls_key is None):
            name = "tls_cert" if self.tls_key is None else "tls_key"
            raise ConfigError(name, getattr(self, name), "tls_cert and tls_key need each other")
        for origin in self.cors_origin:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError("cors_origin", origin, "is not an origin: https://app.example, or *")
        for url in self.store_allow:
            check_allow(url)
        for name, address in (
            *(("prefillers", each) for each in self.prefillers),
            *([("pages_address", self.pages_address)] if self.pages_address is not None else []),
        ):
            parse_address(name, address)
