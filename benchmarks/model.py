"""Our DeepSeek V4 against `transformers` on the same weights and machine: `python -m benchmarks.model
[--json] [--quick]`.

A random model of the shape of `tiny-v4`, fp32, CPU. Ratios are `transformers`' time over ours, taken
alternately in one run, so that a busy machine slows both. Peak memory is that of a process of its own for
each length, less what it needs before.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from benchmarks.machine import describe, parser_of
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Span
from tiercel.models.deepseek_v4.config import V4Config
from tiercel.models.deepseek_v4.model import DeepseekV4
from tiercel.spec import deepseek_v4

PAGE = 128
LENGTHS = (512, 4096)


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    context: int = 512
    prefill: int = 2048
    batch: int = 16
    rounds: int = 5
    steps: int = 8


QUICK = Sizes(context=16, prefill=48, batch=2, rounds=1, steps=1)


def make_theirs() -> DeepseekV4ForCausalLM:
    torch.manual_seed(0)
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    ratios = [0, 0, 4, 128, 4, 128]
    config = DeepseekV4Config(
        vocab_size=4096,
        hidden_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=len(ratios),
        num_attention_heads=4,
        head_dim=64,
        partial_rotary_factor=0.25,
        q_lora_rank=128,
        num_experts_per_tok=2,
        n_routed_experts=8,
        layer_types=[kinds[ratio] for ratio in ratios],
        mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 4,
        sliding_window=64,
        o_groups=2,
        o_lora_rank=64,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=64,
        max_position_embeddings=65536,
    )
    return DeepseekV4ForCausalLM(config).eval().float()


class Ours:
    def __init__(self, theirs: DeepseekV4ForCausalLM, *, texts: int, tokens: int) -> None:
        spec = deepseek_v4(theirs.config.to_dict(), PAGE, "fp32")
        self.pages = -(-tokens // PAGE)
        memory = DeviceMemory(spec, pages=texts * self.pages, tails=2)
        self.model = DeepseekV4(V4Config.from_hf(theirs.config.to_dict()), theirs.state_dict(), memory, texts)

    def span(self, text: int, tokens: torch.Tensor, start: int) -> Span:
        pages = torch.arange(text * self.pages, (text + 1) * self.pages)
        return Span(tokens, start, pages, text)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(theirs: Callable[[], object], ours: Callable[[], object], rounds: int) -> dict[str, float]:
    """Alternately, so that both meet the same machine."""
    theirs()
    ours()
    times = [(seconds(theirs), seconds(ours)) for _ in range(rounds)]
    t, o = statistics.median(a for a, _ in times), statistics.median(b for _, b in times)
    return {"ratio": t / o, "theirs_ms": 1e3 * t, "ours_ms": 1e3 * o}


@torch.inference_mode()
def decode(theirs: DeepseekV4ForCausalLM, batch: int, sizes: Sizes) -> dict[str, float]:
    tokens = torch.randint(0, 4096, (batch, sizes.context))
    past = theirs(tokens, use_cache=True).past_key_values
    ours = Ours(theirs, texts=batch, tokens=sizes.context + 4 * PAGE)
    ours.model.forward([ours.span(i, tokens[i], 0) for i in range(batch)])
    at, token = sizes.context, torch.randint(0, 4096, (batch, 1))

    def their_steps() -> None:
        for _ in range(sizes.steps):
            theirs(token, past_key_values=past, use_cache=True)

    def our_steps() -> None:
        nonlocal at
        for _ in range(sizes.steps):
            ours.model.forward([ours.span(i, token[i], at) for i in range(batch)])
            at += 1

    return ratio(their_steps, our_steps, sizes.rounds)


@torch.inference_mode()
def prefill(theirs: DeepseekV4ForCausalLM, sizes: Sizes) -> dict[str, float]:
    tokens = torch.randint(0, 4096, (1, sizes.prefill))
    ours = Ours(theirs, texts=1, tokens=sizes.prefill)
    return ratio(
        lambda: theirs(tokens, use_cache=True, logits_to_keep=1),
        lambda: ours.model.forward([ours.span(0, tokens[0], 0)]),
        sizes.rounds,
    )


@torch.inference_mode()
def peak_kb(tokens: int, who: str) -> int:
    """Peak memory of a prefill in this process, over what it holds between two of them."""
    theirs = make_theirs()
    ours = Ours(theirs, texts=1, tokens=tokens)
    text = torch.randint(0, 4096, (1, tokens))

    def call() -> None:
        if who == "theirs":
            theirs(text, use_cache=True, logits_to_keep=1)
        else:
            ours.model.forward([ours.span(0, text[0], 0)])

    call()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the first call left behind would hide a part of the second's
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts again from here
    before = _status_kb("VmRSS")
    call()
    return _status_kb("VmHWM") - before


def _status_kb(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def growth(who: str) -> float:
    peaks = []
    for tokens in LENGTHS:
        command = [sys.executable, "-m", "benchmarks.model", "--peak", str(tokens), who]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    return peaks[1] / max(1, peaks[0])


def measure(sizes: Sizes) -> dict[str, Any]:
    """A peak is measured in a process of its own, which takes long: in a quick run it is this process."""
    theirs = make_theirs()
    one, many, long = decode(theirs, 1, sizes), decode(theirs, sizes.batch, sizes), prefill(theirs, sizes)
    if sizes is QUICK:
        peaks: dict[str, float] = {"peak_kb": peak_kb(sizes.context, "ours")}
    else:
        who = {"": "ours", "_transformers": "theirs"}
        peaks = {f"memory_growth_512_to_4096{name}": growth(each) for name, each in who.items()}
    return {
        "decode_ratio_b1": one["ratio"],
        "decode_ratio_b16": many["ratio"],
        "prefill_ratio_2k": long["ratio"],
        **peaks,
        "decode_b1": one,
        "decode_b16": many,
        "prefill_2k": long,
        "machine": describe(),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--peak", nargs=2, metavar=("TOKENS", "WHO"), help="for this program's own use")
    options = parser.parse_args()
    if options.peak:
        print(peak_kb(int(options.peak[0]), options.peak[1]))
        return
    figures = measure(QUICK if options.quick else Sizes())
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, figure in figures.items():
        print(f"{name:42} {figure:.2f}" if isinstance(figure, float) else f"{name:42} {figure}")


if __name__ == "__main__":
    main()
