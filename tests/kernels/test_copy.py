from __future__ import annotations

import torch

from tiercel.kernels.copy import copy_entries_reference, copy_rows_reference


def make_rows(count: int, row_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, row_bytes), dtype=torch.uint8, generator=generator)


def test_rows_go_where_they_are_sent_and_nowhere_else() -> None:
    source, target = make_rows(5, 37, seed=1), make_rows(7, 37, seed=2)
    expected = target.clone()
    expected[6], expected[0], expected[3] = source[2], source[4], source[2]
    copy_rows_reference(source, target, torch.tensor([2, 4, 2]), torch.tensor([6, 0, 3]))
    assert torch.equal(target, expected)


def test_an_entry_moves_as_value_and_scale() -> None:
    """Two entries per row: values of 3 bytes, then scales of 2 bytes, then a byte of padding."""
    source, target = make_rows(4, 11, seed=1), make_rows(3, 11, seed=2)
    expected = target.clone()
    expected[2, 3:6], expected[2, 8:10] = source[1, 0:3], source[1, 6:8]
    expected[0, 0:3], expected[0, 6:8] = source[3, 3:6], source[3, 8:10]
    source_at, target_at = torch.tensor([[1, 0], [3, 1]]), torch.tensor([[2, 1], [0, 0]])
    copy_entries_reference(source, target, source_at, target_at, parts=[(0, 3), (6, 2)], entries=2)
    assert torch.equal(target, expected)


def test_entries_0_63_64_and_191_of_v4_rows() -> None:
    source, target = make_rows(3, 37_440, seed=1), make_rows(5, 37_440, seed=2)
    expected = target.clone()
    moves = [((0, 0), (4, 63)), ((0, 63), (1, 0)), ((1, 0), (1, 63)), ((2, 63), (3, 17))]
    for (row, entry), (to_row, to_entry) in moves:
        for byte in range(576):
            expected[to_row, 576 * to_entry + byte] = source[row, 576 * entry + byte]
        for byte in range(8):
            expected[to_row, 36_864 + 8 * to_entry + byte] = source[row, 36_864 + 8 * entry + byte]
    source_at, target_at = (torch.tensor([move[side] for move in moves]) for side in (0, 1))
    copy_entries_reference(source, target, source_at, target_at, parts=[(0, 576), (36_864, 8)], entries=64)
    assert torch.equal(target, expected)
