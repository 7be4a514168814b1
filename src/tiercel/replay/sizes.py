"""Sizes of the tiers: what fits into them, and how device memory is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercel.cache.residency import Texts, texts_most
from tiercel.engine.config import DevicePlaces, places_held
from tiercel.errors import ConfigError
from tiercel.spec.cache_spec import CacheSpec


@dataclass(frozen=True)
class Sizes:
    """Bytes of each tier. 0 turns the host or the store off."""

    device_bytes: int
    """Of each stage."""
    host_bytes: int = 0
    store_bytes: int = 0
    places: DevicePlaces | None = None
    """What a server's device memory was split into; None: as an engine splits `device_bytes`."""

    def as_dict(self) -> dict[str, int]:
        return {name: size for name, size in vars(self).items() if name != "places"}

    def split(self, spec: CacheSpec, context_tokens: int | None = None, stages: int = 1) -> DevicePlaces:
        return self.places or places_held(self.device_bytes, held_by(spec, stages), context_tokens)


def held_by(spec: CacheSpec, stages: int) -> Sequence[CacheSpec]:
    """What each stage keeps of a page, if all layers have weights of one size."""
    if stages == 1:
        return [spec]
    from tiercel.engine.cut import cut_of  # here: it loads torch

    layers = 1 + max(layer for stream in spec.streams if not stream.draft for layer in stream.layers)
    cut = cut_of(spec, dict.fromkeys(range(layers), 1), layers, stages)
    last = spec.layers[-1] + 1  # a draft's layers are behind the model's
    return [spec.stage(each.first, last if each.ends else each.end) for each in cut]


@dataclass(frozen=True)
class Fitting:
    """How many texts of one length fit at once."""

    tokens: int
    texts: Texts

    def __str__(self) -> str:
        whole, sparse = self.texts
        each = f"texts of {self.tokens:,} tokens that fit at once"
        return f"{each}: {whole:,} whole, {sparse:,} with selected entries on the host (--sparse)"

    def as_dict(self) -> dict[str, int]:
        return {"tokens": self.tokens, **self.texts._asdict()}


def texts_fitting(
    spec: CacheSpec, sizes: Sizes, tokens: int, *, context_tokens: int | None = None, stages: int = 1
) -> Fitting | None:
    """How many texts of so many tokens fit at once where selected entries may stay on the host. None: the
    model selects no entries, there is no host tier, or the device is too small."""
    apart = spec.apart
    if not (apart.selective and sizes.host_bytes):
        return None
    try:
        frames, _, staged = sizes.split(apart, context_tokens, stages)
    except ConfigError:
        return None
    host_places, pages = sizes.host_bytes // apart.place_bytes, -(-tokens // apart.page_tokens)
    return Fitting(tokens, texts_most(apart, frames, pages, host_places=host_places, staged_pages=staged))
