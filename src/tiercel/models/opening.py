"""Opens a model: from a wish to a model on the device memory of a cache.

    Wish ──open_model──→ Opened ──load──→ Loaded ──build──→ Model
                         headers          weights           layers, on memory for `Opened.held`

Everything that can be refused without reading weights is refused by `open_model`, by `Opened.spec` or, before
a byte is read, by `load`. Text is not read here: whoever needs it finds its folder by the model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.errors import ConfigError, SpecError, WeightsError
from tiercel.kernels.choice import Kernels, check_device, describe, kernels_digest, make_kernels
from tiercel.kernels.meaning import digest_of
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Dimensions, Model, Stage
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.draft_model import DraftModel, WithDraft
from tiercel.models.families import DraftOffer, family_of, folder_of, sources_of
from tiercel.models.hub import is_hub_name
from tiercel.models.loading import Plan
from tiercel.models.wish import Choice, Wish
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.hf_fields import whole
from tiercel.spec.identity import BITS, Identity

LONGEST = "max_position_embeddings"


class Folder:
    """The folder of a model. Its config is checked, and the headers of its files are read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.checkpoint = Checkpoint(folder_of(name))
        self.family = family_of(self.checkpoint.config)
        self.dimensions: Dimensions = self.family.read(self.checkpoint.config)

    @property
    def longest(self) -> int | None:
        """The tokens of the longest text that the model was made for."""
        config = self.checkpoint.config
        return None if config.get(LONGEST) is None else whole(config, LONGEST)

    @cached_property
    def offer(self) -> DraftOffer | None:
        """The draft that the checkpoint has."""
        return self.family.draft(self.checkpoint, self.dimensions)

    def commit_choice(self, what: str) -> list[Choice]:
        """A line only if the model is one of the Hub: which commit of it."""
        folder = self.checkpoint.folder
        return [Choice(what, folder.name, f"of {self.name}, in {folder}")] if is_hub_name(self.name) else []

    def arithmetic(self, *words: str) -> str:
        """A digest of `words`, and of what decides which numbers the model computes from its weights."""
        return digest_of(self.dimensions.digest, *words, files=sources_of(self.checkpoint.config))

    def declare(self, page_tokens: int, format: str) -> CacheSpec:
        """What the model caches."""
        return self.family.declare(self.checkpoint.config, page_tokens, format)

    def plan(self, kernels: Kernels, *, draft: bool = False) -> Plan:
        """The weights, planned; those of the model's own draft only if they are wanted."""
        own = self.checkpoint, self.dimensions, kernels.dtype
        return self.family.weights.plan(*own, draft=draft, fp8=kernels.FP8_MATRICES)


class DraftFolder(Folder):
    """The folder of a model that guesses for another one. A `ConfigError` names what can not be used."""

    def __init__(self, name: str) -> None:
        try:
            super().__init__(name)
            _ = self.longest
        except ConfigError as error:
            raise ConfigError("draft", name, error.why) from error
        except (SpecError, WeightsError) as error:
            raise ConfigError("draft", name, str(error)) from error

    def declare(self, page_tokens: int, format: str) -> CacheSpec:
        """The streams name weights and arithmetic: pages with another draft's entries have another form."""
        try:
            spec = super().declare(page_tokens, format)
        except SpecError as error:
            raise ConfigError("draft", self.name, f"can not be cached with the model: {error}") from error
        weights = self.arithmetic(self.checkpoint.digest())
        return replace(spec, streams=tuple(replace(each, weights=weights) for each in spec.streams))


@dataclass(frozen=True)
class Opened:
    """A model that can be loaded."""

    page_tokens: int
    format: str
    device: str
    kernels: Kernels
    target: Folder
    draft: DraftFolder | None = None
    """The model that guesses for it."""
    draft_format: str = ""
    """How that model's entries are kept."""
    own_draft: bool = False
    """Its own draft guesses for it (`Folder.offer`)."""
    apart: bool = False
    """Entries that attention selects have a pool of their own on the device (`CacheSpec.apart`)."""
    stage: Stage | None = None
    """Only these layers are loaded and built; None: all. What guesses is with the last ones."""

    @cached_property
    def target_spec(self) -> CacheSpec:
        declared = self.target.declare(self.page_tokens, self.format)
        return declared.apart if self.apart else declared

    @cached_property
    def draft_spec(self) -> CacheSpec | None:
        if self.own_draft and self.target.offer is not None:
            return self.target.offer.declare(self.page_tokens, self.format)
        return None if self.draft is None else self.draft.declare(self.page_tokens, self.draft_format)

    @cached_property
    def spec(self) -> CacheSpec:
        """What is cached: of the model, and of what guesses for it."""
        return self.target_spec if self.draft_spec is None else self.target_spec.with_draft(self.draft_spec)

    @property
    def layers(self) -> int:
        """How many layers the model has, without those of a draft."""
        return self.target_spec.layers[-1] + 1

    @property
    def held(self) -> CacheSpec:
        """The part of `spec` that this stage has. The draft's layers come behind the model's."""
        if self.stage is None:
            return self.spec
        end = self.spec.layers[-1] + 1 if self.stage.ends else self.stage.end
        return self.spec.stage(self.stage.first, end)

    def identity(self, share: str) -> Identity:
        """Whose numbers are cached. The bytes of the weights are read, unless their digest is remembered."""
        return Identity(
            weights=self.target.checkpoint.digest(),
            arithmetic=self.target.arithmetic(self.format),
            kernels=kernels_digest(self.kernels, self.device) if share == BITS else "",
        )

    def load(self, check: Callable[[Mapping[str, int]], None]) -> Loaded:
        """Read the weights. `check` is given the bytes that they take, before one is read, and raises if they
        are too many."""
        own = self.target.plan(self.kernels, draft=self.own_draft)
        if self.stage is not None:
            own = own.of_stage(self.stage, draft=self.own_draft)
        if self.draft is None or (self.stage is not None and not self.stage.ends):
            check(own.bytes)
            return Loaded(self, own.read(self.device), {})
        drafts = self.draft.plan(self.kernels)
        check({**own.bytes, "draft": sum(drafts.bytes.values())})
        return Loaded(self, own.read(self.device), drafts.read(self.device))

    def choices(self) -> list[Choice]:
        """What was chosen for the model."""
        spec, exact = self.spec, self.kernels.EXACT
        size = f"{len(spec.layers)} layers, a vocabulary of {self.target.dimensions.vocab_size:,}"
        same = "a text's bits do not depend on what else is computed" if exact else "sums depend on the batch"
        return [
            Choice("model", self.target.name, f"{spec.model}, {size}"),
            *self.target.commit_choice("commit"),
            *(self.draft.commit_choice("draft's commit") if self.draft is not None else ()),
            Choice("entries", self.format, f"{spec.bytes_per_token:,.0f} B per token"),
            Choice("kernels", *describe(self.kernels)),
            Choice("exact", "on" if exact else "off", same),
        ]

    def unread(self) -> list[Choice]:
        """A line only if the checkpoint has a draft that is not read."""
        names = self.target.family.weights.draft_names(self.target.checkpoint)
        if self.own_draft or not names:
            return []
        why = f"{len(names):,} tensors are not read, {names[0]} among them"
        return [Choice("own draft", "not used", why)]


class Loaded(NamedTuple):
    """A model's weights on its device."""

    opened: Opened
    weights: dict[str, Tensor]
    draft_weights: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        """What they take on the device. Tied matrices are one tensor under two names."""
        every = [*self.weights.values(), *self.draft_weights.values()]
        return sum({each.data_ptr(): each.nbytes for each in every}.values())

    def build(self, memory: DeviceMemory, running_max: int, guesses_max: int) -> Model:
        """The model, or a stage of it, on memory for `Opened.held`."""
        opened, how = self.opened, (running_max, self.opened.kernels, guesses_max)
        target, draft, stage = opened.target, opened.draft, opened.stage
        if draft is None or not self.draft_weights:
            return target.family.build(target.dimensions, self.weights, memory, *how, stage)
        assert opened.draft_spec is not None
        spec = opened.target_spec if stage is None else opened.target_spec.stage(stage.first, stage.end)
        own, drafts = memory.part(spec), memory.part(opened.draft_spec, draft=True)
        model = target.family.build(target.dimensions, self.weights, own, *how, stage)
        guesser = draft.family.build(draft.dimensions, self.draft_weights, drafts, *how, None)
        guessing = DraftModel(guesser, model.vocab_size, draft.longest)
        return WithDraft(model, guessing, opened.spec.layers[-1])


def open_model(wish: Wish) -> Opened:
    """The model that is wished for. An error names what is wrong."""
    check_device(wish.device)
    kernels = make_kernels(wish.kernels, wish.device, wish.compute)
    if wish.exact and not kernels.EXACT:
        why = f"the {kernels.NAME} kernels add in an order that depends on the batch"
        raise ConfigError("exact", wish.exact, why)
    target = Folder(wish.model)  # last, because a model of the Hub is fetched
    draft = None if wish.draft is None else DraftFolder(wish.draft)
    formats = [
        wish.format or ("fp32" if wish.on_cpu else each.family.format) for each in (target, draft or target)
    ]
    return Opened(wish.tokens_of_page, formats[0], wish.device, kernels, target, draft, formats[1])


def check_device_memory(wish: Wish, weights: Mapping[str, int], *, cache_bytes: int) -> None:
    """Refuses what does not fit into the memory that the device has free now. On a CPU nothing is checked:
    its memory is lent to others and comes back."""
    if torch.device(wish.device).type == "cuda":
        bytes_free, _ = torch.cuda.mem_get_info(wish.device)
        check_memory(wish.model, weights, cache_bytes=cache_bytes, bytes_free=bytes_free)


def check_memory(model: str, weights: Mapping[str, int], *, cache_bytes: int, bytes_free: int) -> None:
    """Refuses weights and a cache that the device has no room for. The error says what takes how much."""
    need = {**weights, "cache": cache_bytes}
    if sum(need.values()) <= bytes_free:
        return
    parts = ", ".join(f"{part} {_gb(size)}" for part, size in sorted(need.items(), key=lambda each: -each[1]))
    room = bytes_free - sum(weights.values())
    change = f"--device-memory {max(room, 0) // 2**20}MiB would fit"
    if room <= 0:
        change = "the weights alone do not fit: use a device with more memory, or smaller weights"
    total = f"needs {_gb(sum(need.values()))} on the device, and {_gb(bytes_free)} are free"
    raise ConfigError("model", model, f"{total}: {parts}; {change}")


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
