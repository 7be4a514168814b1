"""Goal: a page and a tail of vLLM's groups come back from the host as they were, in other blocks, and no
other byte of the pool changes.
Method: one pool of blocks that all groups share, as vLLM's; random bytes, so that any two rows differ."""

from __future__ import annotations

import random

import pytest
import torch

from tiercel import BorrowedMemory, CacheConfig, HostCache, Transfer, make_memories
from tiercel.errors import ConfigError
from tiercel.integrations.vllm.groups import NULL_BLOCK, Group, Groups, layer_of
from tiercel.spec.stream import PREFIX, State, Window
from tiercel.transfer.plan import NO_PLACE

BLOCKS = 64


def names(*layers):
    return tuple(f"model.layers.{layer}.self_attn.attn" for layer in layers)


ONE = Groups("one group", (Group(0, PREFIX, 16, 40, names(0, 1, 2)),))
GEMMA = Groups(
    "a window in groups of a layer each",
    (*(Group(at, Window(64), 32, 24, names(at)) for at in range(3)), Group(3, PREFIX, 32, 24, names(3))),
)
UNLIKE = Groups(
    "blocks of several sizes",
    (
        Group(0, PREFIX, 32, 48, names(0, 3)),
        Group(1, Window(41), 16, 24, names(1, 4)),
        Group(2, Window(100), 16, 56, names(2)),
        Group(3, State(), 64, 96, names(5, 6)),
        Group(4, PREFIX, 64, 16, ("model.layers.0.indexer.cache", "model.layers.3.indexer.cache")),
        Group(0, PREFIX, 32, 12, ("model.layers.0.self_attn.scale",)),
    ),
)
ALL = {groups.model: groups for groups in (ONE, GEMMA, UNLIKE)}


@pytest.fixture(params=ALL)
def groups(request):
    return ALL[request.param]


def test_the_streams_are_what_vllm_keeps():
    spec = UNLIKE.spec
    assert spec.page_tokens == 64 and spec.pages_per_window == 2
    rows = {s.name: (s.layers, spec.row_bytes(s), s.kind.name) for s in spec.streams}
    assert rows == {
        "0.0": ((0, 3), 2 * 48, "PAGE"),
        "1.0": ((1, 4), 3 * 24, "TAIL"),  # the 40 tokens before the next one lie in three blocks of 16
        "2.0": ((2,), 4 * 56, "TAIL"),
        "3.0": ((5, 6), 96, "TAIL"),
        "4.0": ((0, 3), 16, "PAGE"),
        "5.0": ((0,), 2 * 12, "PAGE"),
    }
    assert UNLIKE.parts == {
        "0.0": (0, 1), "4.0": (2,), "5.0": (0, 1), "1.0": (0, 1, 2), "2.0": (3, 4, 5, 6), "3.0": (7,),
    }  # fmt: skip
    assert GEMMA.spec.pages_per_window == 2 and GEMMA.page_tokens == 32
    assert not ONE.spec.tail_streams


def test_places_are_the_blocks_of_the_tables():
    tables = [[1, 2, 3, 4], [0, 0, 0, 0, 0, 6, 7, 8], [0, 0, 0, 0, 9, 10, 11, 12], [0, 13], [14, 15]]
    assert UNLIKE.page(tables, 0) == (1, 2, 14) and UNLIKE.page(tables, 1) == (3, 4, 15)
    assert UNLIKE.page(tables, 1, after=96) == (NO_PLACE, 4, NO_PLACE), "some of it is there already"
    assert UNLIKE.tail(tables, 2) == (6, 7, 8, 9, 10, 11, 12, 13)
    assert UNLIKE.tail(tables, 2, after=96) == (NO_PLACE, 7, 8, NO_PLACE, NO_PLACE, 11, 12, 13)
    assert UNLIKE.tail(tables, 1)[-1] == NO_PLACE, "vLLM keeps the block no more"


def test_a_layer_that_keeps_several_things_has_several_streams():
    two = Groups("m", (Group(0, PREFIX, 16, 8, ("layers.1.attn", "layers.1.extra", "layers.2.attn")),))
    assert {s.name: s.layers for s in two.spec.streams} == {"0.0": (1, 2), "0.1": (1,)}
    assert two.parts == {"0.0": (0,), "0.1": (0,)}
    assert layer_of("model.layers.12.mlp") == 12


def test_what_can_not_be_is_refused():
    with pytest.raises(ConfigError, match="whole text"):
        Groups("m", (Group(0, Window(64), 16, 8, names(0)),))
    with pytest.raises(ConfigError, match="unlike"):
        Groups("m", (Group(0, PREFIX, 16, 8, names(0)), Group(0, PREFIX, 32, 8, names(1))))
    with pytest.raises(ConfigError, match="no number"):
        layer_of("lm_head")


def tensors_over_one_pool(groups):
    """Layer i of each group lies over layer i of the others: [blocks, bytes] each."""
    widest = max(group.block_bytes for group in groups.groups)
    layers = max(len(group.names) for group in groups.groups)
    pool = torch.zeros(layers, BLOCKS, 2 * widest, dtype=torch.uint8)
    found, where, tables = {}, {}, set()
    for group in groups.groups:
        begin = widest if group.table in tables else 0  # a second size of a table lies beside the first
        tables.add(group.table)
        for at, name in enumerate(group.names):
            found[name] = pool[at, :, begin : begin + group.block_bytes]
            where[name] = group
    return pool, found, where


def tables_of(groups, blocks, pages):
    """A table for each group, of blocks that no other has; windows have lost their first blocks."""
    found = []
    for at in sorted({group.table for group in groups.groups}):
        group = next(each for each in groups.groups if each.table == at)
        count = pages * groups.page_tokens // group.block_tokens
        kept = count
        if isinstance(group.keep, Window):
            kept = -(-(group.keep.tokens - 1 + groups.page_tokens) // group.block_tokens)
        lost = max(0, count - kept) if group.keep != PREFIX else 0
        found.append([NULL_BLOCK] * lost + [blocks.pop() for _ in range(count - lost)])
    return found


def test_pages_and_tails_come_back_in_other_blocks(groups):
    rng = random.Random(4)
    pool, tensors, owners = tensors_over_one_pool(groups)
    rows = {row: tensors[name] for row, name in groups.layers.items()}
    memory = BorrowedMemory(groups.spec, rows, groups.parts)
    settings = CacheConfig(host_bytes=2**20)
    cache = HostCache(groups.spec, settings, make_memories(groups.spec, settings, memory))

    def finish(transfer):
        assert isinstance(transfer, Transfer)
        while not (ended := [each for each in cache.step() if each.transfer is transfer]):
            cache.wait(0.1)
        assert ended[0].error is None

    pages, tokens = 3, groups.page_tokens
    blocks = rng.sample(range(1, BLOCKS), BLOCKS - 1)
    before, after = tables_of(groups, blocks, pages), None
    pool.random_(1, 256, generator=torch.Generator().manual_seed(1))
    window = groups.spec.pages_per_window
    tails = {n: groups.tail(before, n) for n in range(pages - window + 1, pages + 1) if window}
    assert all(NO_PLACE not in places for places in tails.values())
    text = [rng.randrange(99) for _ in range(pages * tokens + 1)]
    finish(cache.save(cache.chain(text), 0, [groups.page(before, n) for n in range(pages)], tails=tails))

    kept, used = pool.clone(), sum(before, [])
    blocks = [each for each in rng.sample(range(1, BLOCKS), BLOCKS - 1) if each not in used]
    after = tables_of(groups, blocks, pages)
    found = cache.find(cache.chain(text), hold=True)
    assert found.pages == pages and len(found.tails) == window
    device = tokens + groups.groups[0].block_tokens if groups is UNLIKE else 0  # what vLLM has itself
    places = [groups.page(after, n, after=device) for n in range(device // tokens, pages)]
    back = [groups.tail(after, tail.page.depth, after=device) for tail in found.tails]
    finish(cache.load(found, places, first=device // tokens, tails=back))

    expected, moved = kept.clone(), 0
    for name, group in owners.items():
        tensor = tensors[name]
        was, wanted = (
            each.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            for each in (kept, expected)
        )
        count = pages * tokens // group.block_tokens
        if group.keep == PREFIX:
            moves = {at for at in range(count) if at * group.block_tokens >= device}
        else:
            (row,) = {
                groups.spec.row_bytes(s)
                for s in groups.spec.streams
                if groups.layers.get((s.name, layer_of(name))) == name
            }
            ends = [boundary * tokens // group.block_tokens for boundary in tails]
            moves = {at for end in ends for at in range(end - row // group.block_bytes, end)}
            if group.keep != State():
                moves = {at for at in moves if at * group.block_tokens >= device}
        for at in moves:
            wanted[after[group.table][at]] = was[before[group.table][at]]
            moved += 1
    assert moved > 3
    assert torch.equal(pool, expected), (
        "another byte than those of the blocks was written, or not all of them"
    )
    cache.check()
    cache.close()
