"""Goal: the kernel's queue reads what preadv reads. Method: a file of numbers, reads of all kinds."""

import os
import random

import numpy as np
import pytest

from tests.storage.file.make import aligned, without_queue
from tiercel.storage.file import direct
from tiercel.storage.file.direct import Lanes
from tiercel.storage.file.queue import QUEUE_DEPTH, Queue

PAGES = 600


@pytest.fixture
def file(tmp_path):
    data = np.arange(PAGES * 1024, dtype=np.uint32).tobytes()
    (tmp_path / "numbers").write_bytes(data)
    opened = os.open(tmp_path / "numbers", os.O_RDONLY | os.O_DIRECT)
    yield opened, data
    os.close(opened)


@pytest.fixture
def lane():
    lanes = Lanes(queued=True, size=64 * 4096)
    if not lanes.queued:
        pytest.skip("this kernel has no queue for us")
    with lanes.take() as lane:
        yield lane
    lanes.close()


def test_any_reads_give_what_is_there(file, lane):
    """Aligned and not, one view and many, more than the queue or staging holds at once."""
    opened, data = file
    chance = random.Random(0)
    for _ in range(20):
        requests, expected = [], []
        for _ in range(chance.randint(1, 2 * QUEUE_DEPTH)):
            pages = chance.choice([1, 2, 8, 30])
            start = chance.randrange(PAGES - pages) * 4096
            memory = aligned(bytes(pages * 4096 + 4096))
            shift = chance.choice([0, 0, 1])
            whole = memory[shift : shift + pages * 4096]
            cut = chance.choice([0, 100, 4096])
            requests.append((opened, start, [whole[:cut], whole[cut:]] if cut else [whole]))
            expected.append((whole, data[start : start + pages * 4096]))
        assert direct.read_many(requests, lane) == [True] * len(requests)
        assert all(got == want for got, want in expected)


def test_a_read_past_the_end_is_told_and_the_others_are_right(file, lane):
    opened, data = file
    parts = [aligned(bytes(8 * 4096)) for _ in range(3)]
    requests = [(opened, 0, parts[:1]), (opened, (PAGES - 1) * 4096, parts[1:2]), (opened, 4096, parts[2:])]
    assert direct.read_many(requests, lane) == [True, False, True]
    assert parts[0] == data[: 8 * 4096] and parts[2] == data[4096 : 9 * 4096]


def test_a_read_that_fails_is_an_error(file, lane):
    opened, _ = file
    parts = [aligned(bytes(4096)) for _ in range(2)]
    closed = os.dup(opened)
    os.close(closed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        direct.read_many([(opened, 0, parts[:1]), (closed, 0, parts[1:])], lane)


def test_what_the_kernel_does_not_take_is_read_one_by_one(file, lane, monkeypatch):
    opened, data = file
    monkeypatch.setattr(Queue, "_carry", lambda queue, count: [-11] * count)
    parts = [aligned(bytes(4096)) for _ in range(2)]
    assert direct.read_many([(opened, 0, parts[:1]), (opened, 4096, parts[1:])], lane) == [True, True]
    assert parts == [data[:4096], data[4096:8192]]


def test_an_unknown_machine_has_no_queue(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    with pytest.raises(OSError, match="unknown machine"):
        Queue()


def test_without_a_queue_reads_are_done_one_by_one(file, monkeypatch):
    opened, data = file
    without_queue(monkeypatch)
    lanes = Lanes(queued=True)
    parts = [aligned(bytes(4096)) for _ in range(2)]
    with lanes.take() as lane:
        assert direct.read_many([(opened, 0, parts[:1]), (opened, 4096, parts[1:])], lane) == [True, True]
    assert not lanes.queued and parts == [data[:4096], data[4096:8192]]
