"""HostCache: the host tier for an engine that owns its device memory and its device places.

    find(chain) ──► Found ── the engine takes places of its own ──► load(found, places) ─┐
                                                                                         ├─► step ─► Ended
    the engine has computed pages, or is about to evict them ──► save(chain, 0, places) ─┘

The engine's memory is borrowed (`memory.buffers.BorrowedMemory`), or in processes that carry out plans
(`transfer.remote`). It may hold fewer streams than the host does: the engine reads and writes the other
streams on the host itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiercel.cache.flights import Flight
from tiercel.cache.host_tier import HostTier
from tiercel.cache.request import Ended, Found, Transfer, Wait, WaitFor
from tiercel.errors import TransferError
from tiercel.transfer.plan import Direction
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Item, Move


class HostCache(HostTier[Ended]):
    """Pages and tails on the host. It does not know which of them are on the device as well."""

    def load(
        self,
        found: Found,
        places: Sequence[int],
        *,
        first: int = 0,
        tails: Sequence[int] = (),
        hold: bool = False,
        priority: int = 0,
    ) -> Transfer | Wait:
        """Copy what was found into the caller's places: pages from number `first` on, and the tails to resume
        from, in the order of `found.tails`. `hold` keeps everything found on the host until `release`, for
        streams that the caller reads there."""
        items: list[Item] = [*found.far[first : first + len(places)], *found.tails[: len(tails)]]
        assert len(items) == len(places) + len(tails), "a place for something that was not found"
        if any(item.gone or not item.on_host for item in found.items):
            return Wait(WaitFor.FOUND_LEFT)
        self._count(found.chain, self._use(found, priority))
        pairs = zip(items, (*places, *tails), strict=True)
        moves = [Move(item, place, item.host or ()) for item, place in pairs]
        transfer = Transfer(moves, [found.page, *found.tails], hold)
        for item in transfer.held:
            self.tree.lock(item)
        self._queue(Direction.LOAD, transfer)
        return transfer

    def release(self, transfer: Transfer) -> None:
        """The caller no longer reads what a load holds on the host. Only after the load has ended."""
        assert transfer.hold and not transfer.writers, "I3: held by a load that has not ended, or by none"
        transfer.hold = False
        self._let_go(transfer)

    def save(
        self, chain: KeyChain, first: int, places: Sequence[int], *, tails: Mapping[int, int] | None = None
    ) -> Transfer:
        """Copy pages of a text, from number `first` on, and tails by their boundary in pages, out of the
        caller's places. Host pages are reserved as by `land`; the transfer says what moves.

        The caller writes streams that the device does not hold to the host places of the transfer, and calls
        `landed`; before that nothing of the transfer is readable.
        """
        transfer = self._arrive(chain, first, places, tails or {})
        if self.device_spec.streams != self.spec.streams and transfer.moves:
            transfer.writers = 2
        self._queue(Direction.SAVE, transfer)
        return transfer

    def landed(self, transfer: Transfer, error: TransferError | None = None) -> None:
        super().landed(transfer, error)
        if not transfer.writers:
            self._ended.append(Ended(transfer, transfer.error))

    # How transfers end

    def _queue(self, direction: Direction, transfer: Transfer) -> None:
        if transfer.moves:
            self.flights.queue(direction, transfer.moves, transfer)
        else:
            self._end(direction, transfer, None)

    def _publish(self, landed: Flight) -> None:
        for transfer in landed.waiting:
            assert isinstance(transfer, Transfer)
            self._end(landed.direction, transfer, landed.error)

    def _end(self, direction: Direction, transfer: Transfer, error: TransferError | None) -> None:
        if direction is Direction.SAVE:
            self.landed(transfer, error)
            return
        transfer.writers = 0
        if not transfer.hold:
            self._let_go(transfer)
        self._ended.append(Ended(transfer, error))

    def _let_go(self, transfer: Transfer) -> None:
        held, transfer.held = transfer.held, []
        self._unlock(held)
