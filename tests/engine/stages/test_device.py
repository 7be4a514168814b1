"""Goal: stages on a CUDA device answer as the whole model does there, bit for bit, cold and from every tier.
Method: real processes that share one device, over gloo. Where there is a device for each stage, over NCCL."""

from dataclasses import replace

import pytest

from tests.engine.drive import make_ask, settle, words
from tests.kernels.devices import on_gpu
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.offline import answer_all
from tiercel.models.opening import open_model
from tiercel.models.wish import Wish

MIB = 2**20
CACHE = CacheConfig(host_bytes=256 * MIB, fetch="wait")
PROMPTS = [tuple(words(700 + 500 * i, i)) for i in range(4)]
PROMPTS.append(PROMPTS[3][:1500] + tuple(words(200, 9)))

pytestmark = on_gpu.marks


def opened(stages, folder="", cache=CACHE, device_bytes=64 * MIB, **options):
    store = f"file://{folder}/store?size=1GiB" if folder else None
    build = Build(
        "tiny-v4", device="cuda", device_bytes=device_bytes, stages=stages, format="fp8", store=store
    )
    config = EngineConfig(cache=cache, **{"speculate": "off", "running_max": 4, **options})
    engine, _ = open_engine(build, config)
    engine.cache.compute.observe = lambda *_: None  # what is stored is read, however fast this is
    return engine


def answers(engine, name):
    asks = [make_ask(f"{name}{i}", prompt, 40) for i, prompt in enumerate(PROMPTS)]
    found = answer_all(engine, asks)
    assert not [each.error for each in found if each.error]
    return found


def bits(found):
    return [[(out.token, out.logprob) for out in each.tokens] for each in found]


def close(engine):
    settle(engine)
    engine.cache.check()
    engine.cache.close(60)


@pytest.fixture(scope="module")
def truth():
    engine = opened(1)
    found = bits(answers(engine, "truth"))
    close(engine)
    return found


@pytest.mark.parametrize("stages", [2, 3])
def test_from_every_tier_and_to_other_stages(stages, truth, tmp_path):
    engine = opened(stages, str(tmp_path))
    assert bits(answers(engine, "cold")) == truth
    again = answers(engine, "device")
    assert bits(again) == truth and all(each.usage.device_tokens for each in again)
    settle(engine)
    while engine.cache.tree.evict(10**6, engine.cache.places.take_host):  # everything goes to the host
        engine.cache.places.settle()
        settle(engine)
    again = answers(engine, "host")
    assert bits(again) == truth and again[0].usage.host_tokens
    close(engine)
    for others in (1, 5 - stages):
        engine = opened(others, str(tmp_path))
        stored = answers(engine, "stored")
        assert bits(stored) == truth and stored[0].usage.store_tokens
        close(engine)


@pytest.mark.parametrize("speculate", ["off", "mtp"])
def test_preempted_sparse_and_guessed(speculate, truth):
    spec = open_model(Wish(format="fp8", device="cuda")).spec
    held = [spec.stage(0, 4), spec.stage(4, 6)]
    few = max(32 * each.frame_bytes + 2 * each.tail_bytes for each in held)
    engine = opened(2, device_bytes=few, speculate=speculate)
    assert bits(answers(engine, "pressed")) == truth
    assert engine.counters["preemptions"] or engine.cache.counters["pages_sparse"]
    close(engine)
    engine = opened(2, cache=replace(CACHE, sparse="always"), speculate=speculate)
    assert bits(answers(engine, "sparse")) == truth
    assert engine.cache.counters["pages_sparse"]
    assert speculate == "off" or engine.counters["guesses"]
    close(engine)
