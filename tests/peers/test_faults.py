"""Goal: the worst a peer can do is be slow, and the worst a reader can do is hold pages for a lease. Method:
a real offering process that is stopped, killed and started again; a connection that is cut, stalled or hurt
at any of its bytes; peers that lie."""

import os
import signal
import socket
import threading
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.peers.offering import offering
from tests.peers.proxy import Proxy
from tests.peers.readers import Record, pages, read
from tests.wait import until
from tiercel.errors import StoreError
from tiercel.storage.peer import PeerStore, wire
from tiercel.storage.peer.link import Link, LinkLost
from tiercel.storage.peer.store import _greet
from tiercel.storage.peer.wire import Message, Readiness
from tiercel.types import Kind

KEY = "a key for tests"
TEN = pages(*range(1, 11))
HERE = [True] * 8 + [False] * 2


@pytest.fixture(scope="module")
def offers():
    """A cache with room for others, one without, and one with a key."""
    with offering({"mooncake": "tcp"}, {"host_pages": 8 + 8, "tails": ()}, {"key": KEY}) as all_offers:
        yield all_offers
        for each in all_offers:
            assert each.ask("check") == {"leases": 0}


@pytest.fixture
def peer(offers):
    yield offers[0]
    until(lambda: offers[0].ask("check") == {"leases": 0}, "no lease is left", timeout_s=5)


@contextmanager
def reading(address, **options):
    with closing(PeerStore(address, **({"timeout_s": 2.0} | options))) as store:
        yield store


@contextmanager
def linked(address, key=""):
    """A reader that speaks for itself."""
    host, _, port = address.rpartition(":")
    link = Link(socket.create_connection((host, int(port)), 5))
    link.within(10)
    try:
        _greet(link, key)
        yield link
    finally:
        link.close()


def find(link, records, **options):
    link.within(10)
    link.send(Message.FIND, wire.Find([record.key for record in records], **options).pack())
    kind, body = link.receive()
    assert kind is Message.FOUND
    return wire.Found.parse(body, len(records))


# Keys


def test_only_who_has_the_key_may_ask(offers):
    for wrong in ("", "another key", KEY + " "):
        with reading(offers[2].address, key=wrong) as store, pytest.raises(StoreError, match="key"):
            store.contains([TEN[0].key])
    with reading(offers[2].address, key=KEY) as store:
        assert store.contains([record.key for record in TEN]) == HERE
        assert read(store, TEN) == HERE
    assert offers[2].ask("stats")["keys_refused"] == 3


def test_a_reader_with_a_key_believes_no_server_without_it(peer):
    with reading(peer.address, key=KEY) as store, pytest.raises(StoreError, match="key"):
        store.contains([TEN[0].key])


def test_the_key_of_the_environment_is_used(offers, monkeypatch):
    monkeypatch.setenv("TIERCEL_SHARE_KEY", KEY)
    with reading(offers[2].address) as store:
        assert read(store, TEN[:2]) == [True, True]


@pytest.mark.parametrize(
    "junk",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(4096)],
    ids=["nothing", "http", "ones", "zeros"],
)
def test_a_stranger_is_sent_away_and_others_are_served(peer, junk):
    host, _, port = peer.address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as stranger, suppress(OSError):  # it is cut off
        stranger.sendall(junk)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass
    with reading(peer.address) as store:
        assert read(store, TEN) == HERE


# Leases


def test_what_is_leased_stays_until_the_lease_ends(offers):
    """The pool has sixteen places, eight with pages of ours. Another text takes all that it can get."""
    _, small, _ = offers
    records = pages(*range(1, 9))
    with linked(small.address) as link:
        found = find(link, records, hold_s=30)
        assert [entry.readiness for entry in found.entries] == [Readiness.HERE] * 8
        assert small.ask("fill") == 8 and small.ask("check") == {"leases": 1}
        link.send(Message.READ, wire.Read(found.lease, [0, 7]).pack())
        kind, body = link.receive()
        assert (kind, wire.parse_bytes(body)) == (Message.BYTES, 2 * records[0].form.payload_bytes)
        payload = bytearray(wire.parse_bytes(body))
        link.receive_into([memoryview(payload)])
        wanted = b"".join(record.value[record.form.header_bytes :] for record in (records[0], records[7]))
        assert payload == wanted, "the bytes that were there before the other text came"
        assert wire.End.parse(link.receive()[1]) == wire.End(found.lease, held=True)
    assert small.ask("check") == {"leases": 0}
    assert small.ask("flush") == {"free": 16, "capacity": 16}
    small.ask("land 0 8")


def test_a_lease_ends_by_its_time_and_a_late_read_is_told(offers):
    _, small, _ = offers
    with linked(small.address) as link:
        found = find(link, pages(*range(1, 9)), hold_s=0.2)
        until(lambda: small.ask("check") == {"leases": 0}, "the lease ended", timeout_s=5)
        assert small.ask("fill") == 16, "every page may go"
        link.within(5)
        link.send(Message.READ, wire.Read(found.lease, [0]).pack())
        assert wire.End.parse(link.receive()[1]) == wire.End(found.lease, held=False)
        link.send(Message.DONE, wire.pack_bytes(found.lease))
        assert wire.End.parse(link.receive()[1]) == wire.End(found.lease, held=False)
    assert small.ask("stats")["leases_timed_out"] == 1
    small.ask("flush")
    small.ask("land 0 8")


def test_a_lease_ends_with_its_connection(offers):
    _, small, _ = offers
    with linked(small.address) as link:
        find(link, pages(*range(1, 9)), hold_s=30)
        find(link, pages(*range(1, 9)), hold_s=30)
        assert small.ask("check") == {"leases": 2}
    until(lambda: small.ask("check") == {"leases": 0}, "the leases ended", timeout_s=5)


def test_a_reader_that_stops_reading_costs_no_more_than_its_lease(offers):
    """It asks for more than the buffers of its connection hold, many times, and reads nothing."""
    _, small, _ = offers
    with linked(small.address) as link:
        for _ in range(3000):
            try:
                link.within(1)
                question = wire.Find([record.key for record in pages(*range(1, 9))], hold_s=1.0)
                link.send(Message.FIND, question.pack())
            except LinkLost:
                break
        until(lambda: small.ask("check") == {"leases": 0}, "the leases ended", timeout_s=20)


def test_a_read_of_what_is_not_leased_ends_the_connection(peer):
    with linked(peer.address) as link:
        found = find(link, TEN, hold_s=30)
        link.send(Message.READ, wire.Read(found.lease, [9]).pack())
        with pytest.raises(LinkLost):
            link.receive()


def test_a_read_that_outlives_its_lease_fails(peer):
    with reading(peer.address, hold_s=1e-6) as store, pytest.raises(StoreError):
        store.get([record.get() for record in TEN])


# Connections that break


@pytest.fixture
def proxy(peer):
    own = Proxy(peer.address)
    yield own
    own.close()


def bytes_of_one_read(proxy):
    with reading(proxy.address) as store:
        assert read(store, TEN) == HERE
    return proxy.bytes_passed


@pytest.mark.parametrize("how", ["cut", "stall"])
def test_a_connection_that_ends_or_stalls_at_any_byte_is_an_error_and_the_next_call_works(proxy, how):
    size = bytes_of_one_read(proxy)
    places = range(0, size, size // (12 if how == "cut" else 4))
    for at in (*places, size - 1):
        proxy.hurt(how, at)
        with reading(proxy.address, timeout_s=0.3) as store:
            with pytest.raises(StoreError):
                store.get([record.get() for record in TEN])
            proxy.heal()
            assert read(store, TEN) == HERE
            assert store.stats()["peers"]["1"]["failures"] == 1


def test_a_byte_that_was_flipped_is_never_believed(proxy):
    """Wherever it is: an error, a miss, or a record whose flaw is found."""
    size, found = bytes_of_one_read(proxy), set()
    for at in range(0, size, size // 40):
        proxy.hurt("flip", at)
        gets = [record.get() for record in TEN]
        with reading(proxy.address, timeout_s=0.1) as store:
            try:
                answers = store.get(gets)
            except StoreError:
                found.add("error")
                continue
        for record, get, here in zip(TEN, gets, answers, strict=True):
            value = get.parts[0]
            flaw = (
                record.form.flaw(value, record.page_key, [value[record.form.header_bytes :]])
                if here
                else None
            )
            assert not here or flaw is not None or bytes(value) == record.value
            found.add(flaw)
    assert "error" in found and len(found) > 3, found


def test_an_idle_connection_that_broke_is_opened_again_without_an_error(proxy):
    with reading(proxy.address) as store:
        assert read(store, TEN) == HERE
        proxy.cut_all()
        assert read(store, TEN) == HERE
        told = store.stats()["peers"]["1"]
        assert (told["connections"], told["failures"]) == (2, 0)


# Processes that stop


def stop(pid):
    """The signal is sent at once, and each thread stops a moment later."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    until(
        lambda: all(" T " in (each / "stat").read_text() for each in threads.iterdir()),
        "every thread has stopped",
    )


@pytest.mark.parametrize("transport", ["tcp", "mooncake"])
def test_a_peer_that_is_stopped_is_given_up_and_works_again_when_it_goes_on(peer, transport):
    with reading(peer.address, timeout_s=0.5, transport=transport) as store:
        assert read(store, TEN) == HERE
        stop(peer.process.popen.pid)
        try:
            with pytest.raises(StoreError):
                store.contains([TEN[0].key])
            with pytest.raises(StoreError):
                store.get([TEN[0].get()])
        finally:
            os.kill(peer.process.popen.pid, signal.SIGCONT)
        assert read(store, TEN) == HERE


# Peers that lie


class Liar:
    """Greets as a server does; then `answer` says what it sends."""

    def __init__(self, answer, forms=(TEN[0].form.digest,)):
        self._forms = forms
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._answer = answer
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(Link(connection),), daemon=True).start()

    def _serve(self, link):
        hello = wire.Hello(bytes(16), bytes(32))
        try:
            link.within(20)
            link.send(Message.HELLO, hello.pack())
            nonce = link.receive()[1][:32]
            own = wire.proof("", b"server", hello, nonce)
            link.send(Message.WELCOME, wire.Welcome(own, self._forms, {"tcp": {}}).pack())
            while True:
                self._answer(link, *link.receive())
        except (LinkLost, AttributeError):
            link.close()

    def close(self):
        self._listener.close()


def entry(number, record=TEN[0], **changes):
    return wire.Entry(
        number, Readiness.HERE, record.form.payload_bytes, bytes(record.form.header_bytes)
    )._replace(**changes)


def found(*entries, lease=1):
    return lambda link, kind, body: link.send(Message.FOUND, wire.Found(entries, lease).pack())


def then(answer, *messages, raw=b""):
    """The first answer to a FIND, these to a READ."""

    def both(link, kind, body):
        if kind is Message.FIND:
            answer(link, kind, body)
            return
        for message, own in messages:
            link.send(message, own)
        link.send_all([memoryview(raw)])

    return both


SIZE = TEN[0].form.payload_bytes
LIES = {
    "nothing": lambda link, kind, body: None,
    "an answer to another question": lambda link, kind, body: link.send(Message.END, bytes(9)),
    "no message": lambda link, kind, body: link.send_all([memoryview(b"\xff" * 64)]),
    "half a message": lambda link, kind, body: link.send_all([memoryview(b"\x40\0\0\0\6")]),
    "a torn answer": lambda link, kind, body: link.send(Message.FOUND, b"\0" * 9 + b"\xff\0\0\0"),
    "a key twice": found(entry(0), entry(0)),
    "a key that was not asked for": found(entry(7)),
    "a readiness that does not exist": found(wire.Entry(0, 77)),
    "another length": then(found(entry(0)), (Message.BYTES, wire.pack_bytes(SIZE + 1))),
    "too few bytes": then(found(entry(0)), (Message.BYTES, wire.pack_bytes(SIZE)), raw=bytes(SIZE - 1)),
    "no end": then(found(entry(0)), (Message.BYTES, wire.pack_bytes(SIZE)), raw=bytes(SIZE)),
    "the end of another lease": then(found(entry(0)), (Message.END, wire.End(9).pack())),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_peer_that_answers_nonsense_is_an_error_in_time(lie):
    with (
        closing(Liar(lie)) as liar,
        reading(liar.address, timeout_s=0.1) as store,
        pytest.raises(StoreError),
    ):
        store.get([TEN[0].get()])


@pytest.mark.parametrize("lie", list(LIES.values())[:8], ids=list(LIES)[:8])
def test_a_peer_that_tells_nonsense_while_it_is_watched_is_an_error_in_time(lie):
    with (
        closing(Liar(lie)) as liar,
        reading(liar.address, timeout_s=0.1) as store,
        pytest.raises(StoreError),
    ):
        list(store.watch([TEN[0].key], 60))


def test_a_peer_that_has_a_record_of_another_length_has_none():
    answer = then(
        found(entry(0, payload_bytes=SIZE + 64)),
        (Message.BYTES, wire.pack_bytes(0)),
        (Message.END, wire.End(1).pack()),
    )
    with closing(Liar(answer)) as liar, reading(liar.address) as store:
        assert store.get([TEN[0].get()]) == [False]


def test_records_of_another_form_are_not_asked_for(peer):
    other = Record(1)
    key = bytes([Kind.PAGE]) + b"\1" * 16 + other.page_key
    with reading(peer.address) as store:
        assert store.contains([key]) == [False] and store.get([other.get()._replace(key=key)]) == [False]
        assert store.stats()["peers"]["1"]["other_form"] == 2
        assert read(store, [other]) == [True]


def test_a_record_of_no_known_kind_is_nowhere_and_harms_nobody(peer):
    known = Record(1)
    key = bytes([9]) + known.key[1:]
    with reading(peer.address) as store:
        assert store.contains([key, known.key]) == [False, True]
        assert read(store, [known]) == [True]
