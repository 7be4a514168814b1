"""Compiles for a Hopper GPU, on any machine, what CUDA kernels' functions would launch there.

    python -m tests.kernels.hopper        one line for each kernel, as JSON

This needs a process of its own: where kernels are interpreted, they can not be compiled. Nothing is launched,
so tensors need no content, and live on the CPU.
"""

import json
import re
import subprocess
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tiercel.kernels.cuda import grouped, hot, hyper, rings, rows
from tiercel.kernels.cuda.attention import attention
from tiercel.kernels.cuda.draw import greedy, sample
from tiercel.kernels.cuda.experts import experts, route
from tiercel.kernels.cuda.index import best_rows
from tiercel.kernels.cuda.matrix import linear, pack, pack_all
from tiercel.kernels.entries import Entries, Flat, Numbering
from tiercel.kernels.hot import HostRows, HotRows
from tiercel.kernels.reference.hyper import Site

HOPPER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EPS = 1e-6


def weight(*shape, dtype):
    *m, n, k = shape
    scale = torch.ones(*m, -(-n // 128), -(-k // 128)) if dtype == FP8 else None
    return (pack_all if m else pack)(torch.empty(shape, dtype=dtype), scale)


def rows_of(bytes_each: int, per_row: int, sizes: tuple[int, ...], encoding: str, dim: int) -> Entries:
    return Entries(torch.empty(2, bytes_each, dtype=torch.uint8), per_row, sizes, encoding, dim, 64, 64)


def call_on_entries(tokens: int) -> None:
    """A sparse layer: the indexer, then attention to what it chose."""
    k = 512
    numbers = torch.empty(tokens, dtype=torch.int32)
    flat = Flat(numbers, numbers, numbers, numbers, torch.empty(4, 8, dtype=torch.int32))
    keys = rows_of(8448, 64, (128, 4), "fp8_row", 128)
    best_rows(torch.empty(tokens, 64, 128, dtype=BF16), torch.empty(tokens, 64), keys, 4, flat, k, 600)
    window = rows_of(592, 1, (576, 8), "fp8_groups", 512)
    entries = rows_of(37440, 64, (576, 8), "fp8_groups", 512)
    q, chosen = torch.empty(tokens, 64, 512, dtype=BF16), torch.empty(tokens, k, dtype=torch.int32)
    attention(q, (window, window), 128, entries, chosen, 4, flat, torch.empty(64), 1.0)


def call_all() -> None:
    """Every kernel with the shapes and tiles of V4-Flash. Large tensors are only addresses."""
    for count, n, k, dtype in (
        (8, 4096, 8192, FP8), (64, 4096, 8192, FP8), (8192, 4096, 8192, FP8), (8192, 40960, 1024, BF16),
    ):  # fmt: skip
        linear(torch.empty(count, k, dtype=BF16), weight(n, k, dtype=dtype))
    linear(torch.empty(8, 96), weight(40, 96, dtype=torch.float32))
    for tokens in (1, 1024):
        matrices = weight(9, 4096, 4096, dtype=FP8), weight(9, 4096, 2048, dtype=FP8)
        chosen, weights = route(torch.empty(tokens, 8), None, torch.empty(8), 6, 1.5, ints(tokens))
        experts(torch.empty(tokens, 4096, dtype=BF16), chosen, weights, matrices, 10.0)
    route(torch.empty(8, 256), torch.empty(8, 6, dtype=torch.int64), None, 6, 1.5, ints(8))
    logits = torch.empty(8, 129280)
    sample(logits, torch.empty(8, 6, dtype=torch.float64), greedy(logits))
    call_on_entries(tokens=2)
    call_on_entries(tokens=200)
    call_hyper(tokens=3, n=4, d=4096)
    call_rows(tokens=3)
    call_hot(tokens=3)
    call_grouped()


def call_hot(tokens: int) -> None:
    flat, to = (
        Flat(*(ints(tokens) for _ in range(4)), pages=ints(4, 16)),
        Numbering(ints(4, 16), 700, 65, 7000),
    )
    rows = rows_of(37440, 64, (576, 8), "fp8_groups", 512)
    source = HostRows(1 << 40, 1 << 20, ints(4, 16))
    for k in (64, 512, 2048):
        made = HotRows.make(
            layers=2, rings=4, places=32, per_row=64, entries=4096, tokens=tokens, k=k, device="cpu"
        )
        hot.resolve(ints(tokens, k), flat, ints(tokens), made, 1, to, 64, 4)
    hot.gather(made, flat, k, source, rows, to)
    hot.stage(ints(8, 2), ints(1), source, rows, to)


def call_grouped() -> None:
    """The shapes of Qwen3-8B, and a small one in fp32 whose pages are no power of two."""
    for tokens, kv_heads, dim, page, dtype in (
        (8, 8, 128, 128, BF16),
        (1024, 8, 128, 128, BF16),
        (8, 2, 48, 24, torch.float32),
    ):
        size, name = 2 * dim * dtype.itemsize, "bf16" if dtype == BF16 else "fp32"
        memory = torch.empty(2, kv_heads * page * size, dtype=torch.uint8)
        entries = Entries(memory, kv_heads * page, (size,), name, 2 * dim, 0, 0)
        flat = Flat(*(ints(tokens) for _ in range(4)), pages=ints(4, 16))
        both = torch.empty(tokens, 2, kv_heads, dim, dtype=dtype)
        turn = torch.empty(tokens, dim // 2), torch.empty(tokens, dim // 2)
        key, value = both.unbind(1)
        grouped.store_heads(key, value, turn, entries, flat, ints(tokens), eps=EPS, weight=torch.empty(dim))
        q = torch.empty(tokens, 4 * kv_heads, dim, dtype=dtype)
        grouped.grouped_attention(q, entries, kv_heads, flat, 0.1, 2048)
    grouped.route_softmax(torch.empty(8, 128), 8, normed=True, position=ints(8))
    grouped.gated(torch.empty(8, 2 * 12288, dtype=BF16))


def call_hyper(tokens: int, n: int, d: int) -> None:
    x, y, norm = torch.empty(tokens, n, d, dtype=BF16), torch.empty(tokens, d, dtype=BF16), torch.empty(d)
    each = torch.empty(n * (n + 2))
    site = Site(pack(torch.empty(len(each), n * d)), each, each, norm, n, 20, EPS, EPS)
    _, place, mix = hyper.read(x, site)
    hyper.write(x, y, place, mix)
    hyper.write_read(x, y, place, mix, site)
    hyper.head(x, replace(site, fn=pack(torch.empty(n, n * d)), scale=each[:1], base=each[:n]))


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def encoded(count: int, per_row: int = 1) -> Entries:
    data = torch.empty(count, per_row * 584, dtype=torch.uint8)
    return Entries(data, per_row, (576, 8), "fp8_groups", 512, 64, 64)


def call_rows(tokens: int) -> None:
    turn, weight = (torch.empty(tokens, 32), torch.empty(tokens, 32)), torch.empty(512)
    rows.norm(torch.empty(tokens, 1024), torch.empty(1024), EPS, dtype=BF16)
    rows.norm_rotate(torch.empty(tokens, 64, 512, dtype=BF16), turn, eps=EPS)
    rows.store_window(torch.empty(tokens, 512), turn, EPS, weight, encoded(tokens))
    flat = Flat(*(ints(tokens) for _ in range(4)), pages=ints(4, 16))
    keys = Entries(torch.empty(2, 64 * 132, dtype=torch.uint8), 64, (128, 4), "fp8_row", 128, 0, 0)
    for ratio, channels, pages in ((4, 1024, encoded(2, 64)), (4, 256, keys), (128, 512, encoded(2, 2))):
        recent = torch.empty(4 * 128, 2 * channels), torch.empty(tokens, 2 * channels)
        how = torch.empty(ratio, channels), weight[: pages.dim], EPS, turn, pages, flat
        rows.compress_store(recent, *how, ints(tokens), ring_rows=128)
    recent = encoded(4 * 127), encoded(tokens)
    rings.keep(*recent, flat, ints(tokens), 127)
    rings.write_tails(recent, encoded(2, 128), ints(2, 5), 127)
    rings.restore(recent[0], encoded(2, 128), ints(2, 3), 127)
    kept, new = torch.empty(4 * 5, 4 * 4096), torch.empty(tokens, 4 * 4096, dtype=BF16)
    hidden = Entries(
        torch.empty(2, 4 * 4 * 4096, dtype=torch.uint8), 1, (4 * 4 * 4096,), "fp32", 4 * 4096, 0, 0
    )
    rings.row_before(kept, new, flat, 5)
    rings.keep(kept, new, flat, ints(tokens), 5)
    rings.write_tails((new, new), hidden, ints(2, 5), 5)
    rings.restore(kept, hidden, ints(2, 3), 5)


def report(kernel) -> dict:
    """Its name, bytes of shared memory, registers and bytes of stack (spilled registers) of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        told = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", told)[0]
    return {
        "name": kernel.name,
        "shared": kernel.metadata.shared,
        "registers": int(registers),
        "stack": int(stack),
        "tensor_cores": "wgmma" in kernel.asm["ptx"],
    }


def compile_all() -> list[dict]:
    launch, kernels = JITFunction.run, {}

    def compile_only(function, *args, grid, warmup, **options):
        kernel = launch(function, *args, grid=grid, warmup=True, **options)
        kernels[kernel.hash] = kernel
        return kernel

    driver.set_active(HOPPER)
    JITFunction.run = compile_only
    call_all()
    return [report(kernel) for kernel in kernels.values()]


if __name__ == "__main__":
    for each in compile_all():
        print(json.dumps(each))  # noqa: T201
