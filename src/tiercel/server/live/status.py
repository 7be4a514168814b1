"""Health, metrics, server info, explain, flush: for probes, Prometheus, people and benchmarks."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tiercel.asks.ask import Answer, Ask, EngineStats, Sampling
from tiercel.server.calls.answering import Answering
from tiercel.server.calls.asks import own_id
from tiercel.server.calls.reply import Api
from tiercel.server.calls.schema import gives
from tiercel.server.http import keys
from tiercel.server.http.body import SALT_CHARS_MAX
from tiercel.server.http.border import visit_of
from tiercel.server.http.errors import ApiError
from tiercel.server.http.tenants import Tenant
from tiercel.server.operations.store import store_json

FLUSH_TIMEOUT_MAX_S = 600


class Health(BaseModel):
    status: Literal["ok"]


class ModelInfo(BaseModel):
    """In SGLang's form."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    context_length: int
    vocab_size: int


class ServerInfo(BaseModel):
    """In SGLang's form, with the engine's statistics."""

    version: str
    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: int
    page_size: int
    disable_radix_cache: bool
    internal_states: list[dict[str, Any]]
    """One per SGLang worker. SGLang's benchmark looks here for `avg_spec_accept_length`: tokens per step with
    guesses."""
    stats: dict[str, Any]


class Load(BaseModel):
    """In SGLang's form: of `/get_load`, and of `/v1/loads`. There is one rank."""

    dp_rank: int
    num_reqs: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    num_total_tokens: int


class LoadSum(BaseModel):
    total_running_reqs: int
    total_waiting_reqs: int
    total_tokens: int


class Loads(BaseModel):
    loads: list[Load]
    aggregate: LoadSum


class ReusedTokens(BaseModel):
    device: int
    host: int
    store: int


class ExplanationOut(BaseModel):
    """What a request reused, from which tier, and why not more."""

    prompt_tokens: int
    reused_tokens: ReusedTokens
    """Tokens that each tier supplied. They were not computed."""
    computed_tokens: int
    """All other tokens."""
    replayed_tokens: int
    """Computed tokens whose pages were found, but no tail after them."""
    sparse_pages: int
    """Reused pages whose selected entries were read in host memory when the request began."""
    found_tokens: int
    """Tokens in pages that any tier has, reused or not."""
    why_not_more: str
    summary: str
    share: str
    accept_length: float | None
    """Tokens per step, of the steps that had guesses for the request."""
    stages_ms: dict[str, float]
    """Milliseconds of the stages that have ended: queue, fetch, match, load, prefill, decode."""


def stats_json(stats: EngineStats, tenant: Tenant | None = None) -> dict[str, Any]:
    """The statistics as JSON. Without a store `store` has only `attached`; without KV events there is no
    `events`. A tenant sees no other tenant."""
    fields = asdict(stats) | {"store": store_json(stats.store)}
    if tenant is not None:
        fields["owners"] = {name: held for name, held in fields["owners"].items() if name == tenant.name}
    return {name: value for name, value in fields.items() if value is not None}


class Status:
    """The calls about one server's state."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.service = api.service
        self.path = api.options.model_path or api.service.model_name

    async def health(self) -> Health:
        """The process runs and its engine has not failed."""
        self.api.check_alive()
        return Health(status="ok")

    async def ready(self) -> Health:
        """The model is loaded and requests are served."""
        self.api.check_ready()
        return Health(status="ok")

    async def health_generate(self, request: Request) -> Health:
        """The model computes tokens."""
        self.api.check_ready()
        # Statistics come between two steps: if requests are running, steps are being computed.
        if not (await self.service.stats()).queue.running:
            ask = Ask(f"health/{uuid4().hex}", (0,), Sampling(max_tokens=1, temperature=0))
            asked = Answering(self.service, [[ask]], [Answer()], visit_of(request))
            try:
                await asked.run()
            finally:
                await asked.close()
        return Health(status="ok")

    async def get_load(self) -> list[Load]:
        """Requests and their tokens, for routers."""
        queue = (await self.service.stats()).queue
        running = queue.loading + queue.running
        load = Load(
            dp_rank=0,
            num_reqs=running + queue.waiting,
            num_running_reqs=running,
            num_waiting_reqs=queue.waiting,
            num_tokens=queue.tokens,
            num_total_tokens=queue.tokens,
        )
        return [load]

    async def loads(self) -> Loads:
        """The same, as newer routers ask for it."""
        (load,) = await self.get_load()
        total = LoadSum(
            total_running_reqs=load.num_running_reqs,
            total_waiting_reqs=load.num_waiting_reqs,
            total_tokens=load.num_total_tokens,
        )
        return Loads(loads=[load], aggregate=total)

    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus. Those of a tenant are only for itself and for keys that belong to none."""
        visit = visit_of(request)
        tenant = visit.tenant.name if visit.tenant else None
        page = self.api.metrics.page(
            stats_json(await self.service.stats()),
            shown=lambda name: bool(visit.owner) and tenant in (None, name),
        )
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def server_info(self, request: Request) -> ServerInfo:
        """The served model and the engine's statistics."""
        stats = await self.service.stats()
        mean = stats.accept_length_mean
        return ServerInfo(
            version=version("tiercel"),
            model_path=self.path,
            tokenizer_path=self.path,
            served_model_name=self.service.model_name,
            context_length=self.service.context_tokens,
            page_size=self.service.page_tokens,
            disable_radix_cache=False,
            internal_states=[{} if mean is None else {"avg_spec_accept_length": mean}],
            stats=stats_json(stats, visit_of(request).tenant),
        )

    async def model_info(self) -> ModelInfo:
        """The served model."""
        return ModelInfo(
            model_path=self.path,
            tokenizer_path=self.path,
            is_generation=True,
            context_length=self.service.context_tokens,
            vocab_size=self.service.vocab_size,
        )

    async def stats(self, request: Request) -> dict[str, Any]:
        """The engine's statistics."""
        return stats_json(await self.service.stats(), visit_of(request).tenant)

    async def explain(
        self,
        request: Request,
        request_id: str,
        cache_salt: Annotated[str | None, Query(max_length=SALT_CHARS_MAX)] = None,
    ) -> ExplanationOut:
        """What a request reused, from which tier, and why not more. The API key and the salt must be those of
        the request."""
        explanation = self.service.explain(own_id(request_id, visit_of(request).owner, cache_salt))
        if explanation is None:
            message = f"request {request_id[:200]!r} is not known, or was forgotten"
            raise ApiError(404, message, param="request_id", code="request_not_found")
        reuse = explanation.reuse
        return ExplanationOut(
            prompt_tokens=reuse.prompt_tokens,
            reused_tokens=ReusedTokens(
                device=reuse.device_tokens, host=reuse.host_tokens, store=reuse.store_tokens
            ),
            computed_tokens=reuse.computed_tokens,
            replayed_tokens=reuse.replay_tokens,
            sparse_pages=explanation.sparse_pages,
            found_tokens=reuse.found_tokens,
            why_not_more=reuse.why.value,
            summary=str(reuse),
            share=explanation.share,
            accept_length=explanation.accept_length,
            stages_ms={
                name: round(1e3 * (end - start), 3)
                for name, start, end in (explanation.times.stages() if explanation.times else ())
            },
        )

    async def flush_cache(
        self, timeout: Annotated[float, Query(ge=0, le=FLUSH_TIMEOUT_MAX_S, allow_inf_nan=False)] = 0.0
    ) -> Response:
        """Empty the cache. Wait up to `timeout` seconds for pages in use."""
        stayed = await self.service.flush(timeout)
        if stayed:
            message = f"{stayed} pages are in use and stayed; all others are gone"
            raise ApiError(400, message, code="cache_in_use")
        return PlainTextResponse("Cache flushed.\n")


def router(api: Api) -> APIRouter:
    status = Status(api)
    routes = APIRouter(tags=["status"])
    routes.add_api_route("/health", status.health, responses=gives(Health, 503))
    routes.add_api_route("/ready", status.ready, responses=gives(Health, 503))
    routes.add_api_route(
        "/metrics",
        status.metrics,
        dependencies=keys.optional(api.options),
        response_class=Response,
        responses=gives(None, 401, media_type="text/plain"),
    )
    routes.add_api_route(
        "/flush_cache",
        status.flush_cache,
        methods=["POST"],
        dependencies=keys.admin(api.options),
        response_class=Response,
        responses=gives(None, 400, 401, 403, media_type="text/plain"),
    )
    user = keys.user(api.options)
    for path in ("/get_server_info", "/server_info"):
        routes.add_api_route(path, status.server_info, dependencies=user, responses=gives(ServerInfo, 401))
    for path in ("/get_model_info", "/model_info"):
        routes.add_api_route(path, status.model_info, dependencies=user, responses=gives(ModelInfo, 401))
    well = gives(Health, 401, 429, 503)
    routes.add_api_route("/health_generate", status.health_generate, dependencies=user, responses=well)
    routes.add_api_route("/get_load", status.get_load, dependencies=user, responses=gives(list[Load], 401))
    routes.add_api_route("/v1/loads", status.loads, dependencies=user, responses=gives(Loads, 401))
    routes.add_api_route(
        "/v1/cache/stats", status.stats, dependencies=user, responses=gives(dict[str, Any], 401)
    )
    routes.add_api_route(
        "/v1/cache/explain/{request_id}",
        status.explain,
        dependencies=user,
        responses=gives(ExplanationOut, 401, 404),
    )
    return routes
