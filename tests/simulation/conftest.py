"""Simulations cut a fetch into small reads, and have pages leave and come back in small numbers. Tests after
them in the same process must not see that."""

import pytest

from tiercel.cache import fetch, residency, room


@pytest.fixture(scope="module", autouse=True)
def _sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "READ_BYTES_LEAST", fetch.READ_BYTES_LEAST)
        for name in ("CALM_STEPS", "TOGETHER", "BACK_BYTES", "HOT_SHARE"):
            patch.setattr(residency, name, getattr(residency, name))
        patch.setattr(room, "FEW_PAGES", room.FEW_PAGES)
        yield
