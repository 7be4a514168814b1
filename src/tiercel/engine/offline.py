"""Answers without a server: a model and its cache, asked from the caller's own thread.

with Offline("tiny-v4", store="file:///var/cache/tiercel?size=10GiB") as model:
    first, second = model.generate(["Record: king sword.", "Which record has king?"], max_tokens=20)
    print(first.text, second.usage.cached_tokens)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from tiercel.asks.ask import Answer, Ask, Delta, Sampling
from tiercel.config import parse_bytes
from tiercel.engine.build import open_engine
from tiercel.engine.config import HOST_MEMORY, Build, EngineConfig
from tiercel.engine.engine import Engine
from tiercel.engine.loop import plain_steps
from tiercel.models.families import EMBEDDED


def answer_all(
    engine: Engine, asks: Iterable[Ask], steps: Iterator[list[Delta]] | None = None
) -> list[Answer]:
    """Answers in the order of the asks. Raises `AskError` before anything is computed."""
    left = deque(asks)
    for ask in left:
        engine.check(ask)
    answers = {ask.request_id: Answer() for ask in left}
    steps, unfinished = steps or plain_steps(engine), len(answers)
    while unfinished:
        while left and len(engine.scheduler.waiting) < engine.config.waiting_max:
            engine.add(left.popleft())
        for delta in next(steps):
            answers[delta.request_id].add(delta)
            unfinished -= delta.finish is not None
    return list(answers.values())


class Offline:
    """One model with its tiers. It is used from one thread, and closed once."""

    def __init__(
        self,
        model: str = EMBEDDED,
        *,
        device_memory: str | None = None,
        host_memory: str = HOST_MEMORY,
        store: str | None = None,
    ) -> None:
        """`model`: a Hugging Face folder, a model of the Hub (`owner/name`, `owner/name@revision`), or the
        embedded one. `store`: its URL."""
        device_bytes = None if device_memory is None else parse_bytes(device_memory)
        build = Build(model=model, device_bytes=device_bytes, store=store, store_required=True)
        config = EngineConfig()
        cache = replace(config.cache, host_bytes=parse_bytes(host_memory))
        self.engine, _ = open_engine(build, replace(config, cache=cache))

    def generate(self, prompts: Sequence[str | Sequence[int]], **sampling: Any) -> list[Answer]:
        """Continue texts, or tokens; `sampling` has the fields of `Sampling`. Answers come in order."""
        encode = self.engine.text.encode
        texts = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        how = Sampling(**sampling)
        return answer_all(self.engine, [Ask(str(i), tuple(text), how) for i, text in enumerate(texts)])

    def close(self) -> None:
        """Write what is cached to the store, if there is one, and release everything."""
        self.engine.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
