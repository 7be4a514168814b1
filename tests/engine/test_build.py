"""Goal: whatever a folder has, an engine opens on it and answers exactly, or an error names what is wrong.
Method: small random models in DeepSeek's own form, with the embedded tokenizer."""

import json
import shutil

import pytest
import torch

from tests.engine.drive import FOLDER, logprobs_of, make_ask, run, settle, tokens_of, words
from tests.kernels.devices import every_device, on_gpu
from tests.models.folders import make_config, write_folder
from tests.models.test_weights import (
    DRAFTS,
    FP4_NAMES,
    FP8_NAMES,
    fp4,
    fp8,
    in_original_form,
    make_weights,
    quantized,
)
from tiercel.cache import Wait
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine, who_guesses
from tiercel.engine.config import Build, EngineConfig, places_of
from tiercel.errors import ConfigError, SpecError, WeightsError
from tiercel.kernels.choice import make_kernels
from tiercel.models.opening import Folder, Opened, check_memory
from tiercel.spec.attention import mha
from tiercel.spec.presets import load

MIB = 1024**2
VOCAB = 4096


def make_folder(path, more=None, **changes):
    """Numbers small enough that no layer drowns the others."""
    config = make_config(vocab_size=VOCAB, max_position_embeddings=4096, **changes)
    weights = {name: t * 0.2 if t.is_floating_point() else t for name, t in make_weights(config).items()}
    weights = {name: t for name, t in weights.items() if not name.startswith("mtp.")}
    return with_tokenizer(write_folder(path, weights | (more or {}), config))


def with_tokenizer(path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, path)
    return path


def open_on(folder, *, host_bytes=0, **build):
    cache = CacheConfig(device_pages=1, staging_tails=1, host_bytes=host_bytes)
    build = {"page_tokens": 128, "device_bytes": 16 * MIB} | build
    config = EngineConfig(cache=cache, running_max=2, replay=False)
    return open_engine(Build(model=str(folder), **build), config)


# Shapes

SHAPES = {
    "a window of a page and a token": {"sliding_window": 129},
    "a window of more than two pages": {"sliding_window": 300},
    "windows only": {"compress_ratios": [0, 0, 0, 0], "sliding_window": 40},
    "windows only, longer than a page": {"compress_ratios": [0, 0, 0, 0], "sliding_window": 200},
}


def empty_device(engine):
    """Everything goes to the host: somebody takes all places for a moment."""
    cache = engine.cache
    while isinstance(room := cache.places.reserve(engine, cache.pages.capacity), Wait):
        cache.step()
    with room:
        pass


@pytest.mark.parametrize("shape", SHAPES)
def test_a_text_goes_on_from_what_is_cached_as_if_nothing_were(tmp_path, shape):
    folder = make_folder(tmp_path, **SHAPES[shape])
    prompts = [words(520), [*words(512), *words(200, seed=1)], words(700, seed=3)]
    cold = [run(open_on(folder)[0], make_ask("cold", prompt))[0] for prompt in prompts]
    plenty, _ = open_on(folder)
    spec = plenty.cache.spec
    window = spec.pages_per_window
    little = (7 + 2 * window * spec.places_per_tail) * spec.place_bytes + (window + 1) * spec.tail_bytes
    scarce, _ = open_on(folder, device_bytes=little, host_bytes=16 * MIB)
    assert scarce.cache.pages_most < 16
    for engine in (plenty, scarce):
        reused = [0, 0]
        for name, (prompt, expected) in enumerate(zip(prompts * 2, cold * 2, strict=True)):
            [done] = run(engine, make_ask(str(name), prompt))
            assert not done.error and tokens_of(done) == tokens_of(expected), name
            assert logprobs_of(done) == logprobs_of(expected), name
            reused[0] += done.usage.device_tokens
            reused[1] += done.usage.host_tokens
            settle(engine)
            if engine is scarce:
                empty_device(engine)
        assert reused[engine is scarce] >= 384
        engine.cache.close()


def test_a_model_without_tails_gets_pages_only():
    spec = mha("gqa", 16, layers=2, kv_heads=2, head_dim=8)
    assert places_of(10 * spec.page_bytes, spec) == (10, 0)
    with pytest.raises(ConfigError, match="device_bytes"):
        places_of(spec.page_bytes, spec)


@pytest.mark.parametrize(("device", "staging"), [(64 * 10**9, 64), (16 * 10**9, 21), (64 * MIB, 2)])
def test_staging_places_take_a_two_hundredth_of_the_device_and_pages_all_else(device, staging):
    spec = load("deepseek-v4-flash")
    pages, tails = places_of(device, spec)
    assert tails == staging
    used = pages * spec.place_bytes + tails * spec.tail_bytes
    assert device - spec.place_bytes < used <= device


# What a device has room for

WEIGHTS = {"attention": 5 * 10**9, "experts": 277 * 10**9, "embeddings": 2 * 10**9}


def test_what_fits_to_the_byte_is_not_refused():
    check_memory("v4", WEIGHTS, cache_bytes=10**9, bytes_free=285 * 10**9)
    with pytest.raises(ConfigError, match=r"--device-memory 953MiB would fit"):
        check_memory("v4", WEIGHTS, cache_bytes=10**9, bytes_free=285 * 10**9 - 1)


def test_what_does_not_fit_is_told_with_all_that_takes_memory():
    with pytest.raises(ConfigError) as refused:
        check_memory("v4", WEIGHTS, cache_bytes=3 * 10**8, bytes_free=140 * 10**9)
    assert str(refused.value) == (
        "model = 'v4': needs 284.3 GB on the device, and 140.0 GB are free: "
        "experts 277.0 GB, attention 5.0 GB, embeddings 2.0 GB, cache 0.3 GB; "
        "the weights alone do not fit: use a device with more memory, or smaller weights"
    )


@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_the_memory_of_a_device_is_told_by_what_it_is_used_for(device):
    engine, _ = open_engine(Build(device=device, device_bytes=4 * MIB), EngineConfig(speculate="off"))
    use, kernels = engine.stats().device_use, make_kernels(device=device)
    assert use["weights"] == sum(Folder("tiny-v4").plan(kernels).bytes.values())
    assert 3.5 * MIB < use["cache"] <= 4 * MIB
    if device == "cpu":
        assert use.keys() == {"weights", "cache"}
    else:
        assert min(use.values()) > 0
        assert sum(use.values()) == torch.cuda.get_device_properties(device).total_memory
    engine.cache.close()


# What real folders have


def test_a_draft_nobody_asks_for_is_named_once_and_not_read(tmp_path):
    engine, choices = open_on(make_folder(tmp_path, DRAFTS["DSpark"]()))
    [told] = [each for each in choices if each.what == "own draft"]
    assert told.value == "not used" and "5 tensors are not read, model.mtp." in told.why
    assert not any(each.what == "own draft" for each in open_on(make_folder(tmp_path / "none"))[1])
    assert tokens_of(run(engine, make_ask("a", words(20)))[0])


def speculation_of(folder, asked="auto", **build):
    config = EngineConfig(cache=CacheConfig(device_pages=1, staging_tails=1), running_max=2, speculate=asked)
    engine, choices = open_engine(
        Build(model=str(folder), page_tokens=128, device_bytes=16 * MIB, **build), config
    )
    [told] = [each for each in choices if each.what == "speculation"]
    return engine, told


def test_who_guesses_is_chosen_and_told(tmp_path):
    plain = make_folder(tmp_path / "plain")
    engine, told = speculation_of(plain)
    assert told.value == "ngram, up to 4 tokens" and "has no draft that is read here" in told.why
    assert engine.config.speculate == "ngram" and engine.runner.model.draft is None
    assert speculation_of(plain, "off")[1].value == "off"
    with pytest.raises(ConfigError, match="speculate = 'mtp': the model has no mtp draft"):
        speculation_of(plain, "mtp")
    with pytest.raises(ConfigError, match="speculate = 'mtp': the model has no mtp draft"):
        speculation_of(make_folder(tmp_path / "other", DRAFTS["DSpark"]()), "mtp")
    with pytest.raises(ConfigError, match="speculate = 'eager': must be one of auto, mtp, draft, ngram, off"):
        speculation_of(plain, "eager")


@every_device
def test_on_cuda_a_draft_that_costs_little_guesses_and_nobody_else_unless_asked_for(device):
    kernels = make_kernels("cuda", device)
    told = {}
    for model, asked in (
        ("v4-flash-8e", "auto"),
        ("tiny-v4", "auto"),
        ("tiny-v4", "mtp"),
        ("tiny-v4", "ngram"),
    ):
        opened = Opened(128, "fp8", device, kernels, Folder(model))
        config, choice = who_guesses(EngineConfig(speculate=asked), opened)
        told[model, asked] = config.speculate, choice.why
    assert told["v4-flash-8e", "auto"][0] == told["tiny-v4", "mtp"][0] == "mtp"
    assert told["tiny-v4", "ngram"][0] == "ngram"
    assert told["tiny-v4", "auto"][0] == "off" and "43% of a token with mtp" in told["tiny-v4", "auto"][1]


def test_a_draft_that_costs_much_is_used_only_if_it_is_asked_for():
    engine, told = speculation_of("tiny-v4")
    assert told.value.startswith("ngram") and "43% of a token with mtp" in told.why
    assert all(not stream.name.startswith("draft_") for stream in engine.cache.spec.streams)
    [truth] = run(speculation_of("tiny-v4", "off")[0], make_ask("a", words(200), 24))
    engine, told = speculation_of("tiny-v4", "mtp")
    assert told.value == "mtp, up to 4 tokens" and engine.runner.model.draft is not None
    [answer] = run(engine, make_ask("a", words(200), 24))
    assert answer.tokens == truth.tokens


def test_a_folder_in_the_form_that_deepseek_publishes_is_served(tmp_path):
    """Its names, fp8 and fp4 with exponents as scales, expert by expert, three stages of DSpark."""
    stages = {"dspark_target_layer_ids": [1, 2, 3], "dspark_block_size": 5}
    fp8_blocks = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    published = {"expert_dtype": "fp4", "quantization_config": fp8_blocks, **stages}
    ratios = {"compress_ratios": [0, 4, 128, 4, 0, 0, 0]}
    config = make_config(vocab_size=VOCAB, max_position_embeddings=4096, **published, **ratios)
    target = {n: t for n, t in make_weights(config).items() if not n.startswith("mtp.")}
    written, meant = quantized(in_original_form(target), {FP8_NAMES: fp8, FP4_NAMES: fp4})
    answers = []
    for name, tensors in (("published", written | DRAFTS["DSpark"]()), ("plain", meant)):
        folder = with_tokenizer(write_folder(tmp_path / name, tensors, config))
        [done] = run(open_on(folder)[0], make_ask(name, words(300)))
        answers.append((tokens_of(done), logprobs_of(done)))
    assert answers[0] == answers[1] and len(answers[0][0]) == 8


def test_weights_that_are_no_numbers_do_not_start(tmp_path):
    spoiled = {"lm_head.weight": torch.full((VOCAB, 32), float("nan"))}
    with pytest.raises(WeightsError, match=r"lm_head\.weight holds NaN"):
        open_on(make_folder(tmp_path, spoiled))


@pytest.mark.parametrize(
    ("build", "engine", "field"),
    [
        ({"kernels": "abacus"}, {}, "kernels"),
        ({"kernels": "reference", "exact": True}, {}, "exact"),
        ({"format": "int4"}, {}, "format"),
        ({"draft": "nowhere"}, {}, "draft"),
        ({"device_bytes": 1000}, {}, "device_bytes"),
        ({"store": "memory:"}, {}, "store"),
        ({"peer": ("file:///x",)}, {}, "peer"),
        ({}, {"speculate": "mtp"}, "speculate"),
        ({}, {"speculate": "draft"}, "speculate"),
        ({"draft": "tiny-v4"}, {"speculate": "ngram"}, "draft"),
        ({"model": "long"}, {}, "max_position_embeddings"),
    ],
)
def test_what_can_be_refused_is_refused_before_weights_are_read(tmp_path, build, engine, field):
    spoiled = {"lm_head.weight": torch.full((VOCAB, 32), float("nan"))}
    folder = make_folder(tmp_path, spoiled)
    if build.get("model") == "long":
        config = make_config(vocab_size=VOCAB, max_position_embeddings="long")
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((ConfigError, SpecError)) as refused:
        open_engine(Build(**{**build, "model": str(folder)}), EngineConfig(**engine))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("given", "known", "why"),
    [
        (99_999, "token 2", "eos_token_id 99999 is no token of this model"),
        ([7, -1, 4096], "tokens 2, 7", "eos_token_id -1, 4096 is no token of this model"),
    ],
)
def test_an_eos_token_that_nobody_knows_is_told(tmp_path, given, known, why):
    engine, choices = open_on(make_folder(tmp_path, eos_token_id=given))
    [told] = [each for each in choices if each.what == "end of an answer"]
    assert (told.value, told.why) == (known, why)
    assert tokens_of(run(engine, make_ask("a", words(20), ignore_eos=False))[0])


def test_a_model_without_an_eos_token_is_told(tmp_path):
    folder = make_folder(tmp_path, eos_token_id=None)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    [told] = [each for each in open_on(folder)[1] if each.what == "end of an answer"]
    assert (told.value, told.why) == ("none", "only stop strings and max_tokens end one")


def test_a_layout_with_two_names_is_told_with_both(tmp_path):
    folder = make_folder(tmp_path)
    for name, told in (
        ("page_first", "page_first (the same bytes as page_first_direct)"),
        ("layer_first", "layer_first"),
    ):
        settings = CacheConfig(host_bytes=2**20, layout=name)
        choices = open_engine(Build(model=str(folder), device_bytes=2**21), EngineConfig(settings))[1]
        [value] = [each.value for each in choices if each.what == "host tier"]
        assert value.startswith(f"1 MiB, {told}, ")


def test_an_eos_token_that_everybody_knows_is_not_told(tmp_path):
    assert not any(each.what == "end of an answer" for each in open_on(make_folder(tmp_path))[1])


@pytest.mark.parametrize("given", ["</s>", [[1]], 2.5, True])
def test_an_eos_token_that_is_no_token_is_named(tmp_path, given):
    with pytest.raises(
        WeightsError, match=r"config\.json: eos_token_id = .*must be a token or a list of them"
    ):
        open_on(make_folder(tmp_path, eos_token_id=given))
