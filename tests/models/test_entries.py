"""Goal: every entry has a number, or its memory is refused. Method: memory that is not there."""

import pytest
import torch

from tiercel.errors import ConfigError
from tiercel.kernels import reference
from tiercel.models.entries import EntryRows
from tiercel.spec.attention import values
from tiercel.spec.stream import Stream


def test_more_entries_than_have_numbers_are_refused():
    stream = Stream("c4", (0,), (values(1, "fp32"),), tokens_per_entry=4)
    EntryRows(reference, torch.empty(2**26, 128, dtype=torch.uint8, device="meta"), stream, 128, rope=0)
    with pytest.raises(ConfigError, match=r"device_bytes = .*entries of c4, 2,147,483,648 have numbers"):
        EntryRows(
            reference, torch.empty(2**26 + 1, 128, dtype=torch.uint8, device="meta"), stream, 128, rope=0
        )
