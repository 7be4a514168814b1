"""Host pages that another engine or a peer fills."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercel.cache.places import Places
from tiercel.cache.request import Transfer
from tiercel.cache.stores import Stores
from tiercel.errors import TransferError
from tiercel.tree.keys import KeyChain
from tiercel.tree.node import Move


@dataclass(eq=False)
class Landings:
    """Transfers whose host pages are not readable yet."""

    places: Places
    stores: Stores
    transfers: set[Transfer] = field(default_factory=set)

    def land(self, chain: KeyChain, first: int, pages: int, *, tails: Iterable[int] = ()) -> Transfer:
        """Reserve host pages that the caller writes: `pages` pages of a text from number `first` on, and the
        tails at these boundaries (in pages). The transfer names the places. Left out are pages that the host
        has already or has no room for, and all of them if the text's pages before `first` are not cached.

        They become readable when the writer calls `landed`; until then nobody else touches them.
        """
        return self.arrive(chain, first, [0] * pages, dict.fromkeys(tails, (0,)))

    def landed(self, transfer: Transfer, error: TransferError | None = None) -> None:
        """A writer has finished. With an error nothing of the transfer becomes readable."""
        transfer.writers -= 1
        assert transfer.writers >= 0 and transfer in self.transfers, "I3: a transfer ends once"
        transfer.error = transfer.error or error
        if transfer.writers:
            return
        self.transfers.discard(transfer)
        for item, _, host in transfer.moves:
            self.stores.tree.arrive_done(item, host, transfer.error is None)
        if transfer.error is None:
            self.stores.offer(move.item for move in transfer.moves)
        self.places.settle()

    def arrive(
        self, chain: KeyChain, first: int, places: Sequence[Any], tails: Mapping[int, Any]
    ) -> Transfer:
        """Reserve host pages for what comes from these device places, as far as there is room."""
        tree, keys, transfer = self.stores.tree, chain.keys[: first + len(places)], Transfer()
        self.transfers.add(transfer)
        depth = tree.match(keys, len(keys)).found
        if self.stores.config.force_miss or depth < first:
            return transfer
        anchor = tree.index[keys[depth - 1]] if depth else tree.root
        tree.lock(anchor)  # its places must not be taken for its own children
        texts = chain.texts or [b""] * len(keys)
        brought = []
        for n in range(first, len(keys)):
            if n >= depth or tree.index[keys[n]].host is None:
                host = self.places.take_host_by_force(1)
                if host is None:
                    break
                brought.append((keys[n], host, texts[n]))
        pages = tree.insert_arriving(anchor, brought, owner=chain.owner)
        transfer.moves += [
            Move(page, places[page.depth - 1 - first], host)
            for page, (_, host, _) in zip(pages, brought, strict=True)
        ]
        for boundary, place in sorted(tails.items()):
            self._arrive_tail(chain, boundary, place, transfer)
        tree.unlock(anchor)
        self.places.settle()
        return transfer

    def _arrive_tail(self, chain: KeyChain, boundary: int, place: Any, transfer: Transfer) -> None:
        tree = self.stores.tree
        page = tree.index.get(chain.keys[boundary - 1])
        if page is None or (page.tail is not None and page.tail.host is not None):
            return
        tree.lock(page)
        host = self.places.take_host_by_force(self.stores.spec.places_per_tail)
        if host is not None:
            transfer.moves.append(Move(tree.insert_arriving_tail(page, host), place, host))
            tree.cap_tails(page)
        tree.unlock(page)
