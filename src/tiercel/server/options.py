"""How the server is run: keys and limits, checked once. Every default carries its reason."""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.errors import ConfigError


@dataclass(frozen=True)
class ServerOptions:
    """What whoever starts a server decides. Host and port are not here: they are uvicorn's."""

    api_key: str | None = None
    """Asked of everyone who wants an answer. None: nobody is asked."""

    admin_key: str | None = None
    """Asked for calls that act on the server itself. None: see `loopback`."""

    loopback: bool = False
    """Whether only this machine can connect. If so, admin calls need no key; if not and there is none,
    they are refused. False is the careful answer."""

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
        for name in ("api_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and (not isinstance(key, str) or not key or key != key.strip()):
                raise ConfigError(name, "…", "must be text without blanks around it, or not given")
        for name in ("body_bytes_max", "n_max", "stop_max", "stop_chars_max", "batch_max"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, value, "must be a whole number of at least 1")
