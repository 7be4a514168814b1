"""The kernels of `reference.py` in C for the CPU: faster, and with the same bits for every batch.

The library is built when the package is installed (`native.c`, gcc). If it could not be built, `AVAILABLE` is
false and the plain twins run. Each function checks the dtype, shape and strides of its tensors and passes
pointers to C. Row numbers are not checked: the caller must get them right.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.kernels.reference import CosSin, Recent, Site
from tiercel.kernels.sources import digest_of, host_words

NAME = "native"
EXACT = True
"""The result for a token depends on that token's own inputs only."""

TOKENS_FREE = 64
"""From this many tokens on, a call releases the GIL. Shorter calls keep it: they would have to reacquire it
dozens of times in a millisecond."""

PANEL = 16


class PackedMatrix(NamedTuple):
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
"""The arguments of each C function: p is a pointer, i an int64, f a float."""


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


def digest() -> str:
    """A digest of the library as it was built, not of the current C source."""
    assert _free is not None
    built_from = _free.built_from
    built_from.restype = ctypes.c_char_p
    return digest_of(NAME, built_from().decode(), str(_free.lanes()), *host_words(), files=[Path(__file__)])


def _call(name: str, tokens: int, *arguments: object) -> None:
    function = getattr(_free if tokens >= TOKENS_FREE else _held, name)
    function(*[each.data_ptr() if type(each) is Tensor else each for each in arguments])


Shape = tuple[int, ...]


def _dense(x: Tensor, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """x, if it is dense as C expects. (This takes half a microsecond, 340 times per token of tiny-v4.)"""
    if x.shape == shape and x.dtype is dtype and x.is_contiguous():
        return x
    raise _unfit(x, shape, dtype)


def _rows(x: Tensor, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """x, if its rows are dense. C gets the distance between rows."""
    if x.shape == shape and x.dtype is dtype and (x.is_contiguous() or x[0].is_contiguous()):
        return x
    raise _unfit(x, shape, dtype)


def _unfit(x: Tensor, shape: Shape, dtype: torch.dtype) -> ValueError:
    given = f"{x.dtype} {list(x.shape)} with strides {list(x.stride())}"
    return ValueError(f"a native kernel was given {given}, it wants {dtype} {list(shape)} without gaps")


def _panels(weight: PackedMatrix, n: int, k: int, many: int | None = None) -> Tensor:
    """The memory of a packed matrix, after a check that it is [n, k] and, if given, that there are `many`."""
    if (weight.n, weight.k) != (n, k) or (many is not None and len(weight.panels) != many):
        given = f"{len(weight.panels)} panels of matrices {[weight.n, weight.k]}"
        raise ValueError(f"a native kernel was given {given}, it wants {[n, k]} and {many or 'one'} of them")
    return weight.panels


def pack(weight: Tensor) -> PackedMatrix:
    n, k = weight.shape
    padded = torch.zeros(-(-n // PANEL) * PANEL, k)
    padded[:n] = weight
    return PackedMatrix(padded.view(-1, PANEL, k).transpose(1, 2).contiguous(), n, k)


def linear(x: Tensor, weight: PackedMatrix) -> Tensor:
    panels, n, k = weight
    rows = len(x)
    y = torch.empty(rows, n)
    _call("linear", rows, _rows(x, (rows, k)), x.stride(0), panels, y, n, rows, k, n)
    return y


def linear_groups(x: Tensor, weights: PackedMatrix) -> Tensor:
    panels, n, k = weights
    rows, groups = len(x), len(panels)
    y = torch.empty(rows, groups * n)
    _call("linear_groups", rows, _rows(x, (rows, groups * k)), x.stride(0), panels, y, rows, groups, k, n)
    return y


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, d = x.shape
    y = torch.empty(rows, d)
    _call("norm", rows, _rows(x, (rows, d)), x.stride(0), _dense(weight, (d,)), y, rows, d, eps)
    return y


def norm_rotate(
    x: Tensor, turn: CosSin, *, eps: float | None = None, weight: Tensor | None = None, back: bool = False
) -> Tensor:
    rows, heads, d = x.shape
    y = torch.empty(rows, heads, d)
    cos, sin = turn
    pairs = min(cos.shape[1], d // 2)
    _call(
        "norm_rotate",
        rows,
        _rows(x, (rows, heads, d)),
        x.stride(0),
        y,
        _dense(cos, (rows, pairs)),
        _dense(sin, (rows, pairs)),
        None if weight is None else _dense(weight, (d,)),
        rows,
        heads,
        d,
        2 * pairs,
        -1.0 if eps is None else eps,
        -1.0 if back else 1.0,
    )
    return y


def put_rows(target: Tensor, to: Tensor, source: Tensor, rows: Tensor | None = None) -> None:
    (count,), (sources, width), dtype = to.shape, source.shape, source.dtype
    _rows(target, (len(target), width), dtype)
    _rows(source, (count if rows is None else sources, width), dtype)
    _dense(to, (count,), torch.int64)
    if rows is not None:
        _dense(rows, (count,), torch.int64)
    size = source.element_size()
    strides = target.stride(0) * size, source.stride(0) * size
    _call("put_rows", count, target, strides[0], to, source, strides[1], rows, count, width * size)


# Hyper-connections


def hyper_read(x: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    rows, n, d = x.shape
    outs = 2 * n + n * n
    seen, place, mix = torch.empty(rows, d), torch.empty(rows, n), torch.empty(rows, n, n)
    _call(
        "hyper_read",
        rows,
        _dense(x, (rows, n, d)),
        _panels(site.fn, outs, n * d),
        _dense(site.scale, (outs,)),
        _dense(site.base, (outs,)),
        _dense(site.weight, (d,)),
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
    _dense(x, (rows, n, d)), _dense(y, (rows, d)), _dense(place, (rows, n)), _dense(mix, (rows, n, n))
    _call("hyper_write", rows, x, y, place, mix, out, rows, n, d)
    return out


def hyper_head(x: Tensor, site: Site) -> Tensor:
    rows, n, d = x.shape
    out = torch.empty(rows, d)
    _call(
        "hyper_head",
        rows,
        _dense(x, (rows, n, d)),
        _panels(site.fn, n, n * d),
        site.scale.item(),
        _dense(site.base, (n,)),
        _dense(site.weight, (d,)),
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
    best = None
    if chosen is None:
        assert bias is not None
        best, chosen = _dense(bias, (count,)), torch.empty(rows, k, dtype=torch.int64)
    weights = torch.empty(rows, k)
    _call(
        "route",
        rows,
        _rows(logits, (rows, count)),
        logits.stride(0),
        best,
        _dense(chosen, (rows, k), torch.int64),
        weights,
        rows,
        count,
        k,
        factor,
    )
    return chosen, weights


def pack_all(weights: Tensor) -> PackedMatrix:
    """Packs m matrices [m, n, k] into one tensor. The result's n and k are those of one matrix."""
    panels = torch.stack([pack(each).panels for each in weights])
    return PackedMatrix(panels, weights.shape[1], weights.shape[2])


def experts(
    x: Tensor, chosen: Tensor, weights: Tensor, matrices: tuple[PackedMatrix, PackedMatrix], limit: float
) -> Tensor:
    gate_up, down = matrices
    (rows, d), k, inner, count = x.shape, chosen.shape[1], down.k, len(down.panels)
    y = torch.empty(rows, d)
    _call(
        "experts",
        rows,
        _dense(x, (rows, d)),
        _dense(chosen, (rows, k), torch.int64),
        _dense(weights, (rows, k)),
        _panels(gate_up, 2 * inner, d, many=count),
        _panels(down, d, inner),
        y,
        rows,
        count - 1,
        k,
        d,
        inner,
        limit,
    )
    return y


# Attention


def compress(recent: Recent, rows: Tensor, bias: Tensor, dim: int) -> Tensor:
    (old, new), (entries, width), (ratio, channels) = recent, rows.shape, bias.shape
    if channels < (2 * dim if width > ratio else dim):
        raise ValueError(f"a native kernel was given {channels} channels for entries of {dim}")
    y = torch.empty(entries, dim)
    _call(
        "compress",
        entries,
        _rows(old, (len(old), 2 * channels)),
        old.stride(0),
        len(old),
        _rows(new, (len(new), 2 * channels)),
        new.stride(0),
        _dense(rows, (entries, width), torch.int32),
        _dense(bias, (ratio, channels)),
        y,
        entries,
        width,
        ratio,
        dim,
        channels,
    )
    return y


def best_rows(
    q: Tensor, weights: Tensor, keys: Tensor, rows: Tensor, span: Tensor, visible: Tensor, k: int
) -> Tensor:
    (queries, heads, dim), (spans, most) = q.shape, rows.shape
    k = min(k, most)
    best = torch.empty(queries, k, dtype=torch.int32)
    _call(
        "best_rows",
        queries,
        _dense(q, (queries, heads, dim)),
        _rows(weights, (queries, heads)),
        weights.stride(0),
        _dense(keys, (len(keys), dim)),
        _dense(rows, (spans, most), torch.int32),
        most,
        _dense(span, (queries,), torch.int64),
        _dense(visible, (queries,), torch.int64),
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
    width, k = window.shape[1], chosen.shape[1]
    out = torch.empty(queries, heads, dim)
    _call(
        "attention",
        queries,
        _dense(q, (queries, heads, dim)),
        _rows(old, (len(old), dim)),
        old.stride(0),
        len(old),
        _rows(new, (len(new), dim)),
        new.stride(0),
        _dense(window, (queries, width), torch.int32),
        width,
        _dense(entries, (len(entries), dim)),
        _dense(chosen, (queries, k), torch.int32),
        k,
        _dense(sinks, (heads,)),
        scale,
        out,
        queries,
        heads,
        dim,
    )
    return out
