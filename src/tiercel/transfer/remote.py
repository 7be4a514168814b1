"""Plans that other processes carry out: decided here, done where the memory is.

    this process                                  each rank (a process with its own device memory)
    ────────────                                  ────────────────────────────────────────────────
    submit(plan) ─► Ticket                        rank = RankWorker(number, controller)
    take() ─► [Ticket(7, plan)] ── pickled ─────► rank.start(ticket)
    acknowledge(ack) ◄──────────── pickled ────── rank.acks() ─► [Ack(7, rank 0)]
    all ranks said so ─► poll() ─► [Done]

The caller carries tickets and acks: an engine has its own way to its workers. A plan has failed when one rank
says so, and has ended when all ranks have sent an ack: until then some rank may still be writing. A rank
copies with a controller of its own: in threads, or queued on its device, where a step may wait for a load
layer by layer (`RankWorker.ready`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic

from tiercel.errors import TransferError
from tiercel.transfer.controller import Controller, Done, Ready, Seconds, Ticket, Tickets
from tiercel.transfer.plan import Plan
from tiercel.types import Kind

DEVICE_S = 0.001
"""A device does not notify when a copy has ended: it is asked this often."""


@dataclass(frozen=True)
class Ack:
    """One rank is done with a plan. With an error, its part of the targets holds undefined bytes."""

    number: int
    rank: int
    error: str = ""
    seconds: Seconds = field(default_factory=dict)


class RankWorker:
    """One process that has the memory. An error of a copy is in its ack (I13)."""

    def __init__(self, number: int, controller: Controller) -> None:
        self.number = number
        self._controller = controller
        self._theirs: dict[int, int] = {}
        """For the number of each of our own tickets: the number of the ticket that was handed over."""
        self._refused: list[Ack] = []

    def start(self, ticket: Ticket) -> None:
        """Begin the plan of a ticket. Never blocks."""
        try:
            own = self._controller.submit(ticket.plan, layered=ticket.layered)
        except Exception as error:  # noqa: BLE001 - the ack tells it to the process that decides
            self._refused.append(Ack(ticket.number, self.number, repr(error)))
        else:
            self._theirs[own.number] = ticket.number

    def acks(self) -> list[Ack]:
        """What ended since the last call, for the process that decides."""
        refused, self._refused = self._refused, []
        return refused + [self._ack(done) for done in self._controller.poll()]

    def _ack(self, done: Done) -> Ack:
        error = "" if done.error is None else repr(done.error.__cause__)
        return Ack(self._theirs.pop(done.ticket.number), self.number, error, done.seconds)

    def wait(self, timeout_s: float, unless: Callable[[], bool] | None = None) -> None:
        """Block until something has ended, if anything is under way. With `unless`: until that is true, also
        while nothing is under way. `wake` has it looked at."""
        until_s, landed = monotonic() + timeout_s, self._controller.tickets.landed
        with landed:
            while (
                not (self._controller.has_landed or self._refused)
                and (self._theirs if unless is None else not unless())
                and (left_s := until_s - monotonic()) > 0
            ):
                landed.wait(min(left_s, DEVICE_S) if self._theirs and self._controller.in_order else left_s)

    def wake(self) -> None:
        """Have `wait` look again. May be called by any thread."""
        with self._controller.tickets.landed:
            self._controller.tickets.landed.notify_all()

    def ready(self, number: int) -> Ready:
        """When the layers of the load with this ticket's number may be read. A load that has ended, in
        whatever way, need not be waited for."""
        own = next((own for own, theirs in list(self._theirs.items()) if theirs == number), -1)
        return self._controller.ready(own)


class RemoteController:
    """Tickets out, acks in. `acknowledge` may be called by any thread, all else belongs to one. `in_order`:
    whether it holds for all ranks."""

    def __init__(self, ranks: int, *, in_order: bool = False) -> None:
        self.tickets = Tickets()
        self.poll = self.tickets.take
        self.how = f"{ranks} ranks"
        self.in_order = in_order
        self._ranks = frozenset(range(ranks))
        self._untaken: list[Ticket] = []
        self._waiting: dict[int, tuple[Ticket, dict[int, Ack]]] = {}

    def submit(self, plan: Plan, *, layered: bool = False) -> Ticket:
        ticket = self.tickets.give(plan, layered=layered)
        self._untaken.append(ticket)
        self._waiting[ticket.number] = ticket, {}
        return ticket

    @property
    def has_landed(self) -> bool:
        return self.tickets.has_landed

    def ready(self, number: int) -> Ready:
        raise NotImplementedError(f"load {number}: each rank has its own answer (`RankWorker.ready`)")

    def take(self) -> list[Ticket]:
        """The tickets that every rank is to carry out now, in this order."""
        tickets, self._untaken = self._untaken, []
        return tickets

    def acknowledge(self, ack: Ack) -> None:
        """A rank says that it is done. Each says so once."""
        with self.tickets.landed:
            ticket, acks = self._waiting[ack.number]
            assert ack.rank in self._ranks and ack.rank not in acks, f"I12: {ack} comes from nobody, or twice"
            acks[ack.rank] = ack
            if acks.keys() != self._ranks:
                return
            del self._waiting[ack.number]
        failed = [f"rank {each.rank}: {each.error}" for each in acks.values() if each.error]
        if failed:
            self.tickets.end(ticket, TransferError("; ".join(failed)))
        else:
            self.tickets.end(ticket, None, _slowest([each.seconds for each in acks.values()]))

    def fail(self, why: str) -> None:
        """The ranks are gone: every plan that they have not ended has failed."""
        with self.tickets.landed:
            for ticket, _ in self._waiting.values():
                self.tickets.end(ticket, TransferError(why))
            self._waiting.clear()

    def close(self) -> None:
        """Does not wait for the ranks: plans that none of them took are not done, the others end there."""
        self._untaken = []


def _slowest(of_ranks: list[Seconds]) -> Mapping[str, float]:
    """The time of the slowest rank: they copy at the same time."""
    return {kind.plural: max(each.get(kind.plural, 0.0) for each in of_ranks) for kind in Kind}
