"""Goal: every entry has a number, or its memory is refused. Method: memory that is not there."""

import pytest
import torch

from tiercel.errors import ConfigError, SpecError
from tiercel.kernels import reference
from tiercel.models.entries import EntryRows, codec_of
from tiercel.spec import CacheSpec
from tiercel.spec.attention import values
from tiercel.spec.stream import Stream


def test_more_entries_than_have_numbers_are_refused():
    stream = Stream("c4", (0,), (values(1, "fp32"),), tokens_per_entry=4, encoding="fp32")
    EntryRows(reference, torch.empty(2**26, 128, dtype=torch.uint8, device="meta"), stream, 128, rope=0)
    with pytest.raises(ConfigError, match=r"device_bytes = .*entries of c4, 2,147,483,648 have numbers"):
        EntryRows(
            reference, torch.empty(2**26 + 1, 128, dtype=torch.uint8, device="meta"), stream, 128, rope=0
        )


def test_entries_that_only_their_writer_can_read_are_refused_by_name():
    with pytest.raises(SpecError, match=r"c4.encoding = 'opaque'"):
        codec_of(Stream("c4", (0,), (values(1, "fp32"),)), rope=0)


def test_an_encoding_is_part_of_how_bytes_lie():
    streams = [Stream("c", (0,), (values(2, "bf16"),), encoding=each) for each in ("bf16", "fp16", "opaque")]
    specs = [CacheSpec("m", 4, (stream,)) for stream in streams]
    assert len({spec.form for spec in specs}) == 3
    assert [CacheSpec.from_dict(spec.to_dict()) for spec in specs] == specs
    with pytest.raises(SpecError, match=r"c.encoding = 'bf17'"):
        Stream("c", (0,), (values(2, "bf16"),), encoding="bf17")
