"""The cache of `world` on a CUDA device. Engines write and read on a stream of their own, copies run on
theirs, and random delays are put into all of them: the device is always behind the host."""

from __future__ import annotations

from random import Random

import numpy as np
import torch

from tests.simulation.bytes import POISON, Bytes, Ids, Text
from tests.simulation.world import World
from tiercel.spec import CacheSpec
from tiercel.transfer.copier import WAYS
from tiercel.transfer.plan import Plan
from tiercel.types import PageKey

DELAY_CYCLES = 400_000
CHECKED_PAGES = 2
"""Pages that are read after each step."""


class CudaBytes(Bytes):
    """Everything is queued on `compute`. Wrong bytes are counted there, and looked at now and then."""

    def __init__(self, spec: CacheSpec, device) -> None:
        self.compute = torch.cuda.Stream()
        self.wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.spec = spec
        self.rows = dict(device.rows)
        torch.cuda.synchronize()
        self._prepare()

    def _put(self, row: torch.Tensor, data: np.ndarray) -> None:
        row.copy_(torch.from_numpy(data.copy()).pin_memory(), non_blocking=True)

    def write(self, ids: Ids, key: PageKey, text: Text, *, tail: bool) -> None:
        assert self.texts.setdefault(key, text) == text, "I8: two texts share a key"
        with torch.cuda.stream(self.compute):
            for row, data in self.expected(text, tail):
                at = 0
                for piece in self.pieces(row, ids):
                    self._put(piece, data[at : at + len(piece)])
                    at += len(piece)

    def check(self, ids: Ids, text: Text, *, tail: bool, who: str) -> None:
        with torch.cuda.stream(self.compute):
            for row, data in self.expected(text, tail):
                at = 0
                for got in self.pieces(row, ids):
                    wanted = torch.empty_like(got)
                    self._put(wanted, data[at : at + len(got)])
                    self.wrong += (got != wanted).sum()
                    at += len(got)

    def fill(self, piece: torch.Tensor, value: int = POISON) -> None:
        with torch.cuda.stream(self.compute):
            piece.fill_(value)

    def check_filled(self, piece: torch.Tensor, value: int, who: str) -> None:
        with torch.cuda.stream(self.compute):
            self.wrong += (piece != value).sum()

    def look(self) -> None:
        with torch.cuda.stream(self.compute):
            assert int(self.wrong) == 0, f"I2: {int(self.wrong)} wrong bytes were read on the device"


class CudaWorld(World):
    DEVICE = "cuda"
    COPIERS = WAYS
    bytes: CudaBytes

    def make_bytes(self) -> CudaBytes:
        return CudaBytes(self.spec, self.cache.device)

    def set_up(self, random: Random) -> None:
        self.chance = Random(random.getrandbits(32))
        controller = self.cache.flights.controller
        super().set_up(random)
        if controller is None:
            return
        real = controller.submit

        def submit(plan: Plan, *, layered: bool = False):
            self.delay()
            controller.after = torch.cuda.Event()
            controller.after.record(self.bytes.compute)
            return real(plan, layered=layered)

        controller.submit = submit

    def delay(self) -> None:
        controller = self.cache.flights.controller
        copying = [queue.stream for queue in controller._queued.values()] if controller else []
        for stream in (self.bytes.compute, *copying):
            if self.chance.random() < 0.3:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(self.chance.randrange(DELAY_CYCLES))

    def _do_copy(self, random: Random) -> None:
        """Time passes, or everything that is under way ends."""
        if random.random() < 0.2:
            torch.cuda.synchronize()
        else:
            self.delay()

    def _run_all(self) -> None:
        torch.cuda.synchronize()
        super()._run_all()

    def check(self) -> None:
        self.cache.check()
        self.cache.tree.oracle.check()
        pages = list(self.cache.tree.index.values())
        for page in self.chance.sample(pages, min(CHECKED_PAGES, len(pages))):
            self.check_page(page)
        if self.chance.random() < 0.02:
            self.bytes.look()

    def wind_down(self) -> None:
        super().wind_down()
        self.bytes.look()
        self.cache.close()
