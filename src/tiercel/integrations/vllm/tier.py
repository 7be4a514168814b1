"""Our stores as a secondary tier of vLLM's KV offloading, behind its own CPU tier.

    vllm serve … --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64000000000, "secondary_tiers": [{
                "type": "Tier", "module_path": "tiercel.integrations.vllm",
                "store": "shared:///var/cache/kv?size=200GiB"}]}}'

vLLM names a chunk by a hash of its whole prefix and its group of layers. What else decides its bytes is part
of its record, as vLLM's own file tier has it: model, type, groups, parallel sizes, rank; and the layout of
the cache and the length of a chunk.

A chunk goes from here into vLLM's CPU tier before vLLM takes blocks of the device for it. So a chunk that was
promised and is missed at the load is computed, and no request waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingSpec, OffloadKey, ReqContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TransferJob,
)
from vllm.version import __version__ as VERSION

from tiercel.errors import ConfigError
from tiercel.integrations.hooks import check_hooks
from tiercel.integrations.named_pages import NamedPages, Pool
from tiercel.threads import Crew

log = logging.getLogger(__name__)

TESTED = ("0.32.0", "0.31.0")
LEFT = ("touch", "take_events", "serve_external_requests", "get_stats", "block_size_bytes", "bp_detector")
"""Calls that vLLM answers itself. A store counts a use when a chunk is read."""
USED = {
    AsyncLookupManager: {"batch_lookup", "lookup", "flush", "mark_miss", "cleanup", "shutdown"},
    TransferJob: {"job_id", "keys", "chunk_ids"},
    JobResult: {"job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"},
}
"""Calls and fields of vLLM's other classes."""
THREADS = 4
"""Jobs at the same time. Each is a batch of chunks, which a file store reads and writes at once."""
PATIENCE_S = 30.0
"""While a call of the store takes longer, the store hangs: nothing is found and nothing is kept. A file store
reads a chunk in milliseconds, and all chunks of a long request in seconds."""


class Tier(SecondaryTierManager):  # type: ignore[misc]
    """A store of ours behind vLLM's interface. vLLM's scheduler calls the methods; none of them blocks."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        store: str = "",
        backpressure_detector: Any = None,
        **others: Any,
    ) -> None:
        check_hooks("vllm", SecondaryTierManager, CALLS, tested=TESTED, left=LEFT)
        for kind, names in USED.items():
            if missing := sorted(names - {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}):
                why = f"{kind.__name__} has no {', '.join(missing)} any more"
                raise ConfigError("vllm", VERSION, f"{why}; this tier was tested with {', '.join(TESTED)}")
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if others:
            raise ConfigError(
                "secondary_tiers", ", ".join(others), "are no options of this tier: store is one"
            )
        if not store:
            raise ConfigError("store", store, 'name one, such as "shared:///var/cache/kv?size=200GiB"')
        mapper = FileMapper.from_offloading_spec(
            "", offloading_spec, offloading_spec.blocks_per_chunk, parallel_agnostic=True
        )
        about = {"engine": "vllm", "layout": offloading_spec.config.kv_cache_layout, "rank": mapper.rank}
        self._pages = NamedPages(store, about | mapper.get_run_config())
        self._pool = self._pages.pool("kv", self.block_size_bytes)
        self._rows: np.ndarray | None = np.asarray(primary_kv_view).view(np.uint8)
        self._since: dict[object, float] = {}  # when each call began that the store has not answered
        self._lookups = _Lookups(self._pool, tier_type, self._since)
        self._crew = Crew(THREADS, "tiercel-vllm-tier")
        self._jobs: dict[int, Future[None]] = {}
        self._ended: SimpleQueue[tuple[JobResult, Sequence[OffloadKey]]] = SimpleQueue()

    # What is there

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = False if self._hangs() else self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def _hangs(self) -> bool:
        now = time.monotonic()
        return any(now - since > PATIENCE_S for since in tuple(self._since.values()))

    # Copies

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, load=True)

    def _submit(self, job: TransferJob, *, load: bool) -> None:
        assert self._rows is not None, "the tier is shut down"
        keys, rows = list(job.keys), [memoryview(self._rows[int(chunk)]) for chunk in job.chunk_ids]
        if self._hangs():
            self._ended.put((JobResult(job.job_id, False), keys if load else ()))
        else:
            self._jobs[job.job_id] = self._crew.submit(self._run, job.job_id, keys, rows, load)

    def _run(self, job: int, keys: list[OffloadKey], rows: list[memoryview], load: bool) -> None:
        begin_s, done = time.monotonic(), [False] * len(keys)
        self._since[job] = begin_s
        try:
            done = (self._pool.get if load else self._pool.put)(keys, rows)
        except Exception:
            log.exception("a job with %d chunks failed", len(keys))
        del self._since[job]
        there = [key for key, each in zip(keys, done, strict=True) if each]
        result = JobResult(
            job,
            all(done),
            successful_keys=there if load and not all(done) else None,
            transfer_time=time.monotonic() - begin_s,
            transfer_bytes=len(there) * self.block_size_bytes,
        )
        missed = [key for key, each in zip(keys, done, strict=True) if load and not each]
        self._ended.put((result, missed))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        found = list[JobResult]()
        while True:
            try:
                result, missed = self._ended.get_nowait()
            except Empty:
                return found
            self._jobs.pop(result.job_id, None)
            self._lookups.mark_miss(missed)  # vLLM would ask for them again for ever
            found.append(result)

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        wait(list(self._jobs.values()))

    def shutdown(self) -> None:
        self.drain_jobs()
        self._crew.shutdown()
        self._lookups.shutdown()
        self._jobs.clear()
        self._rows = None  # vLLM gives the memory back next
        self._pages.close()

    def stats(self) -> dict[str, Any]:
        return self._pages.stats()


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Asks the store in a thread of vLLM's, one batch for each step."""

    def __init__(self, pool: Pool, tier_type: str, since: dict[object, float]) -> None:
        self._pool, self._since = pool, since
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Iterable[bool]:  # noqa: ARG002
        self._since["lookup"] = time.monotonic()
        try:
            return self._pool.holds(list(keys))
        finally:
            del self._since["lookup"]


CALLS = [name for name, value in vars(Tier).items() if callable(value) and name[0] != "_" and name != "stats"]
