"""An engine that computes prompts and one that goes on from them, each behind its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tests.engine.drive import deltas_of
from tests.wait import until
from tiercel.asks.ask import Answer, Ask, Prefiller
from tiercel.engine.engine import Engine
from tiercel.engine.service import EngineService
from tiercel.peers.offering import open_listener
from tiercel.storage.open import open_peers, open_stores

HOST = "127.0.0.1"


class Roles:
    def __init__(
        self, first: Engine, second: Engine, transport: str = "tcp", *, patience_s: float = 600
    ) -> None:
        """`second` has no store of its own."""
        listener = open_listener(f"{HOST}:0")
        self._port = int(listener.getsockname()[1])
        url = f"peer://{HOST}:{self._port}?transport={transport}"
        second.cache.attach(open_stores(None, [url]))
        self.prefill, self.decode = EngineService(first, "first"), EngineService(second, "second")
        mooncake = "tcp" if transport == "mooncake" else None
        self.prefill.offer_pages(listener, at=(HOST, self._port), mooncake=mooncake)
        self.decode.pull_prompts(open_peers([url]), patience_s)

    def ask(self, ask: Ask) -> Answer:
        """The answer of the second engine. A router asks both at the same time."""
        named = self.named(ask)

        async def both() -> Answer:
            _, answer = await asyncio.gather(answered(self.prefill, named), answered(self.decode, named))
            return answer

        return asyncio.run(both())

    def named(self, ask: Ask) -> Ask:
        """The ask as a router writes it."""
        return replace(ask, prefiller=Prefiller(HOST, self._port, ask.request_id))

    def settle(self) -> None:
        """Nothing is on its way, and the counts of both engines are right."""
        for service in (self.decode, self.prefill):
            settle(service)

    def forget(self) -> None:
        """Nothing is cached, and every host page is free."""
        self.settle()
        for service in (self.decode, self.prefill):
            assert asyncio.run(service.flush(30)) == 0
            pool = service._engine.cache.host_pages
            assert pool.free == pool.capacity

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


def settle(service: EngineService) -> None:
    """Nothing is on its way, nobody reads its pages, and its counts are right."""
    cache = service._engine.cache
    until(lambda: service._ask(lambda: not cache.busy).result(30), "all has been moved")
    until(lambda: service._ask(lambda: not len(cache.leases)).result(30), "no lease is left")
    service._ask(cache.check).result(30)


async def answered(service: EngineService, ask: Ask) -> Answer:
    answer = Answer()
    async for delta in deltas_of(service, ask):
        answer.add(delta)
    return answer


@contextmanager
def roles(first: Engine, second: Engine, transport: str = "tcp") -> Iterator[Roles]:
    pair = Roles(first, second, transport)
    try:
        yield pair
        pair.settle()
    finally:
        pair.close()
