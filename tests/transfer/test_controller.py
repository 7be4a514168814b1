from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from tests.memory.specs import V4
from tests.simulation.copies import HeldCopies
from tests.transfer.rig import Rig, host_page
from tiercel.errors import TransferError
from tiercel.transfer.controller import Controller, Done, LocalController, Ticket
from tiercel.transfer.copier import DirectCopier, make_copier
from tiercel.transfer.plan import Direction, Leg, Plan

LOAD, SAVE = Direction.LOAD, Direction.SAVE
TIMEOUT_S = 30


class BrokenPageCopier(DirectCopier):
    """One host page can not be read or written."""

    broken_page = host_page(0)

    def copy(self, direction: Direction, leg: Leg) -> None:
        if (self.broken_page,) in leg.host:
            raise OSError("bad memory")
        super().copy(direction, leg)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(V4, "page_first_direct")
    yield rig
    rig.host.close()


@pytest.fixture
def by_hand() -> dict[Direction, HeldCopies]:
    return {direction: HeldCopies() for direction in Direction}


def make_controller(rig: Rig, executors: dict[Direction, HeldCopies] | None = None) -> Controller:
    return LocalController(make_copier("direct", rig.device, rig.host), executors)


def page_plan(rig: Rig, direction: Direction, device: int, host: int) -> Plan:
    return rig.plan(direction, [(device, host)], [])


def tickets(done: list[Done]) -> list[Ticket]:
    return [each.ticket for each in done]


def wait_for_all(controller: Controller) -> list[Done]:
    controller.close()
    return controller.poll()


def test_a_plan_goes_out_and_comes_back_on_the_default_workers(rig: Rig) -> None:
    expected = rig.device_after_round_trip()
    controller = make_controller(rig)
    save = controller.submit(rig.save_plan())
    with controller.tickets.landed:
        assert controller.tickets.landed.wait_for(lambda: controller.has_landed, TIMEOUT_S)
    load = controller.submit(rig.load_plan())
    done = wait_for_all(controller)
    assert {each.ticket: each.error for each in done} == {save: None, load: None}
    assert rig.holds(expected)
    assert (save.number, load.number) == (0, 1)


def test_nothing_in_flight_is_nothing_done(rig: Rig) -> None:
    controller = make_controller(rig)
    assert controller.poll() == []
    controller.close()
    assert controller.poll() == []


def test_an_empty_plan_is_done(rig: Rig) -> None:
    controller = make_controller(rig)
    ticket = controller.submit(Plan.of(LOAD))
    assert tickets(wait_for_all(controller)) == [ticket]


def test_eight_loads_are_in_flight_at_once(rig: Rig, by_hand: dict[Direction, HeldCopies]) -> None:
    controller = make_controller(rig, by_hand)
    sent = [controller.submit(page_plan(rig, LOAD, device, device % 3)) for device in range(8)]
    assert len(by_hand[LOAD].held) == 8
    assert controller.poll() == []
    for _ in range(8):
        by_hand[LOAD].run(0)
    assert tickets(controller.poll()) == sent


def test_out_of_order_completion_is_published_in_order(
    rig: Rig, by_hand: dict[Direction, HeldCopies]
) -> None:
    controller = make_controller(rig, by_hand)
    sent = [controller.submit(page_plan(rig, LOAD, device, 0)) for device in range(4)]
    by_hand[LOAD].run(2)
    assert controller.poll() == []
    by_hand[LOAD].run(0)
    assert tickets(controller.poll()) == [sent[0]]
    by_hand[LOAD].run(0)
    assert tickets(controller.poll()) == sent[1:3]
    by_hand[LOAD].run(0)
    assert tickets(controller.poll()) == [sent[3]]
    assert controller.poll() == []


def test_loads_do_not_wait_for_saves(rig: Rig, by_hand: dict[Direction, HeldCopies]) -> None:
    controller = make_controller(rig, by_hand)
    save = controller.submit(page_plan(rig, SAVE, 0, 0))
    load = controller.submit(page_plan(rig, LOAD, 1, 1))
    by_hand[LOAD].run(0)
    assert tickets(controller.poll()) == [load]
    by_hand[SAVE].run(0)
    assert tickets(controller.poll()) == [save]


def test_a_failing_copy_fails_its_ticket_only_and_the_worker_goes_on(rig: Rig) -> None:
    controller = LocalController(BrokenPageCopier(rig.device, rig.host))
    plans = [page_plan(rig, SAVE, device, host) for device, host in ((0, 1), (1, 0), (2, 2))]
    sent = [controller.submit(plan) for plan in plans]
    done = wait_for_all(controller)
    assert tickets(done) == sent
    assert [each.error is None for each in done] == [True, False, True]
    assert isinstance(done[1].error, TransferError)
    assert isinstance(done[1].error.__cause__, OSError)
    stored = rig.host.flat[2 * V4.page_bytes :]
    c4 = V4.stream("c4")
    _, offset, _, size = rig.host.column(c4, 3)
    assert stored[offset : offset + size].equal(rig.device.view("c4", 3)[2])


def test_a_transfer_its_executor_cancels_fails_and_nobody_waits_for_ever(
    rig: Rig, by_hand: dict[Direction, HeldCopies]
) -> None:
    controller = make_controller(rig, by_hand)
    ticket = controller.submit(page_plan(rig, LOAD, 4, 0))
    by_hand[LOAD].held.pop()[0].cancel()
    (done,) = controller.poll()
    assert (
        done.ticket is ticket and done.error is not None and isinstance(done.error.__cause__, CancelledError)
    )


def test_closing_waits_for_what_is_in_flight_and_may_be_done_twice(
    rig: Rig, by_hand: dict[Direction, HeldCopies]
) -> None:
    controller = make_controller(rig, by_hand)
    sent = [controller.submit(page_plan(rig, SAVE, device, device)) for device in range(3)]
    controller.close()
    controller.close()
    assert tickets(controller.poll()) == sent
