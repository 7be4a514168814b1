"""Copies rows between two memories that the CPU can address: in C, without the GIL; and in a plain twin.

A table of extents says which bytes of every place move (`transfer/extents.py`).
"""

from __future__ import annotations

import ctypes
import importlib.util

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def _load() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("tiercel.kernels._copy")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    library.copy_extents.argtypes = [pointer, whole, pointer, whole, pointer, whole, whole, pointer, whole]
    library.copy_extents.restype = None
    return library


_library = _load()


def copy_extents(extents: Ints, near: Ints, far: Ints, host: int, *, load: bool) -> None:
    """Move the extents of items at places near and far, each [items, parts]. `host` is an address."""
    if _library is None:
        copy_extents_plain(extents, near, far, host, load=load)
        return
    extents, near, far = (np.ascontiguousarray(each, np.int64) for each in (extents, near, far))
    assert extents.shape[1:] == (7,) and near.ndim == far.ndim == 2 and len(near) == len(far)
    places = (number for each in (near, far) for number in (each.ctypes.data, each.shape[1]))
    _library.copy_extents(extents.ctypes.data, len(extents), *places, len(near), host, load)


def copy_extents_plain(extents: Ints, near: Ints, far: Ints, host: int, *, load: bool) -> None:
    for here, there in zip(near.tolist(), far.tolist(), strict=True):
        for start, stride, part, offset, far_stride, far_part, size in extents.tolist():
            sides = start + here[part] * stride, host + offset + there[far_part] * far_stride
            ctypes.memmove(*(sides if load else sides[::-1]), size)
