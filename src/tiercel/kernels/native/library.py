"""The C library of the native kernels: how it is loaded and called, and what tensors it can read.

The library is built when the package is installed (`native.c`, gcc). If it could not be built, `AVAILABLE` is
false and the reference kernels run.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import torch
from torch import Tensor

TOKENS_FREE = 64
"""From this many tokens on, a call releases the GIL. Shorter calls keep it: they would have to reacquire it
dozens of times in a millisecond."""

Shape = tuple[int, ...]

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
SIGNATURES = {
    "linear": "pippiiii",
    "linear_groups": "pippiiii",
    "norm_rotate": "pippppiiiiff",
    "hyper_read": "ppppppppiiiiff",
    "hyper_write": "pppppiii",
    "hyper_head": "ppfpppiiiff",
    "route": "pipppiiif",
    "experts": "ppppppiiiiifi",
    "keep": "pipippii",
    "put_entries": "piippii",
    "compress": "pipiippppppiiiii",
    "best_rows": "ppipiiippiiiipiiii",
    "attention": "ppipiiipiipiippfpii",
    "store_heads": "pipipppfpiiippiii",
    "grouped_attention": "pppiiippfiiii",
    "route_softmax": "pipppiiii",
    "gated": "pipii",
}
"""The arguments of each C function: p is a pointer, i an int64, f a float."""


def _load(kind: type[ctypes.CDLL]) -> ctypes.CDLL | None:
    found = importlib.util.find_spec("tiercel.kernels._native")
    if found is None or found.origin is None:
        return None
    library = kind(found.origin)
    for name, kinds in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [_TYPES[kind] for kind in kinds], None
    library.compress.restype = library.lanes.restype = ctypes.c_int64
    library.built_from.restype = ctypes.c_char_p
    return library


_free, _held = _load(ctypes.CDLL), _load(ctypes.PyDLL)
AVAILABLE = _free is not None


def built_from() -> tuple[str, ...]:
    """What the library was built from, which may not be the current C source; and its vector width."""
    assert _free is not None
    return _free.built_from().decode(), str(_free.lanes())


def call(name: str, tokens: int, *arguments: object) -> Any:
    function = getattr(_free if tokens >= TOKENS_FREE else _held, name)
    return function(*[each.data_ptr() if type(each) is Tensor else each for each in arguments])


def dense(x: Tensor, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
    """Refuses x unless it is dense. (It takes 0.5 µs and is called 340 times per token of tiny-v4.)"""
    if not (x.shape == shape and x.dtype is dtype and x.is_contiguous()):
        raise unfit(x, shape, dtype)


def step_of(x: Tensor, shape: Shape, dtype: torch.dtype = torch.float32) -> int:
    """The distance between two rows of x, in numbers. Refuses x unless each row is dense."""
    if x.shape == shape and x.dtype is dtype and (x.is_contiguous() or x[0].is_contiguous()):
        return x.stride(0)
    raise unfit(x, shape, dtype)


def unfit(x: Tensor, shape: Shape, dtype: torch.dtype) -> ValueError:
    given = f"{x.dtype} {list(x.shape)} with strides {list(x.stride())}"
    return ValueError(f"a native kernel was given {given}, it wants {dtype} {list(shape)} without gaps")
