"""Goal: on a GPU, with recorded forwards, and as a user opens it, sparse texts have the bits of whole ones.
Method: the embedded model opened three times: whole, always sparse, and sparse where there is no room."""

import pytest

from tests.engine.drive import make_ask, words
from tests.kernels.devices import on_gpu
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.offline import answer_all

MIB = 2**20
PROMPTS = [tuple(words(2100 + 400 * i, i)) for i in range(4)]
PROMPTS.append(PROMPTS[3][:2000] + tuple(words(200, 9)))


def answers(device, sparse, device_bytes, speculate):
    cache = CacheConfig(host_bytes=256 * MIB, sparse=sparse)
    config = EngineConfig(cache=cache, running_max=4, context_tokens=4096, speculate=speculate)
    build = Build("tiny-v4", device=device, device_bytes=device_bytes, format="fp8")
    engine, choices = open_engine(build, config)
    asks = [make_ask(f"{i}", prompt, 50) for i, prompt in enumerate(PROMPTS)]
    first = answer_all(engine, asks)
    turn = PROMPTS[0] + tuple(out.token for out in first[0].tokens) + tuple(words(40, 5))
    second = answer_all(engine, [make_ask("turn", turn, 30)])
    counters, told = engine.cache.counters, {each.what: each.value for each in choices}
    engine.cache.check()
    engine.cache.close()
    return [[(out.token, out.logprob) for out in each.tokens] for each in (*first, *second)], counters, told


@pytest.mark.parametrize("device", ["cpu", on_gpu])
@pytest.mark.parametrize("speculate", ["off", "mtp"])
def test_a_server_with_sparse_texts_answers_the_same(device, speculate):
    whole, counters, told = answers(device, "off", 64 * MIB, speculate)
    assert not counters["pages_sparse"] and told["sparse"] == "off"
    always, counters, told = answers(device, "always", 64 * MIB, speculate)
    assert counters["pages_sparse"] and told["sparse"] == "always"
    assert always == whole
    if device == "cuda":
        pressed, counters, _ = answers(device, "auto", MIB, speculate)
        assert counters["pages_sparse"] and pressed == whole
