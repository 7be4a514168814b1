"""Goal: a router learns exactly what is cached, and the engine does not notice. Method: real sockets, and
payloads decoded as the documented arrays, without the code that wrote them."""

import hashlib
import re
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cache.test_tiered_cache import Driver
from tests.wait import until
from tiercel import events
from tiercel.errors import ConfigError
from tiercel.events import EventPublisher, Ledger
from tiercel.tree.check import readable
from tiercel.tree.node import Cleared, Event
from tiercel.types import Kind, Tier

PAGE_TOKENS = 4
LOCAL = "tcp://127.0.0.1:*"
WAIT_MS = 10_000
DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE


def key_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def number_of(name: str) -> int:
    """A page's hash on the wire."""
    (number,) = struct.unpack(">q", key_of(name)[:8])
    return number


def tokens_of(name: str) -> tuple[int, ...]:
    return tuple(key_of(name)[:PAGE_TOKENS])


def stored(name: str, parent: str = "", tier: Tier = DEVICE, *, kind: Kind = Kind.PAGE, known: bool = True):
    tokens = struct.pack(f"<{PAGE_TOKENS}I", *tokens_of(name)) if known else b""
    return Event(True, tier, kind, key_of(name), key_of(parent) if parent else b"", tokens)


def removed(name: str, tier: Tier = DEVICE, *, kind: Kind = Kind.PAGE):
    return Event(False, tier, kind, key_of(name))


class Subscriber:
    """Reads what one publisher sends, by number."""

    def __init__(self, socket, publisher):
        self.socket = socket
        self.publisher = publisher
        self.read = 0
        """Up to this number, all was read."""

    def batch(self):
        """(topic, number, what the payload says)."""
        assert self.socket.poll(WAIT_MS), "nothing came"
        topic, number, payload = self.socket.recv_multipart()
        self.read = int.from_bytes(number, "big") + 1
        return topic, self.read - 1, msgspec.msgpack.decode(payload)

    def tell(self, *told):
        """Publish, and read what comes of it."""
        self.publisher(list(told))
        return self.batch()[2][1]

    def join(self):
        """A subscription takes a while to arrive: until it has, what is published is lost."""
        for _ in range(WAIT_MS // 10):
            self.publisher([Cleared(DEVICE)])
            if self.socket.poll(10):
                break
        while self.read < self.publisher.queued:
            self.batch()
        return self


@contextmanager
def publishing(endpoint: str = LOCAL, kind: type[EventPublisher] = EventPublisher, **options):
    publisher = kind(endpoint, **{"page_tokens": PAGE_TOKENS} | options)
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def subscribed(**options):
    with publishing(**options) as publisher, zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(publisher.endpoint)
        socket.subscribe(b"")
        yield Subscriber(socket, publisher).join()


@contextmanager
def asking(publisher):
    """A socket to ask for a replay on, which holds little."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set_hwm(1)
        socket.connect(publisher.replay_endpoint)
        yield socket


def replayed(socket, first: int, *envelope: bytes) -> list[int]:
    """Numbers of what is sent again, from `first` on."""
    socket.send_multipart([*envelope, first.to_bytes(8, "big")])
    return answered(socket, *envelope)


def answered(socket, *envelope: bytes) -> list[int]:
    """Numbers up to the end."""
    numbers = []
    while True:
        assert socket.poll(WAIT_MS), "nothing came"
        *around, number, payload = socket.recv_multipart()
        assert around == list(envelope)
        if not payload:
            assert number == (-1).to_bytes(8, "big", signed=True)
            return numbers
        numbers.append(int.from_bytes(number, "big"))


def kept(publisher, count: int):
    """Wait until `count` batches can be replayed."""
    with asking(publisher) as socket:
        while len(numbers := replayed(socket, 0)) < count:
            pass
    return numbers


# What is said


def test_a_batch_is_topic_number_and_arrays_as_documented():
    with subscribed(topic="kv@pod@model") as subscriber:
        before = subscriber.publisher.queued
        subscriber.publisher([stored("a"), stored("b", "a"), removed("b")])
        topic, number, (seconds, told, rank) = subscriber.batch()
    assert (topic, number, rank) == (b"kv@pod@model", before, 0)
    assert seconds > 1.7e9
    hashes = [number_of("a"), number_of("b")]
    tokens = [*tokens_of("a"), *tokens_of("b")]
    assert told == [
        ["BlockStored", hashes, None, tokens, PAGE_TOKENS, None, "GPU", None],
        ["BlockRemoved", [number_of("b")], "GPU"],
    ]


class FieldEvent(msgspec.Struct, array_like=True, tag=True):
    """As routers declare them: vLLM's fields, in vLLM's order."""


class BlockStored(FieldEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple | None] | None = None


class BlockRemoved(FieldEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(FieldEvent):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def test_a_router_that_knows_the_fields_types_reads_a_batch():
    told = Ledger(PAGE_TOKENS).tell([stored("a", tier=HOST), stored("b", "a", HOST), Cleared(HOST)])
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode((1.5, told, 0)), type=Batch)
    assert batch == Batch(
        1.5,
        [
            BlockStored(
                [number_of("a"), number_of("b")],
                None,
                [*tokens_of("a"), *tokens_of("b")],
                PAGE_TOKENS,
                None,
                "CPU_PINNED",
                None,
            ),
            BlockRemoved([number_of("b"), number_of("a")], "CPU_PINNED"),
            AllBlocksCleared(),
        ],
        0,
    )


def test_hashes_fit_in_a_signed_number_of_64_bits():
    assert events.hash_of(b"\xff" * 32) == -1
    assert events.hash_of(b"\x7f" + b"\xff" * 31) == 2**63 - 1


@pytest.mark.parametrize(("tier", "medium"), [(DEVICE, "GPU"), (HOST, "CPU_PINNED"), (STORE, "DISK")])
def test_a_tier_has_a_medium(tier, medium):
    (told,) = Ledger(PAGE_TOKENS).tell([stored("a", tier=tier)])
    assert told.medium == medium


def shapes(*given) -> list[tuple[str, int]]:
    """What each event of a batch is, and of how many pages."""
    told = Ledger(PAGE_TOKENS).tell(given)
    return [(each.tag, len(getattr(each, "block_hashes", ()))) for each in told]


def test_a_chain_is_one_event_until_it_branches_or_changes_its_tier():
    pages = (stored("a"), stored("b", "a"), stored("c", "b"))
    assert shapes(*pages) == [("BlockStored", 3)]
    assert shapes(*pages, stored("d", "a")) == [("BlockStored", 3), ("BlockStored", 1)]
    assert shapes(stored("a"), stored("b", "a", HOST)) == [("BlockStored", 1)] * 2
    assert shapes(stored("a"), stored("b")) == [("BlockStored", 1)] * 2


def test_chains_of_two_tiers_may_be_told_by_turns():
    """As everything is told to who comes late: page by page, of each page every tier."""
    pages = [stored(name, parent, tier) for name, parent in (("a", ""), ("b", "a")) for tier in Tier]
    assert shapes(*pages) == [("BlockStored", 2)] * 3
    assert shapes(pages[0], removed("a"), *pages[1:3], *pages) == [
        ("BlockStored", 1),
        ("BlockRemoved", 1),
        *[("BlockStored", 1)] * 2,
        ("BlockStored", 2),
        *[("BlockStored", 2)] * 2,
    ]


def test_a_chain_ends_where_its_tier_loses_something():
    ledger = Ledger(PAGE_TOKENS)
    ledger.tell([stored("a"), stored("b", "a")])
    told = ledger.tell([stored("a"), removed("b"), stored("b", "a")])
    assert [each.tag for each in told] == ["BlockStored", "BlockRemoved", "BlockStored"]
    told = ledger.tell([stored("a"), Cleared(DEVICE), stored("b", "a")])
    assert [each.tag for each in told] == ["BlockStored", "BlockRemoved", "AllBlocksCleared", "BlockStored"]


def test_tails_are_not_told_and_do_not_break_a_chain():
    assert shapes(stored("a", kind=Kind.TAIL), removed("a", kind=Kind.TAIL)) == []
    assert shapes(stored("a"), stored("a", kind=Kind.TAIL), stored("b", "a")) == [("BlockStored", 2)]


def test_pages_whose_tokens_are_not_known_have_an_event_without_any():
    told = Ledger(PAGE_TOKENS).tell([stored("a"), stored("b", "a", known=False)])
    assert [each.token_ids for each in told] == [list(tokens_of("a")), []]
    assert told[1].parent_block_hash == number_of("a")


def test_removals_that_follow_each_other_are_one_event():
    pages = (stored("a"), stored("b", "a"), stored("h", tier=HOST))
    gone = (removed("b"), removed("a"), removed("h", HOST))
    assert shapes(*pages, *gone)[2:] == [("BlockRemoved", 2), ("BlockRemoved", 1)]


def test_what_was_never_told_is_not_taken_back():
    assert shapes(removed("a"), stored("b"), removed("b", HOST)) == [("BlockStored", 1)]


def test_an_event_has_a_limit_of_pages():
    most = events.HASHES_MOST
    names = [str(at) for at in range(most + 2)]
    pages = [stored(name, parent) for name, parent in zip(names, ["", *names], strict=False)]
    assert shapes(*pages) == [("BlockStored", most), ("BlockStored", 2)]
    gone = [removed(name) for name in names]
    assert shapes(*pages, *gone)[2:] == [("BlockRemoved", most), ("BlockRemoved", 2)]
    assert shapes(*pages, Cleared(DEVICE))[2:-1] == [("BlockRemoved", most), ("BlockRemoved", 2)]


def test_clearing_one_tier_names_its_pages_children_first():
    given = (stored("a"), stored("s", tier=STORE), stored("t", "s", STORE), Cleared(STORE))
    told = Ledger(PAGE_TOKENS).tell(given)
    assert told[-1] == ("BlockRemoved", [number_of("t"), number_of("s")], "DISK")


def test_clearing_all_that_is_left_says_so_once():
    given = (stored("a"), stored("h", tier=HOST), Cleared(DEVICE), Cleared(HOST), Cleared(STORE))
    assert shapes(*given)[2:] == [("BlockRemoved", 1), ("BlockRemoved", 1), ("AllBlocksCleared", 0)]


# Replaying what was said


def replay(cached: dict[str, set[int]], told) -> None:
    for name, *fields in told:
        match name:
            case "BlockStored":
                hashes, parent, tokens, block_size, _, medium, _ = fields
                assert len(set(hashes)) == len(hashes) and parent not in hashes
                assert len(tokens) in (0, block_size * len(hashes))
                cached.setdefault(medium, set()).update(hashes)
            case "BlockRemoved":
                hashes, medium = fields
                assert set(hashes) <= cached[medium], "removed what was not there"
                cached[medium] -= set(hashes)
            case "AllBlocksCleared":
                assert not any(cached.values()), "the pages are named first"


NAMES = [f"{text}{page}" for text in "xy" for page in range(3)]
TIERS, KINDS, YES_OR_NO = st.sampled_from(list(Tier)), st.sampled_from(list(Kind)), st.booleans()


def parent_of(name: str) -> str:
    """x2 comes after x1."""
    return name[0] + str(int(name[1]) - 1) if name[1] != "0" else ""


@st.composite
def happenings(draw) -> list:
    """One event, or a chain of stores."""
    tier, name = draw(TIERS), draw(st.sampled_from(NAMES))
    match draw(st.sampled_from(["store", "chain", "remove", "clear"])):
        case "store":
            return [stored(name, parent_of(name), tier, kind=draw(KINDS), known=draw(YES_OR_NO))]
        case "chain":
            names = [each for each in NAMES if each[0] == name[0] and each <= name]
            return [stored(each, parent_of(each), tier) for each in names]
        case "remove":
            return [removed(name, tier, kind=draw(KINDS))]
    return [Cleared(tier)]


STEPS = st.lists(st.lists(happenings(), max_size=8), max_size=8)


def happen(content: dict[Tier, set[str]], event) -> None:
    """The stupid model: which pages are where."""
    if isinstance(event, Cleared):
        content[event.tier].clear()
    elif event.kind is Kind.PAGE:
        (content[event.tier].add if event.stored else content[event.tier].discard)(event.key)


@pytest.fixture(scope="module")
def subscriber():
    with subscribed() as own:
        yield own


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_replaying_the_events_gives_exactly_what_each_tier_holds(subscriber, steps):
    publisher = subscriber.publisher
    publisher([Cleared(tier) for tier in Tier])
    assert subscriber.batch()[2][1][-1] == ["AllBlocksCleared"]
    content: dict[Tier, set[str]] = {tier: set() for tier in Tier}
    cached: dict[str, set[int]] = {}
    for step in (list(chain.from_iterable(each)) for each in steps):
        before = publisher.queued
        publisher(step)
        if publisher.queued > before:
            _, number, (_, told, _) = subscriber.batch()
            assert number == before
            replay(cached, told)
        for event in step:
            happen(content, event)
        for tier, medium in ((DEVICE, "GPU"), (HOST, "CPU_PINNED"), (STORE, "DISK")):
            expected = {int.from_bytes(key[:8], "big", signed=True) for key in content[tier]}
            assert cached.get(medium, set()) == expected


def test_a_real_cache_is_told_of_page_by_page(subscriber):
    driver = Driver()
    publisher, page_tokens = subscriber.publisher, driver.spec.page_tokens
    assert page_tokens == PAGE_TOKENS
    publisher([Cleared(tier) for tier in Tier])
    subscriber.batch()
    cached: dict[str, set[int]] = {}
    tokens_told: dict[int, list[int]] = {}

    def read() -> None:
        driver.cache.step()
        assert publisher.errors == 0
        while subscriber.read < publisher.queued:
            told = subscriber.batch()[2][1]
            replay(cached, told)
            for _, hashes, _, tokens, *_ in (each for each in told if each[0] == "BlockStored"):
                pages = [tokens[at : at + PAGE_TOKENS] for at in range(0, len(tokens), PAGE_TOKENS)]
                tokens_told.update(zip(hashes, pages, strict=bool(tokens)))
        expected: dict[str, set[int]] = {"GPU": set(), "CPU_PINNED": set(), "DISK": set()}
        for event in readable(driver.cache.tree):
            if event.kind is Kind.PAGE:
                expected[events.MEDIA[event.tier]].add(events.hash_of(event.key))
        assert {medium: cached.get(medium, set()) for medium in expected} == expected

    texts = [[number, *range(17)] for number in range(5)]
    driver.serve([9] * 10)
    driver.cache.watch(publisher)
    read()
    assert len(cached["GPU"]) == 2 and not tokens_told, "of what was there before, the tokens are not known"
    for text in texts:
        driver.serve(text)
        read()
        for at, key in enumerate(driver.cache.chain(text, ()).keys[: len(text) // PAGE_TOKENS]):
            assert tokens_told[events.hash_of(key)] == text[at * PAGE_TOKENS : (at + 1) * PAGE_TOKENS]
    assert cached["GPU"] and cached["CPU_PINNED"]
    driver.cache.flush()
    read()
    assert not any(cached.values())
    driver.cache.close()


# What was missed


@pytest.mark.parametrize("envelope", [(), (b"",)], ids=["bare", "like REQ"])
def test_who_missed_some_is_sent_them_again_from_a_number_on(envelope):
    with publishing(replay_endpoint=LOCAL) as publisher:
        for name in "abcd":
            publisher([stored(name)])
        kept(publisher, 4)
        with asking(publisher) as socket:
            assert replayed(socket, 0, *envelope) == [0, 1, 2, 3]
            assert replayed(socket, 2, *envelope) == [2, 3]
            assert replayed(socket, 4, *envelope) == []


def test_only_the_last_batches_are_kept():
    with publishing(replay_endpoint=LOCAL, replay_batches=3) as publisher:
        for name in "abcde":
            publisher([stored(name)])
        with asking(publisher) as socket:
            while (numbers := replayed(socket, 0)) != [2, 3, 4]:
                assert len(numbers) <= 3


@pytest.mark.parametrize("first", range(5))
def test_an_answer_is_whole_however_much_was_answered_before(first):
    """A socket that holds one answer silently loses the end of the next one."""
    with publishing(replay_endpoint=LOCAL, replay_batches=3) as publisher, asking(publisher) as socket:
        for name in "abc"[:first]:
            publisher([stored(name)])
        kept(publisher, min(first, 3))
        assert len(replayed(socket, 0)) == min(first, 3)
        for name in "defgh":
            publisher([stored(name)])
        kept(publisher, 3)
        for _ in range(20):
            assert len(replayed(socket, 0)) <= 3


def test_a_replay_to_a_slow_reader_is_whole_although_it_is_more_than_a_socket_usually_holds():
    batches, page_tokens = 3000, 1024
    tokens = struct.pack(f"<{page_tokens}I", *[2**32 - 1] * page_tokens)
    with publishing(replay_endpoint=LOCAL, page_tokens=page_tokens) as publisher:
        for _ in range(batches):
            publisher([stored("a")._replace(tokens=tokens)])
        kept(publisher, batches)
        with asking(publisher) as slow, asking(publisher) as other:
            slow.send(bytes(8))
            number, _ = slow.recv_multipart()
            assert number == bytes(8)
            # One thread answers: when another one has its answer, this one's is on its way.
            assert replayed(other, 2**63) == []
            assert answered(slow) == list(range(1, batches))


def test_a_wrong_question_is_counted_and_the_next_one_answered(caplog):
    with publishing(replay_endpoint=LOCAL) as publisher, asking(publisher) as socket:
        socket.send_multipart([b"please"])
        socket.send_multipart([b"one", b"too", b"many"])
        assert replayed(socket, 0) == []
        assert publisher.errors == 2
    assert len(caplog.records) == 1, "the first is logged, the rest counted"


# What goes wrong


class Late(EventPublisher):
    """Whose thread begins when it is told to."""

    begin: threading.Event

    def _run(self) -> None:
        self.begin.wait()
        super()._run()


def test_the_engine_does_not_wait_for_a_full_queue_and_the_gap_can_be_seen(monkeypatch):
    monkeypatch.setattr(events, "QUEUE_BATCHES", 2)
    monkeypatch.setattr(Late, "begin", threading.Event(), raising=False)
    with publishing(kind=Late, replay_endpoint=LOCAL) as publisher:
        for at in range(10):
            publisher([stored(str(at))])
        assert publisher.dropped > 0
        assert publisher.queued + publisher.dropped == 10
        through = publisher.queued
        Late.begin.set()
        kept(publisher, through)
        while publisher.queued == through:  # a queue may look full for a moment longer
            publisher([stored("last")])
        assert kept(publisher, through + 1) == [*range(through), through + publisher.dropped]
        assert publisher.errors == 0


def test_what_can_not_be_said_is_counted_and_leaves_a_gap(caplog):
    with subscribed() as subscriber:
        publisher = subscriber.publisher
        before = publisher.queued
        publisher([stored("a")._replace(tokens=b"123")])
        publisher([stored("b")])
        assert subscriber.batch()[1] == before + 1
        assert publisher.errors == 1
    assert len(caplog.records) == 1


def test_a_step_that_changes_nothing_is_no_batch():
    with publishing() as publisher:
        publisher([])
        publisher([stored("a", kind=Kind.TAIL)])
        assert publisher.queued == 0


def test_an_address_that_is_taken_is_a_mistake_of_the_caller_and_nothing_stays_open():
    with publishing() as publisher:
        port = publisher.endpoint.rpartition(":")[2]
        with pytest.raises(ConfigError, match=r"kv_events_replay = 'tcp://.*': Address already in use"):
            EventPublisher("ipc://@tiercel-test-taken", page_tokens=1, replay_endpoint=publisher.endpoint)
        with pytest.raises(ConfigError, match=r"kv_events = 'tcp://\*:\d+': Address already in use"):
            EventPublisher(f"tcp://*:{port}", page_tokens=1)
    with publishing("ipc://@tiercel-test-taken"), publishing(f"tcp://*:{port}"):
        pass


@pytest.mark.parametrize("endpoint", ["", "*", "5557", "tcp://", "tcp://*:port", "carrier-pigeon://*"])
def test_an_address_that_is_none_is_named(endpoint):
    with pytest.raises(ConfigError, match=r"^kv_events = "):
        EventPublisher(endpoint, page_tokens=1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def own_address() -> str:
    """This machine's address towards others, or loopback if it has none. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "lo", "*", "0.0.0.0", "own"])
def test_an_address_of_this_machine_is_listened_on_and_a_subscriber_gets_the_events(host):
    port, host = free_port(), own_address() if host == "own" else host
    with publishing(f"tcp://{host}:{port}") as publisher:
        assert publisher.endpoint.endswith(f":{port}") and not publisher.connects
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            reachable = host if host[0].isdigit() and host != "0.0.0.0" else "127.0.0.1"
            subscriber.connect(f"tcp://{reachable}:{port}")
            subscriber.subscribe(b"")
            assert Subscriber(subscriber, publisher).join().tell(stored("a"))[0][0] == "BlockStored"


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
@pytest.mark.parametrize("host", ["[::1]", "[::]"])
def test_addresses_of_ipv6_are_listened_on_too(host):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("there is no ::1")
    with publishing(f"tcp://{host}:*") as publisher:
        port = publisher.endpoint.rpartition(":")[2]
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.IPV6, 1)
            subscriber.connect(f"tcp://[::1]:{port}")
            subscriber.subscribe(b"")
            assert Subscriber(subscriber, publisher).join().tell(stored("a"))[0][0] == "BlockStored"


def test_a_collector_that_listens_is_connected_to_if_that_is_said():
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        port = subscriber.bind_to_random_port("tcp://127.0.0.1")
        subscriber.subscribe(b"kv@")
        with publishing(f"connect:tcp://127.0.0.1:{port}", topic="kv@a@b") as publisher:
            assert publisher.connects and publisher.endpoint == f"tcp://127.0.0.1:{port}"
            assert Subscriber(subscriber, publisher).join().tell(stored("a"))[0][0] == "BlockStored"


@pytest.mark.parametrize("field", ["kv_events", "kv_events_replay"])
def test_an_address_of_another_machine_is_refused_unless_connecting_is_said(field):
    """To connect there without a word would send everything to nobody."""
    there = "tcp://192.0.2.1:5557"
    with pytest.raises(ConfigError, match=rf"^{field} = '{there}'.* no address of this machine.*connect:"):
        if field == "kv_events":
            EventPublisher(there, page_tokens=1)
        else:
            EventPublisher(LOCAL, page_tokens=1, replay_endpoint=there)
    with pytest.raises(ConfigError, match="^kv_events = .*no.such.host"):
        EventPublisher("tcp://no.such.host.invalid:5557", page_tokens=1)


def test_what_nobody_hears_is_not_counted_as_sent():
    with publishing(replay_endpoint=LOCAL, topic="kv@a") as publisher, zmq.Context() as context:
        publisher([stored("a")])
        kept(publisher, 1)
        assert (publisher.stats().batches, publisher.stats().unheard) == (0, 1)
        with context.socket(zmq.SUB) as deaf:
            deaf.connect(publisher.endpoint)
            deaf.subscribe(b"another topic")
            until(lambda: publisher.stats().subscribers == 1, "somebody subscribed")
            publisher([stored("b")])
            kept(publisher, 2)
            assert (publisher.stats().batches, publisher.stats().unheard) == (0, 2)
        until(lambda: publisher.stats().subscribers == 0, "and left")
        with context.socket(zmq.SUB) as first, context.socket(zmq.SUB) as second:
            for number, each in enumerate((first, second), 1):
                each.connect(publisher.endpoint)
                each.subscribe(b"kv@")
                until(lambda number=number: publisher.stats().subscribers == number, "one more")
            publisher([stored("c")])
            assert first.poll(WAIT_MS) and second.poll(WAIT_MS)
            assert (publisher.stats().batches, publisher.stats().unheard) == (1, 2)
        until(lambda: publisher.stats().subscribers == 0, "both left")


def test_the_last_batches_leave_before_it_closes_and_what_comes_later_is_dropped():
    with subscribed() as subscriber:
        publisher = subscriber.publisher
        for at in range(100):
            publisher([stored(str(at))])
        publisher.close()
        publisher.close()
        told = [subscriber.batch()[2][1] for _ in range(100)]
        assert told[-1][0][1] == [number_of("99")]
        publisher([stored("late")])
        assert (publisher.dropped, publisher.errors) == (1, 0)


def test_the_subscriber_of_the_documentation_works():
    document = (Path(__file__).parents[1] / "docs" / "events.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    with publishing() as publisher:
        command = [sys.executable, "-c", program, publisher.endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                # What is published before it has subscribed is lost: say something until it speaks.
                first = threading.Event()
                lines: list[str] = []
                reader = threading.Thread(
                    target=lambda: (lines.append(process.stdout.readline()), first.set())
                )
                reader.start()
                publisher([stored("a", tier=HOST)])
                while not first.wait(0.01):
                    assert process.poll() is None
                    publisher([stored("b"), removed("b")])
                reader.join()
                publisher([stored("c", tier=STORE)])
                while "DISK" not in (line := process.stdout.readline()):
                    assert line
                assert "'DISK': 1" in line and "'GPU': 0" in line
            finally:
                process.kill()
