"""Goal: a model in stages answers as the whole model does, bit for bit: cold and from every tier, with
guesses, grammars, sparse pages and preemptions, also on what another number of stages has stored. A stage
that dies harms no other text than those of the step under way.
Method: real processes on the CPU."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import sleep

import pytest
import torch

from tests.engine.drive import logprobs_of, make_ask, run, settle, tokens_of, truth_of, words
from tests.engine.stages.kills import kills
from tests.models.qwen3 import write_qwen3
from tiercel.asks.ask import Finish
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.group import devices_of
from tiercel.engine.loop import plain_steps
from tiercel.engine.offline import answer_all
from tiercel.errors import ConfigError
from tiercel.models.opening import open_model
from tiercel.models.wish import Wish
from tiercel.text.grammar import Grammar, regex

CACHE = CacheConfig(host_bytes=64 * 2**20)
COUNT = 20
PROMPTS = [tuple(words(400 + 150 * i, i)) for i in range(3)]
PROMPTS.append(PROMPTS[2][:512] + tuple(words(60, 9)))


def opened(stages, model="tiny-v4", cache=CACHE, device_bytes=16 * 2**20, build=None, **options):
    config = EngineConfig(cache=cache, **{"speculate": "off", "running_max": 8, **options})
    return open_engine(Build(model, stages=stages, device_bytes=device_bytes, **(build or {})), config)


def asks_of(prompts, name="a", **options):
    return [make_ask(f"{name}{i}", prompt, COUNT, **options) for i, prompt in enumerate(prompts)]


def same(answers, truths):
    for answer, truth in zip(answers, truths, strict=True):
        assert not answer.error
        assert tokens_of(answer) == tokens_of(truth)
        assert logprobs_of(answer) == logprobs_of(truth)


def truths(prompts=PROMPTS):
    return [truth_of(prompt, COUNT) for prompt in prompts]


@pytest.mark.rotate("overlap")
@pytest.mark.parametrize("overlap", [False, "queued"], ids=["plain", "queued"])
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_answer_as_the_whole_model_from_every_tier(stages, overlap, tmp_path):
    """Cold, from the device, from the host; what they stored is read by one process and by other stages."""
    store = {"store": f"file://{tmp_path}/store?size=1GiB"}
    cache = replace(CACHE, fetch="wait")
    engine, choices = opened(stages, cache=cache, build=store)
    assert {each.what: each.value for each in choices}["stages"] == str(stages)
    same(run(engine, *asks_of(PROMPTS), overlap=overlap), truths())
    again = run(engine, *asks_of(PROMPTS, "device"), overlap=overlap)
    same(again, truths())
    assert all(answer.usage.device_tokens for answer in again)
    settle(engine)
    while engine.cache.tree.evict(10**6, engine.cache.places.take_host):  # everything goes to the host
        engine.cache.places.settle()
        settle(engine)
    again = run(engine, *asks_of(PROMPTS, "host"), overlap=overlap)
    same(again, truths())
    assert all(answer.usage.host_tokens for answer in again[:3]), "the fourth begins as the third"
    settle(engine)
    engine.cache.close(60)
    for others in (1, 5 - stages):
        engine, _ = opened(others, cache=cache, build=store)
        engine.cache.compute.observe = lambda *_: None  # what is stored is read, however fast this is
        stored = run(engine, *asks_of(PROMPTS), overlap=overlap)
        same(stored, truths())
        assert all(answer.usage.store_tokens for answer in stored[:3]), (
            "what one shape wrote every other reads"
        )
        engine.cache.close(60)


@pytest.mark.parametrize("guesser", ["mtp", "ngram", "draft"])
def test_guesses_of_the_last_stage_are_computed_by_all(guesser, tmp_path):
    build = {"draft": str(write_qwen3(tmp_path))} if guesser == "draft" else {}
    engine, _ = opened(3, speculate=guesser, build=build)
    prompts = [*PROMPTS, tuple(words(40, 3)) * 8]
    same(run(engine, *asks_of(prompts), overlap="queued"), truths(prompts))
    assert engine.counters["guesses"] > 0
    settle(engine)
    engine.cache.close()


def test_texts_that_are_preempted_and_texts_that_are_sampled_have_the_same_answers():
    """With a grammar, with chance and penalties, on a device for hardly two of them."""
    how = [
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "seed": 6, "frequency_penalty": 0.5, "logit_bias": {300: 2.0}},
        {"grammar": Grammar(regex("[a-z ]{500,900}")), "ignore_eos": False},
        {"logprobs": 3, "prompt_logprobs_from": 0},
    ]
    found, spec = [], open_model(Wish()).spec
    for stages in (1, 2):
        held = [spec] if stages == 1 else [spec.stage(0, 4), spec.stage(4, 6)]
        engine, _ = opened(stages, device_bytes=max(21 * s.frame_bytes + 2 * s.tail_bytes for s in held))
        assert engine.cache.config.device_pages == 21
        asks = [make_ask(str(i), prompt, 150, **how[i]) for i, prompt in enumerate(PROMPTS)]
        found.append(answer_all(engine, asks, plain_steps(engine)))
        assert engine.counters["preemptions"] > 0
        settle(engine)
        engine.cache.close()
    same(*reversed(found))
    assert [answer.prompt for answer in found[0]] == [answer.prompt for answer in found[1]]


@pytest.mark.parametrize("guesses", ["off", "mtp"])
def test_stages_read_pages_on_the_host(guesses):
    engine, _ = opened(3, cache=replace(CACHE, sparse="always"), speculate=guesses)
    prompts = [tuple(words(2500, 3)), *PROMPTS]
    same(run(engine, *asks_of(prompts)), truths(prompts))
    same(run(engine, *asks_of(prompts, "again")), truths(prompts))
    assert engine.cache.counters["pages_sparse"] > 0
    read = engine.stats().sparse
    assert read["entries_missed"] > 0 and read["bytes_staged"] > 0
    settle(engine)
    engine.cache.close()


def test_up_to_four_stages_of_a_qwen3_with_eight_layers(tmp_path):
    folder = str(write_qwen3(tmp_path, num_hidden_layers=8))
    answers = []
    for stages in (1, 2, 3, 4):
        engine, choices = opened(stages, folder, build={"page_tokens": 64})
        answers.append([run(engine, *asks_of(PROMPTS, name)) for name in ("a", "b")])
        settle(engine)
        engine.cache.close()
    for staged in answers[1:]:
        for own, alone in zip(staged, answers[0], strict=True):
            same(own, alone)
    told = {each.what: each.why for each in choices}["stages"]
    assert told == "a process each for layers 0 to 1, 2 to 3, 4 to 6, 7 to 7", "the last one has the head"


def test_without_a_host_tier():
    engine, _ = opened(2, cache=CacheConfig())
    same(run(engine, *asks_of(PROMPTS)), truths())
    settle(engine)
    engine.cache.close()


def test_each_stage_has_a_device_of_its_own_where_there_are_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for device, stages, expected in (
        ("cpu", 2, ["cpu", "cpu"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda:2", 2, ["cuda:2", "cuda:3"]),
        ("cuda:3", 2, ["cuda:3", "cuda:3"]),
        ("cuda", 5, ["cuda:0"] * 5),
    ):
        assert devices_of(Build(device=device), stages) == expected


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="more than the 6 layers"):
        opened(7)


def test_a_stage_that_dies_ends_the_texts_of_its_step_only():
    """Others are preempted or wait, and are answered; the prefix that the host has is found again."""
    engine, _ = opened(2, running_max=2)
    first = engine.runner.pids
    same(run(engine, *asks_of(PROMPTS[:1])), truths(PROMPTS[:1]))
    settle(engine)
    for ask in asks_of(PROMPTS, "b"):
        engine.add(ask)
    steps, said, ended = plain_steps(engine), {}, {}

    def heard(deltas):
        for delta in deltas:
            said.setdefault(delta.request_id, []).extend(out.token for out in delta.tokens)
            if delta.finish is not None:
                ended[delta.request_id] = delta.finish

    while len(said) < 2:
        heard(next(steps))
    os.kill(first[1], signal.SIGKILL)
    while engine.tasks:
        heard(next(steps))
    assert not set(first) & set(engine.runner.pids)
    broken = [name for name, finish in ended.items() if finish is Finish.ERROR]
    assert 0 < len(broken) <= 2 and len(ended) == 4
    for name, finish in ended.items():
        expected = tokens_of(truth_of(PROMPTS[int(name[1:])], COUNT))
        assert said.get(name, []) == (
            expected if finish is Finish.LENGTH else expected[: len(said.get(name, []))]
        )
    [again] = run(engine, *asks_of(PROMPTS[:1], "c"))
    same([again], truths(PROMPTS[:1]))
    assert again.usage.host_tokens + again.usage.device_tokens > 0
    settle(engine)
    engine.cache.close()


def test_a_stage_that_dies_while_nothing_is_computed_harms_nobody():
    engine, _ = opened(2)
    with ThreadPoolExecutor(1):
        same(run(engine, *asks_of(PROMPTS[:1])), truths(PROMPTS[:1]))
        for _ in range(2):
            os.kill(engine.runner.pids[0], signal.SIGKILL)
            while not engine.runner.lost:
                sleep(0.01)
            same(run(engine, *asks_of(PROMPTS, "b")), truths())
    settle(engine)
    engine.cache.close()


def test_stages_that_are_killed_under_load():
    answers, _, killed = kills(8.0, seed=3)
    assert answers > 3 and killed > 0
