"""How the server is run: keys and limits, checked once. Every default carries its reason."""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.errors import ConfigError
from tiercel.storage.allow import check_allow


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

    def __post_init__(self) -> None:
        admin_keys = () if self.admin_key is None else (self.admin_key,)
        for name, keys in (("api_key", self.api_keys), ("admin_key", admin_keys)):
            for key in keys:
                if not isinstance(key, str) or not key or key != key.strip():
                    raise ConfigError(name, "…", "must be text without blanks around it, or not given")
        for url in self.store_allow:
            check_allow(url)
        for name in ("body_bytes_max", "n_max", "stop_max", "stop_chars_max", "batch_max"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, value, "must be a whole number of at least 1")

    @property
    def api_keys(self) -> tuple[str, ...]:
        if self.api_key is None or isinstance(self.api_key, tuple):
            return self.api_key or ()
        return (self.api_key,)
