"""The half of the connector that carries plans out, where vLLM's blocks are; and what the halves tell each
other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tiercel.config import CacheConfig
from tiercel.errors import ConfigError
from tiercel.integrations.vllm.groups import Groups
from tiercel.memory.buffers import BorrowedMemory, HostMemory
from tiercel.transfer.controller import Controller, Ticket, make_controller
from tiercel.transfer.plan import Direction
from tiercel.transfer.remote import Ack, RankWorker

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

IDLE_S = 0.002
"""A step in which nothing is computed waits so long for a load: vLLM would ask again at once."""


@dataclass
class Plans(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker half is to do in a step."""

    host: tuple[str, int]
    """Where the host memory is, and the bytes it was made with."""
    tickets: list[Ticket]
    loads: dict[int, str]
    """The request of each load."""
    idle: bool
    """Nothing is computed in this step."""


@dataclass
class Acks(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ended in the worker half."""

    acks: list[Ack]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Acks:
        assert isinstance(other, Acks)
        return Acks(self.acks + other.acks)


class Worker:
    """Copies between vLLM's blocks and the host memory of the scheduler half."""

    def __init__(self, groups: Groups, blocks: int) -> None:
        self._groups, self._blocks = groups, blocks
        self._memory: BorrowedMemory | None = None
        self._host: HostMemory | None = None
        self._copies: Controller | None = None
        self._rank: RankWorker | None = None
        self._loads: dict[int, str] = {}
        self._saves = set[int]()
        self._acks: list[Ack] = []

    def borrow(self, caches: Mapping[str, Tensor]) -> None:
        sizes = {name: group.block_bytes for group in self._groups.groups for name in group.names}
        rows = {
            row: blocks_of(name, caches[name], self._blocks, sizes[name])
            for row, name in self._groups.layers.items()
        }
        self._memory = BorrowedMemory(self._groups.spec, rows, self._groups.parts)

    def load(self, plans: Plans) -> None:
        self._loads |= plans.loads
        self._start(plans, Direction.LOAD)

    def save(self, plans: Plans) -> None:
        """Returns when all is saved: the blocks are another text's in the next step."""
        self._saves |= self._start(plans, Direction.SAVE)
        while self._saves:
            assert self._rank is not None
            self._rank.wait(1.0)
            self._look()

    def loaded(self, plans: Plans) -> tuple[set[str], set[str]]:
        """The requests whose loads have ended, and those of them whose loads have failed."""
        if plans.idle and self._loads and self._rank is not None:
            self._rank.wait(IDLE_S)
        self._look()
        ended, failed = set[str](), set[str]()
        for ack in self._acks:
            if request := self._loads.pop(ack.number, None):
                ended.add(request)
                if ack.error:
                    log.warning("a load of request %s failed, it is computed: %s", request, ack.error)
                    failed.add(request)
        return ended, failed

    def take(self) -> Acks | None:
        acks, self._acks = self._acks, []
        return Acks(acks) if acks else None

    def _start(self, plans: Plans, direction: Direction) -> set[int]:
        tickets = [ticket for ticket in plans.tickets if ticket.plan.direction is direction]
        for ticket in tickets:
            self._open(plans.host).start(ticket)
        return {ticket.number for ticket in tickets}

    def _open(self, host: tuple[str, int]) -> RankWorker:
        if self._rank is None:
            assert self._memory is not None, "vLLM computes before it has told its tensors"
            path, size = host
            settings = CacheConfig()
            self._host = HostMemory(self._groups.spec, settings.layout, size, path=path)
            self._copies = make_controller(settings.copier, self._memory, self._host)
            self._rank = RankWorker(0, self._copies)
        return self._rank

    def _look(self) -> None:
        if self._rank is not None:
            acks = self._rank.acks()
            self._acks += acks
            self._saves -= {ack.number for ack in acks}

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
        if self._host is not None:
            self._host.close()


def blocks_of(name: str, cache: Tensor, blocks: int, size: int) -> Tensor:
    """[blocks, bytes of a block] of a layer's tensor, without a copy. vLLM may cut a block into several."""
    if cache.device.type != "cpu":
        raise ConfigError("device", str(cache.device), "is not tiered yet: only CPUs are")
    parts, item = cache.shape[0] // blocks, cache.element_size()
    dense = 1
    for stride, length in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if length > 1 and stride != dense:
            raise ConfigError("kv_cache_layout", name, "the bytes of a block of a layer do not lie together")
        dense *= length
    if dense * parts * item != size or (parts > 1 and cache.stride(0) != dense):
        what = f"{tuple(cache.shape)} {cache.dtype} with strides {cache.stride()}"
        raise ConfigError(name, what, f"a block has {size} B, in one piece")
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    return raw.as_strided((blocks, size), (cache.stride(0) * parts * item, 1), cache.storage_offset() * item)
