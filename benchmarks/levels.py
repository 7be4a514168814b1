"""How fast each level of the C kernels is on this machine: `python -m benchmarks.levels [--json] [--quick]`.

The same models as in `benchmarks.model`, on each level in turn, so that a busy machine slows all of them. A
ratio is the time of the highest level over that of this one: 0.5 is half as fast. To compare with a build for
this machine only: `BUILD_TIERCEL_LEVELS="v2 v3 v4 machine" pip install .`
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.machine import describe, parser_of
from benchmarks.model import PAGE, QUICK, Ours, Sizes, make_qwen3, make_qwen3_moe, make_theirs, seconds
from tiercel.kernels import native

MODELS = {"deepseek_v4": make_theirs, "qwen3": make_qwen3, "qwen3_moe": make_qwen3_moe}


def steps_of(theirs: Any, batch: int, sizes: Sizes) -> Callable[[], object]:
    """Decode steps that all compute the same: the texts never become longer."""
    tokens = torch.randint(0, 4096, (batch, sizes.context))
    ours = Ours(theirs, texts=batch, tokens=sizes.context + PAGE)
    for i in range(batch):
        ours.model.forward([ours.span(i, tokens[i], 0)])

    def steps() -> None:
        for _ in range(sizes.steps):
            ours.model.forward([ours.span(i, tokens[i, :1], sizes.context) for i in range(batch)])

    return steps


def prefill_of(theirs: Any, sizes: Sizes) -> Callable[[], object]:
    tokens = torch.randint(0, 4096, (sizes.prefill,))
    ours = Ours(theirs, texts=1, tokens=sizes.prefill)
    return lambda: ours.model.forward([ours.span(0, tokens, 0)])


@torch.inference_mode()
def ratios(work: Callable[[], object], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {level: [] for level in native.AVAILABLE}
    for turn in range(rounds + 1):
        for level in native.AVAILABLE:
            native.use_level(level)
            taken = seconds(work)
            if turn:  # the first one warms up
                times[level].append(taken)
    medians = {level: statistics.median(each) for level, each in times.items()}
    return {level: medians[native.AVAILABLE[-1]] / median for level, median in medians.items()}


@torch.inference_mode()
def measure(sizes: Sizes) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, make in MODELS.items():
        theirs = make()
        figures[name] = {
            "decode_b1": ratios(steps_of(theirs, 1, sizes), sizes.rounds),
            "decode_b16": ratios(steps_of(theirs, sizes.batch, sizes), sizes.rounds),
            "prefill_2k": ratios(prefill_of(theirs, sizes), sizes.rounds),
        }
    return {**figures, "machine": describe()}


def main() -> None:
    options = parser_of(__doc__).parse_args()
    figures = measure(QUICK if options.quick else Sizes(rounds=9))
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    machine = figures.pop("machine")
    for model, works in figures.items():
        for work, found in works.items():
            print(f"{model:12} {work:12}", *(f"{level} {ratio:.2f}" for level, ratio in found.items()))
    print(machine)


if __name__ == "__main__":
    main()
