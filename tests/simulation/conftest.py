"""Simulations cut a fetch into small reads. Tests after them in the same process must not see that."""

import pytest

from tiercel.cache import fetch


@pytest.fixture(scope="module", autouse=True)
def _sizes_of_reads():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "READ_BYTES_LEAST", fetch.READ_BYTES_LEAST)
        yield
