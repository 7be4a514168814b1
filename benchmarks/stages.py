"""A model in stages, each in a process of its own: `python -m benchmarks.stages [--json] [--stages N]`.

step_broadcast_us       from the scheduler's process until every stage has a step of 64 texts
wake_us                 the least that can be: a message through such a pipe, to one idle process
bubble_share            decode of 16 texts: the part of the stages' time in which they compute nothing
decode_ratio.N          tokens/s of N texts, over one process with the threads of one stage
prefill_ratio           the same for a prompt
host_pss_ratio          what the host memory takes in all processes together, over one process
process_mib             what each process takes besides
reshaped_fetch_ratio    the first token behind a prefix that another number of stages stored, over its own
"""

from __future__ import annotations

import gc
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any

import torch

from benchmarks.machine import describe, parser_of, tell
from tiercel.asks.ask import Ask, Delta, Sampling
from tiercel.config import CacheConfig
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.engine.engine import Engine
from tiercel.engine.group import Group, StepTimes
from tiercel.engine.loop import steps_of
from tiercel.engine.offline import answer_all

Figures = dict[str, Any]
MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    steps: int = 200
    rounds: int = 3
    prompt: int = 4096
    host_bytes: int = 1024 * MIB
    fetches: int = 9


QUICK = Sizes(steps=12, rounds=1, prompt=512, host_bytes=64 * MIB, fetches=1)


class Running:
    """An engine in one process or in stages, and its loop."""

    def __init__(self, stages: int, sizes: Sizes, **build: Any) -> None:
        cache = CacheConfig(host_bytes=sizes.host_bytes, host_shared=True, fetch="wait")
        config = EngineConfig(cache=cache, speculate="off", running_max=64)
        self.engine: Engine = open_engine(
            Build(stages=stages, device_bytes=256 * MIB // stages, **build), config
        )[0]
        self._executor = ThreadPoolExecutor(1)
        self.steps: Iterator[list[Delta]] = steps_of(self.engine, self._executor)
        self._number = 0

    @property
    def group(self) -> Group | None:
        return self.engine.runner if isinstance(self.engine.runner, Group) else None

    @property
    def pids(self) -> list[int]:
        return [os.getpid(), *(self.group.pids if self.group else ())]

    def ask(self, tokens: int, count: int, seed: int) -> Ask:
        self._number += 1
        random = torch.Generator().manual_seed(seed)
        prompt = tuple(torch.randint(200, 4000, (tokens,), generator=random).tolist())
        return Ask(str(self._number), prompt, Sampling(count, temperature=0.0, ignore_eos=True))

    def decode(self, texts: int, steps: int, seed: int) -> tuple[float, list[StepTimes]]:
        """(seconds of a step of so many texts, where the time of each step was spent)."""
        for i in range(texts):
            self.engine.add(self.ask(40, 4 * steps + 4 * texts, seed + i))
        while len(self.engine.scheduler.running) < texts or self.engine.scheduler.waiting:
            next(self.steps)
        for _ in range(8):
            next(self.steps)
        times, start = list[StepTimes](), time.perf_counter()
        for _ in range(steps):
            next(self.steps)
            if self.group is not None:
                times.append(self.group.times)
        took = (time.perf_counter() - start) / steps
        self.end()
        return took, times

    def first_token(self, ask: Ask) -> float:
        start = time.perf_counter()
        self.engine.add(ask)
        while not any(delta.tokens for delta in next(self.steps)):
            pass
        took = time.perf_counter() - start
        self.end()
        return took

    def end(self) -> None:
        for name in list(self.engine.tasks):
            self.engine.abort(name)
        while not self.engine.idle:
            next(self.steps)

    def close(self) -> None:
        self.end()
        self._executor.shutdown()
        self.engine.cache.close(60)


def speed(sizes: Sizes, stages: int) -> Figures:
    """One process with one thread for each stage's share of the cores, and stages, in turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // stages))
    one, many = Running(1, sizes), Running(stages, sizes)
    found: Figures = {}
    for texts in (1, 16, 64):
        took = {True: list[float](), False: list[float]()}
        every = list[list[StepTimes]]()
        for number in range(sizes.rounds):
            for staged, each in ((False, one), (True, many)):
                seconds, times = each.decode(texts, sizes.steps, 100 * number)
                took[staged].append(seconds)
                every += [times] if staged else []
        one_s, many_s = (statistics.median(took[each]) for each in (False, True))
        found[f"decode_ratio.{texts}"] = one_s / many_s
        found[f"decode_tokens_s.{texts}"] = [texts / one_s, texts / many_s]
        if texts == 16:
            found["bubble_share"] = statistics.median(map(idle_share, every))
        if texts == 64:
            found["step_broadcast_us"] = 1e6 * statistics.median(
                each.sent_s for times in every for each in times
            )
    found["wake_us"] = wake_us(sizes.steps)
    firsts = {True: list[float](), False: list[float]()}
    for number in range(sizes.rounds):
        for staged, each in ((False, one), (True, many)):
            firsts[staged].append(each.first_token(each.ask(sizes.prompt, 1, 7000 + number)))
    one_s, many_s = (statistics.median(firsts[each]) for each in (False, True))
    found |= {
        "prefill_ratio": one_s / many_s,
        "prefill_tokens_s": [sizes.prompt / one_s, sizes.prompt / many_s],
    }
    found |= memory(one, many)
    one.close()
    many.close()
    torch.set_num_threads(threads)
    return found


def idle_share(times: Sequence[StepTimes]) -> float:
    """The part of all stages' time in which they computed nothing, from the end of one step to the end of the
    next one."""
    idle = list[float]()
    for before, each in pairwise(times):
        for (_, ended_s, _), (_, now_s, busy_s) in zip(before.stages, each.stages, strict=True):
            idle.append(1 - busy_s / (now_s - ended_s))
    return statistics.mean(idle)


ECHO = """
import sys, time
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
while pipe.recv_bytes():
    pipe.send(time.monotonic())
"""


def wake_us(count: int) -> float:
    """How long a message of the size of a step takes to a process that waits for it."""
    near, far = socketpair()
    echo = subprocess.Popen([sys.executable, "-c", ECHO, str(far.fileno())], pass_fds=[far.fileno()])
    far.close()
    took = list[float]()
    with Connection(near.detach()) as pipe:
        for _ in range(count):
            time.sleep(0.005)
            sent_s = time.monotonic()
            pipe.send_bytes(bytes(1500))
            took.append(pipe.recv() - sent_s)
        pipe.send_bytes(b"")
    echo.wait()
    return 1e6 * statistics.median(took)


def memory(one: Running, many: Running) -> Figures:
    """Pss counts what processes share once. Both engines run, in this process and in the stages."""
    of_host = [_pss([os.getpid()], one), _pss(many.pids, many)]
    alone = [_besides(pid) / MIB for pid in many.pids[1:]]
    return {"host_pss_ratio": of_host[1] / of_host[0], "process_mib": [round(each) for each in alone]}


def _pss(pids: Sequence[int], running: Running) -> int:
    """What the host memory of an engine takes in these processes: its file is named by its inode."""
    host = running.engine.cache.host
    assert host is not None
    inode, total = Path(host.path).stat().st_ino, 0
    for pid in pids:
        own = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                own = line.split()[4] == str(inode)
            elif own and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def _besides(pid: int) -> int:
    """The Pss of what is no shared memory of ours."""
    total, own = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            own = "memfd:tiercel" in line
        elif not own and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def reshaped(sizes: Sizes, stages: int) -> Figures:
    """The same prompts are stored by one process and by stages, each in a store of its own; the stages read
    both, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        stores = {number: f"file://{folder}/{number}?size=2GiB" for number in (1, stages)}
        for number, store in stores.items():
            writer = Running(number, sizes, store=store)
            for seed in range(sizes.fetches):
                answer_all(writer.engine, [writer.ask(sizes.prompt, 1, seed)])
            writer.close()
        took: dict[int, list[float]] = {number: [] for number in stores}
        readers = {number: Running(stages, sizes, store=store) for number, store in stores.items()}
        for seed in range(sizes.fetches):
            for number, reader in readers.items():
                reader.engine.cache.compute.observe = lambda *_: None  # type: ignore[method-assign]
                ask = reader.ask(sizes.prompt, 1, seed)
                [answer] = answer_all(
                    reader.engine, [replace(ask, request_id=f"warm {seed}", prompt=ask.prompt[:9])]
                )
                took[number].append(reader.first_token(ask))
                assert reader.engine.cache.counters["tokens_store"] > 0, answer
        for reader in readers.values():
            reader.close()
    own, other = (statistics.median(took[number]) for number in (stages, 1))
    return {"reshaped_fetch_ratio": other / own, "fetch_ms": [1e3 * own, 1e3 * other]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--stages", type=int, default=2)
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    figures: Figures = {"machine": describe(), "stages": options.stages}
    for section in (speed, reshaped):
        began = time.perf_counter()
        found = section(sizes, options.stages)
        figures |= found
        gc.collect()
        print(
            f"# {section.__name__}: {time.perf_counter() - began:.1f} s {found}", file=sys.stderr, flush=True
        )
    tell(figures, as_json=options.json)


if __name__ == "__main__":
    main()
