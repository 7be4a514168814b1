"""Goal: any parts become what direct I/O takes, and are what they were. Method: parts of all sizes at all
addresses, laid out, joined again."""

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.file.make import aligned
from tiercel.storage.file import direct
from tiercel.storage.file.direct import ALIGN
from tiercel.storage.file.queue import address

PATTERN = bytes(range(251)) * 600


def make_part(start, size, shift, kind):
    data = PATTERN[start : start + size]
    return (
        kind(data) if kind is not None else aligned(bytes(shift) + data)[shift:] if data else memoryview(b"")
    )


parts_of_any_kind = st.lists(
    st.builds(
        make_part,
        st.integers(0, 250),
        st.sampled_from([0, 1, 100, 4095, 4096, 4097, 16_384, 20_000, 65_536]),
        st.sampled_from([0, 0, 0, 1, 64]),
        st.sampled_from([None, None, bytes, bytearray]),
    ),
    min_size=1,
    max_size=12,
)


def padded_parts(parts):
    rest = -sum(map(len, parts)) % ALIGN
    return [*parts, direct.ZEROS[:rest]] if rest else list(parts)


@given(parts_of_any_kind)
def test_what_is_gathered_is_aligned_and_has_the_same_bytes(parts):
    parts = padded_parts(parts)
    views = direct.gather(parts, direct.aligned(max(sum(map(len, parts)), ALIGN)))
    assert b"".join(views) == b"".join(parts)
    assert all(address(view) % ALIGN == 0 and len(view) % ALIGN == 0 for view in views)


def test_what_lies_right_is_not_copied():
    page = aligned(PATTERN[: 5 * ALIGN + 100])
    views = direct.gather(padded_parts([b"h" * ALIGN, page]), direct.aligned(8 * ALIGN))
    assert [len(view) for view in views] == [ALIGN, 5 * ALIGN, ALIGN]
    assert address(views[1]) == address(page)


def test_the_bytes_of_a_bytearray_stay_where_they_are(monkeypatch):
    """Seldom, but now and then, one lies at a multiple of 4096."""
    page = bytearray(PATTERN[: 5 * ALIGN + 100])
    monkeypatch.setattr(direct, "_is_aligned", lambda part: part is page)
    views = direct.gather(padded_parts([page]), direct.aligned(8 * ALIGN))
    assert address(views[0]) == address(page)


class Slow(direct.Calls):
    """A file in memory that takes and gives as many bytes as it likes."""

    def __init__(self, steps):
        self.data, self.steps = bytearray(), list(steps)

    def _step(self):
        return self.steps.pop(0) if self.steps else 10**9

    def pwritev(self, file, views, offset):
        assert len(views) <= direct.VIEWS_MOST
        data = b"".join(views)[: self._step()]
        self.data[offset : offset + len(data)] = data
        return len(data)

    def preadv(self, file, views, offset):
        data, done = self.data[offset:][: self._step()], 0
        for view in views:
            some = data[done : done + len(view)]
            view[: len(some)] = some
            done += len(some)
        return done


@given(parts_of_any_kind, st.lists(st.integers(1, 8).map(lambda n: n * ALIGN), max_size=5))
def test_short_writes_and_reads_are_gone_on_with(parts, steps):
    parts = padded_parts(parts)
    if not sum(map(len, parts)):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "calls", Slow(steps))
        direct.write(0, 0, direct.gather(parts, direct.aligned(sum(map(len, parts)))))
        direct.calls.steps = list(steps)  # type: ignore[attr-defined]
        targets = [memoryview(bytearray(len(part))) for part in parts]
        assert direct.read(0, 0, targets, direct.aligned(5 * ALIGN)) is True
        assert [bytes(target) for target in targets] == [bytes(part) for part in parts]


def test_a_disk_that_takes_no_more_is_an_error(monkeypatch):
    monkeypatch.setattr(direct, "calls", Slow([ALIGN, 0]))
    with pytest.raises(OSError, match="wrote only a part") as told:
        direct.write(0, 0, [direct.aligned(2 * ALIGN)])
    assert told.value.errno == errno.EIO


def test_a_file_that_ends_is_told(monkeypatch):
    monkeypatch.setattr(direct, "calls", Slow([]))
    direct.calls.data = bytearray(ALIGN + 100)  # type: ignore[attr-defined]
    parts = [memoryview(bytearray(2 * ALIGN))]
    assert direct.read(0, 0, parts, direct.aligned(2 * ALIGN)) is False


def test_more_views_than_the_system_takes_are_several_calls(monkeypatch):
    monkeypatch.setattr(direct, "calls", Slow([]))
    views = [aligned(bytes([number % 256]) * ALIGN) for number in range(direct.VIEWS_MOST + 10)]
    direct.write(0, 0, views)
    assert direct.calls.data == b"".join(views)  # type: ignore[attr-defined]
