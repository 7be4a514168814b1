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

from tiercel.cache.core import Core, Order
from tiercel.cache.flights import Flight
from tiercel.cache.memories import Memories
from tiercel.cache.request import Ended, Found, Transfer, Wait, WaitFor
from tiercel.cache.store_tier import StoreTier
from tiercel.config import CacheConfig
from tiercel.errors import TransferError
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.identity import Identity
from tiercel.transfer.plan import Direction
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Item, Move

Place = int | tuple[int, ...]
"""Where the engine keeps a page or tail: one place, or several if its rows are in several pieces."""


class HostCache:
    """Pages and tails on the host. It does not know which of them are on the device as well. Without an
    `identity` the model's name identifies the cached numbers."""

    def __init__(
        self,
        spec: CacheSpec,
        config: CacheConfig,
        memories: Memories,
        *,
        identity: Identity | None = None,
        pool_order: Order | None = None,
    ) -> None:
        self.core = core = Core(spec, config, memories, identity=identity, pool_order=pool_order)
        self.spec, self.config, self.identity, self.host = spec, config, core.identity, core.host
        self.tree, self.places, self.flights = core.tree, core.places, core.flights
        self.host_pages, self.counters = core.places.host, core.counters
        self.compute, self.leases, self.stores = core.compute, core.leases, core.stores
        self._held: dict[KeyChain, list[Item]] = {}
        """What `find` holds, by text."""
        self._ended: list[Ended] = []
        # What the core and its parts do by themselves has the same name here.
        self.chain, self.prefetch, self.land = core.chain, core.prefetch, core.landings.land
        self.attach, self.detach = core.stores.attach, core.stores.detach
        self.wait, self.flush, self.limit = core.wait, core.flush, core.limit
        self.watch, self.stats, self.show, self.check = core.watch, core.stats, core.show, core.check

    def find(
        self,
        chain: KeyChain,
        *,
        replay: bool = False,
        reuse_most: int | None = None,
        hold: bool = False,
    ) -> Found | Wait:
        """What the host holds of a text, all of it readable now; `replay` and `reuse_most` are those of
        `Core.find`.

        `hold`: what was found stays on the host until `load`, until the next `find` or `withdraw` of the same
        text, or until `release`. Otherwise use the result before the next call of the cache.
        """
        self._unhold(chain)
        found = self.core.find(chain, replay=replay, reuse_most=reuse_most)
        if hold and isinstance(found, Found):
            self._held[chain] = [found.page, *found.tails]
            self.core.lock(self._held[chain])
        return found

    def withdraw(self, chain: KeyChain) -> None:
        self._unhold(chain)
        self.core.withdraw(chain)

    def load(
        self,
        found: Found,
        places: Sequence[Place],
        *,
        first: int = 0,
        tails: Sequence[Place] = (),
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
        self.core.count(found.chain, self.core.use(found, priority))
        pairs = zip(items, (*places, *tails), strict=True)
        moves = [Move(item, place, item.host or ()) for item, place in pairs]
        transfer = Transfer(moves, [found.page, *found.tails], hold)
        self.core.lock(transfer.held)
        self._unhold(found.chain)
        self._queue(Direction.LOAD, transfer)
        return transfer

    def release(self, what: Found | Transfer) -> None:
        """The caller no longer needs what `find` holds, or what a load that has ended holds."""
        if isinstance(what, Found):
            self._unhold(what.chain)
        else:
            assert what.hold and not what.writers, "I3: held by a load that has not ended, or by none"
            what.hold = False
            self._let_go(what)

    def save(
        self,
        chain: KeyChain,
        first: int,
        places: Sequence[Place],
        *,
        tails: Mapping[int, Place] | None = None,
    ) -> Transfer:
        """Copy pages of a text, from number `first` on, and tails by their boundary in pages, out of the
        caller's places. Host pages are reserved as by `land`; the transfer says what moves.

        The caller writes streams that the device does not hold to the host places of the transfer, and calls
        `landed`; before that nothing of the transfer is readable.
        """
        transfer = self.core.landings.arrive(chain, first, places, tails or {})
        if self.core.device_spec.streams != self.spec.streams and transfer.moves:
            transfer.writers = 2
        self._queue(Direction.SAVE, transfer)
        return transfer

    def landed(self, transfer: Transfer, error: TransferError | None = None) -> None:
        self.core.landings.landed(transfer, error)
        if not transfer.writers:
            self._ended.append(Ended(transfer, transfer.error))

    def step(self) -> list[Ended]:
        """Publish what ended; send what was queued since the last step, merged into one load and one save.
        Returns each transfer that ended, once."""
        for flight in self.flights.landed():
            self._publish(flight)
        self.core.step()
        ended, self._ended = self._ended, []
        return ended

    def close(self, store_wait_s: float = 10.0) -> None:
        """Wait for the transfers, and up to `store_wait_s` for writes to the store; release everything."""
        self.core.close(self.step, store_wait_s)

    @property
    def busy(self) -> bool:
        return self.core.busy

    @property
    def store(self) -> StoreTier | None:
        """The store that is attached."""
        return self.stores.attached

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
        self.core.unlock(held)

    def _unhold(self, chain: KeyChain) -> None:
        self.core.unlock(self._held.pop(chain, ()))
