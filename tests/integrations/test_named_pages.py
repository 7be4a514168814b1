"""Goal: pages of any engine come back as they were put, or are missed. Method: bytes that are flipped on the
disk; stores that fail. (What holds over any store: `tiercel.integrations.conformance`, run by
`tests/contract`.)"""

import random

import pytest

from tests.storage.file.make import SEGMENT_BYTES, files_of
from tests.storage.shared.make import make_shared
from tiercel.errors import ConfigError, StoreError
from tiercel.integrations.named_pages import NamedPages
from tiercel.storage.file import FileStore
from tiercel.storage.memory import MemoryStore

ABOUT = {"engine": "tests", "model": "m", "dtype": "bf16"}
SIZE = 5000
KEYS = [f"key {n}" for n in range(20)]


def file_store(folder):
    return FileStore(folder, 1 << 20, segment_bytes=SEGMENT_BYTES, free=0)


STORES = {"memory": lambda _: MemoryStore(), "file": file_store, "shared": make_shared}


@pytest.fixture(params=STORES)
def pages(request, tmp_path):
    pages = NamedPages(STORES[request.param](tmp_path), ABOUT)
    yield pages
    pages.close()


def bytes_of(key, size=SIZE):
    return random.Random(key).randbytes(size)


def empty(count, size=SIZE):
    return [memoryview(bytearray(size)) for _ in range(count)]


def right(pool, *keys):
    """Which of these pages come back; what comes back is compared."""
    into = empty(len(keys), pool.page_bytes)
    found = pool.get(keys, into)
    assert all(
        page == bytes_of(key, pool.page_bytes)
        for key, page, hit in zip(keys, into, found, strict=True)
        if hit
    )
    assert not any(hit and not here for hit, here in zip(found, pool.holds(keys), strict=True))
    return found


def test_what_was_put_comes_back(pages):
    pool = pages.pool("kv", SIZE)
    assert right(pool, *KEYS) == [False] * 20
    assert pool.put(KEYS[::2], [bytes_of(key) for key in KEYS[::2]]) == [True] * 10
    assert right(pool, *KEYS) == pool.holds(KEYS) == [True, False] * 10
    assert pool.put(KEYS, [bytes_of(key) for key in KEYS]) == [True] * 20
    assert right(pool, *KEYS) == [True] * 20
    assert pages.stats() == {
        "state": "working", "hits": 30, "misses": 30, "kept": 30, "refused": 0, "damaged": 0, "failures": 0,
    }  # fmt: skip
    assert pool.delete([KEYS[0], KEYS[1], "nobody"]) == 2
    assert pool.holds(KEYS[:3]) == [False, False, True]
    assert pool.get([], []) == pool.put([], []) == pool.holds([]) == []


def test_a_page_of_another_length_is_the_callers_mistake(pages):
    pool = pages.pool("kv", SIZE)
    with pytest.raises(ConfigError, match="a page of kv has 5,000 bytes"):
        pool.put(["a"], [b"short"])
    with pytest.raises(ConfigError, match="a page of kv has 5,000 bytes"):
        pool.get(["a"], empty(1, SIZE + 1))
    with pytest.raises(ConfigError, match="must have bytes"):
        pages.pool("nothing", 0)
    with pytest.raises(ValueError, match="zip"):
        pool.put(["a", "b"], [bytes_of("a")])


def test_no_byte_that_was_flipped_is_ever_returned(tmp_path):
    pages = NamedPages(file_store(tmp_path), ABOUT)
    pool = pages.pool("kv", SIZE)
    pool.put(KEYS, [bytes_of(key) for key in KEYS])
    chance, flipped = random.Random(1), set(KEYS[::2])
    for key in flipped:  # one byte in each of these pages
        for name in files_of(tmp_path):
            data = bytearray((tmp_path / name).read_bytes())
            if (at := data.find(bytes_of(key)[:64])) >= 0:
                data[at + chance.randrange(SIZE)] ^= 1 << chance.randrange(8)
                (tmp_path / name).write_bytes(data)
                break
        else:
            raise AssertionError(key)
    assert right(pool, *KEYS) == [key not in flipped for key in KEYS]
    assert pages.stats()["damaged"] == 10
    assert pool.holds(KEYS) == [key not in flipped for key in KEYS], "they are deleted"
    assert all(pool.put(KEYS, [bytes_of(key) for key in KEYS])) and all(right(pool, *KEYS))
    pages.close()


def test_a_store_is_never_larger_than_it_may_be(tmp_path):
    pages = NamedPages(file_store(tmp_path), ABOUT)
    pool = pages.pool("kv", SIZE)
    keys = [f"{n}" for n in range(1000)]
    for key in keys:
        pool.put([key], [bytes_of(key)])
    assert sum((tmp_path / name).stat().st_size for name in files_of(tmp_path)) <= 1 << 20
    found = right(pool, *keys)
    assert 50 < sum(found) < 300 and found[-1]
    pages.close()


class Failing(MemoryStore):
    broken = False

    def __getattribute__(self, name):
        if name in ("contains", "get", "put", "delete") and object.__getattribute__(self, "broken"):
            return self.fail
        return object.__getattribute__(self, name)

    def fail(self, *_):
        self.asked += 1
        raise StoreError("the disk is gone")

    asked = 0


def test_a_store_that_fails_costs_hits_and_is_left_alone(caplog):
    now = [0.0]
    store = Failing()
    pages = NamedPages(store, ABOUT, clock=lambda: now[0])
    pool = pages.pool("kv", SIZE)
    pool.put(["a"], [bytes_of("a")])
    store.broken = True
    for _ in range(10):
        assert right(pool, "a") == [False]
        assert pool.put(["b"], [bytes_of("b")]) == [False]
    assert store.asked == pages.stats()["failures"] == 3 and pages.stats()["state"] == "off"
    assert caplog.text.count("the disk is gone") == 1
    store.broken, now[0] = False, 1.0
    assert right(pool, "a") == [True] and pages.stats()["state"] == "working"


def test_a_mistake_while_the_store_is_tried_again_does_not_leave_it_off():
    now = [0.0]
    store = Failing()
    pages = NamedPages(store, ABOUT, clock=lambda: now[0])
    pool = pages.pool("kv", SIZE)
    store.broken = True
    for _ in range(3):
        pool.holds(["a"])
    now[0] = 1.0
    with pytest.raises(KeyError):
        pages.call(lambda: {}["bug"], None)
    store.broken = False
    assert pool.holds(["a"]) == [False] and pages.stats()["state"] == "working"
