"""What an engine is built from and how it is run: frozen, checked once, every default with its reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiercel.config import CacheConfig, check_settings, is_loopback, parse_address, setting
from tiercel.errors import ConfigError
from tiercel.memory.buffers import STAGED_AREAS
from tiercel.models.wish import Wish
from tiercel.policy.evict import make_evict_policy
from tiercel.policy.fetch import make_fetch_policy
from tiercel.policy.speculate import LEVELS_MOST
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.identity import BITS, SHARES

HOST_MEMORY = "1GiB"
"""What a server and `Offline` take by default. (`CacheConfig` has no host tier by default.)"""


MTP = "mtp"
"""The model's own draft."""
DRAFT_MODEL = "draft"
"""The model of `Build.draft`."""
ROLES = ("both", "prefill", "decode")
GUESSERS = {
    MTP: "the model's MTP layers guess",
    DRAFT_MODEL: "the model of --draft guesses",
    "ngram": "the text so far guesses",
    "off": "--speculate ngram turns it on",
}
"""Who guesses, by name, and what a user is told of it."""
SPECULATE = ("auto", *GUESSERS)


@dataclass(frozen=True, kw_only=True)
class Build(Wish):
    """What to serve, and in which memory. The rest of the cache's settings are in `engine.cache`."""

    device_bytes: int | None = setting(
        None,
        "Device memory for pages and tails.",
        otherwise="256MiB of a CPU's memory, or half of what a GPU has left",
        least=1,
        memory=True,
        option="device_memory",
    )
    """Device memory for pages and tails, which attention reads. None: 256 MiB of a CPU's memory; half of
    what a GPU has left beside the weights, or what running texts can fill. Steps take memory too."""
    stages: int = setting(1, "Processes that the model's layers are cut into.", least=1)
    """More than 1: a process for each stage of layers, with the same device memory each: on CUDA a device
    for each, if there are as many."""
    store: str | None = setting(None, "The third tier: file:///path?size=200GiB, redis://…, mooncake://…")
    """URL of a store (`storage.open`); None: there is no third tier."""
    store_required: bool = setting(
        False, "Do not start while the store can not be reached.", flag="--store-required"
    )
    """False: a server starts without it, says so, and uses it as soon as it is there."""
    peer: tuple[str, ...] = setting(
        (), "Another server whose host pages are read: peer://host:port. Repeatable."
    )
    """Peers are asked in this order, and before the store. They need not be there yet."""
    share_pages: str | None = setting(None, "Offer host pages to other servers on this address: host:port")
    share_key: str | None = setting(None, "The key that servers show each other.")
    """Without it pages are offered on a loopback address only."""
    role: str = setting("both", "Whether prompts are computed for others, or by others.", one_of=ROLES)
    """`prefill`: it computes prompts that other servers go on from, and must share its pages. `decode`:
    requests name the peer that computes their prompts. `both`: as a request says."""
    prefill_wait_s: float = setting(10.0, "Seconds that a peer may bring no page of a prompt.", seconds=True)
    """After this time the rest of the prompt is computed here."""
    share_mooncake: str | None = setting(
        None, "Offer host pages through Mooncake too: tcp, or rdma and its devices as rdma:mlx5_0"
    )
    """None: only through our own sockets. Mooncake has no keys: for a network without strangers."""
    share: str = setting(BITS, "Whose stored pages are used: equal bits, or equal numbers.", one_of=SHARES)
    """Who shares stored pages. `bits`: servers that compute the same bits; so a hit changes nothing.
    `numbers`: also other kernels of the same arithmetic, as in a mixed fleet; last bits may differ."""

    @property
    def sources(self) -> tuple[str, ...]:
        """URLs of all stores and peers that pages are fetched from, in the order in which they are asked."""
        return (*self.peer, *([self.store] if self.store is not None else []))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share_key is not None and (not self.share_key or self.share_key != self.share_key.strip()):
            raise ConfigError("share_key", "…", "must not be empty or begin or end with a blank")
        if self.share_pages is not None:
            host, _ = parse_address("share_pages", self.share_pages)
            if not (self.share_key or is_loopback(host)):
                why = "other machines can reach it, and there is no key: give one (--share-key)"
                raise ConfigError("share_pages", self.share_pages, why)
        if self.share_mooncake is not None and not re.fullmatch(r"tcp|rdma(:.+)?", self.share_mooncake):
            raise ConfigError("share_mooncake", self.share_mooncake, "write it as tcp, rdma or rdma:mlx5_0")
        if self.role == "prefill" and self.share_pages is None:
            raise ConfigError("role", self.role, "others read the pages: give an address (--share-pages)")
        if self.role == "decode" and not self.peer:
            raise ConfigError("role", self.role, "somebody computes the prompts: name a server (--peer)")
        if self.exact and self.share != BITS:
            raise ConfigError(
                "share", self.share, "is not exact: pages of other kernels have other last bits"
            )


@dataclass(frozen=True)
class EngineConfig:
    """How requests share a model."""

    cache: CacheConfig = field(default_factory=lambda: CacheConfig(device_pages=256, staging_tails=16))
    running_max: int = setting(64, "Requests that compute at once.", least=1)
    """Requests that compute at the same time. Each has rows of its own beside the pages. Tested up to 512,
    with device and host full: a step takes 6 to 7 µs of planning for each."""

    waiting_max: int = setting(1024, "Requests that may wait; more are refused.", least=1)
    """The limit of the queue. A request behind more others would time out at its client."""

    step_tokens: int | None = setting(
        None, "Tokens of one step.", least=1, otherwise="512 on a CPU, 8192 on CUDA"
    )
    """Tokens of one step: they keep the matrix kernels busy, and running answers wait for one step. None: 512
    on a CPU, 8,192 on CUDA."""

    context_tokens: int | None = setting(
        None, "Tokens of the longest text.", least=1, otherwise="the model's"
    )
    """The longest text. None: what the model was made for (`max_position_embeddings`), if it fits."""

    replay: bool = setting(True, "Compute the last tokens again where no tail is and that is cheaper.")
    """Resume without a tail where computing the last tokens again is exact and cheaper."""

    overlap: bool = setting(True, "Decide the next step while one is computed.", flag="--overlap/--plain")
    """Decide the next step while the model computes this one. The answers are the same."""

    speculate: str = setting("auto", "Who guesses the next tokens.", one_of=SPECULATE)
    """Guesses that are right save steps, and change no answer. How many are made is decided by measurement,
    down to none. auto: the model of `Build.draft`; without one a draft of the model, if its guesses cost
    little, else `ngram`; on CUDA, where a step with guesses can not be queued ahead, else off."""

    draft_tokens_max: int = setting(4, "Guesses of one text in one step, at most.", least=1, most=LEVELS_MOST)
    """The last guesses of a longer chain are hardly ever right. Each takes a row in every ring."""

    @property
    def guesses_max(self) -> int:
        """The most guesses for a text in a step; 0: none. `auto` counts as none until a model is opened."""
        return 0 if self.speculate in ("off", "auto") else self.draft_tokens_max

    def __post_init__(self) -> None:
        check_settings(self)
        make_evict_policy(self.cache.evict)  # raises what is wrong with a user's own class
        make_fetch_policy(self.cache.fetch)


STAGING_MOST = 64
STAGING_SHARE = 0.005


STAGED_SHARE = 0.05
"""The most of the device memory that the rows of sparse pages are staged in."""


def staged_pages_of(device_bytes: int, spec: CacheSpec, context_tokens: int | None) -> int:
    """How many sparse pages a step can read whole: those of the longest text. 0: no page is ever sparse."""
    if not spec.selective:
        return 0
    (stream,) = spec.pools[1]
    most = int(device_bytes * STAGED_SHARE) // (STAGED_AREAS * spec.row_bytes(stream))
    return most if context_tokens is None else min(most, -(-context_tokens // spec.page_tokens))


def staged_bytes(staged_pages: int, spec: CacheSpec) -> int:
    return STAGED_AREAS * staged_pages * spec.row_bytes(spec.pools[1][0]) if staged_pages else 0


def places_of(device_bytes: int, spec: CacheSpec) -> tuple[int, int]:
    """Places in `device_bytes` of device memory, for pages and tails; and staging places for tails.

    A step can write as many tails as there are staging places. They get a two-hundredth of the memory, for
    64 tails at most: more of it costs hits. A small device gets one more than a text reads or writes at once.

    A page without bytes (the model has windows only) counts as large as a tail.
    """
    window, staging = spec.pages_per_window, 0
    if spec.tail_streams:
        share = int(device_bytes * STAGING_SHARE) // spec.tail_bytes
        staging = max(window + 1, min(share, STAGING_MOST))
    least = 2 + -(-2 * window * spec.units_per_tail // spec.frame_units)
    pages = (device_bytes - staging * spec.tail_bytes) // spec.frame_bytes
    if pages < least:
        need = least * spec.frame_bytes + staging * spec.tail_bytes
        raise ConfigError("device_bytes", device_bytes, f"two pages and their tails take {need:,} B")
    return pages, staging


class DevicePlaces(NamedTuple):
    """What device memory is split into: settings of `CacheConfig`."""

    device_pages: int
    staging_tails: int
    staged_pages: int


def places_held(device_bytes: int, held: Sequence[CacheSpec], context_tokens: int | None) -> DevicePlaces:
    """What each device has room for. `held`: what each keeps of a page. A place has one number in all of
    them, so the one with the least room decides."""
    sparse = [each for each in held if each.second]
    staged = min((staged_pages_of(device_bytes, each, context_tokens) for each in sparse), default=0)
    each_has = [
        places_of(device_bytes - (staged_bytes(staged, each) if each.second else 0), each) for each in held
    ]
    frames, staging = (min(counts) for counts in zip(*each_has, strict=True))
    return DevicePlaces(frames, staging, staged)
