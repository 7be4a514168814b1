"""A reader of an offering process: its records by name, and what they must be."""

from __future__ import annotations

from tests.memory.specs import SPECS
from tests.peers.offering import SPEC, TEXT, form_of, payload_of
from tiercel.spec.identity import Identity
from tiercel.storage.base import Get
from tiercel.storage.record import ALIGN_LEAST, RecordKey
from tiercel.tree.keys import KeyChain
from tiercel.types import Kind, PageKey


def page_keys(spec: str = SPEC) -> list[PageKey]:
    own = SPECS[spec]
    chain = KeyChain(Identity(own.model).digest, (), own.page_tokens)
    chain.extend(TEXT)
    return chain.keys


KEYS = page_keys()


class Record:
    """A record of page number `depth` of the text, or of the tail at its end."""

    def __init__(self, depth: int, kind: Kind = Kind.PAGE, align: int = ALIGN_LEAST, grain: int = 0) -> None:
        self.form = form_of(kind, align=align, grain=grain)
        self.page_key = KEYS[depth - 1]
        self.key: RecordKey = self.form.key(self.page_key)

    @property
    def value(self) -> bytes:
        payload = payload_of(self.key, self.form.payload_bytes)
        return self.form.header(self.page_key, [payload]) + payload

    def get(self) -> Get:
        return Get(self.key, [memoryview(bytearray(self.form.record_bytes))])


def pages(*depths: int) -> list[Record]:
    return [Record(depth) for depth in depths]


def read(store, records: list[Record]) -> list[bool]:
    """What `get` returns. Checks what it found, byte by byte."""
    gets = [record.get() for record in records]
    answers = store.get(gets)
    for record, get, here in zip(records, gets, answers, strict=True):
        assert not here or bytes(get.parts[0]) == record.value
    return answers
