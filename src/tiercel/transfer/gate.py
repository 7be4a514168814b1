"""The layer gate: a layer is read as soon as its own bytes are there, and never before.

copying   ──layer 0──┬──layer 1──┬──layer 2──┬── …
                open(0)     open(1)     open(2)
reading         wait(0) ─ compute 0 ─ wait(1) ─ compute 1 ─ …
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from tiercel.errors import TransferError


class LayerGate:
    """One load's layers. Any number of threads may wait; a layer that is open stays open."""

    def __init__(self, layers: Iterable[int]) -> None:
        self._shut = set(layers)
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def open(self, layer: int) -> None:
        """The bytes of this layer are there (I2)."""
        with self._changed:
            assert layer in self._shut, f"layer {layer} is unknown here or open already"
            self._shut.remove(layer)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The layers that are shut now never open. Those that are open stay readable."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Returns when this layer may be read; raises TransferError when it never will."""
        if layer not in self._shut:  # the common case, without the lock: a layer never shuts again
            return
        with self._changed:
            self._changed.wait_for(lambda: layer not in self._shut or self._error is not None)
            if layer in self._shut:
                raise TransferError(f"layer {layer} did not arrive") from self._error
