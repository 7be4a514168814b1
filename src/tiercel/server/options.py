"""Options of the server: keys, limits, time-outs. Checked once; every default has its reason."""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.errors import ConfigError
from tiercel.storage.allow import check_allow

LEAST = {
    "body_bytes_max": 1,
    "n_max": 1,
    "stop_max": 1,
    "stop_chars_max": 1,
    "batch_max": 1,
    "priority_max": 0,
    "connections_max": 1,
}


@dataclass(frozen=True)
class ServerOptions:
    """The operator's choices. Host and port are uvicorn's, not here."""

    api_key: str | tuple[str, ...] | None = None
    """Clients must send one of these keys. None: no key is needed."""

    admin_key: str | None = None
    """The key for admin calls. None: an API key opens them; without any key, see `keys`."""

    loopback: bool = False
    """Whether only this machine can connect. False is the safe default."""

    store_allow: tuple[str, ...] = ()
    """Stores that may be attached over HTTP (`storage.allow`). None by default, because the server opens a
    store's files and connections with its own rights."""

    model_names: tuple[str, ...] = ()
    """More names of the model for clients, besides the service's own and its path."""

    model_path: str | None = None
    """The model's folder, for clients that load the tokenizer. None: only the name is known."""

    strict: bool = False
    """Whether unknown fields are refused. False: they are ignored, as other servers do; the log and a header
    name them."""

    body_bytes_max: int = 8 << 20
    """8 MiB: a million tokens as numbers. A longer body is refused while it is read."""

    n_max: int = 16
    """Answers to one prompt."""

    stop_max: int = 16
    """Stop strings of one request. OpenAI allows 4; common test clients send more."""

    stop_chars_max: int = 256
    """Characters of a stop string. An answer may hold back as many."""

    batch_max: int = 64
    """Prompts in one call. More prompts need more calls, which queue fairly."""

    priority_max: int = 0
    """Requests may set `priority` from -N to N. 0: none may, because otherwise all would."""

    connections_max: int = 1000
    """Below the usual limit of open files. If there are more, the one idle for longest is closed."""

    headers_s: float = 10.0
    """From the connection, or the first byte of a request, to the end of the headers: they fit one packet."""

    body_s: float = 60.0
    """For the body: enough for the longest one at 1 Mbit/s."""

    idle_s: float = 75.0
    """Between two requests. Longer than the 60 s of most proxies, so that the proxy closes first."""

    write_s: float = 60.0
    """How long a client may read nothing of its answer."""

    def __post_init__(self) -> None:
        admin_keys = () if self.admin_key is None else (self.admin_key,)
        for name, keys in (("api_key", self.api_keys), ("admin_key", admin_keys)):
            for key in keys:
                if not isinstance(key, str) or not key or key != key.strip():
                    raise ConfigError(name, "…", "must not be empty or begin or end with a blank")
        for url in self.store_allow:
            check_allow(url)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(name, value, f"must be a whole number of at least {least}")
        for name in ("headers_s", "body_s", "idle_s", "write_s"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
                raise ConfigError(name, seconds, "must be a number of seconds above 0")

    @property
    def api_keys(self) -> tuple[str, ...]:
        if self.api_key is None or isinstance(self.api_key, tuple):
            return self.api_key or ()
        return (self.api_key,)
