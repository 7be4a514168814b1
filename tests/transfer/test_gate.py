from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.memory.specs import V4
from tests.transfer.rig import Rig
from tiercel.errors import TransferError
from tiercel.transfer.controller import LocalController
from tiercel.transfer.copier import DirectCopier
from tiercel.transfer.gate import LayerGate
from tiercel.transfer.plan import Direction, Leg

TIMEOUT_S = 30


def test_an_open_layer_does_not_wait() -> None:
    gate = LayerGate([0, 1, 2])
    gate.open(1)
    gate.wait(1)


def test_a_layer_without_bytes_does_not_wait() -> None:
    LayerGate([0, 2]).wait(1)


def test_a_reader_waits_for_its_own_layer_only() -> None:
    gate = LayerGate([0, 1, 2])
    with ThreadPoolExecutor(3) as readers:
        waits = [readers.submit(gate.wait, layer) for layer in range(3)]
        for layer in (2, 0, 1):
            gate.open(layer)
            waits[layer].result(TIMEOUT_S)


def test_a_failure_is_for_the_layers_that_had_not_arrived() -> None:
    gate, cause = LayerGate([0, 1]), OSError("the disk is gone")
    with ThreadPoolExecutor(1) as readers:
        waiting = readers.submit(gate.wait, 1)
        gate.open(0)
        gate.fail(cause)
        with pytest.raises(TransferError, match="layer 1") as error:
            waiting.result(TIMEOUT_S)
        assert error.value.__cause__ is cause
    gate.wait(0)
    with pytest.raises(TransferError):
        gate.wait(1)


def test_a_layer_opens_once() -> None:
    gate = LayerGate([0])
    gate.open(0)
    with pytest.raises(AssertionError):
        gate.open(0)


class HaltedCopier(DirectCopier):
    """Copies a layer when it is allowed to, and not before."""

    def allow_by_hand(self) -> None:
        self.allowed = {layer: threading.Event() for layer in self.layers}

    def copy(self, direction: Direction, leg: Leg, layer: int) -> None:
        if direction is Direction.LOAD:
            assert self.allowed[layer].wait(TIMEOUT_S)
        super().copy(direction, leg, layer)


def test_layer_i_is_readable_before_layer_i_plus_1_arrives_and_never_before_its_bytes() -> None:
    rig = Rig(V4, "page_first_direct")
    copier = HaltedCopier(rig.device, rig.host)
    copier.allow_by_hand()
    controller = LocalController(copier)
    controller.submit(rig.save_plan()).gate.wait(V4.layers[-1])
    poison, arrived = rig.device_bytes(), rig.device_after_round_trip()
    gate = controller.submit(rig.load_plan()).gate

    def read(layer: int) -> list[bool]:
        """Whether each layer holds what was loaded, seen by a reader the moment its own layer opens."""
        gate.wait(layer)
        return [rig.holds(arrived, each) and not rig.holds(poison, each) for each in V4.layers]

    with ThreadPoolExecutor(len(V4.layers)) as readers:
        reads = [readers.submit(read, layer) for layer in V4.layers]
        for i, layer in enumerate(V4.layers):
            copier.allowed[layer].set()
            assert reads[i].result(TIMEOUT_S) == [True] * (i + 1) + [False] * (len(V4.layers) - i - 1)
    controller.close()
    assert rig.holds(arrived)
