"""Goal: on a GPU the embedded model is the one of the CPU, and no bit of an answer depends on tiers, company
or steps. Method: whole engines. Steps of at most 512 tokens are recorded forwards on a GPU, larger ones are
launched kernel by kernel. The last test runs on a CPU too, with less."""

from __future__ import annotations

import argparse
from dataclasses import replace
from inspect import getsource
from pathlib import Path

import pytest

from tests.engine.drive import Always, make_ask, run, tokens_of, words
from tests.kernels.devices import on_gpu
from tiercel.asks.ask import Answer
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.verify import exams_of, k3, score_of, verify

BUILD = Build(device_bytes=2**26)
COLD = EngineConfig(cache=replace(EngineConfig().cache, force_miss=True))
"""Nothing is reused."""


def everything_of(answer: Answer) -> tuple[list[tuple[int, float | None]], ...]:
    """The tokens and logprobs of the prompt, then those of the answer."""
    assert not answer.error
    return tuple([(out.token, out.logprob) for out in part] for part in (answer.prompt, answer.tokens))


@pytest.mark.parametrize("device", [on_gpu])
def test_the_embedded_model_is_the_one_of_the_cpu(device: str) -> None:
    """36 texts of up to 900 tokens: half of them code, which the model was trained on, half of them noise.
    Numbers are fp32 on both; sums are added in another order."""
    found = []
    for where in ("cpu", device):
        engine, _ = open_engine(replace(BUILD, device=where, compute="fp32", format="fp32"), COLD)
        code = engine.text.encode(getsource(argparse))
        texts = [(code[300 * i :] if i % 2 else words(900, i))[: 300 + 17 * i] for i in range(36)]
        asks = [make_ask(str(i), text, 24, prompt_logprobs_from=1) for i, text in enumerate(texts)]
        answers = [everything_of(each) for each in run(engine, *asks)]
        found.append((answers, score_of(engine, list(exams_of(engine, "tiny-v4")))))
        engine.cache.close()
    (theirs, recall), (ours, our_recall) = found
    assert our_recall == recall == 1.0
    for part in (0, 1):  # prompts, answers
        differences = []
        for mine, own in zip(ours, theirs, strict=True):
            assert [token for token, _ in mine[part]] == [token for token, _ in own[part]]
            pairs = zip(mine[part], own[part], strict=True)
            differences += [mine_p - own_p for (_, mine_p), (_, own_p) in pairs]
        assert k3(differences) < 1e-5, part


@pytest.mark.parametrize("device", [on_gpu])
def test_no_tier_changes_a_bit_in_the_numbers_of_a_gpu(tmp_path: Path, device: str) -> None:
    """bf16, entries of fp8; through device, host and store, and answers again as parts of prompts."""
    config = EngineConfig(cache=replace(EngineConfig().cache, host_bytes=2**28))
    report = verify(replace(BUILD, device=device), config, tmp_path)
    assert report.holds(kl=0.0, dlogprob=0.0), report
    assert report.recall["cold"] and report.recall["cold"] > 0.9, report


@pytest.mark.parametrize("device", [on_gpu])
def test_guesses_of_the_mtp_layer_change_no_bit_of_an_answer(device: str) -> None:
    """Code, which is mostly guessed right, and noise; asked twice, the second time from the device tier."""
    found = []
    for speculate in ("off", "mtp"):
        config = EngineConfig(speculate=speculate)
        engine, _ = open_engine(replace(BUILD, device=device), config)
        code = engine.text.encode(getsource(argparse))
        texts = [(code[300 * i :] if i % 4 else words(900, i))[: 100 + 37 * i] for i in range(16)]
        asks = [make_ask(str(i), text, 40, logprobs=0 if i % 5 else None) for i, text in enumerate(texts)]
        if speculate == "mtp":
            engine.scheduler.guessing.policy = Always(3)
        for _ in range(2):
            answers = [run(engine, asks[0])[0], *run(engine, *asks[1:], overlap="queued")]
            found.append([everything_of(each) for each in answers])
        accepted = engine.stats().accept_length_mean
        assert engine.cache.counters["tokens_device"] > 1000
        engine.cache.close()
    assert found[0] == found[1] == found[2] == found[3]
    assert accepted > 1.5, accepted


LENGTHS = {
    "cpu": [700, 130, 61, 1],
    "cuda": [9000, 5000, 2500, 1300, 700, *range(1, 590, 10)],
}
"""Tokens of prompts that are computed together: 4 texts, 64 texts."""


@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_company_and_the_tokens_of_a_step_change_no_bit(device: str) -> None:
    texts = [words(length, i) for i, length in enumerate(LENGTHS[device])]
    asks = [make_ask(str(i), text, 24, prompt_logprobs_from=1) for i, text in enumerate(texts)]
    plain = [make_ask(str(i), text, 24, logprobs=None) for i, text in enumerate(texts)]
    sampled = [
        make_ask(
            str(i),
            text,
            24,
            logprobs=None if i % 3 else 0,
            temperature=0.8,
            top_p=0.9,
            top_k=40 * (i % 2),
            seed=i,
        )
        for i, text in enumerate(texts)
    ]
    truth = sampled_truth = None
    for step_tokens in (8192, 512):
        config = replace(COLD, step_tokens=step_tokens, running_max=64)
        engine, _ = open_engine(replace(BUILD, device=device), config)
        alone = [everything_of(run(engine, ask)[0]) for ask in asks]
        truth = truth or alone
        assert alone == truth, step_tokens
        assert [everything_of(each) for each in run(engine, *asks)] == truth, step_tokens
        # Tokens that nobody wants the logprobs of are drawn on the device, and read there by the next step.
        drawn = [tokens_of(each) for each in run(engine, *plain, overlap="queued")]
        assert drawn == [[token for token, _ in answer] for _, answer in truth], step_tokens
        drawn = [tokens_of(run(engine, ask)[0]) for ask in sampled]
        sampled_truth = sampled_truth or drawn
        assert drawn == sampled_truth, step_tokens
        assert [tokens_of(each) for each in run(engine, *sampled, overlap="queued")] == sampled_truth
        assert engine.counters["preemptions"] == 0
        engine.cache.close()
