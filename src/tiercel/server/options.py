"""How the server is run: keys and limits, checked once. Every default carries its reason."""

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
    """What whoever starts a server decides. Host and port are not here: they are uvicorn's."""

    api_key: str | tuple[str, ...] | None = None
    """One of them is asked of everyone who wants an answer. None: nobody is asked."""

    admin_key: str | None = None
    """Asked for calls that act on the server itself. None: an API key is; where there is none, see `keys`."""

    loopback: bool = False
    """Whether only this machine can connect. False is the careful answer."""

    store_allow: tuple[str, ...] = ()
    """Stores that may be attached over HTTP (`storage.allow`). None: a URL makes the server open files and
    connections with its own rights."""

    model_names: tuple[str, ...] = ()
    """Names of the model for clients besides the service's own. Its path is one in any case."""

    model_path: str | None = None
    """The folder of model and tokenizer, for clients that load the tokenizer. None: only a name is known."""

    strict: bool = False
    """Whether a field that nobody knows is refused. False: it is ignored, which is what clients of the
    field's other servers are used to; the log and a header name it."""

    body_bytes_max: int = 8 << 20
    """8 MiB: a million tokens as numbers. What is longer is refused while it is being read."""

    n_max: int = 16
    """Answers to one prompt."""

    stop_max: int = 16
    """Stop strings of one request. OpenAI allows 4; test clients of this field send more."""

    stop_chars_max: int = 256
    """So many characters of each answer may be held back, and are compared at each step."""

    batch_max: int = 64
    """Prompts in one call: those who have more make more calls, which queue fairly."""

    priority_max: int = 0
    """`priority` of a request, up or down. 0: nobody may set one, because everybody would."""

    connections_max: int = 1000
    """Below what most systems let a process open. When there are more, the one that waits longest goes."""

    headers_s: float = 10.0
    """From a connection, or the first byte of a request, to the end of its headers: they fit one packet."""

    body_s: float = 60.0
    """For the body: the longest one at 1 Mbit/s."""

    idle_s: float = 75.0
    """Between two requests. Longer than the 60 s of most proxies, so that it is they who close."""

    write_s: float = 60.0
    """For a client that reads nothing of its answer. Meanwhile the answer is kept for it."""

    def __post_init__(self) -> None:
        admin_keys = () if self.admin_key is None else (self.admin_key,)
        for name, keys in (("api_key", self.api_keys), ("admin_key", admin_keys)):
            for key in keys:
                if not isinstance(key, str) or not key or key != key.strip():
                    raise ConfigError(name, "…", "must be text without blanks around it, or not given")
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
