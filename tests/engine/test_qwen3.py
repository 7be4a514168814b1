"""Goal: a model without windows is served from every tier as exactly as one with them. Method: a small random
Qwen3 in a folder as `transformers` saves it; every run of `verify`; many at once on scarce pages."""

from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.drive import logprobs_of, make_ask, run, settle, tokens_of, words
from tests.models.qwen3 import YARN, write_qwen3
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.errors import SpecError, WeightsError
from tiercel.verify import verify

MIB = 1024**2
CONFIG = EngineConfig(CacheConfig(device_pages=1, host_bytes=64 * MIB), running_max=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("qwen3"), tie_word_embeddings=True)


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def either(request, tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("qwen3"), moe=request.param)


def build_of(folder, **options):
    return Build(str(folder), **{"page_tokens": 32, "device_bytes": 16 * MIB, **options})


@pytest.mark.parametrize("format", ["fp32", "bf16"])
def test_no_tier_changes_a_bit(tmp_path, either, format):
    report = verify(build_of(either, format=format), CONFIG, tmp_path)
    assert report.holds(kl=0.0, dlogprob=0.0), report
    assert report.share == "bits"
    assert min(report.cached_tokens["device"], report.cached_tokens["host"]) > 2000


def test_broken_host_pages_are_noticed(folder):
    """The control: the answer depends on the bytes that come back."""
    prompt = words(300)
    engine, _ = open_engine(build_of(folder), CONFIG)
    engine, _ = open_engine(build_of(folder, device_bytes=14 * engine.cache.spec.page_bytes), CONFIG)
    [truth] = run(engine, make_ask("a", prompt))
    run(engine, make_ask("other", words(400, seed=1)))
    settle(engine)
    engine.cache.host.flat[::7] ^= 0x15
    [broken] = run(engine, make_ask("b", prompt))
    assert broken.usage.host_tokens >= 256
    assert logprobs_of(broken) != logprobs_of(truth)


@pytest.mark.parametrize("overlap", [False, True])
def test_many_on_scarce_pages_answer_as_each_alone(either, overlap):
    """Texts begin alike and are decoded together, preempted where pages are short."""
    prompts = [[*words(70, seed=i % 2), *words(20 + 9 * i, seed=10 + i)] for i in range(8)]
    cold, _ = open_engine(build_of(either), replace(CONFIG, cache=replace(CONFIG.cache, force_miss=True)))
    truth = [run(cold, make_ask("alone", prompt, 40))[0] for prompt in prompts]
    page = cold.cache.spec.page_bytes
    engine, _ = open_engine(build_of(either, device_bytes=16 * page), CONFIG)
    for _ in range(2):
        asks = [make_ask(str(i), prompt, 40) for i, prompt in enumerate(prompts)]
        for answer, expected in zip(run(engine, *asks, overlap=overlap), truth, strict=True):
            assert tokens_of(answer) == tokens_of(expected) and not answer.error
            assert logprobs_of(answer) == logprobs_of(expected)
        settle(engine)
    assert engine.cache.counters["tokens_device"] > 0 and engine.cache.counters["tokens_host"] > 0
    engine.cache.close(), cold.cache.close()


def test_no_family_finds_the_pages_of_another_in_one_store(folder, tmp_path):
    """The same tokens to every model of these tests, with and without a draft, and to one that differs in a
    single weight: only who wrote a page finds it."""
    moe = write_qwen3(tmp_path / "moe", moe=True)
    shaken = write_qwen3(tmp_path / "shaken", tie_word_embeddings=True)
    weights = load_file(shaken / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, shaken / "model.safetensors", {"format": "pt"})
    store, config = f"file://{tmp_path}/store?size=1GiB", replace(CONFIG.cache, fetch="wait")
    builds = [
        build_of(folder, store=store, page_tokens=128),
        build_of(shaken, store=store, page_tokens=128),
        build_of(moe, store=store, page_tokens=128),
        build_of("tiny-v4", store=store, page_tokens=128),
        build_of(folder, store=store, page_tokens=128, draft=str(moe)),
        build_of(folder, store=store, page_tokens=128, format="bf16"),
    ]
    for found in (0, 256):
        for build in builds:
            engine, _ = open_engine(build, replace(CONFIG, cache=config))
            engine.cache.compute.observe = lambda *_: None  # what is stored is read, however fast this is
            [answer] = run(engine, make_ask("a", words(300)))
            assert answer.usage.store_tokens == found, build
            engine.cache.close(60)


def test_another_rope_finds_nothing_in_the_store(folder, tmp_path):
    other = write_qwen3(tmp_path / "other", tie_word_embeddings=True, rope_parameters=YARN)
    store = f"file://{tmp_path}/store?size=1GiB"
    reused = []
    for each in (folder, other, folder):
        engine, _ = open_engine(
            build_of(each, store=store), replace(CONFIG, cache=replace(CONFIG.cache, fetch="wait"))
        )
        [answer] = run(engine, make_ask("a", words(200)))
        reused.append(answer.usage.store_tokens)
        engine.cache.close(60)
    assert reused == [0, 0, 192]


def test_what_can_not_be_opened_is_named(folder, tmp_path):
    with pytest.raises(SpecError, match="fp8"):
        open_engine(build_of(folder, format="fp8"), CONFIG)
    with pytest.raises(SpecError, match="use_sliding_window"):
        open_engine(build_of(write_qwen3(tmp_path / "a", use_sliding_window=True)), CONFIG)
    biased = write_qwen3(tmp_path / "b", attention_bias=True)
    (biased / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(WeightsError, match=r"not of this model: .*k_proj.bias"):
        open_engine(build_of(biased), CONFIG)
