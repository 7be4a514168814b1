"""What `NamedPages` promises, as checks over any store: ours, or one of your own (`tiercel store
conformance`). Every public function is a check, as in `storage.conformance.checks`: it takes an empty store,
or the subject.

    from tiercel.integrations.conformance import CHECKS
    from tiercel.storage.conformance import Subject, run_checks

    for result in run_checks(Subject(open=lambda: MyStore("somewhere/empty")), CHECKS):
        print(result)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from inspect import isfunction

from tiercel.integrations.named_pages import Key, NamedPages, Pool
from tiercel.storage.base import Store
from tiercel.storage.conformance.samples import SMALL_BYTES, Inapplicable, Subject, expect, together

ABOUT = {"engine": "conformance", "model": "m", "dtype": "bf16"}
KEYS = [f"key {number}" for number in range(20)]
_SIZES = (1, 300, 64 << 10, 3 << 20)
_THREADS = 6


def pages_come_back_as_they_were_put(store: Store) -> None:
    """Pages of each length; those that were not put are misses."""
    pages = NamedPages(store, ABOUT)
    for size in _SIZES:
        pool = pages.pool("kv", size)
        expect(_found(pool, KEYS) == [False] * 20, f"an empty store has pages of {size} B")
        _keep(pool, KEYS[::2])
        expect(_found(pool, KEYS) == [True, False] * 10, f"pages of {size} B, some of which were put")
        expect(pool.delete([KEYS[0], KEYS[1]]) == 1, "delete counts wrong")
        expect(_found(pool, KEYS[:3]) == [False, False, True], "after a delete")
    counted = pages.stats()
    expect((counted["kept"], counted["damaged"], counted["failures"]) == (40, 0, 0), f"counted {counted}")


def a_page_may_be_in_pieces_and_a_key_any_text_or_bytes(store: Store) -> None:
    """Pieces of any length, put in others than they are read in; keys of any length."""
    pool = NamedPages(store, ABOUT).pool("kv", 300)
    data, into = memoryview(_page("pieces", 300)), memoryview(bytearray(300))
    keys: list[Key] = [b"\0\xff", "ключ", "a" * 5000, "", b"0"]
    expect(pool.put(keys, [[data[:7], data[7:7], data[7:]]] * 5) == [True] * 5, "pieces were not kept")
    for key in [*keys, b"", "0"]:  # a text and its bytes are one key
        into[:] = bytes(300)
        expect(pool.get([key], [[into[:250], into[250:]]]) == [True], f"{key!r} was put, and is missed")
        expect(into == data, f"{key!r} came back with other bytes")


def another_meaning_is_another_page(store: Store) -> None:
    """The name of a pool, the length of its pages, what the engine says about both: a page is found by those
    only who say the same."""
    pages = NamedPages(store, ABOUT)
    _keep(pages.pool("kv", 5000), KEYS[:1])
    others = [pages.pool("window", 5000), pages.pool("kv", 5001), pages.pool("kv", 5000, {"layout": "other"})]
    for about in ({**ABOUT, "dtype": "fp8"}, {**ABOUT, "rank": 0}, {}):
        others.append(NamedPages(store, about).pool("kv", 5000))
    for pool in others:
        expect(_found(pool, KEYS[:1]) == [False], "a page was found by who means another one")
    same = NamedPages(store, dict(reversed(ABOUT.items()))).pool("kv", 5000)
    expect(_found(same, KEYS[:1]) == [True], "a page is not found by who means the same")


def a_spoiled_page_is_a_miss_and_can_be_put_again(subject: Subject) -> None:
    """Its record is deleted; the pages beside it stay."""
    if subject.spoil is None:
        raise Inapplicable("nobody says how to damage a value")
    store = subject.open()
    pages = NamedPages(store, ABOUT)
    pool = pages.pool("kv", 5000)
    _keep(pool, KEYS[:3])
    subject.spoil(store, pool.record(KEYS[1]))
    expect(_found(pool, KEYS[:3], held=False) == [True, False, True], "one of three pages was damaged")
    expect(pool.holds(KEYS[:3]) == [True, False, True], "a damaged page is still listed")
    _keep(pool, KEYS[:3])
    expect(_found(pool, KEYS[:3]) == [True] * 3, "put again after it was damaged")


def threads_may_use_a_pool(store: Store) -> None:
    """Each puts and gets pages of its own."""
    pool = NamedPages(store, ABOUT).pool("kv", 5000)

    def act(number: int) -> None:
        keys = [f"{number} {each}" for each in KEYS]
        _keep(pool, keys)
        expect(_found(pool, keys) == [True] * 20, f"thread {number} misses what it put")

    together(partial(act, number) for number in range(_THREADS))


def a_full_store_loses_pages_and_mixes_up_none(subject: Subject) -> None:
    """Three times as many pages as it has room for."""
    if subject.open_small is None:
        raise Inapplicable("nobody says how to open a small store")
    pool = NamedPages(subject.open_small(), ABOUT).pool("kv", 256 << 10)
    keys = [f"{number}" for number in range(3 * SMALL_BYTES // (256 << 10))]
    for first in range(0, len(keys), 16):
        pool.put(keys[first : first + 16], [_page(key, 256 << 10) for key in keys[first : first + 16]])
    found = sum(_found(pool, keys, held=False))
    expect(0 < found < len(keys), f"{found} of {len(keys)} pages are in a store with room for a third")


def a_store_that_fails_costs_hits_only(store: Store) -> None:
    """Here it is closed. No call of a pool raises an error."""
    pages = NamedPages(store, ABOUT)
    pool = pages.pool("kv", 5000)
    _keep(pool, KEYS[:1])
    store.close()
    for _ in range(5):
        expect(_found(pool, KEYS[:1]) == [False], "a closed store has pages")
        expect(pool.put(KEYS[:1], [_page(KEYS[0], 5000)]) == [False], "a closed store keeps pages")
        expect(pool.delete(KEYS[:1]) == 0, "a closed store deletes pages")
    expect(0 < pages.stats()["failures"] < 15, f"it is asked again and again: {pages.stats()}")


def pages_outlive_the_store(subject: Subject) -> None:
    """After close and open they are there."""
    if subject.open_again is None:
        raise Inapplicable("the store is not durable")
    first = NamedPages(subject.open(), ABOUT)
    _keep(first.pool("kv", 5000), KEYS)
    first.close()
    again = NamedPages(subject.open_again(), ABOUT)
    expect(_found(again.pool("kv", 5000), KEYS) == [True] * 20, "pages are lost after close and open")


CHECKS: list[Callable[..., None]] = [
    each
    for name, each in list(globals().items())
    if isfunction(each) and each.__module__ == __name__ and not name.startswith("_")
]


def _page(key: Key, size: int) -> bytes:
    return random.Random(key).randbytes(size)


def _keep(pool: Pool, keys: Sequence[str]) -> None:
    answer = pool.put(keys, [_page(key, pool.page_bytes) for key in keys])
    expect(answer == [True] * len(keys), f"put of {len(keys)} pages answered {answer}")


def _found(pool: Pool, keys: Sequence[str], *, held: bool = True) -> list[bool]:
    """Which of these pages come back. What comes back is compared. `held`: `holds` must say the same."""
    into = [bytearray(pool.page_bytes) for _ in keys]
    answer = pool.get(keys, into)
    for key, page, hit in zip(keys, into, answer, strict=True):
        expect(not hit or page == _page(key, pool.page_bytes), f"{key!r} came back with other bytes")
    expect(not held or pool.holds(keys) == answer, "holds and get do not agree")
    return answer
