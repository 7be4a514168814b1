"""Goal: single entries move by number, and no other byte changes. Method: random numbers, compared with the
plain twin; counts around multiples of a row; in Triton's interpreter, or on a device where there is one."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.devices import every_device
from tiercel.kernels.entries import Entries, move_entries_plain, parts_of
from tiercel.kernels.move import move_entries

ROWS = 70
FORMS = {
    "flash": (64, (576, 8), 37_440),
    "index": (64, (128, 4), 8_448),
    "one part": (32, (40,), 1_280),
    "odd": (5, (7, 3), 51),
    "one in a row": (1, (24, 8), 32),
}


def make(form: str, device: str, pinned: bool = False) -> Entries:
    per_row, sizes, row_bytes = FORMS[form]
    rows = torch.randint(0, 256, (ROWS, row_bytes), dtype=torch.uint8)
    rows = rows.pin_memory() if pinned and device == "cuda" else rows.to(device)
    return Entries(rows, per_row, sizes, "fp8_groups", sizes[0], 0, 0)


def test_an_entry_of_c4_is_two_ranges_of_its_row_where_the_field_has_them() -> None:
    entries = make("flash", "cpu")
    values, scales = parts_of(entries)
    for i in range(64):
        assert torch.equal(values[7, i], entries.rows[7, 576 * i : 576 * (i + 1)])
        assert torch.equal(scales[7, i], entries.rows[7, 36_864 + 8 * i : 36_864 + 8 * (i + 1)])


@every_device
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [0, 1, 5, 63, 64, 65])
@pytest.mark.parametrize("load", [True, False], ids=["load", "save"])
def test_entries_move_by_number_and_nothing_else_does(device: str, form: str, count: int, load: bool) -> None:
    torch.manual_seed(count)
    near, far = make(form, device), make(form, device, pinned=True)
    to, source = (near, far) if load else (far, near)
    numbers = [torch.randperm(ROWS * to.per_row)[:count].to(device) for _ in range(2)]
    if count > 2:
        numbers[0][1] = numbers[1][2] = -1
    wanted = to._replace(rows=to.rows.cpu().clone())
    here, there = (each.cpu() for each in numbers)
    move_entries_plain(wanted, here, source._replace(rows=source.rows.cpu()), there)
    before = source.rows.cpu().clone()
    move_entries(to, numbers[0], source, numbers[1])
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(to.rows.cpu(), wanted.rows)
    assert torch.equal(source.rows.cpu(), before)


@every_device
def test_a_full_row_of_entries_from_as_many_pages_is_not_taken_for_a_page(device: str) -> None:
    """In the field a count that is a multiple of a row's entries was moved as whole rows."""
    to, source = make("flash", device), make("flash", device)
    scattered = torch.arange(64, device=device) * 64 + 3
    wanted = source.rows.view(-1)[3 * 576 : 4 * 576].cpu()
    move_entries(to, torch.arange(64, device=device), source, scattered)
    assert torch.equal(to.rows[0, :576].cpu(), wanted)
    assert torch.equal(to.rows[0, 5 * 576 : 6 * 576].cpu(), source.rows[5, 3 * 576 : 4 * 576].cpu())
