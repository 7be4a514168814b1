"""Opens a model's folder and builds an engine on it. Every choice that is made is listed with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tiercel.cache import TieredCache
from tiercel.cache.memories import make_memories
from tiercel.config import LAYOUT_NAMES, CacheConfig
from tiercel.engine.config import DRAFT_MODEL, GUESSERS, MTP, Build, EngineConfig, places_of
from tiercel.engine.engine import Engine
from tiercel.engine.scheduler import STEP_TOKENS
from tiercel.errors import ConfigError
from tiercel.kernels.choice import Kernels, check_device, kernels_digest, make_kernels
from tiercel.kernels.meaning import digest_of
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import BytesCheck, Dimensions
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.draft_model import DraftFolder, DraftModel, WithDraft
from tiercel.models.families import (
    EMBEDDED,
    DraftOffer,
    Family,
    family_of,
    folder_of,
    sources_of,
    text_folder_of,
)
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.identity import BITS, Identity
from tiercel.storage.open import check_peers, hide, open_stores, shown
from tiercel.text.text import Text

CPU_BYTES = 256 * 2**20
CUDA_STEP_TOKENS = 8192

GUESS_SHARE_MOST = 0.1
"""What a guess of the model's own draft may take, of what a token takes, unless that draft is asked for.
Above it a guess is worth less than one that the text so far makes for nothing."""


@dataclass(frozen=True)
class Choice:
    """One line of what was chosen, and why."""

    what: str
    value: str
    why: str


def open_engine(build: Build, config: EngineConfig) -> tuple[Engine, list[Choice]]:
    """The engine, and the choices made for it. All input is checked first; an error names what is wrong."""
    checkpoint = Checkpoint(folder_of(build.model))
    family = family_of(checkpoint.config)
    own = family.read(checkpoint.config)
    check_device(build.device)
    kernels = make_kernels(build.kernels, build.device, build.compute, family.kernels)
    if build.exact and not kernels.EXACT:
        why = f"the {kernels.NAME} kernels add in an order that depends on the batch"
        raise ConfigError("exact", build.exact, why)
    build, config = _with_defaults(build, config, family)
    assert build.page_tokens and build.format
    folder = None if build.draft is None else DraftFolder(build.draft)
    if folder is None:
        config, offer, speculation = _speculation(config, family, checkpoint, own, kernels)
    else:
        (config, speculation), offer = _draft_speculation(config, folder, kernels), None
    spec = target_spec = family.declare(checkpoint.config, build.page_tokens, build.format)
    if (draft := offer or folder) is not None:
        draft_spec = draft.declare(build.page_tokens, build.format)
        spec = spec.with_draft(draft_spec)
    check_peers(build.peer)
    if build.device_bytes is not None:
        _places(build.device_bytes, spec, config)  # fails for too little memory before weights are read
    text = Text(text_folder_of(build.model))
    check, fp8 = _memory_check(build), kernels.NAME == "cuda"
    if folder is not None:
        _check_tokens(text, folder)
        draft_weights, check = load_draft(folder, build.device, kernels, check)
    mtp = offer is not None
    weights = family.load(checkpoint, own, build.device, kernels.dtype, draft=mtp, fp8=fp8, check=check)
    longest = config.context_tokens or checkpoint.config.get("max_position_embeddings")
    config = replace(config, context_tokens=longest)
    device_bytes = build.device_bytes or _device_bytes(build.device, spec, config)
    build = replace(build, device_bytes=device_bytes)
    pages, tails = _places(device_bytes, spec, config)
    settings = replace(config.cache, device_pages=pages, device_tails=tails)
    identity = _identity(build, checkpoint, own, kernels)
    memory = DeviceMemory(spec, pages, tails, build.device)
    memories = make_memories(spec, settings, memory)
    try:
        cache = TieredCache(spec, settings, memories, identity=identity)
    except BaseException:
        memories.close()
        raise
    if build.sources:
        _attach(cache, build)
    how = config.running_max, kernels, config.guesses_max
    if folder is None:
        model = family.build(own, weights, memory, *how)
    else:
        target = family.build(own, weights, memory.part(target_spec), *how)
        guesser = folder.build(draft_weights, memory.part(draft_spec, draft=True), *how)
        draft_model = DraftModel(guesser, target.vocab_size, folder.longest)
        model = WithDraft(target, draft_model, spec.layers[-1])
    engine = Engine(model, cache, text, config)
    model.warm_up(engine.context_tokens)
    choices = _choices(build, config, engine, kernels.NAME, exact=kernels.EXACT)
    unread = [] if mtp else family.draft_names(checkpoint)
    return engine, [*choices, speculation, *_unread_choice(unread), *_end_choice(text, own.vocab_size)]


def _with_defaults(build: Build, config: EngineConfig, family: Family) -> tuple[Build, EngineConfig]:
    """Settings with their defaults. The device memory of a GPU is known only when the weights are there."""
    on_cpu = torch.device(build.device).type == "cpu"
    build = replace(
        build,
        page_tokens=build.page_tokens or (128 if build.model == EMBEDDED else 256),
        format=build.format or ("fp32" if on_cpu else family.format),
        device_bytes=build.device_bytes or (CPU_BYTES if on_cpu else None),
    )
    tokens = config.step_tokens or (STEP_TOKENS if on_cpu else CUDA_STEP_TOKENS)
    return build, replace(config, step_tokens=tokens)


def _speculation(
    config: EngineConfig, family: Family, checkpoint: Checkpoint, own: Dimensions, kernels: Kernels
) -> tuple[EngineConfig, DraftOffer | None, Choice]:
    """Who guesses: what was asked for, or else what costs little."""
    asked, cuda = config.speculate, kernels.NAME == "cuda"
    if asked == DRAFT_MODEL:
        raise ConfigError("speculate", asked, "needs a model that guesses: --draft FOLDER")
    offer = family.draft(checkpoint, own) if asked in ("auto", MTP) else None
    if asked == MTP and offer is None:
        raise ConfigError("speculate", asked, f"the model has no {asked} draft that is read here")
    chosen, more = asked, ""
    if asked == "auto":
        chosen = "off" if cuda else "ngram"
        if offer is None:
            more = "; the model has no draft that is read here"
        elif offer.share <= GUESS_SHARE_MOST:
            chosen = MTP
        else:
            more = f"; a guess takes {offer.share:.0%} of a token with {MTP}"
    choice = _speculation_choice(chosen, config, GUESSERS[chosen] + more)
    return replace(config, speculate=chosen), offer if chosen == MTP else None, choice


def _draft_speculation(
    config: EngineConfig, folder: DraftFolder, kernels: Kernels
) -> tuple[EngineConfig, Choice]:
    """Speculation with the model of a folder as the drafter."""
    if config.speculate not in ("auto", DRAFT_MODEL):
        why = f"excludes --speculate {config.speculate}: one of them says who guesses"
        raise ConfigError("draft", folder.name, why)
    if kernels.NAME == "cuda":
        raise ConfigError("draft", folder.name, "the cuda kernels do not compute drafts")
    upto = f"; it was made for texts of {folder.longest:,} tokens" if folder.longest is not None else ""
    choice = _speculation_choice(DRAFT_MODEL, config, f"the model {folder.name} guesses{upto}")
    return replace(config, speculate=DRAFT_MODEL), choice


def _speculation_choice(chosen: str, config: EngineConfig, why: str) -> Choice:
    value = chosen if chosen == "off" else f"{chosen}, up to {config.draft_tokens_max} tokens"
    return Choice("speculation", value, why)


def _check_tokens(text: Text, folder: DraftFolder) -> None:
    """A guess is a token, so both models must have the same tokens."""
    if (difference := text.difference(text_folder_of(folder.name))) is not None:
        raise ConfigError("draft", folder.name, f"has another tokenizer: {difference}")


def load_draft(
    folder: DraftFolder, device: str, kernels: Kernels, check: BytesCheck
) -> tuple[dict[str, Tensor], BytesCheck]:
    """The draft's weights, and the check for the model's weights, which counts both."""
    size = 0

    def check_draft(parts: Mapping[str, int]) -> None:
        nonlocal size
        size = sum(parts.values())
        check({"draft": size})

    weights = folder.load(device, kernels, check_draft)
    return weights, lambda parts: check({**parts, "draft": size})


def _places(device_bytes: int, spec: CacheSpec, config: EngineConfig) -> tuple[int, int]:
    return places_of(device_bytes, spec, config.running_max, host_bytes=config.cache.host_bytes)


def _device_bytes(device: str, spec: CacheSpec, config: EngineConfig) -> int:
    """Half of the memory that a GPU has left beside the weights, or all that running texts can ever fill."""
    half = torch.cuda.mem_get_info(device)[0] // 2
    if config.context_tokens is None:
        return half
    pages, tails = -(-config.context_tokens // spec.page_tokens), max(4, 2 * spec.pages_per_window)
    return min(half, config.running_max * (pages * spec.host_page_bytes + tails * spec.tail_bytes))


def _memory_check(build: Build) -> BytesCheck:
    """A check that weights fit into what the device has free now. On a CPU nothing is checked: its memory is
    lent to others and comes back."""
    if torch.device(build.device).type != "cuda":
        return lambda _: None
    bytes_free, _ = torch.cuda.mem_get_info(build.device)
    return partial(check_memory, build.model, cache_bytes=build.device_bytes or 0, bytes_free=bytes_free)


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


def _identity(build: Build, checkpoint: Checkpoint, own: Dimensions, kernels: Kernels) -> Identity:
    return Identity(
        weights=checkpoint.digest(),
        arithmetic=digest_of(own.digest, str(build.format), files=sources_of(checkpoint.config)),
        kernels=kernels_digest(kernels, build.device) if build.share == BITS else "",
    )


def _attach(cache: TieredCache, build: Build) -> None:
    url = build.sources[0]
    if cache.host is None:
        raise ConfigError("store", hide(url, url), "needs a host tier to read into: give it host memory")
    store = open_stores(build.store, build.peer, key=build.share_key or "")
    assert store is not None
    cache.attach(store)


def _share_choice(share: str) -> Choice:
    equal, other = (
        "with kernels of the same bits only",
        "other kernels' pages are taken: last bits may differ",
    )
    return Choice("share", share, equal if share == BITS else other)


def _store_choice(build: Build, cache: CacheConfig) -> Choice:
    if not build.sources:
        return Choice("store tier", "off", "--store URL or --peer URL turns it on")
    late = f", {cache.fetch_deadline_s} s per 1,024 tokens" if cache.fetch == "deadline" else ""
    return Choice("store tier", ", ".join(map(shown, build.sources)), f"fetch {cache.fetch}{late}")


def _unread_choice(names: list[str]) -> list[Choice]:
    example = f"{len(names):,} tensors are not read, {names[0]} among them" if names else ""
    return [Choice("own draft", "not used", example)] if names else []


def _end_choice(text: Text, vocab_size: int) -> list[Choice]:
    """A line only if some answers may never end: no end token, or one that the model does not have."""
    known = sorted(token for token in text.eos if 0 <= token < vocab_size)
    unknown = ", ".join(map(str, sorted(text.eos - set(known))))
    if known and not unknown:
        return []
    why = f"eos_token_id {unknown} is no token of this model"
    value = f"token{'s' * (len(known) > 1)} {', '.join(map(str, known))}" if known else "none"
    return [Choice("end of an answer", value, why if unknown else "only stop strings and max_tokens end one")]


def _why_longest(engine: Engine) -> str:
    made_for = engine.config.context_tokens == engine.context_tokens
    return "what the model was made for" if made_for else "what fits on the device"


def _choices(
    build: Build, config: EngineConfig, engine: Engine, kernels: str, *, exact: bool
) -> list[Choice]:
    cache: CacheConfig = engine.cache.config
    spec = engine.cache.spec
    controller = engine.cache.controller
    layout = LAYOUT_NAMES[cache.layout]
    if layout != cache.layout:
        layout = f"{cache.layout} (the same bytes as {layout})"
    host = f"{cache.host_bytes:,} B, {layout}, {controller.how}" if controller else "off"
    why = {"native": "built at installation", "cuda": "in Triton, for this device"}
    same = "a text's bits do not depend on what else is computed" if exact else "sums depend on the batch"
    device = f"{cache.device_pages} pages of {spec.page_tokens} tokens, {cache.device_tails} tails"
    return [
        Choice(
            "model", build.model, f"{spec.model}, {len(spec.layers)} layers, {engine.vocab_size:,} tokens"
        ),
        Choice("entries", str(build.format), f"{spec.bytes_per_token:,.0f} B per token"),
        Choice("kernels", kernels, why.get(kernels, "the native ones were not built, or not asked for")),
        Choice("exact", "on" if exact else "off", same),
        Choice("device tier", device, f"{build.device_bytes:,} B"),
        Choice("host tier", host, f"save {cache.save}, evict {cache.evict}"),
        _store_choice(build, cache),
        _share_choice(build.share),
        Choice("longest text", f"{engine.context_tokens:,} tokens", _why_longest(engine)),
        Choice("steps", "overlapped" if config.overlap else "plain", f"{config.step_tokens} tokens each"),
        Choice("requests", f"{config.running_max} running", f"{config.waiting_max} may wait"),
    ]
