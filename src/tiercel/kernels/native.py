"""The kernels of `reference.py` in C for the CPU: faster, and exact, whatever is computed together.

The library is built when the package is installed (`native.c`, gcc); where it could not be built, `AVAILABLE`
is false and the plain twins run. Each function here checks nothing and only hands pointers over: tensors are
fp32, their last dimension is dense, row numbers are int32.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.kernels.reference import Recent, Site, Turn

NAME = "native"
EXACT = True
"""What is computed for a token depends on nothing but that token's own inputs."""

TOKENS_FREE = 64
"""From so many tokens on a call lasts long enough to let other threads of Python run meanwhile. Below, it
would have to win the interpreter back dozens of times in a millisecond."""

PANEL = 16


class Matrix(NamedTuple):
    """A weight [n, k] in panels of 16 rows."""

    panels: Tensor
    n: int
    k: int


_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_SIGNATURES = {
    "linear": "pippiiii",
    "linear_groups": "pippiiii",
    "norm": "pippiif",
    "norm_rotate": "pippppiiiiff",
    "hyper_read": "ppppppppiiiiff",
    "hyper_write": "pppppiii",
    "hyper_head": "ppfpppiiiff",
    "route": "pipppiiif",
    "experts": "ppppppiiiiif",
    "put_rows": "pippipii",
    "compress": "piipipppiiiii",
    "best_rows": "ppippipppiiii",
    "attention": "ppiipipippipfpiii",
}
"""Of each function in C: p a pointer, i an int64, f a float."""


def _load(kind: type[ctypes.CDLL]) -> ctypes.CDLL | None:
    found = importlib.util.find_spec("tiercel.kernels._native")
    if found is None or found.origin is None:
        return None
    library = kind(found.origin)
    for name, kinds in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [_TYPES[kind] for kind in kinds], None
    library.lanes.restype = ctypes.c_int64
    return library


_free, _held = _load(ctypes.CDLL), _load(ctypes.PyDLL)
AVAILABLE = _free is not None
BITS = f"{NAME} {platform.machine()} {_free.lanes() if _free else 0}"
"""Where this is equal, so are the bits of what is computed, as far as is known."""


def _call(name: str, tokens: int, *arguments: object) -> None:
    function = getattr(_free if tokens >= TOKENS_FREE else _held, name)
    function(*[each.data_ptr() if type(each) is Tensor else each for each in arguments])


def pack(weight: Tensor) -> Matrix:
    n, k = weight.shape
    padded = torch.zeros(-(-n // PANEL) * PANEL, k)
    padded[:n] = weight
    return Matrix(padded.view(-1, PANEL, k).transpose(1, 2).contiguous(), n, k)


def linear(x: Tensor, weight: Matrix) -> Tensor:
    panels, n, k = weight
    rows = len(x)
    y = torch.empty(rows, n)
    _call("linear", rows, x, x.stride(0), panels, y, n, rows, k, n)
    return y


def linear_groups(x: Tensor, weights: Matrix) -> Tensor:
    panels, n, k = weights
    rows, groups = len(x), len(panels)
    y = torch.empty(rows, groups * n)
    _call("linear_groups", rows, x, x.stride(0), panels, y, rows, groups, k, n)
    return y


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, d = x.shape
    y = torch.empty(rows, d)
    _call("norm", rows, x, x.stride(0), weight, y, rows, d, eps)
    return y


def norm_rotate(
    x: Tensor, turn: Turn, *, eps: float | None = None, weight: Tensor | None = None, back: bool = False
) -> Tensor:
    rows, heads, d = x.shape
    y = torch.empty(rows, heads, d)
    cos, sin = turn
    _call(
        "norm_rotate",
        rows,
        x,
        x.stride(0),
        y,
        cos,
        sin,
        None if weight is None else weight,
        rows,
        heads,
        d,
        2 * cos.shape[1],
        -1.0 if eps is None else eps,
        -1.0 if back else 1.0,
    )
    return y


def put_rows(target: Tensor, to: Tensor, source: Tensor, rows: Tensor | None = None) -> None:
    count, size = len(to), source.element_size()
    strides = target.stride(0) * target.element_size(), source.stride(0) * size
    _call("put_rows", count, target, strides[0], to, source, strides[1], rows, count, source.shape[1] * size)


# Hyper-connections


def hyper_read(x: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    rows, n, d = x.shape
    seen, place, mix = torch.empty(rows, d), torch.empty(rows, n), torch.empty(rows, n, n)
    _call(
        "hyper_read",
        rows,
        x,
        site.fn.panels,
        site.scale,
        site.base,
        site.weight,
        seen,
        place,
        mix,
        rows,
        n,
        d,
        site.iterations,
        site.hc_eps,
        site.eps,
    )
    return seen, place, mix


def hyper_write(x: Tensor, y: Tensor, place: Tensor, mix: Tensor) -> Tensor:
    rows, n, d = x.shape
    out = torch.empty(rows, n, d)
    _call("hyper_write", rows, x, y, place, mix, out, rows, n, d)
    return out


def hyper_head(x: Tensor, site: Site) -> Tensor:
    rows, n, d = x.shape
    out = torch.empty(rows, d)
    _call(
        "hyper_head",
        rows,
        x,
        site.fn.panels,
        site.scale.item(),
        site.base,
        site.weight,
        out,
        rows,
        n,
        d,
        site.hc_eps,
        site.eps,
    )
    return out


# Experts


def route(
    logits: Tensor, chosen: Tensor | None, bias: Tensor | None, k: int, factor: float
) -> tuple[Tensor, Tensor]:
    rows, count = logits.shape
    given = chosen is not None
    if chosen is None:
        chosen = torch.empty(rows, k, dtype=torch.int64)
    weights = torch.empty(rows, k)
    _call(
        "route",
        rows,
        logits,
        logits.stride(0),
        None if given else bias,
        chosen,
        weights,
        rows,
        count,
        k,
        factor,
    )
    return chosen, weights


def pack_all(weights: Tensor) -> Matrix:
    """[m, n, k], one after the other in one piece; n and k are of one."""
    panels = torch.stack([pack(each).panels for each in weights])
    return Matrix(panels, weights.shape[1], weights.shape[2])


def experts(
    x: Tensor, chosen: Tensor, weights: Tensor, matrices: tuple[Matrix, Matrix], limit: float
) -> Tensor:
    gate_up, down = matrices
    rows, d = x.shape
    y = torch.empty(rows, d)
    _call(
        "experts",
        rows,
        x,
        chosen,
        weights,
        gate_up.panels,
        down.panels,
        y,
        rows,
        len(down.panels) - 1,
        chosen.shape[1],
        d,
        down.k,
        limit,
    )
    return y


# Attention


def compress(recent: Recent, rows: Tensor, bias: Tensor, dim: int) -> Tensor:
    (old, new), (entries, width) = recent, rows.shape
    y = torch.empty(entries, dim)
    _call(
        "compress",
        entries,
        old,
        old.stride(0),
        len(old),
        new,
        new.stride(0),
        rows,
        bias,
        y,
        entries,
        width,
        bias.shape[0],
        dim,
        bias.shape[1],
    )
    return y


def best_rows(
    q: Tensor, weights: Tensor, keys: Tensor, rows: Tensor, span: Tensor, visible: Tensor, k: int
) -> Tensor:
    queries, heads, dim = q.shape
    best = torch.empty(queries, k, dtype=torch.int32)
    _call(
        "best_rows",
        queries,
        q,
        weights,
        weights.stride(0),
        keys,
        rows,
        rows.shape[1],
        span,
        visible,
        best,
        queries,
        heads,
        dim,
        k,
    )
    return best


def attention(
    q: Tensor,
    recent: Recent,
    window: Tensor,
    entries: Tensor,
    chosen: Tensor,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    (old, new), (queries, heads, dim) = recent, q.shape
    out = torch.empty(queries, heads, dim)
    _call(
        "attention",
        queries,
        q,
        old,
        old.stride(0),
        len(old),
        new,
        new.stride(0),
        window,
        window.shape[1],
        entries,
        chosen,
        chosen.shape[1],
        sinks,
        scale,
        out,
        queries,
        heads,
        dim,
    )
    return out
