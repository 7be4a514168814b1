"""Goal: a load for a step is queued group by group, in order, and an error in the middle is not lost. Pages
of real models are left to the copy engines. Method: groups that tell when they are queued, and events that
tell when they are waited for; memories without bytes. No GPU is needed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tiercel.errors import TransferError
from tiercel.memory.buffers import BorrowedMemory, DeviceMemory, HostMemory, Memory
from tiercel.spec import CacheSpec
from tiercel.spec.presets import PRESETS, load
from tiercel.transfer.cuda import Events, are_large
from tiercel.transfer.extents import Extents, extents_of
from tiercel.types import Kind


class Event:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.passed = name, log, False

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")

    def query(self) -> bool:
        return self.passed


def groups_of(log: list[str], broken: int | None = None) -> Any:
    """Layers 0 to 4, 5 to 14, 15 to 42."""
    for i, last in enumerate((4, 14, 42)):
        if i == broken:
            raise TransferError("no")
        log.append(f"queue {last}")
        yield last, Event(str(last), log)


def test_a_group_is_queued_when_it_is_waited_for():
    log: list[str] = []
    events = Events(groups_of(log))
    assert log == ["queue 4"], "the first is queued at once"
    for layer in (0, 4, 5, 20, 3):
        events.wait(layer)
    assert log[1:] == ["wait 4", "wait 4", "queue 14", "wait 14", "queue 42", "wait 42", "wait 4"]


def test_who_asks_whether_it_is_done_queues_the_rest():
    log: list[str] = []
    events = Events(groups_of(log))
    assert not events.done() and log == ["queue 4", "queue 14", "queue 42"]
    events.events[-1][1].passed = True  # type: ignore[attr-defined]
    assert events.done() and events.error is None


@pytest.mark.parametrize("broken", [0, 1])
def test_behind_an_error_nothing_is_queued_and_the_error_is_told(broken):
    log: list[str] = []
    events = Events(groups_of(log, broken))
    events.wait(42)  # its reader goes on, and what it computes is thrown away
    events.queue_all()
    assert isinstance(events.error, TransferError) and len(events.events) == broken
    for _, event in events.events:
        event.passed = True  # type: ignore[attr-defined]
    assert events.done(), "it ends, with its error"


# What is left to the copy engines


def tables(spec: CacheSpec, device: Memory, layout: str = "page_first_direct") -> list[Extents]:
    """The extents of a whole page, and of each group of its layers."""
    with HostMemory(spec, layout, 4 * spec.place_bytes) as host:
        return [extents_of(device, host, Kind.PAGE, each) for each in (None, *spec.layer_groups())]


def borrowed(spec: CacheSpec) -> BorrowedMemory:
    rows = {
        (stream.name, layer): torch.empty(3, spec.row_bytes(stream), dtype=torch.uint8)
        for stream in spec.streams
        for layer in stream.layers
    }
    return BorrowedMemory(spec, rows)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("second", [(), ("c4",)], ids=["one pool", "c4 apart"])
@pytest.mark.parametrize("model", PRESETS)
def test_pages_and_their_groups_of_layers_are_left_to_the_copy_engines(model, second, draft):
    spec = replace(load(model, draft=draft), second=second)
    device = DeviceMemory(spec, 2, 1, "meta")  # as on CUDA
    whole, *groups = tables(spec, device)
    assert len(groups) == 3 and all(map(are_large, (whole, *groups)))
    with HostMemory(spec, "page_first_direct", 4 * spec.place_bytes) as host:
        assert are_large(extents_of(device, host, Kind.TAIL))


@pytest.mark.parametrize("model", PRESETS)
def test_rows_that_lie_alone_are_left_to_the_kernel(model):
    spec = load(model)
    assert not any(map(are_large, tables(spec, borrowed(spec))))
    assert not any(map(are_large, tables(spec, DeviceMemory(spec, 2, 1, "meta"), "layer_first")))


def test_it_is_the_size_around_an_average_byte_that_counts():
    def made(*sizes: int) -> Extents:
        table = np.zeros((len(sizes), 7), np.int64)
        table[:, 6] = sizes
        return table

    assert not are_large(made(37_440)) and not are_large(made(*[37_440] * 21, *[8_448] * 21))
    assert are_large(made(40_960)) and are_large(made(18_624, 74_880)) and are_large(made())


def test_nothing_to_wait_for_is_done():
    events = Events()
    events.wait(7)
    assert events.done() and events.error is None
