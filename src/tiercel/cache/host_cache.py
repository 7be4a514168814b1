"""HostCache: the host tier for an engine that owns its device memory, and gives out its places.

    find(chain) ──► Found ── the engine takes places of its own ──► load(found, places) ─┐
                                                                                         ├─► step ─► Ended
    the engine has computed pages, or is about to evict them ──► save(chain, 0, places) ─┘

The engine's memory is borrowed (`memory.buffers.BorrowedMemory`), or in processes that carry out plans
(`transfer.remote`). It may hold fewer streams than the host does: those it reads on the host itself, and
writes there itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiercel.cache.flights import Landed, count
from tiercel.cache.found import Found
from tiercel.cache.host_tier import Executors, HostTier, Order
from tiercel.cache.request import Wait, WaitFor
from tiercel.cache.transfers import Ended, Transfer
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError, TransferError
from tiercel.memory.buffers import Memory
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.identity import Identity
from tiercel.transfer.controller import Controller
from tiercel.transfer.plan import Direction
from tiercel.tree.actions import Move
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Item


class HostCache(HostTier[Ended]):
    """Pages and tails on the host. Which of them are on the device as well is not its business."""

    def __init__(
        self,
        spec: CacheSpec,
        config: CacheConfig,
        device: Memory | Controller,
        *,
        identity: Identity | None = None,
        executors: Executors | None = None,
        pool_order: Order | None = None,
    ) -> None:
        if not config.host_bytes:
            raise ConfigError("host_bytes", 0, "is all the memory that a cache without a device pool has")
        super().__init__(spec, config, device, identity=identity, executors=executors, pool_order=pool_order)
        self._whole = self.device_spec.streams == spec.streams
        self._ended: list[Ended] = []

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
        from, in the order of `found.tails`.

        `hold` keeps everything found on the host until `release`, for streams the caller reads there.
        """
        items: list[Item] = [*found.far[first : first + len(places)], *found.tails[: len(tails)]]
        assert len(items) == len(places) + len(tails), "a place for something that was not found"
        if any(item.gone or not item.on_host for item in found.items):
            return Wait(WaitFor.FOUND_LEFT)
        self._use(found, priority)
        moves = [
            Move(item, place, item.host or ()) for item, place in zip(items, (*places, *tails), strict=True)
        ]
        transfer = Transfer(moves, [found.page, *found.tails], hold)
        for item in transfer.held:
            self.tree.lock(item)
        self._queue(Direction.LOAD, transfer)
        return transfer

    def release(self, transfer: Transfer) -> None:
        """The caller no longer reads on the host what a load holds there. Not before the load has ended."""
        assert transfer.hold and not transfer.writers, "I3: held by a load that has not ended, or by none"
        transfer.hold = False
        self._let_go(transfer)

    def save(
        self, chain: KeyChain, first: int, places: Sequence[int], *, tails: Mapping[int, int] | None = None
    ) -> Transfer:
        """Copy pages of a text, from number `first` on, and tails by their boundary in pages, out of the
        caller's places. Host pages for them are had as for `land`; the transfer says what moves.

        Streams that the device does not hold are written by the caller, to the host places of the transfer;
        nothing of it is readable before he has said so (`landed`).
        """
        transfer = self._arrive(chain, first, places, tails or {}, Transfer(writers=1 if self._whole else 2))
        if not self._whole and not transfer.moves:
            transfer.writers = 1
        self._queue(Direction.SAVE, transfer)
        return transfer

    def landed(self, transfer: Transfer, error: TransferError | None = None) -> None:
        super().landed(transfer, error)
        if not transfer.writers:
            self._ended.append(Ended(transfer, transfer.error))

    def step(self) -> list[Ended]:
        """What ended since the last step: each transfer is told once."""
        super().step()
        ended, self._ended = self._ended, []
        return ended

    # How transfers end

    def _queue(self, direction: Direction, transfer: Transfer) -> None:
        if transfer.moves:
            self.flights.queue(direction, transfer.moves, transfer)
        else:
            self._end(direction, transfer, None)

    def _publish(self, landed: Landed) -> list[Ended]:
        for transfer in landed.flight.waiting:
            assert isinstance(transfer, Transfer)
            self._end(landed.direction, transfer, landed.error)
        count(self.counters, landed)
        return []

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
