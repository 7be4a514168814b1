"""Goal: one owner's connections and requests leave time for those of the others, and nobody is held up who is
alone. Method: the parts with a clock of their own, and a real server with real sockets."""

import asyncio
import os
import selectors
import socket
import time
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.scripted import LOOPBACK, ScriptedService, served
from tests.wait import until
from tiercel.server.http import aside, pace
from tiercel.server.http.aside import Turns
from tiercel.server.http.keys import Owners
from tiercel.server.http.pace import Bucket, Door, Pace
from tiercel.server.options import ServerOptions


class Jumping(selectors.DefaultSelector):
    """Where an event loop would wait, its time jumps."""

    now_s = 0.0

    def select(self, timeout=None):
        self.now_s += timeout or 0.0
        return super().select(0)


class Clock(asyncio.SelectorEventLoop):
    def __init__(self):
        self.selector = Jumping()
        super().__init__(self.selector)

    def time(self):
        return self.selector.now_s


def run(coroutine):
    with asyncio.Runner(loop_factory=Clock) as runner:
        return runner.run(coroutine)


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5)), max_size=30))
def test_a_bucket_gives_so_many_a_second(steps):
    bucket, now_s, taken = Bucket(2.0, 4, 0.0), 0.0, 0
    for pause_s, count in steps:
        now_s += pause_s
        if not bucket.wait_s(now_s):
            bucket.take(count)
            taken += count
        assert taken <= 4 + 2 * now_s + 4, "what is overdrawn is less than the largest part"
        now_s += bucket.wait_s(now_s)
        assert bucket.wait_s(now_s) < 1e-9


async def until_set(event):
    await event.wait()


async def begun(owners, *, beside):
    """When a request of each owner began. `beside`: who has a request open all the time."""
    here, loop = Pace(), asyncio.get_running_loop()
    times = {owner: [] for owner in owners}
    ends = asyncio.Event()

    open_ones = [asyncio.create_task(here.counting(owner, until_set)(ends)) for owner in beside]
    await asyncio.sleep(0)
    for owner in owners:
        here.begin(owner, lambda owner=owner: times[owner].append(loop.time()) or True)
    while sum(map(len, times.values())) < len(owners):
        await asyncio.sleep(0.01)
    ends.set()
    await asyncio.gather(*open_ones)
    return times


def test_who_is_alone_is_not_held_up():
    times = run(begun(["a"] * 1000, beside=["a"]))
    assert times["a"] == [0.0] * 1000


def test_who_begins_many_while_others_are_there_begins_them_in_time():
    times = run(begun([*["a"] * 1000, "b"], beside=["b"]))
    at_once, per_s = pace.OWNER_MS_AFTER_A_PAUSE / pace.REQUEST_MS, pace.OWNER_MS_PER_S / pace.REQUEST_MS
    assert times["b"] == [0.0], "nobody waits for another's"
    assert sum(each == 0 for each in times["a"]) == pytest.approx(at_once, abs=2)
    assert times["a"][-1] == pytest.approx((1000 - at_once) / per_s, rel=0.02)
    assert times["a"] == sorted(times["a"])


def test_who_was_alone_owes_nothing_when_another_comes():
    async def scene():
        here, loop, times = Pace(), asyncio.get_running_loop(), []
        for _ in range(1000):
            here.spend("a", 0.01)
        ends = asyncio.Event()
        other = asyncio.create_task(here.counting("b", lambda: until_set(ends))())
        await asyncio.sleep(0)
        here.begin("a", lambda: times.append(loop.time()) or True)
        await asyncio.sleep(10)
        ends.set()
        await other
        return times

    assert run(scene())[0] < 0.1


def test_a_request_whose_client_has_left_takes_nobodys_time():
    async def scene():
        here, loop, ends = Pace(), asyncio.get_running_loop(), asyncio.Event()
        other = asyncio.create_task(here.counting("b", lambda: until_set(ends))())
        await asyncio.sleep(0)
        here.spend("a", 0.2)
        times = []
        for _ in range(1000):
            here.begin("a", lambda: False)
        here.begin("a", lambda: times.append(loop.time()) or True)
        await asyncio.sleep(10)
        ends.set()
        await other
        return times[0]

    assert run(scene()) < 2.0


def test_owners_that_were_here_once_are_forgotten(monkeypatch):
    monkeypatch.setattr(pace, "OWNERS_KEPT", 8)

    async def scene():
        here = Pace()
        for number in range(100):
            here.spend(str(number), 0.1)
        return len(here._buckets)

    assert run(scene()) <= 8


def test_a_wrong_key_is_no_owner_of_its_own():
    owners = Owners(ServerOptions(api_key=("one", "two"), admin_key="three"))
    named = {
        key: owners.find({"authorization": f"Bearer {key}"}, "1.2.3.4") for key in ("one", "two", "three")
    }
    assert len({*named.values(), "1.2.3.4"}) == 4
    assert owners.find({"x-api-key": "one"}, "1.2.3.4") == named["one"]
    for headers in ({}, {"authorization": "Bearer four"}, {"authorization": "Basic one"}):
        assert owners.find(headers, "1.2.3.4") == "1.2.3.4"


# Work on large bodies


class Strict:
    """A pace that lets everybody rest for a hundred seconds for each second of work."""

    def __init__(self):
        self.spent_s = {}

    def spend(self, owner, seconds):
        self.spent_s[owner] = seconds
        return 100 * seconds


def test_who_has_done_large_work_rests_and_others_do_not_wait_for_it():
    async def scene():
        begun, loop, strict = [], asyncio.get_running_loop(), Strict()
        turns = Turns(1, "test", each=1, pace=strict)

        def work(owner):
            begun.append((owner, loop.time()))
            until_s = time.thread_time() + 0.02
            while time.thread_time() < until_s:
                pass

        await asyncio.gather(*(turns.run(owner, work, owner) for owner in "aaab"))
        return begun, strict.spent_s

    begun, spent_s = run(scene())
    assert 0.02 <= spent_s["a"] < 2 and [owner for owner, _ in begun] == [*"abaa"]
    first, second, third = (at_s for owner, at_s in begun if owner == "a")
    assert second - first >= 2 and third - second >= 2, "each rest is a hundred times as long as the work"


def test_tokenizing_does_not_count_as_holding_the_interpreter(monkeypatch):
    strict, at_s = Strict(), iter([1.0, 5.0])
    monkeypatch.setattr(aside, "tokenizing_s", lambda: next(at_s))
    with pytest.MonkeyPatch.context() as patch:
        clock = iter([10.0, 14.5])
        patch.setattr(time, "thread_time", lambda: next(clock))
        asyncio.run(Turns(1, "test", each=1, pace=strict).run("a", lambda: None))
    assert strict.spent_s == {"a": 0.5}


# Connections


@contextmanager
def listening():
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen(pace.BACKLOG)
        yield socket.socket(fileno=os.dup(listener.fileno())), listener.getsockname()[1]  # as the server does


@asynccontextmanager
async def open_door(listener, held_max):
    """Yields the addresses of those who were let in."""
    made, transports = [], []

    class Silent(asyncio.Protocol):
        def connection_made(self, transport):
            made.append(transport.get_extra_info("peername"))
            transports.append(transport)

    door = Door([listener], Silent, None, held_max)
    yield made
    door.close()
    await door.wait_closed()
    for transport in transports:
        transport.abort()
    await asyncio.sleep(0)


async def let_in(addresses, *, held_max, more=()):
    """In which order clients are let in that have all knocked; `more`: who knocks once the first are in."""
    with listening() as (listener, port):

        def knock(address):
            return socket.create_connection(("127.0.0.1", port), source_address=(address, 0))

        clients = [knock(address) for address in addresses]
        async with open_door(listener, held_max) as made:
            while len(made) < pace.LET_IN_AFTER_A_PAUSE:
                await asyncio.sleep(0.001)
            first = len(made)
            clients += [knock(address) for address in more]
            while len(made) < (len(clients) if held_max > len(clients) else first + 2 * len(more)):
                await asyncio.sleep(0.01)
    for client in clients:
        client.close()
    return [address for address, _ in made[first:]]


def test_at_the_door_addresses_take_turns(monkeypatch):
    monkeypatch.setattr(pace, "LET_IN_AFTER_A_PAUSE", 8)
    monkeypatch.setattr(pace, "LET_IN_PER_S", 50.0)
    later = asyncio.run(let_in(["127.0.0.1"] * 40, held_max=100, more=["127.0.0.2"] * 2))
    assert later.index("127.0.0.2") <= 4, "it does not wait behind the forty"
    assert later.count("127.0.0.2") == 2 and len(later) >= 30, "and all come in"


async def knocked(addresses, *, held_max, let_in):
    """Of clients that have all knocked before the door opens: who is let in first, and who is sent away."""
    with listening() as (listener, port):
        clients = [
            socket.create_connection(("127.0.0.1", port), source_address=(address, 0))
            for address in addresses
        ]
        async with open_door(listener, held_max) as made:
            while len(made) < let_in:
                await asyncio.sleep(0.001)
            ports = [client.getsockname()[1] for client in clients]
            away = [i for i, client in enumerate(clients) if is_closed(client)]
    for client in clients:
        client.close()
    return [ports.index(port) for _, port in made], away


def is_closed(client):
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_of_one_address_the_newest_and_the_oldest_take_turns(monkeypatch):
    monkeypatch.setattr(pace, "LET_IN_AFTER_A_PAUSE", 6)
    first, away = asyncio.run(knocked(["127.0.0.1"] * 20, held_max=100, let_in=6))
    assert first[:6] == [19, 0, 18, 1, 17, 2] and away == []


def test_if_too_many_wait_at_the_door_the_oldest_of_the_longest_line_is_sent_away(monkeypatch):
    monkeypatch.setattr(pace, "LET_IN_AFTER_A_PAUSE", 4)
    addresses = ["127.0.0.2"] * 2 + ["127.0.0.1"] * 38
    first, away = asyncio.run(knocked(addresses, held_max=10, let_in=4))
    assert away == [*range(2, 32)], "none of the shorter line"
    assert {0, 1} & {*first[:4]}


def test_a_door_survives_an_error_and_opens_again(monkeypatch, caplog):
    monkeypatch.setattr(pace, "RETRY_S", 0.05)

    class Broken:
        """A listener that has no more files, once."""

        def __init__(self, own):
            self._own, self.broken = own, True

        def accept(self):
            if self.broken:
                self.broken = False
                raise OSError(24, "Too many open files")
            return self._own.accept()

        def __getattr__(self, name):
            return getattr(self._own, name)

    async def scene():
        with listening() as (listener, port):
            async with open_door(Broken(listener), 10) as made:
                client = socket.create_connection(("127.0.0.1", port))
                while not made:
                    await asyncio.sleep(0.01)
                client.close()

    asyncio.run(asyncio.wait_for(scene(), 10))
    assert [each.getMessage() for each in caplog.records] == [
        "no connection can be accepted now: [Errno 24] Too many open files"
    ]


def test_a_flood_of_requests_is_answered_later_and_others_are_answered_now():
    """A key floods; another has a stream open and asks. Both get every answer."""
    service = ScriptedService(hold_after=1)
    options = replace(LOOPBACK, api_key=("flood", "other"))
    requests = b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer flood\r\n\r\n"
    with served(service, options) as url:
        host, port = url.removeprefix("http://").split(":")
        headers = {"authorization": "Bearer other"}
        asking = httpx.Client(base_url=url, headers=headers, timeout=20)
        with asking, asking.stream("POST", "/generate", json={"text": "x", "stream": True}):
            clients = [socket.create_connection((host, int(port)), timeout=20) for _ in range(64)]
            answered = 0
            for _ in range(4):
                for client in clients:
                    client.sendall(requests)
                assert asking.get("/health").status_code == 200
                for client in clients:
                    said = b""
                    while not said.endswith(b"]}"):
                        said += client.recv(65536)
                    answered += said.startswith(b"HTTP/1.1 200 ")
            assert answered == 4 * len(clients)
            for client in clients:
                client.close()
            until(lambda: service.holding.is_set(), "the stream is still open")


def asked_with(key, what="GET /v1/models"):
    return f"{what} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n\r\n".encode()


def test_requests_of_a_connection_begin_at_the_pace_of_their_owner(monkeypatch):
    monkeypatch.setattr(pace, "REQUEST_MS", 1e6)
    options = replace(LOOPBACK, api_key=("flood", "other"))
    with ExitStack() as sockets:
        with served(ScriptedService(hold_after=1), options) as url, ExitStack() as held:
            host, port = url.removeprefix("http://").split(":")
            asking = httpx.Client(base_url=url, headers={"authorization": "Bearer other"}, timeout=20)
            held.enter_context(asking)
            held.enter_context(asking.stream("POST", "/generate", json={"text": "x", "stream": True}))
            first, second = (sockets.enter_context(socket.create_connection((host, int(port)))) for _ in "12")
            first.settimeout(20)
            first.sendall(asked_with("flood"))
            assert first.recv(65536).startswith(b"HTTP/1.1 200 ")
            second.settimeout(0.5)
            second.sendall(asked_with("flood"))
            with pytest.raises(TimeoutError):
                second.recv(1)
        second.settimeout(20)
        assert second.recv(65536).startswith(b"HTTP/1.1 503 "), "it had not begun when the server shut down"


def test_a_request_behind_another_of_its_connection_does_not_begin_once_the_server_shuts_down():
    service = ScriptedService(hold_after=1)
    body = b'{"text": "x"}'
    ask = (
        b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n"
    )
    with served(service) as url:
        host, port = url.removeprefix("http://").split(":")
        client = socket.create_connection((host, int(port)), timeout=20)
        client.sendall(2 * (ask + body))
        until(lambda: service.holding.is_set(), "the first one is being answered")
    with client:
        said = b""
        while more := client.recv(65536):
            said += more
    assert len(service.asks) == 1 and said.count(b"HTTP/1.1 ") == 1


def test_what_an_owner_sends_is_not_read_while_it_rests(monkeypatch):
    monkeypatch.setattr(Pace, "spend", lambda *_: 30.0)
    service = ScriptedService()
    body = b'{"text": "x"}'
    head = (
        b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n"
    )
    with served(service) as url:
        host, port = url.removeprefix("http://").split(":")
        client = socket.create_connection((host, int(port)), timeout=0.5)
        client.sendall(head)
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        client.sendall(body)
        with pytest.raises(TimeoutError):
            client.recv(1)
    with client:
        client.settimeout(20)
        said = client.recv(65536)
    assert said.startswith(b"HTTP/1.1 503 ") and b"was not begun when the server shut down" in said
    assert service.asks == []


def test_small_writes_are_sent_at_once():
    """An answer of several writes would wait 40 ms for each otherwise."""

    async def scene():
        found = asyncio.get_running_loop().create_future()

        class Asking(asyncio.Protocol):
            def connection_made(self, transport):
                own = transport.get_extra_info("socket")
                found.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        with listening() as (listener, port):
            door = Door([listener], Asking, None, 10)
            with socket.create_connection(("127.0.0.1", port)):
                nodelay = await asyncio.wait_for(found, 10)
            door.close()
            await door.wait_closed()
        return nodelay

    assert asyncio.run(scene()) == 1
