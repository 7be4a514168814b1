"""Engines on the embedded model, and asks for them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import monotonic

import pytest

import tiercel.models
from tiercel.asks.ask import Ask, Sampling
from tiercel.cache import TieredCache
from tiercel.config import CacheConfig
from tiercel.engine.config import EngineConfig
from tiercel.engine.engine import Engine
from tiercel.engine.loop import overlapped_steps, plain_steps, queued_steps
from tiercel.engine.offline import answer_all
from tiercel.engine.queue_runner import QueueRunner, make_runner
from tiercel.engine.step import Queues
from tiercel.models.checkpoint import Checkpoint
from tiercel.models.deepseek_v4 import weights
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.model import build
from tiercel.spec import deepseek_v4, deepseek_v4_mtp
from tiercel.text.text import Text

FOLDER = Path(tiercel.models.__file__).parent / "tiny_v4"
CHECKPOINT = Checkpoint(FOLDER)
CONFIG = V4Config.from_hf(CHECKPOINT.config)
WEIGHTS = weights.WEIGHTS.plan(CHECKPOINT, CONFIG).read()
TEXT = Text(FOLDER)
PAGE = 128
SPEC = deepseek_v4(CHECKPOINT.config, PAGE, "fp32")


DRAFTED = SPEC.with_draft(deepseek_v4_mtp(CHECKPOINT.config, PAGE, "fp32", hidden=True))


class Always:
    """Every text gets this many guesses in every step."""

    def __init__(self, count):
        self.count = count

    def accepted(self, record, *, asked, made, accepted):
        record.steps += 1
        record.tokens += accepted + 1

    def stepped(self, **_):
        pass

    def choose(self, records, most, others=0):
        return [min(self.count, each) for each in most]


def make_engine(  # noqa: PLR0913
    *,
    pages=64,
    host_pages=0,
    change=None,
    cache=None,
    clock=monotonic,
    guesses=0,
    second=(),
    order=None,
    **options,
):
    """Room for a text of so many `pages` and its tails; `host_pages` of host memory; `cache`: other settings
    of the cache; `options`: the engine's; `guesses`: the number for every text; 0: none; `change`: is given
    the model; `second`: streams in a second device pool; `order`: in which places are given out."""
    options = {"running_max": 8, "speculate": "off"} | options
    spec = replace(DRAFTED if options["speculate"] == "mtp" else SPEC, second=second)
    tails = 2 * spec.pages_per_window * spec.units_per_tail
    places, staging = pages - (-tails // spec.frame_units), 3 * spec.pages_per_window
    settings = CacheConfig(places, staging, host_bytes=host_pages * spec.place_bytes, staged_pages=pages)
    settings = replace(settings, **(cache or {}))
    config = EngineConfig(cache=settings, **options)
    own = TieredCache(spec, settings, pool_order=order)
    made = build(CONFIG, WEIGHTS, own.device, config.running_max, guesses_max=config.guesses_max)
    if change is not None:
        change(made)
    engine = Engine(make_runner(made, own, TEXT, config), own, TEXT, config, clock)
    if guesses:
        engine.scheduler.guessing.policy = Always(guesses)
    return engine


def bytes_for(pages, spec):
    """Device memory for a text of so many `pages` and its tails, and no more."""
    tails = 2 * spec.pages_per_window * spec.places_per_tail
    staging = spec.pages_per_window + 1 if spec.tail_streams else 0
    return (pages + tails) * spec.place_bytes + staging * spec.tail_bytes


def make_ask(name, prompt, count=8, **options):
    """A greedy ask with logprobs. Options are fields of the ask, or else of its sampling."""
    own = {key: options.pop(key) for key in list(options) if key in Ask.__dataclass_fields__}
    sampling = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True} | options
    return Ask(name, tuple(prompt), Sampling(count, **sampling), **own)


def words(count, seed=0):
    """Random tokens."""
    return [(seed * 7919 + i * i * 31 + i * 17) % 3800 + 200 for i in range(count)]


LOOPS = pytest.mark.parametrize("overlap", [False, True, "queued"], ids=["plain", "overlapped", "queued"])


def one_loop(test):
    """Each of the other cases with one of the loops."""
    return pytest.mark.rotate("overlap")(LOOPS(test))


def steps_of(engine, overlap, executor):
    """Queued steps of a model in this process run at once, as everything on a CPU; the order is that of a
    device. Stages queue them by themselves."""
    if overlap == "queued":
        if not isinstance(engine.runner, Queues):
            engine.runner = QueueRunner(
                engine.runner.model, None, engine.runner._drafter, TEXT.grammars, engine.runner._staging
            )
        return queued_steps(engine, engine.runner.start)
    return overlapped_steps(engine, executor) if overlap else plain_steps(engine)


def run(engine, *asks, overlap=False):
    """Answers in the order of the asks."""
    with ThreadPoolExecutor(1) as executor:
        return answer_all(engine, asks, steps_of(engine, overlap, executor))


@cache
def cold_engine():
    """It reuses nothing."""
    return make_engine(cache={"force_miss": True})


@cache
def truth_of(prompt, count=8):
    """The cold answer to a prompt (a tuple), computed once for all tests of a process."""
    return run(cold_engine(), make_ask("t", prompt, count))[0]


def settle(engine):
    """Nothing on its way, every invariant holds, and every place that is held has an owner."""
    while engine.cache.busy:
        engine.cache.step()
    engine.cache.check()
    own = engine.scheduler
    assert not own.tasks and not own.running and not own.waiting and not own.loading
    assert len(own.free_rings) == engine.config.running_max


def tokens_of(answer):
    return [out.token for out in answer.tokens]


def logprobs_of(answer):
    return [out.logprob for out in answer.tokens]


class OracleDrafter:
    """Knows whole texts, and guesses each token right with a probability."""

    def __init__(self, texts, right, random):
        self._texts, self._right, self._random = [list(text) for text in texts], right, random

    def begin(self, ring):
        pass

    def guess(self, texts, counts):
        return [self._guess(text.tokens.tolist(), count) for text, count in zip(texts, counts, strict=True)]

    def _guess(self, tokens, count):
        known = next((text for text in self._texts if text[: len(tokens)] == tokens), tokens)
        following = known[len(tokens) : len(tokens) + self._random.randint(0, count)]
        return [token if self._random.random() < self._right else (token + 1) % 4000 for token in following]


def guess_with(engine, drafter, guesses=4):
    """Every text gets `guesses` guesses of this drafter."""
    engine.runner._drafter = drafter
    engine.scheduler.guessing.policy = Always(guesses)
    return engine


async def deltas_of(service, ask):
    """The Deltas of an answer. Closing the generator ends the ask."""
    queue = asyncio.Queue()
    answering = asyncio.create_task(service.submit(ask, queue.put_nowait))
    answering.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (delta := await queue.get()) is not None:
            yield delta
        await answering
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
