"""Plans that other processes carry out: decided here, done where the memory is.

    this process                                 each rank (a process with its own device memory)
    ────────────                                 ────────────────────────────────────────────────
    submit(plan) ─► orders                       rank = Rank(number, copier)
    take() ─► [Order(7, plan)] ── pickled ─────► rank.carry(order) ─► Ack(7, rank 0)
    acknowledge(ack) ◄─────────── pickled ─────┘
    all ranks said so ─► poll() ─► [Done]

How orders and acks travel is the caller's: an engine has its own way to its workers. A plan has failed when
one rank says so, and ended when all have spoken: until then some rank may still be writing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiercel.errors import TransferError
from tiercel.transfer.controller import Carried, Controller, carry
from tiercel.transfer.copier import Copier
from tiercel.transfer.plan import Plan


@dataclass(frozen=True)
class Order:
    """A plan under a number."""

    number: int
    plan: Plan


@dataclass(frozen=True)
class Ack:
    """One rank has done with an order. With an error, its part of the targets holds anything."""

    number: int
    rank: int
    error: str = ""
    seconds: tuple[tuple[str, float], ...] = ()
    """Time spent copying pages and tails."""


class Rank:
    """One process that has the memory. It survives whatever a copy raises (I13)."""

    def __init__(self, number: int, copier: Copier) -> None:
        self.number = number
        self._copier = copier

    def carry(self, order: Order) -> Ack:
        seconds: dict[str, float] = {}
        try:
            carry(self._copier, self._copier.layers, order.plan, lambda _: None, seconds)
        except BaseException as error:  # noqa: BLE001 - it is told to whoever decides
            return Ack(order.number, self.number, repr(error))
        return Ack(order.number, self.number, seconds=tuple(seconds.items()))


class RemoteController(Controller):
    """Orders out, acks in. `take` and `acknowledge` belong to the thread of `submit` and `poll`."""

    def __init__(self, layers: tuple[int, ...], ranks: int) -> None:
        super().__init__(layers)
        self._ranks = frozenset(range(ranks))
        self._orders: list[Order] = []
        self._waiting: dict[int, tuple[Carried, dict[int, Ack]]] = {}

    def _start(self, flight: Carried) -> None:
        ticket = flight.ticket
        self._orders.append(Order(ticket.number, ticket.plan))
        self._waiting[ticket.number] = flight, {}

    def take(self) -> list[Order]:
        """What every rank is to do now, in this order."""
        orders, self._orders = self._orders, []
        return orders

    def acknowledge(self, ack: Ack) -> None:
        """A rank says that it is done. Each says so once."""
        flight, acks = self._waiting[ack.number]
        assert ack.rank in self._ranks and ack.rank not in acks, f"I12: {ack} comes from nobody, or twice"
        acks[ack.rank] = ack
        if acks.keys() != self._ranks:
            return
        del self._waiting[ack.number]
        failed = [f"rank {each.rank}: {each.error}" for each in acks.values() if each.error]
        if not failed:
            self._count(flight, acks)
            for layer in self.layers:
                flight.ticket.gate.open(layer)
        self._end(flight, TransferError("; ".join(failed)) if failed else None)

    def _count(self, flight: Carried, acks: dict[int, Ack]) -> None:
        """The slowest rank counts: they copy at the same time."""
        spent = self.seconds[flight.ticket.direction]
        for what in ("pages", "tails"):
            slowest = max(dict[str, Any](ack.seconds).get(what, 0.0) for ack in acks.values())
            spent[what] = spent.get(what, 0.0) + slowest

    def close(self) -> None:
        """The ranks are not ours to wait for: what none of them took is not done, what they do ends there."""
        self._orders = []
