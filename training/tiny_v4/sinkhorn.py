"""The doubly-stochastic projection of mHC, [T,n,n] logits -> [T,n,n], with its gradient.

`sinkhorn_plain` is the definition; on CUDA one kernel each way does it in registers instead of about eighty
tiny launches. The forward pass keeps its divisors, so the backward pass walks back through the iterations by
multiplying and recomputes nothing.
"""

# ruff: noqa: PLR0913
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without an accelerator: only the plain form exists
    triton = None

BLOCK_TOKENS = 64  # a sequence is a multiple of the window of 64, so no block is partly filled


def sinkhorn_plain(logits: Tensor, iters: int, eps: float) -> Tensor:
    b = torch.softmax(logits, dim=-1) + eps
    for i in range(iters):
        if i:
            b = b / (b.sum(dim=-1, keepdim=True) + eps)
        b = b / (b.sum(dim=-2, keepdim=True) + eps)
    return b


if triton is not None:

    @triton.jit
    def _places(BLOCK: tl.constexpr, N: tl.constexpr, ITERS: tl.constexpr):
        """Of the matrices, [BLOCK,N,N], and of their first divisors, [BLOCK,N] (2 * ITERS rows a token)."""
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        n = tl.arange(0, N)
        at = token[:, None, None] * N * N + n[None, :, None] * N + n[None, None, :]
        return at, token[:, None] * 2 * ITERS * N + n[None, :]

    @triton.jit
    def _forward(
        logits, out, divisors, EPS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, ITERS: tl.constexpr
    ):
        at, row = _places(BLOCK, N, ITERS)
        b = tl.load(logits + at)
        b = tl.exp(b - tl.max(b, axis=2)[:, :, None])
        b = b / tl.sum(b, axis=2)[:, :, None] + EPS
        for i in tl.static_range(ITERS):
            if i > 0:
                r = tl.sum(b, axis=2) + EPS
                tl.store(divisors + row + 2 * i * N, r)
                b = b / r[:, :, None]
            c = tl.sum(b, axis=1) + EPS
            tl.store(divisors + row + (2 * i + 1) * N, c)
            b = b / c[:, None, :]
        tl.store(out + at, b)

    @triton.jit
    def _backward(
        out,
        divisors,
        grad,
        back,
        EPS: tl.constexpr,
        BLOCK: tl.constexpr,
        N: tl.constexpr,
        ITERS: tl.constexpr,
    ):
        at, row = _places(BLOCK, N, ITERS)
        b, g = tl.load(out + at), tl.load(grad + at)
        for k in tl.static_range(ITERS):
            c = tl.load(divisors + row + (2 * (ITERS - k) - 1) * N)
            g = (g - tl.sum(g * b, axis=1)[:, None, :]) / c[:, None, :]
            b = b * c[:, None, :]
            if k < ITERS - 1:
                r = tl.load(divisors + row + (2 * (ITERS - k) - 2) * N)
                g = (g - tl.sum(g * b, axis=2)[:, :, None]) / r[:, :, None]
                b = b * r[:, :, None]
        p = b - EPS
        tl.store(back + at, p * (g - tl.sum(g * p, axis=2)[:, :, None]))


class Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iters: int, eps: float) -> Tensor:
        tokens, n, _ = logits.shape
        out, divisors = torch.empty_like(logits), logits.new_empty(tokens, 2 * iters, n)
        _forward[(tokens // BLOCK_TOKENS,)](logits, out, divisors, eps, BLOCK_TOKENS, n, iters)
        ctx.save_for_backward(out, divisors)
        ctx.iters, ctx.eps = iters, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out, divisors = ctx.saved_tensors
        tokens, n, _ = out.shape
        back, grad = torch.empty_like(out), grad.contiguous()
        _backward[(tokens // BLOCK_TOKENS,)](out, divisors, grad, back, ctx.eps, BLOCK_TOKENS, n, ctx.iters)
        return back, None, None


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    if not logits.is_cuda:
        return sinkhorn_plain(logits, iters, eps)
    assert len(logits) % BLOCK_TOKENS == 0, len(logits)
    return Sinkhorn.apply(logits.contiguous(), iters, eps)
