"""Goal: a request whose prompt another server computes is answered, whatever that server has room for, does
or says; each learns when the other gives up. Method: two engines, each behind its thread, on real sockets; a
server that lies. Nobody loses patience here: who is not told waits until the test fails."""

import asyncio
from contextlib import closing, contextmanager

import pytest

from tests.engine.drive import PAGE, make_ask, make_engine, run, words
from tests.peers.roles import answered, roles, settle
from tests.peers.test_engines import same
from tests.peers.test_faults import Liar
from tests.wait import until
from tiercel.asks.ask import Prefiller
from tiercel.engine.service import EngineService
from tiercel.storage.open import open_peers, open_stores
from tiercel.storage.peer import wire
from tiercel.storage.peer.wire import Message, Readiness
from tiercel.storage.record import form_of
from tiercel.transfer.mover import forms_of

TEXT = words(5 * PAGE + 3)
HOST_PAGES = 40


@pytest.fixture(scope="module")
def truth():
    return run(make_engine(cache={"force_miss": True}), make_ask("truth", TEXT))[0]


@contextmanager
def full(engine):
    """Somebody else holds every host page."""
    other = engine.cache.chain(words(HOST_PAGES * PAGE, seed=99))
    landing = engine.cache.land(other, 0, HOST_PAGES)
    assert len(landing.moves) == HOST_PAGES
    yield lambda: engine.cache.landed(landing)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_full_host_pool_costs_no_answer(truth, side):
    """And when there is room again, pages are pulled."""
    first, second = make_engine(host_pages=HOST_PAGES), make_engine(host_pages=HOST_PAGES)
    with full(first if side == "prefill" else second) as make_room, roles(first, second) as both:
        answer = both.ask(make_ask("full", TEXT))
        assert same(answer, truth) and answer.usage.store_tokens == 0
        both.settle()
        getattr(both, side)._ask(make_room).result(30)
        both.forget()
        answer = both.ask(make_ask("room", TEXT))
        assert same(answer, truth) and answer.usage.store_tokens == 5 * PAGE


@pytest.mark.parametrize("save", ["through", "back"])
def test_a_prompt_for_another_server_displaces_older_texts_from_the_host(save):
    """Whatever would be saved otherwise, and whether the device has it already. The host has room for few."""
    cold = make_engine(cache={"force_miss": True})
    first, second = make_engine(host_pages=16, cache={"save": save}), make_engine(host_pages=HOST_PAGES)
    with roles(first, second) as both:
        for number in range(4):
            ask = make_ask(str(number), words(2 * PAGE + 1, seed=number), 2)
            if number % 2:
                asyncio.run(answered(both.prefill, ask))
            answer = both.ask(ask)
            assert same(answer, run(cold, ask)[0]) and answer.usage.store_tokens == 2 * PAGE
            both.settle()


async def while_it_travels(both, ask):
    """The tasks of both servers, when the first pages have come to the second."""
    tasks = [asyncio.ensure_future(answered(server, ask)) for server in (both.prefill, both.decode)]
    while not both.decode._engine.cache.store.counters["bytes_read"]:
        await asyncio.sleep(0.001)
    return tasks


def test_a_prompt_that_is_aborted_where_it_is_computed_goes_on_where_it_is_answered():
    long = words(12 * PAGE, seed=4)
    [truth] = run(make_engine(cache={"force_miss": True}), make_ask("truth", long, 2))
    first, second = make_engine(host_pages=200, step_tokens=PAGE), make_engine(host_pages=200)
    with roles(first, second) as both:
        named = both.named(make_ask("aborted", long, 2))

        async def abort():
            computing, waiting = await while_it_travels(both, named)
            computing.cancel()
            return await waiting

        answer = asyncio.run(abort())
        assert same(answer, truth) and answer.usage.store_tokens < 11 * PAGE


def test_a_prompt_is_not_computed_to_its_end_for_a_request_that_was_aborted():
    long = words(30 * PAGE, seed=5)
    first, second = make_engine(host_pages=200, step_tokens=PAGE), make_engine(host_pages=200)
    with roles(first, second) as both:
        named = both.named(make_ask("aborted", long, 2))

        async def abort():
            computing, waiting = await while_it_travels(both, named)
            waiting.cancel()
            return await computing

        asyncio.run(abort())
        assert first.counters["finished_abort"] == 1
        until(lambda: not both.decode._pulling, "nothing more is pulled")


class Pretender:
    """It says that it has everything. `brings`: what a read gets."""

    def __init__(self, spec, brings):
        self._spec, self._brings, self.reads = spec, brings, 0
        self._sizes = {}

    def __call__(self, link, kind, body):
        if kind is Message.DONE:
            link.send(Message.END, wire.End(wire.parse_bytes(body)).pack())
        elif kind is Message.READ:
            self.reads += 1
            size = sum(self._sizes[link][number] for number in wire.Read.parse(body).numbers)
            link.send(Message.BYTES, wire.pack_bytes(size))
            link.send_all([memoryview(bytes(size))])
            link.send(Message.END, wire.End(1).pack())
        else:
            self._find(link, wire.Find.parse(body))

    def _find(self, link, question):
        if not question.wait_s and self._brings == "nothing":
            link.send(Message.FOUND, wire.Found([]).pack())
            return
        forms = {form.digest: form for own in forms_of(self._spec, question.align).values() for form in own}
        entries = []
        for number, key in enumerate(question.keys):
            form = forms[form_of(key)]
            payload = bytes(form.payload_bytes)
            header = form.header(key[-32:], [b"\1" * len(payload)])
            entries.append(wire.Entry(number, Readiness.HERE, len(payload), header))
        self._sizes[link] = [entry.payload_bytes for entry in entries]
        link.send(Message.FOUND, wire.Found(entries, lease=1).pack())


@pytest.mark.parametrize("brings", ["nothing", "zeros"])
def test_a_peer_that_lies_about_what_it_has_costs_no_answer(truth, brings):
    engine = make_engine(host_pages=HOST_PAGES)
    pretender = Pretender(engine.cache.spec, brings)
    with closing(Liar(pretender, forms=engine.cache.leases.forms)) as liar:
        url = f"peer://{liar.address}?timeout_s=5"
        engine.cache.attach(open_stores(None, [url]))
        with closing(EngineService(engine, "tiny-v4")) as service:
            service.pull_prompts(open_peers([url]), 600)
            host, _, port = liar.address.rpartition(":")
            ask = make_ask("lied to", TEXT, prefiller=Prefiller(host, int(port), "room"))
            answer = asyncio.run(answered(service, ask))
            assert same(answer, truth) and answer.usage.store_tokens == 0
            assert bool(pretender.reads) == (brings == "zeros")
            assert bool(engine.cache.store.mover.flaws) == (brings == "zeros")
            settle(service)
            assert asyncio.run(service.flush(30)) == 0
            assert engine.cache.host_pages.free == HOST_PAGES
