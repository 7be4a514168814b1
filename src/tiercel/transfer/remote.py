"""Plans that other processes carry out: decided here, done where the memory is.

    this process                                  each rank (a process with its own device memory)
    ────────────                                  ────────────────────────────────────────────────
    submit(plan) ─► Ticket                        rank = RankWorker(number, copier)
    take() ─► [Ticket(7, plan)] ── pickled ─────► rank.carry(ticket) ─► Ack(7, rank 0)
    acknowledge(ack) ◄──────────── pickled ─────┘
    all ranks said so ─► poll() ─► [Done]

The caller carries tickets and acks: an engine has its own way to its workers. A plan has failed when one rank
says so, and has ended when all ranks have spoken: until then some rank may still be writing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tiercel.errors import TransferError
from tiercel.transfer.controller import Controller, Ticket, carry
from tiercel.transfer.copier import Copier
from tiercel.types import Kind


@dataclass(frozen=True)
class Ack:
    """One rank is done with a plan. With an error, its part of the targets holds anything."""

    number: int
    rank: int
    error: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent copying pages and tails."""


class RankWorker:
    """One process that has the memory. It survives whatever a copy raises (I13)."""

    def __init__(self, number: int, copier: Copier) -> None:
        self.number = number
        self._copier = copier

    def carry(self, ticket: Ticket) -> Ack:
        seconds: dict[str, float] = {}
        try:
            carry(self._copier, ticket.plan, seconds)
        except BaseException as error:  # noqa: BLE001 - the ack tells it to the process that decides
            return Ack(ticket.number, self.number, repr(error))
        return Ack(ticket.number, self.number, seconds=seconds)


class RemoteController(Controller):
    """Tickets out, acks in. `take` and `acknowledge` belong to the thread of `submit` and `poll`."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.how = f"{ranks} ranks"
        self._ranks = frozenset(range(ranks))
        self._untaken: list[Ticket] = []
        self._waiting: dict[int, tuple[Ticket, dict[int, Ack]]] = {}

    def _start(self, ticket: Ticket, *, layered: bool) -> None:  # noqa: ARG002 - a process is told all at once
        self._untaken.append(ticket)
        self._waiting[ticket.number] = ticket, {}

    def take(self) -> list[Ticket]:
        """What every rank is to do now, in this order."""
        tickets, self._untaken = self._untaken, []
        return tickets

    def acknowledge(self, ack: Ack) -> None:
        """A rank says that it is done. Each says so once."""
        ticket, acks = self._waiting[ack.number]
        assert ack.rank in self._ranks and ack.rank not in acks, f"I12: {ack} comes from nobody, or twice"
        acks[ack.rank] = ack
        if acks.keys() != self._ranks:
            return
        del self._waiting[ack.number]
        failed = [f"rank {each.rank}: {each.error}" for each in acks.values() if each.error]
        if not failed:
            spent = self.seconds[ticket.plan.direction]
            for kind in Kind:  # the slowest rank counts: they copy at the same time
                spent[kind.plural] += max(each.seconds.get(kind.plural, 0.0) for each in acks.values())
        self._end(ticket, TransferError("; ".join(failed)) if failed else None)

    def close(self) -> None:
        """The ranks are not ours to wait for: what none of them took is not done, what they do ends there."""
        self._untaken = []
