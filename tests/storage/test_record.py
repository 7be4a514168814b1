"""Goal: what is read back is used only if every byte is right. Method: the example of the format's
description, round trips, and every way to be wrong that can be listed."""

import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiercel.storage.record import VERSION, Flaw, Form, Header, Note, kind_of, pack, parse
from tiercel.types import Kind

DOCUMENT = (Path(__file__).parents[2] / "docs" / "record-format.md").read_text()

DIGEST = bytes(range(0x20, 0x30))
PAGE_KEY = bytes(range(0xC0, 0xE0))
PAYLOAD = bytes(range(16))
FORM = Form(Kind.PAGE, DIGEST, (("kv", (2, 3), 8),), 16, grain=1, grains=4)
HEADER = FORM.header(PAGE_KEY, [PAYLOAD])


def test_the_example_of_the_document_is_what_the_code_writes():
    dump = re.search(r"```hex\n(.*?)```", DOCUMENT, re.DOTALL)[1]
    rows = [line.split(maxsplit=1) for line in dump.splitlines()]
    assert [int(at, 16) for at, _ in rows] == list(range(0, 16 * len(rows), 16))
    assert b"".join(bytes.fromhex(row) for _, row in rows) == HEADER + PAYLOAD


def test_the_table_of_the_document_says_where_everything_is():
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (?:`(\w+)`)? ?\|", DOCUMENT, re.MULTILINE)
    assert len(rows) == 15
    ends = [0]
    field = {}
    for at, size, name in rows:
        assert int(at) == ends[-1], f"{name} begins where the one before ends"
        ends.append(int(at) + int(size))
        field[name] = HEADER[int(at) : ends[-1]]
    assert ends[-1] == 128
    assert struct.unpack("<H", field["version"]) == (VERSION,)
    assert field["kind"] == bytes([Kind.PAGE])
    assert struct.unpack("<I", field["header_bytes"]) == (len(HEADER),)
    assert struct.unpack("<Q", field["payload_bytes"]) == (16,)
    assert struct.unpack("<HH", field["grain"] + field["grains"]) == (1, 4)
    assert (field["form"], field["page_key"]) == (DIGEST, PAGE_KEY)
    assert field["payload_check"] == xxhash.xxh3_128(PAYLOAD).intdigest().to_bytes(16, "big")
    assert HEADER[128 : 128 + struct.unpack("<I", field["table_bytes"])[0]] == FORM.table
    zeroed = HEADER.replace(field["header_check"], bytes(8))
    assert field["header_check"] == xxhash.xxh3_64(zeroed).intdigest().to_bytes(8, "big")


def test_the_kinds_of_the_document_are_all():
    assert re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", DOCUMENT, re.MULTILINE) == [
        (str(kind.value), kind.name) for kind in (*Kind, *Note)
    ]


def test_every_flaw_is_in_the_document():
    for flaw in Flaw:
        assert flaw.value.lower() in DOCUMENT.lower()


def test_a_record_as_it_was_written_has_no_flaw():
    assert FORM.flaw(HEADER, PAGE_KEY, [PAYLOAD]) is None
    assert FORM.record_bytes == len(HEADER) + len(PAYLOAD)
    assert parse(HEADER).key == FORM.key(PAGE_KEY) == b"\x31" + DIGEST + PAGE_KEY


def flipped(data: bytes, at: int, mask: int) -> bytes:
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def test_every_changed_byte_of_the_header_is_a_flaw():
    for at in range(len(HEADER)):
        for mask in (0x01, 0x80, 0xFF):
            flaw = FORM.flaw(flipped(HEADER, at, mask), PAGE_KEY, [PAYLOAD])
            assert flaw is (Flaw.FOREIGN if at < 8 else Flaw.HEADER), at


def test_every_changed_byte_of_the_payload_is_a_flaw():
    for at in range(len(PAYLOAD)):
        for mask in (0x01, 0x80, 0xFF):
            assert FORM.flaw(HEADER, PAGE_KEY, [flipped(PAYLOAD, at, mask)]) is Flaw.CHECKSUM, at


def test_what_is_cut_short_is_a_flaw():
    for length in range(len(HEADER)):
        flaw = FORM.flaw(HEADER[:length], PAGE_KEY, [PAYLOAD])
        assert flaw is (Flaw.FOREIGN if length < 128 else Flaw.HEADER), length
    for length in range(len(PAYLOAD)):
        assert FORM.flaw(HEADER, PAGE_KEY, [PAYLOAD[:length]]) is Flaw.CHECKSUM, length


@pytest.mark.parametrize(
    ("expected", "flaw"),
    [
        (replace(FORM, digest=bytes(16)), Flaw.FORM),
        (replace(FORM, kind=Kind.TAIL), Flaw.KEY),
        (replace(FORM, streams=(("kv", (0, 2), 8),)), Flaw.FORM),
        (replace(FORM, streams=(("kx", (0, 1), 8),)), Flaw.FORM),
        (replace(FORM, streams=(("kv", (0, 1, 2), 8),), payload_bytes=24), Flaw.FORM),
        (replace(FORM, grain=2), Flaw.FORM),
        (replace(FORM, grains=3), Flaw.FORM),
    ],
)
def test_a_whole_record_of_something_else_is_a_flaw(expected, flaw):
    assert expected.flaw(HEADER, PAGE_KEY, [PAYLOAD]) is flaw


def test_the_record_of_another_key_is_a_flaw():
    assert FORM.flaw(HEADER, bytes(32), [PAYLOAD]) is Flaw.KEY


def test_a_header_that_says_another_length_than_its_table_is_a_flaw():
    lying = parse(HEADER)._replace(payload_bytes=15)
    assert FORM.flaw(pack(lying), PAGE_KEY, [PAYLOAD]) is Flaw.FORM


def test_an_unknown_kind_is_a_flaw_even_with_a_right_checksum():
    assert parse(pack(parse(HEADER)._replace(kind=99))) is Flaw.HEADER


def test_only_a_whole_header_can_be_of_another_version():
    header = parse(HEADER)
    later = pack(header._replace(version=VERSION + 1))
    assert parse(later) is Flaw.VERSION
    assert parse(flipped(later, 100, 1)) is Flaw.HEADER


names = st.text(max_size=8)
sizes = st.integers(1, 40)
streams = st.lists(
    st.tuples(names, st.lists(st.integers(0, 99), max_size=4).map(tuple), sizes), max_size=4
).map(tuple)


@given(
    st.sampled_from([Kind.PAGE, Kind.TAIL]),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=32, max_size=32),
    streams,
    st.sampled_from([64, 128, 512, 4096]),
    st.data(),
)
def test_any_record_comes_back(kind, digest, page_key, rows, align, data):
    size = sum(len(layers) * row for _, layers, row in rows)
    form = Form(kind, digest, rows, size, align)
    payload = data.draw(st.binary(min_size=size, max_size=size))
    cut = data.draw(st.integers(0, size))
    header = form.header(page_key, [payload[:cut], payload[cut:]])
    assert len(header) == form.header_bytes
    assert len(header) % align == 0
    read = parse(header + payload)
    assert isinstance(read, Header)
    assert (read.kind, read.form, read.page_key, read.payload_bytes) == (kind, digest, page_key, size)
    assert read.key == form.key(page_key) and kind_of(read.key) == (kind, VERSION)
    assert pack(read) == header
    assert form.flaw(header, page_key, [payload]) is None


@given(st.binary(max_size=400))
def test_any_bytes_are_looked_at_without_harm(data):
    assert isinstance(parse(data), Flaw)


@given(st.binary(min_size=1, max_size=16), st.integers(0, len(HEADER) + len(PAYLOAD) - 1))
def test_anything_written_over_a_record_is_a_flaw(patch, at):
    record = bytearray(HEADER + PAYLOAD)
    record[at : at + len(patch)] = patch
    record = record[: len(HEADER) + len(PAYLOAD)]
    flaw = FORM.flaw(record[: len(HEADER)], PAGE_KEY, [record[len(HEADER) :]])
    assert (flaw is None) == (record == HEADER + PAYLOAD)
