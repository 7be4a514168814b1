"""The kernels of `reference.py` in C for the CPU: faster, and with the same bits for every batch.

The library is built when the package is installed (`native.c`, gcc). If it could not be built, `AVAILABLE` is
false and the reference kernels run. Each function checks the dtype, shape and strides of its tensors and
passes pointers to C. Row numbers are not checked: the caller must get them right. All tensors are on the CPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.kernels.draw import greedy as greedy
from tiercel.kernels.draw import masked as masked
from tiercel.kernels.draw import sample as sample
from tiercel.kernels.reference import CosSin, Recent, Site

NAME = "native"
EXACT = True
"""The result for a token depends on that token's own inputs only."""

dtype = torch.float32

TOKENS_FREE = 64
"""From this many tokens on, a call releases the GIL. Shorter calls keep it: they would have to reacquire it
dozens of times in a millisecond."""

PANEL = 16


class PackedMatrix(NamedTuple):
    """A weight [n, k] in panels of 16 rows."""

    panels: Tensor
    n: int
    k: int


Shape = tuple[int, ...]

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_SIGNATURES = {
    "linear": "pippiiii",
    "linear_groups": "pippiiii",
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
    library.lanes.restype, library.built_from.restype = ctypes.c_int64, ctypes.c_char_p
    return library


_free, _held = _load(ctypes.CDLL), _load(ctypes.PyDLL)
AVAILABLE = _free is not None


def built_from() -> tuple[str, ...]:
    """What the library was built from, which may not be the current C source; and its vector width."""
    assert _free is not None
    return _free.built_from().decode(), str(_free.lanes())


def _call(name: str, tokens: int, *arguments: object) -> None:
    function = getattr(_free if tokens >= TOKENS_FREE else _held, name)
    function(*[each.data_ptr() if type(each) is Tensor else each for each in arguments])


def _dense(x: Tensor, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
    """Refuses x unless it is dense. (It takes 0.5 µs and is called 340 times per token of tiny-v4.)"""
    if not (x.shape == shape and x.dtype is dtype and x.is_contiguous()):
        raise _unfit(x, shape, dtype)


def _rows(x: Tensor, shape: Shape, dtype: torch.dtype = torch.float32) -> int:
    """The distance between two rows of x, in numbers. Refuses x unless each row is dense."""
    if x.shape == shape and x.dtype is dtype and (x.is_contiguous() or x[0].is_contiguous()):
        return x.stride(0)
    raise _unfit(x, shape, dtype)


def _unfit(x: Tensor, shape: Shape, dtype: torch.dtype) -> ValueError:
    given = f"{x.dtype} {list(x.shape)} with strides {list(x.stride())}"
    return ValueError(f"a native kernel was given {given}, it wants {dtype} {list(shape)} without gaps")


def _panels(weight: PackedMatrix, n: int, k: int, many: int | None = None) -> Tensor:
    """The memory of a packed matrix. Refuses a matrix that is not [n, k], or not one of `many`."""
    if (weight.n, weight.k) != (n, k) or (many is not None and weight.panels.shape[0] != many):
        given = f"{len(weight.panels)} panels of matrices {[weight.n, weight.k]}"
        raise ValueError(f"a native kernel was given {given}, it wants {[n, k]} and {many or 'one'} of them")
    return weight.panels


def pack(weight: Tensor) -> PackedMatrix:
    n, k = weight.shape
    padded = torch.zeros(-(-n // PANEL) * PANEL, k)
    padded[:n] = weight
    return PackedMatrix(padded.view(-1, PANEL, k).transpose(1, 2).contiguous(), n, k)


def pack_all(weights: Tensor) -> PackedMatrix:
    """Packs m matrices [m, n, k] into one tensor. The result's n and k are those of one matrix."""
    panels = torch.stack([pack(each).panels for each in weights])
    return PackedMatrix(panels, weights.shape[1], weights.shape[2])


# Sizes are `shape[0]`: on a tensor `len` takes 2.6 us and `shape[0]` 0.3, a hundred times per decode step.


def linear(x: Tensor, weight: PackedMatrix, *, wide: bool = False) -> Tensor:  # noqa: ARG001
    (panels, n, k), rows = weight, x.shape[0]
    y = torch.empty(rows, n)
    _call("linear", rows, x, _rows(x, (rows, k)), panels, y, n, rows, k, n)
    return y


def linear_groups(x: Tensor, weights: PackedMatrix) -> Tensor:
    (panels, n, k), rows, groups = weights, x.shape[0], weights.panels.shape[0]
    y = torch.empty(rows, groups * n)
    _call("linear_groups", rows, x, _rows(x, (rows, groups * k)), panels, y, rows, groups, k, n)
    return y


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, d = x.shape
    _dense(weight, (d,))
    y = torch.empty(rows, d)
    _call("norm_rotate", rows, x, _rows(x, (rows, d)), y, None, None, weight, rows, 1, d, 0, eps, 1.0)
    return y


def norm_rotate(
    x: Tensor, rotation: CosSin, *, eps: float | None = None, weight: Tensor | None = None, back: bool = False
) -> Tensor:
    (rows, heads, d), (cos, sin) = x.shape, rotation
    pairs = min(cos.shape[1], d // 2)
    step = _rows(x, (rows, heads, d))
    _dense(cos, (rows, pairs))
    _dense(sin, (rows, pairs))
    if weight is not None:
        _dense(weight, (d,))
    y, eps, direction = torch.empty(rows, heads, d), -1.0 if eps is None else eps, -1.0 if back else 1.0
    _call("norm_rotate", rows, x, step, y, cos, sin, weight, rows, heads, d, 2 * pairs, eps, direction)
    return y


def put_rows(target: Tensor, to: Tensor, source: Tensor, rows: Tensor | None = None) -> None:
    (count,), (sources, width), dtype = to.shape, source.shape, source.dtype
    size = source.element_size()
    to_step = _rows(target, (target.shape[0], width), dtype) * size
    step = _rows(source, (count if rows is None else sources, width), dtype) * size
    _dense(to, (count,), torch.int64)
    if rows is not None:
        _dense(rows, (count,), torch.int64)
    _call("put_rows", count, target, to_step, to, source, step, rows, count, width * size)


# Hyper-connections


def hyper_read(x: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    rows, n, d = x.shape
    outs = 2 * n + n * n
    _dense(x, (rows, n, d))
    _dense(site.scale, (outs,))
    _dense(site.base, (outs,))
    _dense(site.weight, (d,))
    weights = _panels(site.fn, outs, n * d), site.scale, site.base, site.weight
    out = torch.empty(rows, d), torch.empty(rows, n), torch.empty(rows, n, n)
    _call("hyper_read", rows, x, *weights, *out, rows, n, d, site.iterations, site.hc_eps, site.eps)
    return out


def hyper_write(x: Tensor, y: Tensor, place: Tensor, mix: Tensor) -> Tensor:
    rows, n, d = x.shape
    _dense(x, (rows, n, d))
    _dense(y, (rows, d))
    _dense(place, (rows, n))
    _dense(mix, (rows, n, n))
    out = torch.empty(rows, n, d)
    _call("hyper_write", rows, x, y, place, mix, out, rows, n, d)
    return out


def hyper_head(x: Tensor, site: Site) -> Tensor:
    rows, n, d = x.shape
    _dense(x, (rows, n, d))
    _dense(site.base, (n,))
    _dense(site.weight, (d,))
    weights = _panels(site.fn, n, n * d), site.scale.item(), site.base, site.weight
    out = torch.empty(rows, d)
    _call("hyper_head", rows, x, *weights, out, rows, n, d, site.hc_eps, site.eps)
    return out


# Experts


def route(
    logits: Tensor, chosen: Tensor | None, bias: Tensor | None, k: int, factor: float
) -> tuple[Tensor, Tensor]:
    rows, count = logits.shape
    if chosen is None:
        assert bias is not None
        _dense(bias, (count,))
        chosen = torch.empty(rows, k, dtype=torch.int64)
    else:
        bias = None  # a bias only chooses
        _dense(chosen, (rows, k), torch.int64)
    weights, step = torch.empty(rows, k), _rows(logits, (rows, count))
    _call("route", rows, logits, step, bias, chosen, weights, rows, count, k, factor)
    return chosen, weights


def experts(
    x: Tensor, chosen: Tensor, weights: Tensor, matrices: tuple[PackedMatrix, PackedMatrix], limit: float
) -> Tensor:
    gate_up, down = matrices
    (rows, d), k, inner, count = x.shape, chosen.shape[1], down.k, down.panels.shape[0]
    _dense(x, (rows, d))
    _dense(chosen, (rows, k), torch.int64)
    _dense(weights, (rows, k))
    panels = _panels(gate_up, 2 * inner, d, many=count), _panels(down, d, inner)
    y = torch.empty(rows, d)
    _call("experts", rows, x, chosen, weights, *panels, y, rows, count - 1, k, d, inner, limit)
    return y


# Attention


def _pools(recent: Recent, width: int) -> tuple[Tensor, int, int, Tensor, int]:
    """Both pools of recent rows as C takes them, each row `width` numbers."""
    old, new = recent
    olds, news = old.shape[0], new.shape[0]
    return old, _rows(old, (olds, width)), olds, new, _rows(new, (news, width))


def compress(recent: Recent, rows: Tensor, bias: Tensor, dim: int) -> Tensor:
    (entries, width), (ratio, channels) = rows.shape, bias.shape
    if channels < (2 * dim if width > ratio else dim):
        raise ValueError(f"a native kernel was given {channels} channels for entries of {dim}")
    _dense(rows, (entries, width), torch.int32)
    _dense(bias, (ratio, channels))
    y, pools = torch.empty(entries, dim), _pools(recent, 2 * channels)
    _call("compress", entries, *pools, rows, bias, y, entries, width, ratio, dim, channels)
    return y


def best_rows(
    q: Tensor, weights: Tensor, keys: Tensor, rows: Tensor, span: Tensor, visible: Tensor, k: int
) -> Tensor:
    (queries, heads, dim), (spans, most) = q.shape, rows.shape
    k = min(k, most)
    _dense(q, (queries, heads, dim))
    _dense(keys, (keys.shape[0], dim))
    _dense(rows, (spans, most), torch.int32)
    _dense(span, (queries,), torch.int64)
    _dense(visible, (queries,), torch.int64)
    best, step = torch.empty(queries, k, dtype=torch.int32), _rows(weights, (queries, heads))
    lists = rows, most, span, visible
    _call("best_rows", queries, q, weights, step, keys, *lists, best, queries, heads, dim, k)
    return best


def attention(
    q: Tensor, recent: Recent, window: Tensor, entries: Tensor, chosen: Tensor, sinks: Tensor, scale: float
) -> Tensor:
    (queries, heads, dim), width, k = q.shape, window.shape[1], chosen.shape[1]
    _dense(q, (queries, heads, dim))
    _dense(window, (queries, width), torch.int32)
    _dense(entries, (entries.shape[0], dim))
    _dense(chosen, (queries, k), torch.int32)
    _dense(sinks, (heads,))
    out, lists = torch.empty(queries, heads, dim), (window, width, entries, chosen, k)
    pools = _pools(recent, dim)
    _call("attention", queries, q, *pools, *lists, sinks, scale, out, queries, heads, dim)
    return out
