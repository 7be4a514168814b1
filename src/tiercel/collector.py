"""Python's garbage collector, and what it need not look at.

A full collection visits every object that the collector tracks, in whatever thread it starts, and all threads
wait for it. A cache of a million pages has millions of objects: that took more than a second. So the tree
hides them. The rest of a server is collected as ever, and no setting of the collector is changed there.

Reference counts free hidden objects, as they free all others. But a circle of hidden objects is never found.
So code that hides an object has to break its circles (`tree.index`).
"""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def _untrack() -> Callable[[Any], None]:
    """A function that hides objects; it may be called twice for an object. Other Pythons hide nothing."""
    if platform.python_implementation() != "CPython":
        return lambda _: None
    untrack = ctypes.pythonapi.PyObject_GC_UnTrack
    untrack.argtypes, untrack.restype = (ctypes.py_object,), None
    return untrack


hide = _untrack()
"""Hides an object: the collector does not visit it any more. (Not for a dict: it is tracked again when
something is put into it.)"""


def hidden_list() -> list[Any]:
    """A list that the collector does not visit, whatever is put into it."""
    made: list[Any] = []
    hide(made)
    return made


@contextmanager
def resting() -> Iterator[None]:
    """The collector does not run meanwhile. For work of a limited length that leaves no circles behind."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
