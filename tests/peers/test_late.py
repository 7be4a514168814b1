"""Goal: memory that was given up is never written again. Method: transfers that fail while some of their
bytes are still on the way, and a transport whose bytes come long after everybody stopped waiting."""

import mmap
import threading
from contextlib import closing

import pytest

from tests.peers.offering import TEXT, Offered
from tests.peers.readers import pages, read
from tests.peers.test_pull import EIGHT, PAGE, Puller
from tests.wait import until
from tiercel.cache import Wait
from tiercel.errors import StoreError
from tiercel.peers.offering import where
from tiercel.storage.peer import PeerStore
from tiercel.storage.peer.mooncake import MooncakeEngine, MooncakeTransport
from tiercel.storage.peer.transport import TcpTransport, Wanted
from tiercel.storage.peer.wire import Entry, Readiness
from tiercel.threads import start

LARGE = 32 << 20
SMALL = 4096
NOWHERE = 1 << 40


def test_a_read_of_mooncake_that_failed_has_ended_with_all_its_pieces():
    """One of its pieces fails at once, since its peer lied about where that lies; the other takes long. The
    last bytes of the long one come last: they get a new owner as soon as the read has failed."""
    theirs, ours = (memoryview(mmap.mmap(-1, LARGE + SMALL)) for _ in range(2))
    theirs[:] = b"\1" * len(theirs)
    peer = MooncakeEngine("127.0.0.1", "tcp", "", 1.0)
    base = peer.register(theirs).start
    offer = {"session": f"127.0.0.1:{peer.port}", "base": base}
    long = Entry(0, Readiness.HERE, LARGE, b"", [(0, LARGE)])
    lie = Entry(1, Readiness.HERE, SMALL, b"", [(NOWHERE, SMALL)])
    last = ours[LARGE - SMALL : LARGE]
    with closing(MooncakeTransport("127.0.0.1", "tcp", "", 1.0)) as transport:
        transport.register(ours)
        for parts in ((ours[:LARGE], ours[LARGE:]), (memoryview(bytearray(LARGE)), ours[LARGE:])):
            for _ in range(2):
                with pytest.raises(StoreError):
                    transport.read(None, offer, 1, [Wanted(long, [parts[0]]), Wanted(lie, [parts[1]])])
                last[:] = b"\7" * SMALL
                transport._engine.pull(offer["session"], [(base, base, LARGE)])  # as long as the one before
                assert bytes(last) == b"\7" * SMALL


class Late(TcpTransport):
    """Its bytes come when somebody says so."""

    def __init__(self):
        self.began, self.arrive = threading.Event(), threading.Event()

    def read(self, *what):
        self.began.set()
        assert self.arrive.wait(60)
        return super().read(*what)


def test_a_peer_whose_read_takes_too_long_is_asked_nothing_until_the_read_has_ended():
    peer, [record] = Offered(), pages(1)
    with closing(peer.offering), closing(PeerStore(where(peer.offering._listener), timeout_s=0.2)) as store:
        store._transport = late = Late()
        reading = start(lambda: store.get([record.get()]), "read")
        assert late.began.wait(60)

        def refuses():
            try:
                return store.contains([record.key]) == []
            except StoreError as error:
                return "sends too slowly" in str(error)

        until(refuses, "its time is over")
        with pytest.raises(StoreError, match="sends too slowly"):
            store.get([record.get()])
        with pytest.raises(StoreError, match="sends too slowly"):
            next(store.watch([record.key], 1))
        late.arrive.set()
        assert isinstance(reading.exception(60), StoreError)
        assert read(store, [record]) == [True]


def test_host_pages_stay_reserved_as_long_as_bytes_may_come():
    peer = Offered()
    with closing(peer.offering):
        store, late = PeerStore(where(peer.offering._listener), timeout_s=5.0), Late()
        store._transport = late
        puller = Puller(store, host_pages=32, store_timeout_s=0.2)
        with closing(puller.cache):
            reserved = 8 + 2 * puller.spec.places_per_tail
            chain = puller.cache.chain(EIGHT)
            while isinstance(found := puller.cache.find(chain), Wait):
                puller.cache.step()
                puller.cache.wait(0.01)
            assert late.began.is_set() and found.pages == 0, "the request computes"
            puller.cache.withdraw(chain)
            puller.cache.flush()
            other = puller.cache.chain(TEXT[::-1])
            landing = puller.cache.land(other, 0, 32)
            assert len(landing.moves) == puller.cache.host_pages.capacity - reserved
            views = [view for move in landing.moves for view in puller.cache.host.views(move.host, [PAGE])[0]]
            for view in views:
                view[:] = b"\7" * len(view)
            late.arrive.set()

            def is_over():
                puller.cache.step()
                return not puller.tier.mover.under_way

            until(is_over, "the late bytes have come", timeout_s=10)
            assert all(bytes(view) == b"\7" * len(view) for view in views)
            puller.cache.landed(landing)
            puller.settle()
            puller.cache.flush()
            assert puller.cache.host_pages.free == puller.cache.host_pages.capacity
            until(lambda: puller.pull().pages, "the peer is used again", timeout_s=10)
        peer.ask(peer.cache.check).result()
        until(lambda: peer.ask(lambda: not len(peer.cache.leases)).result(), "no lease is left")
