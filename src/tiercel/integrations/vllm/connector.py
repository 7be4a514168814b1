"""The host tier and a store inside vLLM, for every model whose layers read their whole text or a window of
it.

    vllm serve … --kv-transfer-config '{"kv_connector": "TiercelConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "tiercel.integrations.vllm",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {
            "host_memory": "64GiB", "store": "shared:///var/cache/kv?size=200GiB"}}'

vLLM makes two of it. One decides, in the scheduler's process; one carries plans out, where the blocks are.

    vllm_scheduler   HostCache ── tickets of plans, in the metadata of a step ──► vllm_worker
                         ▲ ──────────── acks, in the output of the step ─────────────┘

A load runs beside the steps while its request waits. A save ends within its step, after the forward: vLLM may
give the blocks to another text in the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from tiercel.config import parse_bytes
from tiercel.errors import ConfigError
from tiercel.integrations.hooks import check_hooks
from tiercel.integrations.vllm.model import groups_of, identity_of
from tiercel.integrations.vllm.scheduler import Scheduler
from tiercel.integrations.vllm.worker import Acks, Plans, Worker

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

TESTED = ("0.32.0", "0.31.0")
LEFT = (
    *("build_kv_connector_stats", "build_prom_metrics", "get_finished_count", "get_required_kvcache_layout"),
    *("bind_connector_metadata", "clear_connector_metadata", "has_connector_metadata", "finish_forward"),
    *("get_block_ids_with_load_errors", "get_finished", "get_handshake_metadata", "get_mem_pool_context"),
    *("get_kv_connector_kv_cache_events", "get_kv_connector_stats", "handle_preemptions", "take_events"),
    *("bind_gpu_block_pool", "bind_kv_cache_manager", "get_loaded_kv_cache_group_ids", "on_new_request"),
    *("has_pending_block_frees", "register_finished_partial_tail", "request_finished"),
    *("requires_piecewise_for_cudagraph", "reset_capture_state", "set_host_xfer_buffer_ops"),
    *("set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware"),
    "get_external_cache_hit_sources",  # not asked by 0.31
)
"""Calls that vLLM answers itself."""
OPTIONS = ("host_memory", "store")


class TiercelConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's interface. Each call goes to the half that this one is."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_hooks("vllm", KVConnectorBase_V1, CALLS, tested=TESTED, left=LEFT)
        super().__init__(vllm_config, role, kv_cache_config)
        _check(vllm_config)
        groups = groups_of(vllm_config, kv_cache_config)
        self.scheduler: Scheduler | None = None
        self.worker: Worker | None = None
        if role is KVConnectorRole.SCHEDULER:
            layout = str(getattr(kv_cache_config, "kv_cache_layout", ""))
            options = self._kv_transfer_config.kv_connector_extra_config
            host_bytes = parse_bytes(options["host_memory"], "host_memory")
            identity = identity_of(vllm_config, layout)
            self.scheduler = Scheduler(groups, identity, host_bytes, options.get("store", ""))
        else:
            self.worker = Worker(groups, kv_cache_config.num_blocks)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # The scheduler half

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.find(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.load(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # here: 0.31 has none

        stored = min(num_external_tokens, self._scheduler.texts[request.request_id].stored)
        tiers = {CacheHitSource.HOST: num_external_tokens - stored, CacheHitSource.DISK: stored}
        return {tier: tokens for tier, tokens in tiers.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Plans:
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.ended(connector_output)

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.forget(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler.cache.busy

    def reset_cache(self) -> bool:
        return self._scheduler.reset()

    @property
    def _scheduler(self) -> Scheduler:
        assert self.scheduler is not None, "a call of the scheduler's to the worker half"
        return self.scheduler

    # The worker half

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._worker.borrow(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """What a forward reads was loaded before it was planned."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are saved together, after the forward."""

    def wait_for_save(self) -> None:
        self._worker.save(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        recved, failed = self._worker.loaded(self._get_connector_metadata())
        return KVConnectorTransferResults(finished_recving=recved, failed_recving=failed)

    def build_connector_worker_meta(self) -> Acks | None:
        return self._worker.take()

    @property
    def _worker(self) -> Worker:
        assert self.worker is not None, "a call of the worker's to the scheduler half"
        return self.worker

    def shutdown(self) -> None:
        half = self.scheduler or self.worker
        assert half is not None
        half.close()


CALLS = [
    name
    for name, value in vars(TiercelConnector).items()
    if callable(value) and name[0] != "_" and name not in (*LEFT, "request_finished_all_groups")
]


def _check(config: VllmConfig) -> None:
    """Refuses what would give wrong texts, or end requests that could be computed."""
    transfer = config.kv_transfer_config
    policy = transfer.kv_load_failure_policy
    if policy != "recompute":
        why = 'ends a request whose load fails, which can be computed: set it to "recompute"'
        raise ConfigError("kv_load_failure_policy", policy, why)
    if unknown := sorted({*transfer.kv_connector_extra_config} - {*OPTIONS}):
        why = f"are no options of this connector: {', '.join(OPTIONS)} are"
        raise ConfigError("kv_connector_extra_config", ", ".join(unknown), why)
    if "host_memory" not in transfer.kv_connector_extra_config:
        raise ConfigError("host_memory", "", "say how much host memory there is, such as 64GiB")
    if config.parallel_config.world_size != 1:
        raise ConfigError("world_size", config.parallel_config.world_size, "several ranks are not tiered yet")
    if config.speculative_config is not None:
        raise ConfigError("speculative_config", "…", "groups of a draft are not tiered yet")
