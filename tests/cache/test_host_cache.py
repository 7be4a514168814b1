"""Goal: what `HostCache` promises an engine that owns its device memory. Method: a tiny declaration, memory
as others allocate it, bytes that name their text. (`simulation.foreign` runs the same from seeds.)"""

import pickle
import time
from types import SimpleNamespace

import pytest

from tests.simulation.bytes import Bytes, HostRows, text_of
from tests.simulation.specs import SPECS
from tests.transfer.borrowed import make_borrowed
from tiercel.cache import HostCache, Request, RequestState, TieredCache, Transfer, Wait, WaitFor
from tiercel.cache.memories import make_memories
from tiercel.config import CacheConfig
from tiercel.errors import ConfigError, TransferError
from tiercel.memory.buffers import DeviceMemory, HostMemory
from tiercel.storage.memory import MemoryStore
from tiercel.transfer.controller import make_controller
from tiercel.transfer.remote import RankWorker, RemoteController

PLAIN, V4 = SPECS["full attention"], SPECS["compressed"]
TEXT = list(range(18))
"""Four full pages of four tokens, and two tokens more."""


class Engine:
    """Twelve pages and six tails of its own."""

    def __init__(self, spec=V4, *, host_pages=60, only=None, **settings):
        self.spec = spec
        held = spec if only is None else spec.only(only)
        self.memory = make_borrowed(held, 12, 6)
        config = CacheConfig(host_bytes=host_pages * spec.place_bytes, **settings)
        self.cache = HostCache(spec, config, make_memories(spec, config, self.memory))
        self.bytes = Bytes(spec, self.memory)
        self.rows = HostRows(self.cache.host)

    def compute(self, places, tails=(), tokens=TEXT):
        """Write the pages of a text to places, and tails to theirs: {boundary: place}."""
        chain = self.cache.chain(tokens)
        for number, here in enumerate(places):
            self.bytes.write(here, chain.keys[number], self.text(number + 1, tokens), tail=False)
        for boundary, here in dict(tails).items():
            self.bytes.write(here, chain.keys[boundary - 1], self.text(boundary, tokens), tail=True)
        return chain

    def text(self, pages, tokens=TEXT):
        return text_of((), tokens[: pages * self.spec.page_tokens])

    def save(self, places, tails=None, tokens=TEXT):
        chain = self.compute(places, tails or {}, tokens)
        transfer = self.cache.save(chain, 0, places, tails=tails)
        self.settle(transfer)
        return transfer

    def settle(self, transfer):
        for _ in range(1000):
            for ended in self.cache.step():
                if ended.transfer is transfer:
                    self.cache.check()
                    return ended.error
            self.cache.wait(0.1)
        raise AssertionError("it never ended")

    def check(self, places, tails=(), tokens=TEXT):
        for number, here in enumerate(places):
            self.bytes.check(here, self.text(number + 1, tokens), tail=False, who="the engine")
        for boundary, here in dict(tails).items():
            self.bytes.check(here, self.text(boundary, tokens), tail=True, who="the engine")


def test_what_was_saved_comes_back_to_other_places_bit_by_bit():
    engine = Engine()
    engine.save([7, 2, 9, 4], {4: 3})
    found = engine.cache.find(engine.cache.chain(TEXT))
    assert (found.pages, [tail.page.depth for tail in found.tails]) == (4, [4])
    transfer = engine.cache.load(found, [1, 0, 11, 5], tails=[0])
    assert engine.settle(transfer) is None
    engine.check([1, 0, 11, 5], {4: 0})


def test_only_what_the_device_lacks_is_loaded():
    engine = Engine()
    engine.save([7, 2, 9, 4], {4: 3})
    found = engine.cache.find(engine.cache.chain(TEXT))
    transfer = engine.cache.load(found, [1], first=3, tails=[0])
    assert [move.item.depth for move in transfer.pages()] == [4]
    engine.settle(transfer)
    engine.check([7, 2, 9, 1], {4: 0})


def test_a_text_without_a_tail_is_not_resumed_and_with_a_replay_it_is():
    engine = Engine()
    engine.save([7, 2, 9, 4])
    assert engine.cache.find(engine.cache.chain(TEXT)).pages == 0
    long = [*range(18), *range(40)]
    engine.save([7, 2, 9, 4], tokens=long)
    assert engine.cache.find(engine.cache.chain(long), replay=True).reuse.found_tokens == 16


def test_what_the_host_has_is_not_saved_again():
    engine = Engine()
    engine.save([7, 2, 9, 4], {4: 3})
    again = engine.cache.save(engine.cache.chain(TEXT), 0, [7, 2, 9, 4], tails={4: 3, 2: 3})
    assert [move.item.page.depth for move in again.tails()] == [2] and not list(again.pages())


def test_a_text_whose_beginning_is_not_there_is_not_saved():
    engine = Engine()
    chain = engine.compute([7, 2, 9, 4])
    transfer = engine.cache.save(chain, 2, [9, 4])
    assert transfer.moves == [] and engine.settle(transfer) is None
    assert engine.cache.tree.index == {}


def test_as_much_is_saved_as_there_is_room_for_and_the_coldest_text_gives_way():
    engine = Engine(PLAIN, host_pages=5)
    engine.save([0, 1, 2, 3])
    other = [9] * 16
    engine.save([4, 5, 6, 7], tokens=other)
    find = engine.cache.find
    assert find(engine.cache.chain([*other, 0])).pages == 4
    assert find(engine.cache.chain(TEXT)).pages == 1


def test_what_is_on_its_way_is_waited_for():
    engine = Engine()
    chain = engine.compute([7, 2, 9, 4], {4: 3})
    transfer = engine.cache.save(chain, 0, [7, 2, 9, 4], tails={4: 3})
    assert engine.cache.find(chain) == Wait(WaitFor.ARRIVING)
    engine.settle(transfer)
    assert engine.cache.find(chain).pages == 4


def test_what_left_between_finding_and_loading_is_to_be_found_again():
    engine = Engine()
    engine.save([7, 2, 9, 4], {4: 3})
    found = engine.cache.find(engine.cache.chain(TEXT))
    engine.cache.flush()
    assert engine.cache.load(found, [1, 0, 11, 5], tails=[0]) == Wait(WaitFor.FOUND_LEFT)
    assert engine.cache.find(engine.cache.chain(TEXT)).pages == 0


def other_texts(engine):
    """So much is saved that everything else leaves the host, if it may."""
    for first in (100, 200):
        engine.save([4, 5, 6, 7], tokens=range(first, first + 16))


def test_what_find_holds_stays_until_it_is_loaded():
    engine = Engine(PLAIN, host_pages=9)
    engine.save([0, 1, 2, 3])
    found = engine.cache.find(engine.cache.chain(TEXT), hold=True)
    other_texts(engine)
    assert engine.cache.flush() == 4
    transfer = engine.cache.load(found, [8, 9, 10, 11])
    assert engine.settle(transfer) is None
    engine.check([8, 9, 10, 11])
    assert engine.cache.flush() == 0, "a load that has ended holds nothing"


@pytest.mark.parametrize("end", ["release", "find", "withdraw"])
def test_what_find_holds_may_leave_when_the_caller_says_so(end):
    engine = Engine(PLAIN, host_pages=9)
    engine.save([0, 1, 2, 3])
    chain = engine.cache.chain(TEXT)
    found = engine.cache.find(chain, hold=True)
    other = engine.cache.find(engine.cache.chain(TEXT), hold=True)
    getattr(engine.cache, end)(found if end == "release" else chain)
    assert engine.cache.flush() == 4, "it is held for another text"
    engine.cache.release(other)
    engine.cache.release(other)
    assert engine.cache.flush() == 0


def test_a_save_that_fails_leaves_nothing_and_is_told():
    engine = Engine()

    class Broken:
        def copy(self, *_):
            raise OSError("no copy today")

    controller = engine.cache.flights.controller
    copier, controller._copier = controller._copier, Broken()
    chain = engine.compute([7, 2, 9, 4], {4: 3})
    transfer = engine.cache.save(chain, 0, [7, 2, 9, 4], tails={4: 3})
    assert isinstance(engine.settle(transfer), TransferError)
    assert engine.cache.tree.index == {} and not engine.cache.host_pages.owned_ids()
    controller._copier = copier
    assert engine.settle(engine.cache.save(chain, 0, [7, 2, 9, 4], tails={4: 3})) is None
    assert engine.cache.find(chain).pages == 4


def test_a_cache_without_host_memory_is_refused():
    with pytest.raises(ConfigError, match="host_bytes"):
        HostCache(PLAIN, CacheConfig(), make_memories(PLAIN, CacheConfig(), make_borrowed(PLAIN, 2, 1)))


def test_what_was_saved_is_in_the_store_for_the_next_process():
    store = MemoryStore()
    for first in (True, False):
        engine = Engine()
        engine.cache.attach(store if first else Reopened(store))
        if first:
            engine.save([7, 2, 9, 4], {4: 3})
            while engine.cache.busy:
                engine.cache.step()
                engine.cache.wait(0.01)
            continue
        chain = engine.cache.chain(TEXT)
        engine.compute([])
        engine.cache.compute.observe(1, 100.0)
        while isinstance(found := engine.cache.find(chain), Wait):
            engine.cache.step()
            time.sleep(0.001)
        assert (found.pages, found.reuse.store_tokens) == (4, 16)
        engine.settle(engine.cache.load(found, [1, 0, 11, 5], tails=[0]))
        engine.check([1, 0, 11, 5], {4: 0})


class Reopened(MemoryStore):
    def __init__(self, store):
        super().__init__()
        self._values = store._values


# A device that does not hold every stream


def test_a_stream_that_stays_on_the_host_is_written_read_and_found_there():
    """`k` is never on the device: the engine writes its rows on the host, and reads them there."""
    spec = SPECS["full attention"]
    engine = Engine(spec, only=["v"])
    assert ("k", 0) not in engine.bytes.rows and ("v", 0) in engine.bytes.rows
    chain = engine.compute([7, 2, 9, 4])
    saved = engine.cache.save(chain, 0, [7, 2, 9, 4])
    for _ in range(50):
        assert engine.cache.step() == [], "the engine has not written its part"
        engine.cache.wait(0.01)
    assert engine.cache.find(chain) == Wait(WaitFor.ARRIVING)
    for move in saved.pages():
        for row, data in engine.bytes.expected(engine.text(move.item.depth), False):
            if row not in engine.bytes.rows:
                engine.rows.write(row, move.host, bytes(data), tail=False)
    engine.cache.landed(saved)
    assert engine.settle(saved) is None

    loaded = engine.cache.load(engine.cache.find(chain), [1, 0, 11, 5], hold=True)
    assert engine.settle(loaded) is None
    engine.check([1, 0, 11, 5])
    assert engine.cache.flush() == 4, "what the engine reads on the host stays there"
    for move in loaded.pages():
        expected = engine.bytes.expected(engine.text(move.item.depth), False)
        engine.rows.check(expected, move.host, tail=False, who="both streams, on the host")
    moved = engine.cache.stats().moved_bytes
    assert moved["loaded"] == moved["saved"] == {"v": 4 * spec.bytes_of(spec.stream("v"))}
    engine.cache.release(loaded)
    assert engine.cache.flush() == 0


# Host pages that somebody else writes


def land(cache, rows, bytes_, tokens, *, tails=()):
    """What a peer does: it writes whole pages."""
    pages = len(tokens) // cache.spec.page_tokens
    transfer = cache.land(cache.chain(tokens), 0, pages, tails=tails)
    for item, _, hosts in transfer.moves:
        tail = item in [move.item for move in transfer.tails()]
        text = text_of((), tokens[: (item.page if tail else item).depth * cache.spec.page_tokens])
        for row, data in bytes_.expected(text, tail):
            rows.write(row, hosts, bytes(data), tail=tail)
    return transfer


def test_pages_that_land_are_readable_when_the_writer_said_so():
    engine = Engine()
    transfer = land(engine.cache, engine.rows, engine.bytes, TEXT, tails=[4])
    assert engine.cache.find(engine.cache.chain(TEXT)) == Wait(WaitFor.ARRIVING)
    engine.cache.landed(transfer)
    assert engine.settle(transfer) is None
    engine.settle(engine.cache.load(engine.cache.find(engine.cache.chain(TEXT)), [1, 0, 11, 5], tails=[0]))
    engine.check([1, 0, 11, 5], {4: 0})


def test_pages_that_do_not_land_are_forgotten():
    engine = Engine()
    transfer = land(engine.cache, engine.rows, engine.bytes, TEXT, tails=[4])
    engine.cache.landed(transfer, TransferError("the peer is gone"))
    assert engine.settle(transfer) is transfer.error
    assert engine.cache.tree.index == {} and not engine.cache.host_pages.owned_ids()


def test_what_lands_in_a_tiered_cache_is_loaded_by_the_next_request():
    config = CacheConfig(24, 4, host_bytes=40 * V4.place_bytes)
    cache = TieredCache(V4, config)
    bytes_ = Bytes(V4, cache.device)
    cache.landed(land(cache, HostRows(cache.host), bytes_, TEXT, tails=[4]))
    cache.check()
    request = cache.begin(cache.chain(TEXT))
    assert isinstance(request, Request) and request.reuse.host_tokens == 16
    while request.state is RequestState.LOADING:
        cache.step()
        cache.wait(0.1)
    for page in range(4):
        text = text_of((), TEXT[: (page + 1) * V4.page_tokens])
        bytes_.check(request.table[page], text, tail=False, who="the page table")
    bytes_.check(request.resume_tails[0].device, text_of((), TEXT[:16]), tail=True, who="the tail")
    cache.close()


# Memory in other processes


def test_ranks_carry_out_what_the_cache_decides():
    """Two ranks with half of the layers each. (`test_remote` runs ranks in processes of their own.)"""
    stages = V4.stage(0, 1), V4.stage(1, 3)
    config = CacheConfig(host_bytes=40 * V4.place_bytes, host_shared=True)
    controller = RemoteController(ranks=2)
    cache = HostCache(V4, config, make_memories(V4, config, None, controller=controller))
    ranks, writers = [], []
    for number, stage in enumerate(stages):
        memory = make_borrowed(stage, 12, 6)
        host = HostMemory(V4, config.layout, config.host_bytes, path=cache.host.path)
        ranks.append(RankWorker(number, make_controller("direct", memory, host)))
        writers.append(Bytes(V4, memory))

    def settle(transfer):
        cache.step()
        for ticket in controller.take():
            for rank in ranks:
                assert cache.step() == []
                rank.start(pickle.loads(pickle.dumps(ticket)))
                rank.wait(10)
                (ack,) = rank.acks()
                controller.acknowledge(pickle.loads(pickle.dumps(ack)))
        (ended,) = cache.step()
        assert isinstance(transfer, Transfer) and ended.transfer is transfer and ended.error is None

    chain = cache.chain(TEXT)
    for writer in writers:
        for page, here in enumerate([7, 2, 9, 4]):
            writer.write(here, chain.keys[page], text_of((), TEXT[: 4 * (page + 1)]), tail=False)
        writer.write(3, chain.keys[3], text_of((), TEXT[:16]), tail=True)
    settle(cache.save(chain, 0, [7, 2, 9, 4], tails={4: 3}))
    settle(cache.load(cache.find(chain), [1, 0, 11, 5], tails=[0]))
    for writer in writers:
        for page, here in enumerate([1, 0, 11, 5]):
            writer.check(here, text_of((), TEXT[: 4 * (page + 1)]), tail=False, who="a rank")
        writer.check(0, text_of((), TEXT[:16]), tail=True, who="a rank")
    cache.check()
    cache.close()


def test_a_tiered_cache_has_its_device_memory_in_other_processes():
    """A rank with all the layers. It waits for a load layer by layer, where its controller can."""
    config = CacheConfig(24, 4, host_bytes=40 * V4.place_bytes, host_shared=True)
    controller = RemoteController(ranks=1, in_order=True)
    cache = TieredCache(V4, config, make_memories(V4, config, None, controller=controller))
    memory = DeviceMemory(V4, 24, 4)
    host = HostMemory(V4, config.layout, config.host_bytes, path=cache.host.path)
    copies, bytes_ = LayerByLayer(make_controller("direct", memory, host)), Bytes(V4, memory)
    rank = RankWorker(0, copies)

    def settle():
        while cache.busy:
            ended.extend(cache.step())
            for ticket in controller.take():
                rank.start(pickle.loads(pickle.dumps(ticket)))
                if ticket.layered:
                    rank.ready(ticket.number).wait(0)
                rank.wait(10)
                for ack in rank.acks():
                    controller.acknowledge(pickle.loads(pickle.dumps(ack)))

    ended = []
    first = cache.begin(cache.chain(TEXT))
    tails = cache.extend(first, 16).tails
    for page in range(4):
        key, text = first.chain.keys[page], text_of((), TEXT[: 4 * (page + 1)])
        bytes_.write(first.table[page], key, text, tail=False)
    bytes_.write(tails[16], first.chain.keys[3], text_of((), TEXT[:16]), tail=True)
    cache.commit(first, 16)
    cache.finish(first)
    settle()
    assert cache.leave_device(cache.chain(TEXT)) == 0
    for here in range(24):
        bytes_.poison(here, tail=False)
    again = cache.begin(cache.chain(TEXT))
    number = cache.load_under_way(again)
    assert again.reuse.host_tokens == 16 and number is not None
    settle()
    assert [each.request for each in ended] == [again] and again.state is RequestState.RUNNING
    assert copies.waited == [(number, 0)]
    for page in range(4):
        text = text_of((), TEXT[: 4 * (page + 1)])
        bytes_.check(again.table[page], text, tail=False, who="the rank")
    bytes_.check(again.resume_tails[0].device, text_of((), TEXT[:16]), tail=True, who="the rank")
    assert rank.ready(number) is None, "it has ended: there is nothing to wait for"
    cache.check()
    cache.close()


class LayerByLayer:
    """A controller of a CPU that counts who waits for layers."""

    in_order = True

    def __init__(self, own):
        self._own, self.waited = own, []

    def __getattr__(self, name):
        return getattr(self._own, name)

    def ready(self, number):
        ticket = next((t for queue in self.tickets.under_way() for t in queue if t.number == number), None)
        return ticket and SimpleNamespace(wait=lambda layer: self.waited.append((number, layer)))
