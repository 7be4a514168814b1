"""The C library of the native kernels: how it is loaded and called, and what tensors it can read.

Libraries are built when the package is installed (`native.c`, gcc), one for each level of CPUs
(`kernels/levels.py`). The highest one that this CPU can run is loaded. Without one the reference kernels run.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiercel.kernels.levels import LEVELS, MACHINE, runnable

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


def _path(name: str) -> str | None:
    """Where a library is; None: it was not built."""
    found = importlib.util.find_spec(f"tiercel.kernels.{name}")
    return None if found is None else found.origin


def cpu_features() -> frozenset[str]:
    """What this CPU can do (`cpu.c`)."""
    if (path := _path("_cpu")) is None:
        return frozenset()
    library = ctypes.CDLL(path)
    library.features.restype = ctypes.c_char_p
    return frozenset(library.features().decode().split())


_paths = {level: path for level in (*LEVELS, MACHINE) if (path := _path(f"_native_{level}")) is not None}
AVAILABLE = runnable(_paths, cpu_features())
"""The levels that were built and that this CPU can run, lowest first."""


class _Libraries(NamedTuple):
    """One library, loaded twice: its calls release the GIL, or hold it."""

    level: str
    free: ctypes.CDLL
    held: ctypes.CDLL


def _load(level: str) -> _Libraries:
    loaded = _Libraries(level, ctypes.CDLL(_paths[level]), ctypes.PyDLL(_paths[level]))
    for library in loaded[1:]:
        for name, kinds in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = [_TYPES[kind] for kind in kinds], None
        library.compress.restype = library.lanes.restype = ctypes.c_int64
        library.built_from.restype = ctypes.c_char_p
    return loaded


_libraries = _load(AVAILABLE[-1]) if AVAILABLE else None


def level() -> str:
    """The level that this process computes on."""
    assert _libraries is not None
    return _libraries.level


def use_level(level: str) -> None:
    """Compute on one of `AVAILABLE` from now on, in the whole process."""
    global _libraries  # noqa: PLW0603
    _libraries = _load(level)


def built_from() -> tuple[str, ...]:
    """What the library was built from, which may not be the current C source; and its vector width."""
    assert _libraries is not None
    return _libraries.free.built_from().decode(), str(_libraries.free.lanes())


def call(name: str, tokens: int, *arguments: object) -> Any:
    assert _libraries is not None
    function = getattr(_libraries.free if tokens >= TOKENS_FREE else _libraries.held, name)
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
