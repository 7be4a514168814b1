"""Goal: every store keeps the contract. Method: every check on every back end, with real servers."""

import pytest

from tiercel.storage.conformance import CHECKS, Inapplicable

INAPPLICABLE = {
    ("memory", "what_was_kept_outlives_the_store"),
    ("mooncake_own", "what_was_kept_outlives_the_store"),
}
"""What does not concern a back end, and why that is right: these keep records in the process itself."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_store_keeps_the_contract(back_end, check):
    name, subject = back_end
    try:
        check(subject)
    except Inapplicable as why:
        assert (name, check.__name__) in INAPPLICABLE, why
    else:
        assert (name, check.__name__) not in INAPPLICABLE
