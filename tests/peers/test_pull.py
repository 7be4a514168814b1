"""Goal: a cache takes from a peer what it lacks, whatever goes wrong; then its counts are right. Method:
a real offering process, a cache that reads it, bytes that follow from their keys."""

import os
import signal
import time
from contextlib import closing, contextmanager

import pytest

from tests.memory.specs import SPECS
from tests.peers.offering import SPEC, TEXT, offering, payload_of
from tests.peers.proxy import Proxy
from tests.peers.readers import Record
from tests.transfer.borrowed import make_borrowed
from tests.wait import until
from tiercel.cache import HostCache, Wait
from tiercel.cache.memories import make_memories
from tiercel.cache.store_tier import PROBE_AGAIN_S
from tiercel.config import LAYOUTS, CacheConfig
from tiercel.policy.breaker import BreakerState
from tiercel.storage.file import FileStore
from tiercel.storage.memory import MemoryStore
from tiercel.storage.peer import PeerStore
from tiercel.storage.several import SeveralStores
from tiercel.tree.node import Item, Tail
from tiercel.types import Kind

PAGE = 128
EIGHT = TEXT[: 8 * PAGE + 1]
PAGE_BYTES, TAIL_BYTES = Record(1).form.payload_bytes, Record(4, Kind.TAIL).form.payload_bytes


@pytest.fixture(scope="module")
def offers():
    """One for each layout, and one that has the first four pages only."""
    layouts = [{"layout": layout, "shuffle": 5, "mooncake": "tcp"} for layout in LAYOUTS]
    with offering(*layouts, {"pages": 4, "tails": [4]}) as all_offers:
        yield all_offers
        for each in all_offers:
            until(lambda each=each: each.ask("check") == {"leases": 0}, "no lease is left", timeout_s=10)


@pytest.fixture
def peer(offers):
    return offers[0]


class Puller:
    """A cache of its own, with a peer or more."""

    def __init__(self, store, *, spec=SPEC, layout=LAYOUTS[0], host_pages=64, **settings):
        self.spec = SPECS[spec]
        settings = {"fetch": "wait", "store_timeout_s": 5.0} | settings
        config = CacheConfig(host_bytes=host_pages * self.spec.place_bytes, layout=layout, **settings)
        order = lambda count: list(range(count))[::-1]  # noqa: E731
        self.cache = HostCache(
            self.spec,
            config,
            make_memories(self.spec, config, make_borrowed(self.spec, 2, 2)),
            pool_order=order,
        )
        self.late_s = 0.0
        self.cache.attach(store, clock=lambda: time.monotonic() + self.late_s)

    def pull(self, tokens=EIGHT):
        """What the cache has of a text after it has waited for its peers. Every byte is checked."""
        chain = self.cache.chain(tokens)
        while isinstance(found := self.cache.find(chain), Wait):
            self.cache.step()
            self.cache.wait(0.01)
        self.cache.check()
        items: list[Item] = [*found.far, *found.tails]
        for item in items:
            forms = self.cache.store.mover.forms[item.kind]
            key = item.page.key if isinstance(item, Tail) else item.key
            parts = self.cache.host.views(item.host, [form.payload_bytes for form in forms])
            for form, views in zip(forms, parts, strict=True):
                assert b"".join(views) == payload_of(form.key(key), form.payload_bytes)
        self.cache.withdraw(chain)
        return found

    @property
    def tier(self):
        return self.cache.store

    def settle(self):
        while self.cache.busy:
            self.cache.step()
            self.cache.wait(0.01)
        self.cache.check()


@contextmanager
def pulling(*addresses, store=None, peer=None, **options):
    own = [PeerStore(each, **({"timeout_s": 1.0} | (peer or {}))) for each in addresses]
    several = own[0] if len(own) == 1 and store is None else SeveralStores(own, store)
    puller = Puller(several, **options)
    with closing(puller.cache):
        yield puller
        puller.settle()
        puller.cache.flush()
        assert puller.cache.host_pages.free == puller.cache.host_pages.capacity, "no place is lost"


@pytest.mark.parametrize("transport", ["tcp", "mooncake"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_and_tails_come_byte_by_byte_whatever_the_layouts(offers, layout, transport):
    for peer in offers[:2]:
        with pulling(peer.address, layout=layout, peer={"transport": transport}) as puller:
            found = puller.pull()
            assert found.pages == 8 and found.reuse.store_tokens == 8 * PAGE
            assert found.tails[0].page.depth == 8
            assert puller.tier.counters["bytes_read"] == 8 * PAGE_BYTES + 2 * TAIL_BYTES


def test_only_what_is_missing_travels(peer):
    with pulling(peer.address) as puller:
        before = peer.ask("stats")["bytes_sent"]
        assert puller.pull(EIGHT[: 4 * PAGE + 1]).pages == 4
        first = peer.ask("stats")["bytes_sent"]
        assert first - before == 4 * PAGE_BYTES + TAIL_BYTES
        assert puller.pull().pages == 8
        assert peer.ask("stats")["bytes_sent"] - first == 4 * PAGE_BYTES + TAIL_BYTES
        assert puller.pull().pages == 8
        assert peer.ask("stats")["bytes_sent"] - first == 4 * PAGE_BYTES + TAIL_BYTES


def test_nothing_is_written_to_a_peer(peer):
    with pulling(peer.address) as puller:
        puller.pull()
        transfer = puller.cache.land(puller.cache.chain(TEXT[::-1][: 2 * PAGE]), 0, 2)
        puller.cache.landed(transfer)
        puller.settle()
        assert not puller.tier.writes.backlog and not puller.tier.counters["pages_written"]
        assert not any(item.stored for item in puller.cache.tree.items())


def test_a_text_that_the_peer_does_not_have_is_one_question(peer):
    with pulling(peer.address) as puller:
        assert puller.pull(TEXT[::-1][: 8 * PAGE]).pages == 0
        assert puller.tier.counters["bytes_read"] == 0 and puller.tier.counters["failures"] == 0


def test_a_small_host_pool_takes_what_fits_into_half_of_it(peer):
    with pulling(peer.address, host_pages=12) as puller:
        assert puller.pull().pages == 4
        assert puller.cache.host_pages.free == 12 - 4 - puller.spec.places_per_tail


def test_a_host_pool_that_others_hold_takes_nothing_and_nothing_is_lost(peer):
    with pulling(peer.address, host_pages=20) as puller:
        landing = puller.cache.land(puller.cache.chain(TEXT[::-1]), 0, 20)
        assert len(landing.moves) == 20 and puller.pull().pages == 0
        puller.cache.landed(landing)
        assert puller.pull().pages == 8


def test_other_tenants_and_other_models_find_nothing(peer):
    with pulling(peer.address) as puller:
        chain = puller.cache.chain(EIGHT, ("tenant",))
        while isinstance(found := puller.cache.find(chain), Wait):
            puller.cache.step()
            puller.cache.wait(0.01)
        assert found.pages == 0
    with pulling(peer.address, spec="v4 with its draft") as puller:
        assert puller.pull().pages == 0


# Several


def test_peers_are_asked_in_order_and_then_the_store(offers):
    store = MemoryStore()
    last = Record(8, Kind.TAIL), *(Record(depth) for depth in range(5, 9))
    store._values = {record.key: record.value for record in last}
    with pulling(offers[2].address, store=store) as puller:
        found = puller.pull()
        assert found.pages == 8
        assert puller.tier.counters["bytes_read"] >= 8 * PAGE_BYTES + TAIL_BYTES
    with pulling(offers[2].address, offers[0].address) as puller:
        assert puller.pull().pages == 8


def test_with_a_store_besides_what_is_computed_is_written_to_it(offers, tmp_path):
    """A file store has longer headers: a peer makes them as long."""
    store = FileStore(str(tmp_path / "store"), size=64 << 20)
    with pulling(offers[0].address, store=store) as puller:
        assert puller.pull().pages == 8
        chain = puller.cache.chain(TEXT[::-1][: 2 * PAGE])
        puller.cache.landed(puller.cache.land(chain, 0, 2))
        puller.settle()
        assert puller.tier.counters["pages_written"] == 2
        assert puller.tier.mover._store.kept(
            [puller.tier.mover.forms[Kind.PAGE][-1].key(key) for key in chain.keys]
        )


def test_a_peer_that_is_not_there_costs_nothing_but_the_question(offers):
    with pulling("127.0.0.1:9", offers[0].address) as puller:
        assert puller.pull().pages == 8
        assert puller.tier.breaker.state is BreakerState.WORKING


# When it goes wrong


def test_flipped_bytes_are_counted_and_computed_and_the_peer_is_tried_again(peer):
    proxy = Proxy(peer.address)
    with closing(proxy), pulling(proxy.address, peer={"timeout_s": 0.5}) as puller:
        proxy.hurt("flip", 9000)
        assert puller.pull().pages == 0 and puller.tier.mover.flaws == {"checksum": 1}
        proxy.heal()
        proxy.cut_all()
        assert puller.pull().pages == 8


def test_a_peer_whose_bytes_are_always_damaged_is_left_alone_for_a_while(peer):
    proxy = Proxy(peer.address)
    with closing(proxy), pulling(proxy.address, peer={"timeout_s": 0.5}) as puller:
        puller.cache.compute.observe(10_000, 1)
        proxy.hurt("flip", 9000)
        for _ in range(20):
            assert puller.pull().pages == 0
            puller.cache.flush()
            proxy.cut_all()
        assert puller.tier.counters["fetches_not_worth"] > 0
        read = puller.tier.counters["bytes_read"]
        assert puller.pull().pages == 0 and puller.tier.counters["bytes_read"] == read
        proxy.heal()
        puller.late_s = PROBE_AGAIN_S + 1
        until(lambda: puller.pull().pages == 8, "the peer is tried again", timeout_s=20)


def test_one_failure_is_no_blacklist(peer):
    proxy = Proxy(peer.address)
    with closing(proxy), pulling(proxy.address, peer={"timeout_s": 0.3}) as puller:
        proxy.hurt("cut", 10)
        assert puller.pull().pages == 0
        proxy.heal()
        assert puller.pull().pages == 8
        assert puller.tier.breaker.state is BreakerState.WORKING


def test_a_peer_that_stops_while_it_is_read_leaves_no_place_behind(peer):
    proxy = Proxy(peer.address)
    with closing(proxy), pulling(proxy.address, peer={"timeout_s": 0.5}) as puller:
        proxy.hurt("stall", 9000)
        os.kill(peer.process.popen.pid, signal.SIGSTOP)
        try:
            assert puller.pull().pages == 0
        finally:
            os.kill(peer.process.popen.pid, signal.SIGCONT)
        proxy.heal()
        assert until(lambda: puller.pull().pages == 8, "the peer is used again", timeout_s=20)


@pytest.mark.parametrize("transport", ["tcp", "mooncake"])
def test_pages_and_tails_of_several_records_each_come_byte_by_byte(transport):
    spec, layouts = (
        "v4 in records",
        [{"layout": layout, "shuffle": 3, "mooncake": "tcp"} for layout in LAYOUTS],
    )
    assert len(SPECS[spec].grains(Kind.PAGE)) > 1 < len(SPECS[spec].grains(Kind.TAIL))
    with offering(*({"spec": spec} | each for each in layouts)) as offers:
        for peer in offers:
            with pulling(peer.address, spec=spec, peer={"transport": transport}) as puller:
                found = puller.pull()
                assert found.pages == 8 and found.tails[0].page.depth == 8
