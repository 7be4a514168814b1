"""Goal: every entry has a number, or its memory is refused. Method: memory that is not there."""

import pytest
import torch

from tiercel.errors import ConfigError, SpecError
from tiercel.kernels.entries import encode, parts_of, read_entries, write_entries
from tiercel.models.rows import entries_in
from tiercel.spec import CacheSpec
from tiercel.spec.attention import values
from tiercel.spec.stream import Part, Stream


def test_more_entries_than_have_numbers_are_refused():
    stream = Stream("c4", (0,), (values(1, "fp32"),), tokens_per_entry=4, encoding="fp32")
    entries_in(torch.empty(2**26, 128, dtype=torch.uint8, device="meta"), stream, 128)
    with pytest.raises(ConfigError, match=r"device_bytes = .*entries of c4, 2,147,483,648 have numbers"):
        entries_in(torch.empty(2**26 + 1, 128, dtype=torch.uint8, device="meta"), stream, 128)


@pytest.mark.parametrize("padding", [0, 7])
def test_parts_follow_each_other_each_for_all_entries(padding):
    """Two entries a row, a value of 3 B and a scale of 4 B: value 0, value 1, scale 0, scale 1, padding."""
    stream = Stream("i", (0,), (Part("value", 3), Part("scale", 4)), encoding="fp8_row")
    memory = torch.zeros(4, 14 + padding, dtype=torch.uint8)
    rows = entries_in(memory, stream, 2)
    x = torch.tensor([[448.0, 1.0, -2.0], [-896.0, 2.0, 4.0]])
    write_entries(rows, torch.tensor([5, 6]), x)
    value, scale = encode(x, rows)
    assert torch.equal(memory[2, 3:6], value[0]) and torch.equal(memory[2, 10:14], scale[0])
    assert torch.equal(memory[3, 0:3], value[1]) and torch.equal(memory[3, 6:10], scale[1])
    assert torch.equal(read_entries(rows, torch.tensor([6, 5])), x.flip(0))
    memory[2, 3:6] = memory[2, 10:14] = memory[3, 0:3] = memory[3, 6:10] = 0
    assert not memory.any()


@pytest.mark.parametrize(
    ("rope", "group", "exponents"),
    [(2, 4, [119, 131, 143, 0]), (0, 6, [119, 131, 0, 0]), (4, 3, [119, 131, 143, 155])],
)
def test_a_stream_says_which_channels_stay_bf16_and_how_many_of_the_others_share_a_scale(
    rope, group, exponents
):
    """Groups of 1.5, 0.5, 0.5, …, each 4096 times the one before: with the scale of another group they would
    not come back. No group of DeepSeek V4 is so small."""
    count = sum(map(bool, exponents))
    parts = Part("value", count * group + 2 * rope), Part("scale", 4)
    stream = Stream("c4", (0,), parts, encoding="fp8_groups", rope=rope, group=group)
    rows = entries_in(torch.zeros(3, 2 * stream.bytes_per_entry, dtype=torch.uint8), stream, 2)
    groups = torch.full((count, group), 0.5)
    groups[:, 0] = 1.5
    groups *= 4096.0 ** torch.arange(count)[:, None]
    x = torch.cat([groups.flatten(), torch.tensor([3e5, 1.0078125, -7.0, 0.0])[:rope].bfloat16().float()])
    write_entries(rows, torch.tensor([4]), x[None])
    value, scale = (part[2] for part in parts_of(rows))
    assert scale[0].tolist() == exponents and not value[1].any() and not scale[1].any()
    assert torch.equal(value[0, count * group :].view(torch.bfloat16).float(), x[count * group :])
    assert torch.equal(read_entries(rows, torch.tensor([4]))[0], x)


def test_entries_that_only_their_writer_can_read_are_refused_by_name():
    with pytest.raises(SpecError, match=r"c4.encoding = 'opaque'"):
        entries_in(torch.zeros(1, 4, dtype=torch.uint8), Stream("c4", (0,), (values(1, "fp32"),)), 1)


def test_an_encoding_is_part_of_how_bytes_lie():
    streams = [Stream("c", (0,), (values(2, "bf16"),), encoding=each) for each in ("bf16", "fp16", "opaque")]
    specs = [CacheSpec("m", 4, (stream,)) for stream in streams]
    assert len({spec.form for spec in specs}) == 3
    assert [CacheSpec.from_dict(spec.to_dict()) for spec in specs] == specs
    with pytest.raises(SpecError, match=r"c.encoding = 'bf17'"):
        Stream("c", (0,), (values(2, "bf16"),), encoding="bf17")
