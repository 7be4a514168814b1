"""What an engine is built from and how it is run: frozen, checked once, every default with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiercel.config import CacheConfig
from tiercel.errors import ConfigError
from tiercel.models.families import EMBEDDED
from tiercel.spec.identity import BITS, SHARES

MIB = 1024**2


@dataclass(frozen=True)
class Build:
    """What to serve, and in which memory. The rest of the cache's settings are in `engine.cache`."""

    model: str = EMBEDDED
    page_tokens: int | None = None
    """None: 128 for the embedded model, whose texts are short, else 256."""
    format: str = "fp32"
    """How entries are kept. fp32: the bits of the model, on a CPU nothing else is faster."""
    device_bytes: int = 256 * MIB
    """Device memory for pages and tails, which attention reads."""
    kernels: str = "auto"
    exact: bool = False
    """Refuse to start on kernels whose bits depend on the batch. False: the start table names them."""
    store: str | None = None
    """URL of a store (`storage.open`); None: there is no third tier."""
    share: str = BITS
    """With whom stored pages are shared. `bits`: those who compute the same bits; so a hit changes nothing.
    `numbers`: also other kernels of the same arithmetic, as in a mixed fleet; last bits may differ."""

    def __post_init__(self) -> None:
        if self.share not in SHARES:
            raise ConfigError("share", self.share, f"must be one of {', '.join(SHARES)}")
        if self.exact and self.share != BITS:
            raise ConfigError(
                "share", self.share, "is not exact: pages of other kernels have other last bits"
            )


@dataclass(frozen=True)
class EngineConfig:
    """How requests share a model."""

    cache: CacheConfig = field(default_factory=lambda: CacheConfig(device_pages=256, device_tails=64))
    running_max: int = 64
    """Requests that compute at the same time. Each has rows of its own beside the pages."""

    waiting_max: int = 1024
    """The limit of the queue. A request behind so many others would time out at its client."""

    step_tokens: int = 512
    """Tokens of one step. Four pages keep the matrix kernels busy, and running answers wait for one step."""

    context_tokens: int | None = None
    """The longest text. None: what the model was made for (`max_position_embeddings`), if it fits."""

    replay: bool = True
    """Resume without a tail where computing the last tokens again is exact and cheaper."""

    overlap: bool = True
    """Decide the next step while the model computes this one. The answers are the same."""

    def __post_init__(self) -> None:
        for name in ("running_max", "waiting_max", "step_tokens", "context_tokens"):
            value = getattr(self, name)
            if name == "context_tokens" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, value, "must be a whole number of at least 1")
