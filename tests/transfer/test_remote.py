"""Goal: what is decided in one process is done in others, and is done only when all of them say so.

Method: two processes with half of the layers each map the same host memory and carry out pickled plans; every
byte is compared.
"""

from __future__ import annotations

import multiprocessing
import pickle
from multiprocessing.connection import Connection

import pytest
import torch

from tests.memory.specs import V4
from tests.transfer.borrowed import make_borrowed
from tests.transfer.rig import DEVICE_PAGES, DEVICE_TAILS, Rig, device_page, host_page
from tiercel.errors import TransferError
from tiercel.memory.buffers import HostMemory
from tiercel.transfer.controller import Ticket, make_controller
from tiercel.transfer.plan import Direction, Plan
from tiercel.transfer.remote import Ack, RankWorker, RemoteController

LOAD, SAVE = Direction.LOAD, Direction.SAVE
STAGES = (V4.stage(0, 2), V4.stage(2, 5))
LAYOUT = "page_first_direct"


def carry(rank: RankWorker, ticket: Ticket) -> Ack:
    rank.start(ticket)
    rank.wait(60)
    (ack,) = rank.acks()
    return ack


def rank_process(number: int, path: str, size: int, tickets: Connection) -> None:
    """A rank's whole life: tickets in, acks out; at the end what its device memory holds."""
    stage = STAGES[number]
    memory = make_borrowed(stage, DEVICE_PAGES, DEVICE_TAILS, seed=number)
    with HostMemory(V4, LAYOUT, size, path=path) as host:
        rank = RankWorker(number, make_controller("direct", memory, host))
        while (ticket := tickets.recv()) is not None:
            tickets.send(carry(rank, ticket))
    views = {(s.name, layer): memory.view(s.name, layer).numpy() for s in stage.streams for layer in s.layers}
    tickets.send(views)


class Ranks:
    """Two processes, and what must be in their memories."""

    def __init__(self, path: str, size: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.processes, self.pipes = [], []
        for number in range(len(STAGES)):
            here, there = spawn.Pipe()
            process = spawn.Process(target=rank_process, args=(number, path, size, there), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(here)

    def carry_out(self, controller: RemoteController) -> None:
        for ticket in controller.take():
            for pipe in self.pipes:
                pipe.send(ticket)
            assert controller.poll() == [], "nobody has said anything yet"
            for pipe in self.pipes:
                assert pipe.poll(60), "a rank does not answer"
                controller.acknowledge(pipe.recv())

    def end(self) -> list[dict]:
        memories = []
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            assert pipe.poll(60), "a rank does not answer"
            memories.append(pipe.recv())
            process.join(60)
        return memories


def test_plans_are_carried_out_by_processes_that_map_the_same_host_memory() -> None:
    rig = Rig(V4, LAYOUT)
    size = rig.host.flat.numel()
    with HostMemory(V4, LAYOUT, size, shared=True) as host:
        ranks = Ranks(host.path, size)
        controller = RemoteController(ranks=len(STAGES))
        for plan in (rig.save_plan(theirs=True), rig.load_plan(theirs=True)):
            ticket = controller.submit(pickle.loads(pickle.dumps(plan)))
            ranks.carry_out(controller)
            (done,) = controller.poll()
            assert done.ticket is ticket and done.error is None
        memories = ranks.end()
        expected = expected_host(rig, size)
        named = rig.host_bytes_named()
        assert torch.equal(host.flat[named], expected[named]) and not host.flat[~named].any()
    for number, stage in enumerate(STAGES):
        before = make_borrowed(stage, DEVICE_PAGES, DEVICE_TAILS, seed=number)
        for stream in stage.streams:
            pages = stream in stage.page_streams
            there, back = (rig.pages, rig.pages_back) if pages else (rig.their_tails, rig.their_tails_back)
            for layer in stream.layers:
                rows = before.view(stream.name, layer).clone()
                for (source, _), (target, _) in zip(there, back, strict=True):
                    rows[target] = before.view(stream.name, layer)[source]
                assert torch.equal(torch.from_numpy(memories[number][stream.name, layer]), rows)


def expected_host(rig: Rig, size: int) -> torch.Tensor:
    """What one process with both memories would have saved."""
    with HostMemory(V4, LAYOUT, size) as host:
        for number, stage in enumerate(STAGES):
            memory = make_borrowed(stage, DEVICE_PAGES, DEVICE_TAILS, seed=number)
            carry(
                RankWorker(number, make_controller("reference", memory, host)),
                make_ticket(rig.save_plan(theirs=True)),
            )
        return host.flat.clone()


def make_ticket(plan: Plan) -> Ticket:
    controller = RemoteController(ranks=1)
    controller.submit(plan)
    (ticket,) = controller.take()
    return ticket


# Acks


def make_plan(direction: Direction, place: int) -> Plan:
    return Plan.of(direction, [((device_page(place),), (host_page(place),))])


def test_a_plan_ends_when_every_rank_said_so_and_fails_when_one_did() -> None:
    controller = RemoteController(ranks=3)
    first, second = (controller.submit(make_plan(SAVE, place)) for place in (1, 2))
    assert controller.take() == [first, second]
    assert controller.take() == []
    controller.acknowledge(Ack(first.number, 2, error="OSError('bad memory')"))
    controller.acknowledge(Ack(first.number, 0))
    assert not controller.has_landed, "rank 1 may still be writing"
    for rank in range(3):
        controller.acknowledge(Ack(second.number, rank, seconds={"pages": 0.25 * rank}))
    assert controller.poll() == [], "in the order of submission"
    controller.acknowledge(Ack(first.number, 1))
    failed, done = controller.poll()
    assert (failed.ticket, done.ticket) == (first, second) and done.error is None
    assert isinstance(failed.error, TransferError) and "rank 2: OSError('bad memory')" in str(failed.error)
    assert controller.tickets.seconds[SAVE]["pages"] == 0.5, "the slowest of them"


def test_an_ack_that_comes_twice_or_from_nobody_is_a_bug() -> None:
    controller = RemoteController(ranks=2)
    number = controller.submit(make_plan(LOAD, 1)).number
    controller.acknowledge(Ack(number, 0))
    for rank in (0, 2):
        with pytest.raises(AssertionError, match="I12"):
            controller.acknowledge(Ack(number, rank))


def test_a_rank_survives_a_controller_that_takes_no_plan_and_tells_it(monkeypatch) -> None:
    rig = Rig(V4, LAYOUT)
    controller = make_controller("direct", rig.device, rig.host)
    rank, taking = RankWorker(1, controller), controller.submit

    def refuse(plan, *, layered=False):
        raise AssertionError("I7: no place of ours")

    monkeypatch.setattr(controller, "submit", refuse)
    ack = carry(rank, make_ticket(rig.save_plan(theirs=True)))
    assert (ack.number, ack.rank) == (0, 1) and "I7" in ack.error
    monkeypatch.setattr(controller, "submit", taking)
    assert carry(rank, make_ticket(rig.save_plan(theirs=True))).error == ""


def test_a_rank_survives_a_copy_that_fails_and_tells_it() -> None:
    rig = Rig(V4, LAYOUT)
    rank = RankWorker(1, make_controller("direct", rig.device, rig.host))
    wrong = make_plan(SAVE, 10_000)
    ack = carry(rank, make_ticket(wrong))
    assert (ack.number, ack.rank) == (0, 1) and "AssertionError" in ack.error
    assert carry(rank, make_ticket(rig.save_plan(theirs=True))).error == ""
