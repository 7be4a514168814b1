"""Stages that are killed at random moments while texts run: every answer is right, or ends with an error, and
nothing is kept by anybody.

    python -m tests.engine.stages.kills [--seconds N] [--seed N]
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from tests.engine.drive import make_ask, settle, tokens_of, truth_of, words
from tiercel.asks.ask import Finish
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.group import Group
from tiercel.engine.loop import steps_of

PROMPTS = [tuple(words(300 + 90 * i, i % 3)) for i in range(8)]
COUNT = 24


def kills(seconds: float, seed: int, stages: int = 2) -> tuple[int, int, int]:
    """Returns (answers, answers that ended with an error, processes killed)."""
    random = Random(seed)
    config = EngineConfig(
        cache=CacheConfig(host_bytes=64 * 2**20), running_max=4, speculate=random.choice(["off", "ngram"])
    )
    engine, _ = open_engine(Build(stages=stages, device_bytes=3 * 2**20), config)
    group = engine.runner
    assert isinstance(group, Group)
    until_s, asked, killed = time.monotonic() + seconds, 0, 0
    prompts, said, ended = {}, {}, {}
    next_kill_s = time.monotonic() + random.uniform(0.1, 1.0)
    with ThreadPoolExecutor(1) as executor:
        steps = steps_of(engine, executor)
        while time.monotonic() < until_s or engine.tasks:
            if time.monotonic() < until_s and len(engine.tasks) < 6 and random.random() < 0.3:
                prompts[str(asked)] = prompt = random.choice(PROMPTS)
                engine.add(make_ask(str(asked), prompt, COUNT))
                asked += 1
            if time.monotonic() > next_kill_s and time.monotonic() < until_s:
                os.kill(random.choice(group.pids), signal.SIGKILL)
                killed += 1
                next_kill_s = time.monotonic() + random.uniform(0.5, 4.0) + 4.0
            for delta in next(steps):
                said.setdefault(delta.request_id, []).extend(out.token for out in delta.tokens)
                if delta.finish is not None:
                    ended[delta.request_id] = delta.finish
    failed = 0
    for name, prompt in prompts.items():
        expected = tokens_of(truth_of(prompt, COUNT))
        tokens = said.get(name, [])
        assert tokens == expected[: len(tokens)], f"{name} of seed {seed} says something else"
        assert ended[name] in (Finish.LENGTH, Finish.ERROR), ended[name]
        assert ended[name] is Finish.ERROR or len(tokens) == COUNT
        failed += ended[name] is Finish.ERROR
    settle(engine)
    engine.flush()
    cache = engine.cache
    assert cache.pages.free == cache.pages.capacity and cache.host_pages.free == cache.host_pages.capacity
    processes = [*group.pids]
    cache.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes), "a stage is still there"
    return len(prompts), failed, killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    options = parser.parse_args()
    until_s, seed = time.monotonic() + options.seconds, options.seed
    while time.monotonic() < until_s:
        answers, failed, killed = kills(min(60.0, until_s - time.monotonic()), seed, 2 + seed % 2)
        print(f"seed {seed}: {answers} answers, {failed} with an error, {killed} kills", flush=True)  # noqa: T201
        seed += 1


if __name__ == "__main__":
    main()
