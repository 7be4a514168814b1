"""Builds an engine on a model's folder. Every choice that is made is listed with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from tiercel.cache import TieredCache
from tiercel.cache.memories import Memories, check_host, make_memories
from tiercel.config import LAYOUT_NAMES, CacheConfig, size_text
from tiercel.engine.config import (
    DRAFT_MODEL,
    GUESSERS,
    MTP,
    STAGING_MOST,
    Build,
    EngineConfig,
    places_held,
    places_of,
)
from tiercel.engine.cut import cut_of, layer_weights
from tiercel.engine.engine import Engine
from tiercel.engine.group import Group
from tiercel.engine.queue_runner import make_runner
from tiercel.engine.scheduler import STEP_TOKENS
from tiercel.engine.sources import open_sources
from tiercel.engine.stage_messages import StageRoom
from tiercel.engine.step import Queues
from tiercel.errors import ConfigError
from tiercel.memory.buffers import STAGED_AREAS, DeviceMemory
from tiercel.models.families import text_folder_of
from tiercel.models.opening import Opened, check_device_memory, open_model
from tiercel.models.wish import Choice
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.identity import BITS, NUMBERS
from tiercel.storage.base import Store
from tiercel.storage.open import shown
from tiercel.text.text import Text

CPU_BYTES = 256 * 2**20
CUDA_STEP_TOKENS = 8192
SHARE_WHY = {
    BITS: "with kernels of the same bits only",
    NUMBERS: "other kernels' pages are taken: last bits may differ",
}

GUESS_SHARE_MOST = 0.1
"""What a guess of the model's own draft may take, of what a token takes, unless that draft is asked for.
Above it a guess is worth less than one that the text so far makes for nothing."""


def open_engine(
    build: Build, config: EngineConfig, store: Store | None = None
) -> tuple[Engine, list[Choice]]:
    """The engine, and the choices made for it. All input is checked first; an error names what is wrong.

    `store`: what `open_sources` opened, if the caller has called it. It is closed with the engine's cache, or
    when this fails.
    """
    with ExitStack() as undo:
        if store is None:
            store = open_sources(build, config.cache)
        if store is not None:
            undo.callback(store.close)
        engine = _open_engine(build, config, store)
        undo.pop_all()
    return engine


def _open_engine(build: Build, config: EngineConfig, store: Store | None) -> tuple[Engine, list[Choice]]:
    opened = open_model(build)
    config, speculation = who_guesses(config, opened, build.stages)
    opened = replace(opened, own_draft=config.speculate == MTP)
    config = replace(
        config,
        step_tokens=config.step_tokens or (STEP_TOKENS if build.on_cpu else CUDA_STEP_TOKENS),
        context_tokens=config.context_tokens or opened.target.longest,
    )
    opened, sparse = who_is_sparse(config.cache, opened, build)
    spec, device_bytes = opened.spec, build.device_bytes or (CPU_BYTES if build.on_cpu else None)
    check_host(spec, config.cache, build.device)
    if device_bytes is not None and build.stages == 1:
        places_of(device_bytes, spec)  # fails for too little memory before weights are read
    text, told = _open_text(opened), list[Choice]()
    if build.stages > 1:
        group, cache, device_bytes = _open_group(build, config, opened, device_bytes, store)
        engine = Engine(group, cache, text, config)
        told = [_stages_choice(group)]
    else:
        loaded = opened.load(partial(check_device_memory, build, cache_bytes=device_bytes or 0))
        device_bytes = device_bytes or _device_bytes(_half_free(build.device), spec, config)
        cache_config = _with_places(config.cache, [spec], device_bytes, config.context_tokens)
        places = cache_config.device_pages, cache_config.staging_tails
        memory = DeviceMemory(spec, *places, build.device, STAGED_AREAS * cache_config.staged_pages)
        cache = _open_cache(build, cache_config, opened, make_memories(spec, cache_config, memory), store)
        model = loaded.build(memory, config.running_max, config.guesses_max)
        use = partial(device_use, build.device, weights=loaded.bytes, cache=memory.bytes)
        engine = Engine(make_runner(model, cache, text, config), cache, text, config, device_use=use)
        model.warm_up(engine.context_tokens)
    choices = [*opened.choices(), *told, *_choices(build, engine, device_bytes, store), *sparse, speculation]
    return engine, [*choices, *opened.unread(), *_end_choice(text, engine.vocab_size)]


def _with_places(
    config: CacheConfig, held: Sequence[CacheSpec], device_bytes: int, context_tokens: int | None
) -> CacheConfig:
    """The settings with the places that each device has room for. `held`: what each keeps of a page."""
    return replace(config, **places_held(device_bytes, held, context_tokens)._asdict())


def _open_group(
    build: Build, config: EngineConfig, opened: Opened, device_bytes: int | None, store: Store | None
) -> tuple[Group, TieredCache, int]:
    """The processes of the stages, and the cache above them."""
    weights = layer_weights(opened.target.plan(opened.kernels, draft=opened.own_draft))
    cut = cut_of(opened.spec, weights, opened.layers, build.stages)
    held = [replace(opened, stage=stage).held for stage in cut]
    if device_bytes is not None:  # fails for too little memory before weights are read
        _with_places(config.cache, held, device_bytes, config.context_tokens)
    group = Group(build, config, opened, cut)
    try:
        if device_bytes is None:
            device_bytes = min(_device_bytes(group.bytes_free // 2, each, config) for each in held)
        settings = replace(config.cache, host_shared=True)
        settings = _with_places(settings, held, device_bytes, config.context_tokens)
        memories = Memories(controller=group.controller)
        if settings.host_bytes:
            memories = make_memories(opened.spec, settings, None, controller=group.controller)
        host = None if memories.host is None else (memories.host.path, settings.host_bytes)
    except BaseException:
        group.end()
        raise
    cache = _open_cache(build, settings, opened, memories, store)
    try:
        group.open(StageRoom(settings.device_pages, settings.staging_tails, settings.staged_pages, host))
    except BaseException:
        cache.close(0.0)
        raise
    return group, cache, device_bytes


def _stages_choice(group: Group) -> Choice:
    layers = ", ".join(f"{stage.first} to {stage.end - 1}" for stage in group.cut)
    return Choice("stages", str(len(group.cut)), f"a process each for layers {layers}")


def who_is_sparse(config: CacheConfig, opened: Opened, build: Build) -> tuple[Opened, list[Choice]]:
    """Whether entries that attention selects may stay on the host, and why."""
    asked, selects = config.sparse, opened.spec.apart.selective
    if asked == "always" and not (selects and config.host_bytes):
        why = "there is no host memory" if selects else f"{opened.spec.model} selects no entries"
        raise ConfigError("sparse", asked, f"needs entries that may stay on the host: {why}")
    if not selects:
        return opened, []
    if asked == "off" or not config.host_bytes:
        return opened, [Choice("sparse", "off", "pages of running texts are whole on the device")]
    if asked == "auto" and build.on_cpu:
        return opened, [
            Choice("sparse", "off", "a CPU's memory is no smaller for one tier than for the other")
        ]
    when = "as soon as they are saved" if asked == "always" else "where the device has no room for them"
    return replace(opened, apart=True), [Choice("sparse", asked, f"selected entries stay on the host {when}")]


def who_guesses(config: EngineConfig, opened: Opened, stages: int = 1) -> tuple[EngineConfig, Choice]:
    """Who guesses: the model that was given for it, or what was asked for, or else what costs little."""
    asked, draft = config.speculate, opened.draft
    if draft is None:
        chosen, why = _guesser(asked, opened, queues=opened.kernels.QUEUES or stages > 1)
    elif asked not in ("auto", DRAFT_MODEL):
        why = f"excludes --speculate {asked}: one of them says who guesses"
        raise ConfigError("draft", draft.name, why)
    else:
        upto = f"; it was made for texts of {draft.longest:,} tokens" if draft.longest is not None else ""
        chosen, why = DRAFT_MODEL, f"the model {draft.name} guesses{upto}"
    value = chosen if chosen == "off" else f"{chosen}, up to {config.draft_tokens_max} tokens"
    return replace(config, speculate=chosen), Choice("speculation", value, why)


def _guesser(asked: str, opened: Opened, *, queues: bool) -> tuple[str, str]:
    """Who guesses without a model that is given for it, and why. `queues`: a step without guesses is queued
    before the one before it has ended."""
    if asked == DRAFT_MODEL:
        raise ConfigError("speculate", asked, "needs a model that guesses: --draft FOLDER")
    offer = opened.target.offer if asked in ("auto", MTP) else None
    if asked == MTP and offer is None:
        raise ConfigError("speculate", asked, f"the model has no {asked} draft that is read here")
    if asked != "auto":
        return asked, GUESSERS[asked]
    if offer is not None and offer.share <= GUESS_SHARE_MOST:
        return MTP, GUESSERS[MTP]
    chosen, more = "off" if queues else "ngram", "the model has no draft that is read here"
    if offer is not None:
        more = f"a guess takes {offer.share:.0%} of a token with {MTP}"
    return chosen, f"{GUESSERS[chosen]}; {more}"


def _open_text(opened: Opened) -> Text:
    """The model's text. A guess is a token, so a model that guesses must have the same tokens."""
    text, draft = Text(text_folder_of(opened.target.name)), opened.draft
    if draft is not None and (difference := text.difference(text_folder_of(draft.name))) is not None:
        raise ConfigError("draft", draft.name, f"has another tokenizer: {difference}")
    return text


def device_use(device: str, *, weights: int, cache: int) -> dict[str, int]:
    """Bytes of the device's memory by what they are used for now. A CPU's memory is not ours alone: of it
    only our own part is told."""
    ours = {"weights": weights, "cache": cache}
    if torch.device(device).type != "cuda":
        return ours
    free, whole = torch.cuda.mem_get_info(device)
    return {**ours, "other": whole - free - weights - cache, "free": free}


def _half_free(device: str) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) // 2


def _device_bytes(half: int, spec: CacheSpec, config: EngineConfig) -> int:
    """Half of the memory that a GPU has left beside the weights, or all that running texts can ever fill."""
    if config.context_tokens is None:
        return half
    pages, tails = -(-config.context_tokens // spec.page_tokens), max(4, 2 * spec.pages_per_window)
    each = pages * spec.frame_bytes + tails * spec.units_per_tail * spec.unit_bytes
    return min(half, config.running_max * each + STAGING_MOST * spec.tail_bytes)


def _open_cache(
    build: Build, config: CacheConfig, opened: Opened, memories: Memories, store: Store | None
) -> TieredCache:
    try:
        identity = opened.identity(build.share)
        cache = TieredCache(opened.spec, config, memories, identity=identity)
    except BaseException:
        memories.close()
        raise
    if store is not None:
        cache.attach(store)
    return cache


def _store_choice(build: Build, cache: CacheConfig, store: Store | None) -> Choice:
    if store is None:
        return Choice("store tier", "off", "--store URL or --peer URL turns it on")
    late = f", {cache.fetch_deadline_s} s per 1,024 tokens" if cache.fetch == "deadline" else ""
    why = store.trouble or f"fetch {cache.fetch}{late}"
    return Choice("store tier", ", ".join(map(shown, build.sources)), why)


def _end_choice(text: Text, vocab_size: int) -> list[Choice]:
    """A line only if some answers may never end: no end token, or one that the model does not have."""
    known = sorted(token for token in text.eos if 0 <= token < vocab_size)
    unknown = ", ".join(map(str, sorted(text.eos - set(known))))
    if known and not unknown:
        return []
    why = f"eos_token_id {unknown} is no token of this model"
    value = f"token{'s' * (len(known) > 1)} {', '.join(map(str, known))}" if known else "none"
    return [Choice("end of an answer", value, why if unknown else "only stop strings and max_tokens end one")]


def _choices(build: Build, engine: Engine, device_bytes: int, store: Store | None) -> list[Choice]:
    config, cache = engine.config, engine.cache.config
    controller = engine.cache.controller
    layout = LAYOUT_NAMES[cache.layout]
    if layout != cache.layout:
        layout = f"{cache.layout} (the same bytes as {layout})"
    host = f"{size_text(cache.host_bytes)}, {layout}, {controller.how}" if controller else "off"
    made_for = config.context_tokens == engine.context_tokens
    longest = "what the model was made for" if made_for else "what fits on the device"
    each = engine.cache.spec.units_per_tail
    device, size = f"{cache.device_pages} pages of {engine.page_tokens} tokens", size_text(device_bytes)
    size += " for each stage" if build.stages > 1 else ""
    if each:
        device += f"; a tail takes {each}"
        size += f"; a step writes up to {cache.staging_tails} tails"
    return [
        Choice("device tier", device, size),
        Choice("host tier", host, f"save {cache.save}, evict {cache.evict}"),
        _store_choice(build, cache, store),
        Choice("share", build.share, SHARE_WHY[build.share]),
        Choice("longest text", f"{engine.context_tokens:,} tokens", longest),
        Choice("steps", _loop_of(engine), f"{config.step_tokens} tokens each"),
        Choice("requests", f"{config.running_max} running", f"{config.waiting_max} may wait"),
    ]


def _loop_of(engine: Engine) -> str:
    if not engine.config.overlap:
        return "plain"
    return "queued" if isinstance(engine.runner, Queues) else "overlapped"
