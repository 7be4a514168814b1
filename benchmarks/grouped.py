"""How fast grouped-query attention on pages is, in turns with torch's `scaled_dot_product_attention` on
contiguous tensors.

    python -m benchmarks.grouped [--json] [--quick] [--device cuda]

On the CPU the C kernels, fp32, one layer of Qwen3-0.6B (16 heads on 8, 128 channels); on CUDA the Triton
kernels, bf16, one layer of Qwen3-8B (32 on 8). A prefill computes the last 8,192 tokens of a text at most;
torch computes a whole one. A decode reads texts that are not in a cache: there are 512 MB of them on CUDA.
Shares are those of an H200: 990 TFLOP/s and 4.8 TB/s.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.machine import describe, parser_of, tell
from tiercel.kernels.entries import Entries, Flat
from tiercel.kernels.native import grouped as native_grouped

PAGE = 128
TFLOPS, BANDWIDTH = 990.0, 4800.0
"""Dense bf16 and memory of an H200, by its data sheet."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured, and where."""

    heads: int
    kv_heads: int
    dim: int
    prefills: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    """(texts, tokens of each)"""
    cold_bytes: int = 0
    rounds: int = 9
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    prefill_most: int = 8192

    @property
    def token_bytes(self) -> int:
        return 2 * self.kv_heads * self.dim * self.dtype.itemsize


CPU = Sizes(16, 8, 128, (512, 2048), ((1, 512), (16, 512), (1, 8192)))
DECODES = tuple((texts, tokens) for texts in (1, 16, 64) for tokens in (2048, 32768))
CUDA = Sizes(
    32, 8, 128, (2048, 8192, 32768), DECODES, cold_bytes=512 * 2**20, device="cuda", dtype=torch.bfloat16
)
QUICK = Sizes(4, 2, 32, (40,), ((2, 40),), rounds=1)

Call = Callable[[], Tensor]


class Texts:
    """Random keys and values of some texts of equal length, in pages and as tensors."""

    def __init__(self, sizes: Sizes, texts: int, tokens: int) -> None:
        self.sizes, self.tokens = sizes, tokens
        how: dict[str, Any] = {"device": sizes.device, "dtype": sizes.dtype}
        pages, kv_heads, dim = -(-tokens // PAGE), sizes.kv_heads, sizes.dim
        rows = torch.randn(texts * pages, kv_heads * PAGE * 2 * dim, **how)
        name = "bf16" if sizes.dtype == torch.bfloat16 else "fp32"
        size = 2 * dim * sizes.dtype.itemsize
        self.entries = Entries(rows.view(torch.uint8), kv_heads * PAGE, (size,), name, 2 * dim, 0, 0)
        self.table = torch.randperm(texts * pages).view(texts, pages).int().to(sizes.device)
        self.keys, self.values = (torch.randn(texts, kv_heads, tokens, dim, **how) for _ in range(2))

    def ours(self, kernels: ModuleType, first: int, texts: int, new: int) -> Call:
        """The last `new` tokens of some texts."""
        sizes, count = self.sizes, texts * new
        device, start = sizes.device, self.tokens - new
        position = torch.arange(start, self.tokens, dtype=torch.int32, device=device).repeat(texts)
        number = torch.arange(texts, dtype=torch.int32, device=device).repeat_interleave(new)
        flat = Flat(position, torch.full_like(position, start), number * new, number + first, self.table)
        q = torch.randn(count, sizes.heads, sizes.dim, device=device, dtype=sizes.dtype)
        scale = sizes.dim**-0.5
        return lambda: kernels.grouped_attention(q, self.entries, sizes.kv_heads, flat, scale, self.tokens)

    def theirs(self, first: int, texts: int, new: int) -> Call:
        sizes, part = self.sizes, slice(first, first + texts)
        q = torch.randn(texts, sizes.heads, new, sizes.dim, device=sizes.device, dtype=sizes.dtype)
        key, value = self.keys[part], self.values[part]
        return lambda: scaled_dot_product_attention(q, key, value, is_causal=new > 1, enable_gqa=True)


def seconds(ours: list[Call], theirs: list[Call], sizes: Sizes) -> tuple[float, float]:
    """Of one call each, in turns."""
    timed = [_recorded(calls) if sizes.device == "cuda" else _called(calls) for calls in (ours, theirs)]
    times = [[each() for each in timed] for _ in range(sizes.rounds + 1)][1:]
    mine, other = (statistics.median(column) for column in zip(*times, strict=True))
    return mine / len(ours), other / len(theirs)


def _called(calls: list[Call]) -> Callable[[], float]:
    def timed() -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start

    return timed


def _recorded(calls: list[Call]) -> Callable[[], float]:
    calls[0]()  # compiled before it is recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def timed() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    return timed


def prefill(kernels: ModuleType, sizes: Sizes, tokens: int) -> dict[str, float]:
    texts, new = Texts(sizes, 1, tokens), min(tokens, sizes.prefill_most)
    mine, other = seconds([texts.ours(kernels, 0, 1, new)], [texts.theirs(0, 1, tokens)], sizes)
    each = 4 * sizes.heads * sizes.dim
    start = tokens - new
    rate = each * (new * start + new * (new + 1) / 2) / mine / 1e12
    their_rate = each * tokens * (tokens + 1) / 2 / other / 1e12
    figures = {"ms": 1e3 * mine, "tflop_s": rate, "torch_tflop_s": their_rate, "ratio": rate / their_rate}
    return figures | ({"share": rate / TFLOPS} if sizes.device == "cuda" else {})


def decode(kernels: ModuleType, sizes: Sizes, batch: int, tokens: int) -> dict[str, float]:
    size = batch * tokens * sizes.token_bytes
    calls = max(1, sizes.cold_bytes // size)
    texts, firsts = Texts(sizes, batch * calls, tokens), range(0, batch * calls, batch)
    mine, other = seconds(
        [texts.ours(kernels, first, batch, 1) for first in firsts],
        [texts.theirs(first, batch, 1) for first in firsts],
        sizes,
    )
    rates = size / mine / 1e9, size / other / 1e9
    figures = {"us": 1e6 * mine, "gb_s": rates[0], "torch_gb_s": rates[1], "ratio": other / mine}
    return figures | ({"share": rates[0] / BANDWIDTH} if sizes.device == "cuda" else {})


@torch.inference_mode()
def measure(sizes: Sizes) -> dict[str, Any]:
    kernels = native_grouped
    if sizes.device == "cuda":
        from tiercel.kernels.cuda import grouped as kernels  # type: ignore[no-redef] # here: it needs Triton
    figures: dict[str, Any] = {}
    for tokens in sizes.prefills:
        figures[f"prefill_{tokens}"] = prefill(kernels, sizes, tokens)
    for batch, tokens in sizes.decodes:
        figures[f"decode_{batch}x{tokens}"] = decode(kernels, sizes, batch, tokens)
    return figures | {"machine": describe()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    sizes = QUICK if options.quick else CUDA if options.device == "cuda" else CPU
    tell(measure(sizes), as_json=options.json)


if __name__ == "__main__":
    main()
