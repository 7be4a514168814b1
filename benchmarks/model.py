"""Our models against `transformers` on the same weights and machine: `python -m benchmarks.model
[--json] [--quick] [--device cuda]`.

Random models, fp32, CPU: DeepSeek V4 of the shape of `tiny-v4`, a small Qwen3, the same with experts. On CUDA
Qwen3 with the dimensions of Qwen3-8B, bf16. Ratios are `transformers`' time over ours, taken alternately in
one run, so that a busy machine slows both. Peak memory is that of a process of its own for each length, less
what it needs before.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.machine import describe, parser_of
from tiercel.kernels.choice import make_kernels
from tiercel.memory.buffers import DeviceMemory
from tiercel.models.base import Span
from tiercel.models.families import family_of

PAGE = 128
LENGTHS = (512, 4096)
FLOPS, BYTES_S = 990e12, 4.8e12
"""Dense bf16 and memory of an H200, by its data sheet."""


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


DENSE: dict[str, int] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
QWEN3_8B: dict[str, int] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def make_qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**DENSE, max_position_embeddings=65536)).eval().float()


def make_qwen3_moe() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**DENSE, **EXPERTS, norm_topk_prob=True, max_position_embeddings=65536)
    return Qwen3MoeForCausalLM(config).eval().float()


class Ours:
    """Our model on the weights of theirs, on their device."""

    def __init__(self, theirs: Any, *, texts: int, tokens: int) -> None:
        config = theirs.config.to_dict()
        self.pages, family, device = -(-tokens // PAGE), family_of(config), str(theirs.device)
        kernels = make_kernels(device=device)
        spec = family.declare(config, PAGE, "fp32" if device == "cpu" else family.format)
        memory = DeviceMemory(spec, pages=texts * self.pages, tails=2, device=device)
        weights = {
            name: weight if weight.dim() > 1 else weight.float()
            for name, weight in theirs.state_dict().items()
        }
        self.model = family.build(family.read(config), weights, memory, texts, kernels, 0, None)
        self.model.warm_up(self.pages * PAGE)

    def span(self, text: int, tokens: torch.Tensor, start: int) -> Span:
        pages = torch.arange(text * self.pages, (text + 1) * self.pages)
        return Span(tokens, start, pages[None], text)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ratio(theirs: Callable[[], object], ours: Callable[[], object], rounds: int) -> dict[str, float]:
    """Alternately, so that both meet the same machine."""
    theirs()
    ours()
    times = [(seconds(theirs), seconds(ours)) for _ in range(rounds)]
    t, o = statistics.median(a for a, _ in times), statistics.median(b for _, b in times)
    return {"ratio": t / o, "theirs_ms": 1e3 * t, "ours_ms": 1e3 * o}


@torch.inference_mode()
def decode(theirs: Any, batch: int, sizes: Sizes) -> dict[str, float]:
    tokens = torch.randint(0, 4096, (batch, sizes.context))
    past = theirs(tokens.to(theirs.device), use_cache=True, logits_to_keep=1).past_key_values
    ours = Ours(theirs, texts=batch, tokens=sizes.context + 4 * PAGE)
    for i in range(batch):
        ours.model.forward([ours.span(i, tokens[i], 0)])
    at, token = sizes.context, torch.randint(0, 4096, (batch, 1))
    same = token.to(theirs.device)

    def their_steps() -> None:
        for _ in range(sizes.steps):
            theirs(same, past_key_values=past, use_cache=True)

    def our_steps() -> None:
        nonlocal at
        for _ in range(sizes.steps):
            ours.model.forward([ours.span(i, token[i], at) for i in range(batch)])
            at += 1

    return ratio(their_steps, our_steps, sizes.rounds)


@torch.inference_mode()
def prefill(theirs: Any, sizes: Sizes) -> dict[str, float]:
    tokens = torch.randint(0, 4096, (1, sizes.prefill))
    ours, same = Ours(theirs, texts=1, tokens=sizes.prefill), tokens.to(theirs.device)
    return ratio(
        lambda: theirs(same, use_cache=True, logits_to_keep=1),
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


def ratios(theirs: Any, sizes: Sizes) -> dict[str, Any]:
    one, many, long = decode(theirs, 1, sizes), decode(theirs, sizes.batch, sizes), prefill(theirs, sizes)
    return {
        "decode_ratio_b1": one["ratio"],
        "decode_ratio_b16": many["ratio"],
        "prefill_ratio_2k": long["ratio"],
        "decode_b1": one,
        "decode_b16": many,
        "prefill_2k": long,
    }


def measure(sizes: Sizes) -> dict[str, Any]:
    """A peak is measured in a process of its own, which takes long: in a quick run it is this process."""
    if sizes is QUICK:
        peaks: dict[str, float] = {"peak_kb": peak_kb(sizes.context, "ours")}
    else:
        who = {"": "ours", "_transformers": "theirs"}
        peaks = {f"memory_growth_512_to_4096{name}": growth(each) for name, each in who.items()}
    return {
        **ratios(make_theirs(), sizes),
        **peaks,
        "qwen3": ratios(make_qwen3(), sizes),
        "qwen3_moe": ratios(make_qwen3_moe(), sizes),
        "machine": describe(),
    }


def measure_cuda(sizes: Sizes) -> dict[str, Any]:
    """Qwen3-8B's dimensions, random weights, bf16. Shares are those of an H200."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        theirs = Qwen3ForCausalLM(Qwen3Config(**QWEN3_8B, max_position_embeddings=65536)).eval()
    torch.set_default_dtype(torch.float32)
    numbers, table = sum(each.numel() for each in theirs.parameters()), theirs.lm_head.weight.numel()
    layers, heads, dim = QWEN3_8B["num_hidden_layers"], QWEN3_8B["num_key_value_heads"], QWEN3_8B["head_dim"]
    figures: dict[str, Any] = {"parameters": numbers}
    for batch in (1, 16, 64):
        found = figures[f"decode_b{batch}"] = decode(theirs, batch, sizes)
        read = 2 * (numbers - table) + batch * sizes.context * layers * heads * dim * 4
        found["share_of_bandwidth"] = read * sizes.steps / (found["ours_ms"] * 1e-3) / BYTES_S
    for tokens in (2048, 8192):
        found = figures[f"prefill_{tokens}"] = prefill(theirs, replace(sizes, prefill=tokens))
        products = 2 * (numbers - 2 * table) * tokens
        products += 2 * tokens * tokens * QWEN3_8B["num_attention_heads"] * dim * layers
        found["share_of_arithmetic"] = products / (found["ours_ms"] * 1e-3) / FLOPS
    return {**figures, "machine": describe()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--peak", nargs=2, metavar=("TOKENS", "WHO"), help="for this program's own use")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    if options.peak:
        print(peak_kb(int(options.peak[0]), options.peak[1]))
        return
    sizes = QUICK if options.quick else Sizes()
    if options.device == "cuda":
        figures = measure_cuda(sizes if options.quick else Sizes(context=2048, steps=16))
    else:
        figures = measure(sizes)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, figure in figures.items():
        print(f"{name:42} {figure:.2f}" if isinstance(figure, float) else f"{name:42} {figure}")


if __name__ == "__main__":
    main()
