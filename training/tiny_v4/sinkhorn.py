"""The doubly-stochastic projection of mHC, [N,n,n] logits -> [N,n,n], with its gradient.

`sinkhorn_plain` is the definition; `Sinkhorn` runs it in registers on CUDA: about eighty tiny
launches per site become one. The forward pass keeps the 2*iters-1 divisors, so the backward pass walks
back through the iterations by multiplying, and recomputes nothing.
"""

# ruff: noqa: ARG001, PLR0913
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without an accelerator: only the plain form exists
    triton = None

BLOCK_TOKENS = 64


def sinkhorn_plain(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    b = torch.softmax(logits, dim=-1) + eps
    b = b / (b.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        b = b / (b.sum(dim=-1, keepdim=True) + eps)
        b = b / (b.sum(dim=-2, keepdim=True) + eps)
    return b


if triton is not None:

    @triton.jit
    def _forward(
        logits,
        out,
        divisors,
        tokens,
        EPS: tl.constexpr,
        N: tl.constexpr,
        ITERS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        n = tl.arange(0, N)
        at = row[:, None, None] * N * N + n[None, :, None] * N + n[None, None, :]
        keep = (row < tokens)[:, None, None] & (n >= 0)[None, :, None] & (n >= 0)[None, None, :]
        at_d = row[:, None] * (2 * ITERS - 1) * N + n[None, :]
        keep_d = (row < tokens)[:, None] & (n >= 0)[None, :]
        b = tl.load(logits + at, mask=keep, other=0.0)
        b = tl.exp(b - tl.max(b, axis=2)[:, :, None])
        b = b / tl.sum(b, axis=2)[:, :, None] + EPS
        c = tl.sum(b, axis=1) + EPS
        tl.store(divisors + at_d, c, mask=keep_d)
        b = b / c[:, None, :]
        for i in range(1, ITERS):
            r = tl.sum(b, axis=2) + EPS
            tl.store(divisors + at_d + (2 * i - 1) * N, r, mask=keep_d)
            b = b / r[:, :, None]
            c = tl.sum(b, axis=1) + EPS
            tl.store(divisors + at_d + (2 * i) * N, c, mask=keep_d)
            b = b / c[:, None, :]
        tl.store(out + at, b, mask=keep)

    @triton.jit
    def _backward(
        out,
        grad,
        divisors,
        grad_in,
        tokens,
        EPS: tl.constexpr,
        N: tl.constexpr,
        ITERS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        n = tl.arange(0, N)
        at = row[:, None, None] * N * N + n[None, :, None] * N + n[None, None, :]
        keep = (row < tokens)[:, None, None] & (n >= 0)[None, :, None] & (n >= 0)[None, None, :]
        at_d = row[:, None] * (2 * ITERS - 1) * N + n[None, :]
        keep_d = (row < tokens)[:, None] & (n >= 0)[None, :]
        b = tl.load(out + at, mask=keep, other=0.0)
        g = tl.load(grad + at, mask=keep, other=0.0)
        for k in range(1, ITERS):
            i = ITERS - k
            c = tl.load(divisors + at_d + (2 * i) * N, mask=keep_d, other=1.0)
            g = (g - tl.sum(g * b, axis=1)[:, None, :]) / c[:, None, :]
            b = b * c[:, None, :]
            r = tl.load(divisors + at_d + (2 * i - 1) * N, mask=keep_d, other=1.0)
            g = (g - tl.sum(g * b, axis=2)[:, :, None]) / r[:, :, None]
            b = b * r[:, :, None]
        c = tl.load(divisors + at_d, mask=keep_d, other=1.0)
        g = (g - tl.sum(g * b, axis=1)[:, None, :]) / c[:, None, :]
        p = b * c[:, None, :] - EPS
        tl.store(grad_in + at, p * (g - tl.sum(g * p, axis=2)[:, :, None]), mask=keep)


@torch.library.custom_op("tiny_v4::sinkhorn_forward", mutates_args=())
def sinkhorn_forward(logits: torch.Tensor, iters: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, n, _ = logits.shape
    out = torch.empty_like(logits)
    divisors = logits.new_empty(tokens, 2 * iters - 1, n)
    _forward[(triton.cdiv(tokens, BLOCK_TOKENS),)](logits, out, divisors, tokens, eps, n, iters, BLOCK_TOKENS)
    return out, divisors


@sinkhorn_forward.register_fake
def _(logits: torch.Tensor, iters: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(logits), logits.new_empty(logits.shape[0], 2 * iters - 1, logits.shape[1])


@torch.library.custom_op("tiny_v4::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(
    out: torch.Tensor, grad: torch.Tensor, divisors: torch.Tensor, eps: float
) -> torch.Tensor:
    tokens, n, _ = out.shape
    grad_in = torch.empty_like(out)
    iters = (divisors.shape[1] + 1) // 2
    _backward[(triton.cdiv(tokens, BLOCK_TOKENS),)](
        out, grad.contiguous(), divisors, grad_in, tokens, eps, n, iters, BLOCK_TOKENS
    )
    return grad_in


@sinkhorn_backward.register_fake
def _(out: torch.Tensor, grad: torch.Tensor, divisors: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(out)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output)
    ctx.eps = inputs[2]


def _gradient(ctx, grad_out, _grad_divisors):
    out, divisors = ctx.saved_tensors
    return sinkhorn_backward(out, grad_out, divisors, ctx.eps), None, None


sinkhorn_forward.register_autograd(_gradient, setup_context=_setup)


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    if logits.is_cuda:
        return sinkhorn_forward(logits.contiguous(), iters, eps)[0]
    return sinkhorn_plain(logits, iters, eps)
