"""Goal: every store keeps the contract, and pages of other engines. Method: every check on every back end,
with real servers."""

from threading import Condition

import pytest

from tests.contract.conftest import BACK_ENDS
from tests.simulation.copies import HeldCopies
from tests.simulation.specs import SPECS
from tiercel.integrations import conformance as of_pages
from tiercel.memory.buffers import HostMemory
from tiercel.storage.conformance import apply
from tiercel.storage.conformance.checks import CHECKS
from tiercel.storage.conformance.samples import Inapplicable
from tiercel.storage.open import _SCHEMES
from tiercel.transfer.mover import ItemPlace, Presence, StoreMover, Work, Workers
from tiercel.types import HostPageId, Kind, PageKey

INAPPLICABLE = {
    ("memory", "what_was_kept_outlives_the_store"),
    ("memory", "pages_outlive_the_store"),
    ("mooncake_own", "what_was_kept_outlives_the_store"),
    ("mooncake_own", "pages_outlive_the_store"),
}
"""What does not concern a back end, and why that is right: these keep records in the process itself."""


ELSEWHERE = {"peer": "tests/peers: it can only be read"}
"""Stores whose contract is checked in another place."""


def test_every_store_is_put_to_the_test():
    checked = {each.partition("_")[0] for each in BACK_ENDS} | {*ELSEWHERE}
    classes = {scheme.store for name, scheme in _SCHEMES.items() if name in checked}
    forgotten = {name for name, scheme in _SCHEMES.items() if scheme.store not in classes}
    assert not forgotten, f"{forgotten}: write how it is opened in BACK_ENDS of tests/contract/conftest.py"


@pytest.mark.parametrize("check", [*CHECKS, *of_pages.CHECKS], ids=lambda check: check.__name__)
def test_a_store_keeps_the_contract(back_end, check):
    name, subject = back_end
    try:
        apply(check, subject)
    except Inapplicable as why:
        assert (name, check.__name__) in INAPPLICABLE, why
    else:
        assert (name, check.__name__) not in INAPPLICABLE


def test_what_is_listed_and_can_not_be_read_is_removed_counted_and_written_again(back_end):
    """By whoever reads through the store, whatever happened to the value."""
    _, subject = back_end
    spec, store, hands = SPECS["in records"], subject.open(), HeldCopies()
    host = HostMemory(spec, "page_first_direct", 20 * spec.place_bytes)
    workers = Workers(hands, hands, hands, retry_after_s=())
    mover = StoreMover(store, spec, host, landed=Condition(), workers=workers)

    def do(work: Work, first_place: int) -> list[Presence]:
        pieces = [
            ItemPlace(Kind.PAGE, PageKey(bytes([number]) * 32), (HostPageId(first_place + number),))
            for number in range(3)
        ]
        operation = mover.submit(work, pieces)
        hands.shutdown()
        mover.poll()
        assert operation.error is None
        return operation.answers

    all_here = [Presence.HERE] * 3
    try:
        assert do(Work.WRITE, 0) == all_here
        subject.spoil(store, mover.keys(ItemPlace(Kind.PAGE, PageKey(bytes([1]) * 32)))[-1])
        assert do(Work.ASK, 0) == all_here, "listed"
        assert do(Work.READ, 10) == [Presence.HERE, Presence.DAMAGED, Presence.HERE]
        assert mover.flaws == {"unreadable": 1} or mover.flaws == {"foreign": 1}
        assert do(Work.ASK, 0) == [Presence.HERE, Presence.MISSING, Presence.HERE]
        assert do(Work.WRITE, 0) == all_here
        assert do(Work.READ, 10) == all_here
    finally:
        mover.close()
