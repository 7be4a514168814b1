"""Goal: entries chosen on the host are found in hot rows or brought there, and no other byte changes.
Method: the plain twin against a model of dicts and lists over a long random trace; the CUDA kernels against
the twin, in Triton's interpreter with tiles of a few cells, or on a device where there is one. Bytes are
random. Rows begin at multiples of a stride that is less than a row."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.kernels.devices import every_device, interpreted, on_gpu
from tiercel.kernels import hot as twin
from tiercel.kernels.cuda import hot as cuda
from tiercel.kernels.entries import Entries, Flat, Numbering
from tiercel.kernels.hot import HostRows, HotRows


class Form(NamedTuple):
    encoding: str
    sizes: tuple[int, ...]
    per_row: int
    stride: int


FORMS = {
    "fp32": Form("fp32", (16,), per_row=4, stride=32),
    "fp8_groups": Form("fp8_groups", (16, 4), per_row=4, stride=48),
    "odd": Form("fp8_groups", (7, 3), per_row=5, stride=25),
    "flash": Form("fp8_groups", (576, 8), per_row=64, stride=576),
    "short": Form("fp32", (32,), per_row=64, stride=1024),
}
SMALL = ["fp32", "fp8_groups", "odd"]
LAYERS, STAGED = 2, 6
PADDING = None

every_set = pytest.mark.parametrize(
    ("kernels", "device"),
    [
        pytest.param(twin, "cpu", id="twin"),
        pytest.param(cuda, "cpu", marks=interpreted.marks, id="cuda on cpu"),
        pytest.param(cuda, "cuda", marks=on_gpu.marks, id="cuda on cuda"),
    ],
)


@pytest.fixture(autouse=True)
def small_tiles(request, monkeypatch):
    """On a device what is used there."""
    if "cpu" in getattr(request.node, "callspec", SimpleNamespace(params={})).params.values():
        monkeypatch.setattr(cuda, "CELLS_TILE", 8)
        monkeypatch.setattr(cuda, "TOGETHER", 2)
        monkeypatch.setattr(cuda, "GATHER_PROGRAMS", 4)
        monkeypatch.setattr(cuda, "GATHER_LEAST", 1)
        monkeypatch.setattr(cuda, "STAGE_PROGRAMS", 2)
        monkeypatch.setattr(cuda, "STAGE_TILE", 32)


class Scene:
    """Texts in rings, all their pages on the host; the memory of a device; hot rows."""

    def __init__(self, form, device, *, places, entries, tokens, k, most=4, seed=0):
        """`places`: how many hot rows each ring has; `entries`: of a text; `most`: tokens of a short span."""
        self.form, self.device, self.k, self.most = FORMS[form], device, k, most
        random = torch.Generator().manual_seed(seed)
        encoding, sizes, per_row, stride = self.form
        self.row_bytes = -(-per_row * sum(sizes) // stride) * stride
        row, rings, pages = self.row_bytes // stride, len(places), -(-entries // per_row)
        self.entries, self.step = entries, LAYERS * row + 1
        self.staged = (sum(places) + 1) * self.step

        self.host = torch.randint(0, 256, (rings * pages, LAYERS * self.row_bytes + 40), dtype=torch.uint8)
        self.host = self.host.pin_memory() if device == "cuda" else self.host
        self.pages = torch.randperm(rings * pages, generator=random).view(rings, pages).int()
        self.table = self.pages.to(device)
        size = (self.staged + STAGED * row) * stride
        self.memory = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random).to(device)
        view = self.memory.as_strided((size // stride - row + 1, self.row_bytes), (stride, 1))
        self.rows = Entries(view, per_row, sizes, encoding, 12, 4, 8)

        most = max(places)
        self.hot = HotRows.make(
            layers=LAYERS, rings=rings, places=most, per_row=per_row, entries=pages * per_row, tokens=tokens,
            k=k, device=device,
        )  # fmt: skip
        every = torch.randperm(sum(places) + 1, generator=random).int().split([*places, 1])
        for ring, own in enumerate(every[:-1]):
            self.hot.places[ring, : len(own)] = own
            twin.begin(self.hot, ring, len(own) * per_row)

    def on_cpu(self):
        """A copy for the twin. The host's bytes are shared."""
        other = object.__new__(Scene)
        other.__dict__.update(self.__dict__, device="cpu", memory=self.memory.cpu().clone(), table=self.pages)
        view = other.memory.as_strided(self.rows.rows.shape, self.rows.rows.stride())
        other.rows = self.rows._replace(rows=view)
        other.hot = HotRows(*(each.cpu().clone() for each in self.hot))
        return other

    def source(self, layer):
        address = self.host.data_ptr() + layer * self.row_bytes
        return HostRows(address, self.host.stride(0), self.table)

    def numbering(self, layer):
        first = 1 + layer * (self.row_bytes // self.form.stride)
        return Numbering(torch.empty(0), self.step, first, self.staged)

    def call(self, kernels, chosen, where, layer):
        """`chosen` is changed in place."""
        flat, end = where
        to = self.numbering(layer)
        kernels.resolve(chosen, flat, end, self.hot, layer, to, self.form.per_row, self.most)
        kernels.gather(self.hot, flat, chosen.shape[1], self.source(layer), self.rows, to)

    def bytes_of(self, memory, row_at, inner):
        """The parts of an entry of the row that begins at a byte of `memory`."""
        value, scale = (*self.form.sizes, 0)[:2]
        behind = row_at + self.form.per_row * value + inner * scale
        return memory[row_at + inner * value :][:value], memory[behind:][:scale]

    def at_number(self, memory, number):
        """The parts of an entry in the device's memory, by its number."""
        per_row = self.form.per_row
        return self.bytes_of(memory, number // per_row * self.form.stride, number % per_row)

    def on_host(self, ring, e, layer):
        place, inner = self.pages[ring, e // self.form.per_row], e % self.form.per_row
        return self.bytes_of(self.host[place].numpy(), layer * self.row_bytes, inner)


def where_of(spans, device="cpu"):
    """(flat, end) of spans (ring, tokens); padding is as a recorded call has it."""
    numbers = []
    for ring, tokens in spans:
        first, start = len(numbers), 100 + ring if ring is not PADDING else 0
        for i in range(tokens):
            real = (start + i, start, first, ring, start + tokens)
            numbers.append(real if ring is not PADDING else (-1, 0, 0, 0, 0))
    *flat, end = torch.tensor(numbers, dtype=torch.int32).T.contiguous().to(device)
    return Flat(*flat, pages=torch.empty(0)), end


def lists_of(scene, spans, random, overlap=0.5):
    """int32 [tokens, k]. The lists of a span overlap. Some chosen entries are on the device, and some of a
    list is nothing."""
    lists = []
    for _, tokens in spans:
        own = torch.randperm(scene.entries, generator=random)[: scene.k]
        for _ in range(tokens):
            other = torch.randperm(scene.entries, generator=random)[: scene.k]
            other = other[~torch.isin(other, own)]
            changed = torch.rand(len(own), generator=random) > overlap
            changed &= changed.cumsum(0) <= len(other)
            own = own.clone()
            own[changed] = other[: int(changed.sum())]
            code = torch.full((scene.k,), -1)
            code[: len(own)] = -2 - own
            kind = torch.rand(scene.k, generator=random)
            lists.append(torch.where(kind < 0.15, 7 + own[0], torch.where(kind < 0.25, -1, code)))
    return torch.stack(lists).int()


# The plain twin


class Model:
    """What the twin does, with lists and bytes."""

    def __init__(self, scene):
        self.scene, self.memory = scene, scene.memory.numpy().copy()
        self.cells = {
            (layer, ring): [[cell, -1] for cell in range(int(count))]
            for ring, count in enumerate(scene.hot.cells)
            for layer in range(LAYERS)
        }

    def call(self, chosen, spans, layer):
        """The lists as they must become."""
        scene, at, out = self.scene, 0, []
        for ring, tokens in spans:
            lists = chosen[at : at + tokens]
            at += tokens
            if ring is not PADDING and tokens <= scene.most and self.cells[layer, ring]:
                place_of = self.place(lists, ring, layer)
                lists = [[place_of.get(code, code) for code in each] for each in lists]
            out += lists
        return out

    def place(self, lists, ring, layer):
        scene, per_row, cells = self.scene, self.scene.form.per_row, self.cells[layer, ring]
        wanted = []
        for code in (code for each in lists for code in each if code <= -2):
            if -2 - code not in wanted:
                wanted.append(-2 - code)
        used = [pair for pair in cells if pair[1] in wanted]
        free = [pair for pair in cells if pair[1] not in wanted]
        numbers = {}
        for cell, _ in cells:
            place = int(scene.hot.places[ring, cell // per_row])
            to = scene.numbering(layer)
            numbers[cell] = (place * to.step + to.first) * per_row + cell % per_row
        fresh = []
        for e in wanted:
            if e not in [held for _, held in used]:
                cell = free.pop(0)[0]
                fresh.append([cell, e])
                parts = zip(
                    scene.at_number(self.memory, numbers[cell]), scene.on_host(ring, e, layer), strict=True
                )
                for target, data in parts:
                    target[:] = data
        self.cells[layer, ring] = free + fresh + used
        return {-2 - e: numbers[cell] for cell, e in fresh + used}


@pytest.mark.parametrize("form", ["fp32", "fp8_groups"])
def test_the_twin_is_a_cache_that_forgets_the_least_recently_used(form):
    """In a trace of calls texts end, others begin with few cells and get more. A text mostly chooses near
    what it chose before."""
    scene = Scene(form, "cpu", places=[4, 3, 0], entries=40, tokens=8, k=4)
    model, numpy, per_row = Model(scene), np.random.default_rng(1), scene.form.per_row
    named, loaded = 0, 0
    for step in range(10_000):
        layer, ring = int(numpy.integers(LAYERS)), int(numpy.integers(2))
        if step % 50 == 0:
            twin.begin(scene.hot, ring, 2 * per_row)
            for each in range(LAYERS):
                model.cells[each, ring] = [[cell, -1] for cell in range(2 * per_row)]
        elif step % 50 == 25:
            cells = [4, 3][ring] * per_row
            twin.begin(scene.hot, ring, cells)
            for each in range(LAYERS):
                model.cells[each, ring] = [[cell, -1] for cell in range(cells)]
        spans = [(ring, int(numpy.integers(1, 6))), (PADDING, 1), (2, 1)]
        scene.most = int(scene.hot.cells[ring]) // 4
        codes = -2 - (step // 10 + numpy.integers(0, 18, (spans[0][1] + 2, 4))) % scene.entries
        chosen = torch.from_numpy(np.where(numpy.random(codes.shape) < 0.2, -1, codes)).int()
        want = model.call(chosen.tolist(), spans, layer)
        scene.call(twin, chosen, where_of(spans), layer)
        named += len({*chosen[chosen >= 0].tolist()})
        loaded += int(scene.hot.counts.sum())
        assert chosen.tolist() == want
        for (each, own), cells in model.cells.items():
            assert scene.hot.held[each, own, :, : len(cells)].T.tolist() == cells
        assert np.array_equal(scene.memory.numpy(), model.memory)
        assert scene.hot.asked.tolist() == [named, loaded]
    assert 0.2 * named < loaded < 0.8 * named, "a trace of hits and misses"


# The kernels


def same_as_twin(scene, spans, chosen, layer, kernels=cuda):
    """Call the kernels, and the twin on a copy: everything is equal afterwards. Returns the chosen."""
    other, own, wanted = scene.on_cpu(), chosen.to(scene.device), chosen.clone()
    scene.call(kernels, own, where_of(spans, scene.device), layer)
    other.call(twin, wanted, where_of(spans), layer)
    agree(scene, other, own, wanted)
    return wanted


def agree(scene, other, own, wanted):
    assert torch.equal(own.cpu(), wanted)
    for name in ("held", "seen", "counts", "jobs", "asked"):
        assert torch.equal(getattr(scene.hot, name).cpu(), getattr(other.hot, name)), name
    assert torch.equal(scene.memory.cpu(), other.memory)


MIXED = [(2, 1), (PADDING, 2), (0, 3), (3, 4), (1, 2), (PADDING, 1)]
"""A text without hot rows; one with a long span, which is not touched; padding between them."""


@every_device
@pytest.mark.parametrize("form", SMALL)
@pytest.mark.parametrize("k", [4, 7, 16])
def test_kernels_do_what_the_twin_does(form, k, device):
    per_row = FORMS[form].per_row
    places = [-(-3 * k // per_row), -(-3 * k // per_row), 0, -(-k // per_row)]
    scene = Scene(form, device, places=places, entries=6 * k, tokens=13, k=k, most=3, seed=k)
    random = torch.Generator().manual_seed(k)
    for step in range(5):
        same_as_twin(scene, MIXED, lists_of(scene, MIXED, random), step % LAYERS)


@every_device
def test_all_cells_may_be_missed_and_then_all_be_hit(device):
    """The lists of a span name as many entries as there are cells. Of the third call half are hits."""
    scene = Scene("fp32", device, places=[6, 6], entries=48, tokens=4, k=8)
    spans, codes = [(1, 3)], (-2 - torch.randperm(48)).int()
    for at in (0, 0, 12, 24):
        same_as_twin(scene, spans, codes[at : at + 24].view(3, 8).clone(), 1)
    assert scene.hot.counts[:3].tolist() == [12, 0, 0]
    assert scene.hot.asked.tolist() == [4 * 24, 24 + 0 + 12 + 12]


@every_device
def test_choices_may_be_more_than_cells_if_the_text_has_fewer_entries(device):
    scene = Scene("fp32", device, places=[6, 6], entries=24, tokens=4, k=8)
    spans, random = [(1, 4)], torch.Generator().manual_seed(3)
    for _ in range(3):
        same_as_twin(scene, spans, lists_of(scene, spans, random), 0)


@every_device
def test_an_entry_that_a_list_names_twice_has_one_cell(device):
    scene = Scene("fp8_groups", device, places=[4], entries=20, tokens=2, k=5)
    chosen = torch.tensor([[-5, -5, 3, -9, -5], [-9, -2, -2, -1, -5]], dtype=torch.int32)
    same_as_twin(scene, [(0, 2)], chosen, 0)
    assert scene.hot.jobs[:3, 0].tolist() == [3, 7, 0] and scene.hot.counts.tolist() == [3, 0]
    assert scene.hot.asked.tolist() == [3, 3]


@every_device
def test_a_text_gets_more_cells(device):
    scene = Scene("fp32", device, places=[3, 4], entries=40, tokens=2, k=8)
    random = torch.Generator().manual_seed(5)
    twin.begin(scene.hot, 1, 8)
    for _ in range(2):
        same_as_twin(scene, [(1, 1)], lists_of(scene, [(1, 1)], random), 1)
    twin.begin(scene.hot, 1, 16)
    for layer in range(LAYERS):
        assert scene.hot.held[layer, 1, :, :16].tolist() == [list(range(16)), [-1] * 16], "all is forgotten"
    for _ in range(2):
        same_as_twin(scene, [(1, 2)], lists_of(scene, [(1, 2)], random), 1)


@every_set
@pytest.mark.parametrize("form", ["fp32", "fp8_groups"])
def test_every_number_names_a_row_with_the_bytes_of_its_entry(form, kernels, device):
    scene = Scene(form, device, places=[6, 7, 6], entries=70, tokens=8, k=8)
    spans, random = [(1, 3), (PADDING, 1), (0, 1), (2, 2)], torch.Generator().manual_seed(2)
    for step in range(4):
        chosen, layer = lists_of(scene, spans, random), step % LAYERS
        allowed = scene.memory.cpu().numpy().copy()
        out = chosen.clone().to(device)
        scene.call(kernels, out, where_of(spans, device), layer)
        memory, at = scene.memory.cpu().numpy(), 0
        for ring, tokens in spans:
            own, numbers = chosen[at : at + tokens].flatten(), out[at : at + tokens].cpu().flatten()
            at += tokens
            assert torch.equal(own[own >= -1], numbers[own >= -1])
            pairs = {*zip(own[own <= -2].tolist(), numbers[own <= -2].tolist(), strict=True)}
            if ring is PADDING:
                continue
            assert len(pairs) == len({code for code, _ in pairs}) == len({number for _, number in pairs})
            for code, number in pairs:
                data = scene.on_host(ring, -2 - code, layer)
                for here, there, target in zip(
                    scene.at_number(memory, number), data, scene.at_number(allowed, number), strict=True
                ):
                    assert np.array_equal(here, there)
                    target[:] = there
            cells = int(scene.hot.cells[ring])
            for each in range(LAYERS):
                assert sorted(scene.hot.held[each, ring, 0, :cells].tolist()) == [*range(cells)]
        assert np.array_equal(memory, allowed), "no other byte changes"


@every_set
def test_a_text_without_chosen_entries_on_the_host_is_left_as_it_is(kernels, device):
    scene = Scene("fp8_groups", device, places=[4, 4], entries=20, tokens=4, k=5)
    before = [each.clone() for each in (*scene.hot, scene.memory)]
    chosen = torch.tensor([[3, 9, -1, 4, 0], [7, -1, -1, -1, -1], [-1] * 5, [-1] * 5], dtype=torch.int32)
    out = chosen.clone().to(device)
    scene.call(kernels, out, where_of([(0, 2), (1, 1), (PADDING, 1)], device), 0)
    assert torch.equal(out.cpu(), chosen)
    assert all(map(torch.equal, before, (*scene.hot, scene.memory)))


COUNTS = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 200]


@every_set
@pytest.mark.parametrize("apart", [False, True], ids=["side by side", "each in its page"])
def test_single_entries_are_copied_whatever_their_number(kernels, device, apart):
    """A number that would fill whole rows is no copy of rows. The plain twin copies every number."""
    for count in range(1, 201) if kernels is twin else COUNTS:
        scene = Scene("fp8_groups", device, places=[50], entries=800, tokens=1, k=200, seed=count)
        e = torch.arange(count) * 4 + torch.arange(count) % 4 if apart else torch.arange(count) + 3
        want, chosen = scene.memory.cpu().numpy().copy(), torch.full((1, 200), -1, dtype=torch.int32)
        chosen[0, :count] = -2 - e
        out = chosen.clone().to(device)
        scene.call(kernels, out, where_of([(0, 1)], device), 1)
        for each, number in zip(e.tolist(), out[0, :count].tolist(), strict=True):
            parts = zip(scene.at_number(want, number), scene.on_host(0, each, 1), strict=True)
            for target, data in parts:
                target[:] = data
        assert int(scene.hot.counts.sum()) == count
        assert np.array_equal(scene.memory.cpu().numpy(), want), "these entries, and no other byte"


@every_set
@pytest.mark.parametrize("form", SMALL)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_rows_are_staged_whole_and_no_other_byte_changes(form, count, kernels, device):
    scene = Scene(form, device, places=[2], entries=60, tokens=1, k=4)
    row, to = scene.row_bytes // scene.form.stride, scene.numbering(1)
    places = torch.randperm(len(scene.host))[:STAGED]
    targets = torch.randperm(STAGED) * row
    jobs = torch.stack([places, targets], 1).int()
    want = scene.memory.cpu().clone()
    for place, target in jobs[:count].tolist():
        at = (to.staged + target) * scene.form.stride
        want[at : at + scene.row_bytes] = scene.host[place, scene.row_bytes : 2 * scene.row_bytes]
    number = torch.tensor([count], dtype=torch.int32, device=device)
    kernels.stage(jobs.to(device), number, scene.source(1), scene.rows, to)
    assert torch.equal(scene.memory.cpu(), want)


# The shapes of V4


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("k", [512, 1024, 2048])
@pytest.mark.parametrize("texts", [1, 2, 3, 63, 64, 65, 128, 512])
def test_many_texts_do_what_the_twin_does(texts, k, device):
    """Every other text has two tokens, as many as its cells allow."""
    places = [2 * k // 64] * texts
    scene = Scene("short", device, places=places, entries=4 * k, tokens=2 * texts, k=k)
    spans, random = [(ring, 1 + ring % 2) for ring in range(texts)], torch.Generator().manual_seed(texts)
    for _ in range(2):
        same_as_twin(scene, spans, lists_of(scene, spans, random), 1)


@pytest.mark.parametrize("device", [on_gpu])
def test_flash_does_what_the_twin_does(device):
    scene = Scene("flash", device, places=[8, 32, 0, 24, 8], entries=5000, tokens=18, k=512)
    spans, random = [(1, 4), (PADDING, 3), (0, 1), (3, 3), (4, 5), (2, 1)], torch.Generator().manual_seed(0)
    for step in range(4):
        same_as_twin(scene, spans, lists_of(scene, spans, random, overlap=0.8), step % LAYERS)


@pytest.mark.parametrize("device", [on_gpu])
def test_a_recorded_call_is_replayed_with_other_texts_and_padding(device):
    tokens, k = 8, 512
    scene = Scene("flash", device, places=[8, 16, 24], entries=3000, tokens=tokens, k=k, most=3)
    spans, random = [(PADDING, tokens)], torch.Generator().manual_seed(0)
    flat, end = where = where_of(spans, device)
    chosen = lists_of(scene, spans, random).to(device)
    start = scene.on_cpu()
    scene.call(cuda, chosen, where, 1)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scene.call(cuda, chosen, where, 1)
    assert torch.equal(scene.memory.cpu(), start.memory)
    for spans in (
        [(1, 2), (PADDING, 6)],
        [(0, 1), (2, 3), (1, 1), (PADDING, 3)],
        [(2, 2), (1, 2), (PADDING, 4)],
        [(2, 4), (0, 1), (PADDING, 3)],
        [(PADDING, 8)],
    ):
        other, lists = scene.on_cpu(), lists_of(scene, spans, random)
        now, now_end = where_of(spans, device)
        for old, new in zip((*flat[:4], end, chosen), (*now[:4], now_end, lists), strict=True):
            old.copy_(new)
        graph.replay()
        other.call(twin, lists, where_of(spans), 1)
        agree(scene, other, chosen, lists)
