"""How much of conversations a small device reuses: `python -m benchmarks.conversations [--device cuda]`.

A real engine with a small device, a small host and a file store, beside the same traffic on a device that
holds everything. Conversations of several turns with one system prompt, some at once; which of them goes on
next is random. Every turn sends all of the text so far. A case is named by the MiB of its device.

    reuse           prompt tokens that were not computed, over all prompt tokens
    reuse_endless   the same where the device holds everything
    ratio           of the two (aim 0.97)
    tokens          prompt tokens from each tier
    missed          tokens that the device that holds everything reused and this one did not, by the reason
                    that the engine gives (`Reuse.why`) for the turns that missed them

The cases are for V4-Flash's dimensions (`v4-flash-8e`). Another model (`tiny-v4` on a CPU) gets as many
places on device and host, and texts of as many pages.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu_engines import OneModel, RunningEngine
from benchmarks.machine import describe, parser_of, tell
from tiercel.config import CacheConfig
from tiercel.engine.config import places_of
from tiercel.policy.resume import Reuse
from tiercel.spec.presets import load

MIB = 1024**2
MODELS = {"cpu": ("tiny-v4", 400 * MIB), "cuda": ("v4-flash-8e", 7168 * MIB)}
"""For each device the model, and memory that holds all conversations of a case."""
FLASH = load("deepseek-v4-flash")


@dataclass(frozen=True)
class Case:
    """Sizes of the tiers for V4-Flash, and the traffic. Texts are in 64ths of a page."""

    device_bytes: int
    host_bytes: int
    conversations: int
    store_bytes: int = 4096 * MIB
    turns: int = 4
    at_once: int = 6
    shared: int = 8 * 64
    message: tuple[int, int] = (75, 325)
    """The shortest and the longest message of a user: 300 to 1,300 tokens of V4-Flash."""
    answer: int = 8


CASES = {"700": Case(700 * MIB, 400 * MIB, 64), "220": Case(220 * MIB, 300 * MIB, 40)}
QUICK = Case(30 * MIB, 20 * MIB, conversations=6, turns=2, at_once=2, shared=64, message=(40, 90), answer=4)


@dataclass(frozen=True)
class Turn:
    who: int
    more: tuple[int, ...]
    """The tokens of this message; before the first one the system prompt."""
    ends: tuple[int, ...]
    """Ends of messages within `more`."""


def traffic(case: Case, model: OneModel) -> list[Turn]:
    """All turns in the order in which they are asked. A conversation goes on when others have asked since."""
    chance, unit = random.Random(31), model.page_tokens // 64
    shared = model.words(case.shared * unit, seed=1)
    left = dict.fromkeys(range(case.conversations), case.turns)
    turns: list[Turn] = []
    while left:
        recent = {turn.who for turn in turns[-case.at_once :]}
        who = chance.choice([each for each in left if each not in recent] or list(left))
        message = model.words(unit * chance.randint(*case.message), seed=100 + len(turns))
        more = shared + message if left[who] == case.turns else message
        turns.append(Turn(who, more, (len(shared), len(more)) if len(more) > len(message) else (len(more),)))
        left[who] -= 1
        if not left[who]:
            del left[who]
    return turns


def converse(running: RunningEngine, turns: list[Turn], at_once: int, answer: int) -> list[Reuse]:
    """What each turn reused."""
    texts: dict[int, list[int]] = {}
    asked: dict[str, int] = {}
    reuses: dict[int, Reuse] = {}
    waiting = iter(enumerate(turns))
    following = next(waiting, None)
    while following or asked:
        if (
            following
            and len(asked) < at_once
            and following[1].who not in {turns[i].who for i in asked.values()}
        ):
            number, turn = following
            text = texts.setdefault(turn.who, [])
            ends = tuple(len(text) + end for end in turn.ends)
            text += turn.more
            asked[running.add(text, answer, ends)] = number
            following = next(waiting, None)
            continue
        for delta in running.step():
            number = asked[delta.request_id]
            texts[turns[number].who] += [out.token for out in delta.tokens]
            if delta.finish is not None:
                explained = running.engine.explain(delta.request_id)
                assert explained is not None
                reuses[number] = explained.reuse
                del asked[delta.request_id]
    return [reuses[number] for number in range(len(turns))]


def reuse_of(reuses: list[Reuse]) -> float:
    return sum(each.cached_tokens for each in reuses) / sum(each.prompt_tokens for each in reuses)


def settings_of(model: OneModel, device_bytes: int, host_bytes: int) -> CacheConfig:
    """As an engine would divide so many bytes for V4-Flash: as many places for this model."""
    spec = model.spec
    scale = spec.place_bytes / FLASH.place_bytes
    pages, staging = places_of(int(device_bytes * scale), spec)
    return CacheConfig(device_pages=pages, staging_tails=staging, host_bytes=int(host_bytes * scale))


def figures_of(case: Case, model: OneModel, folder: Path) -> Iterator[tuple[str, Any]]:
    turns = traffic(case, model)
    answer = case.answer * model.page_tokens // 64
    with model.engine() as running:
        start = time.perf_counter()
        endless = converse(running, turns, case.at_once, answer)
        endless_s = time.perf_counter() - start
        reasons = {why for _, _, why in running.cache.tree.copies.evicted}
        assert "room" not in reasons, "the device does not hold everything"
    store_bytes = int(case.store_bytes * model.spec.place_bytes / FLASH.place_bytes)
    store = f"file://{folder}?size={store_bytes}"
    settings = settings_of(model, case.device_bytes, case.host_bytes)
    with model.with_cache(settings, store=store) as running:
        start = time.perf_counter()
        reuses = converse(running, turns, case.at_once, answer)
        seconds = time.perf_counter() - start
        running.rest()
        tier, counters = running.cache.store, running.cache.counters
        assert tier is not None
        yield "reuse", reuse_of(reuses)
        yield "reuse_endless", reuse_of(endless)
        yield "ratio", reuse_of(reuses) / reuse_of(endless)
        yield "prompt_tokens", sum(each.prompt_tokens for each in reuses)
        for name in ("device", "host", "store", "replayed"):
            yield f"tokens.{name}", counters[f"tokens_{name}"]
        for name in ("fetches", "fetches_late", "fetches_not_worth", "pages_written", "tails_written"):
            yield name, tier.counters[name]
        for name in ("writes_dropped", "writes_passed"):
            yield name, tier.counters[name]
        yield "preemptions", running.engine.counters["preemptions"]
        yield "seconds", seconds
        yield "seconds_ratio", seconds / endless_s
        yield "missed", dict(missed(reuses, endless).most_common())


def missed(reuses: list[Reuse], endless: list[Reuse]) -> Counter[str]:
    """Tokens that were reused on the device that holds everything, and not here, by the reason."""
    counted: Counter[str] = Counter()
    for here, there in zip(reuses, endless, strict=True):
        if (tokens := there.cached_tokens - here.cached_tokens) > 0:
            counted[here.why.value] += tokens
    return counted


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=list(MODELS), default="cpu")
    parser.add_argument("--case", choices=list(CASES), nargs="+", default=list(CASES))
    options = parser.parse_args()
    cases = {"30": QUICK} if options.quick else {name: CASES[name] for name in options.case}
    with TemporaryDirectory() as folder:
        name, device_bytes = MODELS[options.device]
        model = OneModel(name, options.device, device_bytes)
        figures = {
            f"{name}.{key}": figure
            for name, case in cases.items()
            for key, figure in figures_of(case, model, Path(folder) / name)
        }
    tell({"machine": describe(), **figures}, as_json=options.json)


if __name__ == "__main__":
    main()
