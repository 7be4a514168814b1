"""Goal: a step for which there is no memory ends the texts of that step. All others are served, and their
tokens are those of an engine with enough memory.
Method: a large prompt comes beside an answer. On a GPU, memory is limited for a while. On a CPU, which has
no such limit, a forward of many tokens raises what CUDA raises."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest.mock import patch
from weakref import ref

import pytest
import torch

from tests.engine.drive import LOOPS, make_ask, make_engine, run, settle, steps_of, tokens_of, words
from tests.kernels.devices import on_gpu
from tiercel.asks.ask import Answer, Delta, Finish
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.models.frame import Frame

LARGE = {"cpu": 1500, "cuda": 6000}
"""Tokens of a prompt that takes too much. On a GPU: a few tensors of 12 MB each, and more."""
SLACK = 16 * 2**20
"""What a GPU has left then. Torch takes 2 MiB at a time for the small tensors of an answer, and 20 MiB for
larger ones."""


@contextmanager
def little_memory(device: str) -> Iterator[None]:
    if device == "cpu":
        real = Frame.forward

        def forward(model, spans, *rest):
            if sum(len(span.tokens) for span in spans) > LARGE["cpu"] // 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return real(model, spans, *rest)

        with patch.object(Frame, "forward", forward):
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + SLACK
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def follow(steps: Iterator[list[Delta]], answers: dict[str, Answer], ended: Callable[[], object]) -> None:
    while not ended():
        for delta in next(steps):
            answers[delta.request_id].add(delta)


@pytest.mark.parametrize(
    ("device", "overlap"),
    [("cpu", False), ("cpu", True), ("cpu", "queued"), pytest.param("cuda", "queued", marks=on_gpu.marks)],
)
def test_a_step_without_memory_ends_its_texts_and_no_others(device: str, overlap: bool | str) -> None:
    asks = {
        "before": make_ask("before", words(200), 12),
        "beside": make_ask("beside", words(9, 1), 12),
        "large": make_ask("large", words(LARGE[device], 2), 4),
        "waiting": make_ask("waiting", words(200, 3), 12),
    }
    config = EngineConfig(running_max=2, step_tokens=8192)
    build = Build(device=device, format="bf16", device_bytes=256 * 2**20)
    engine, _ = open_engine(build, config)
    expected = {name: tokens_of(run(engine, ask)[0]) for name, ask in asks.items()}
    engine.flush()
    answers = {name: Answer() for name in asks}
    with ThreadPoolExecutor(1) as executor, little_memory(device):
        steps = steps_of(engine, overlap, executor)
        engine.add(asks["before"])
        follow(steps, answers, lambda: answers["before"].finish)
        engine.add(asks["beside"])
        follow(steps, answers, lambda: answers["beside"].tokens)
        engine.add(asks["large"])
        engine.add(asks["waiting"])  # two may run at once
        follow(steps, answers, lambda: not engine.tasks)
        steps.close()
    for name in ("beside", "large"):
        assert answers[name].finish is Finish.ERROR and "out of memory" in answers[name].error, name
    for name in ("before", "waiting"):
        assert answers[name].finish is Finish.LENGTH and tokens_of(answers[name]) == expected[name], name
    assert engine.counters["steps_failed"] == 1
    settle(engine)
    for name, ask in asks.items():  # with memory again
        assert tokens_of(run(engine, ask)[0]) == expected[name], name
    settle(engine)
    engine.cache.close()


@LOOPS
def test_what_a_failed_step_held_is_free_for_the_next(overlap, caplog) -> None:
    caplog.set_level("CRITICAL", "tiercel")  # pytest keeps what is logged, tracebacks too
    engine, held = make_engine(), list[ref[torch.Tensor]]()

    def forward(*_):
        activations = torch.zeros(9)
        held.append(ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    gc.disable()  # a device has no memory for what waits to be collected
    try:
        with patch.object(Frame, "forward", forward):
            [answer] = run(engine, make_ask("a", words(9), 4), overlap=overlap)
        assert answer.finish is Finish.ERROR and held
        assert not any(each() is not None for each in held)
    finally:
        gc.enable()
