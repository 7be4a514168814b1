"""Builds the application from routes, border, errors and schema."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from tiercel.asks.service import Service
from tiercel.server.calls import anthropic, native, openai_api, responses, schema, tokens
from tiercel.server.calls.anthropic_replies import AnthropicErrorBody
from tiercel.server.calls.reply import Api
from tiercel.server.http import errors
from tiercel.server.http.aside import Aside
from tiercel.server.http.border import Border
from tiercel.server.http.metrics import Metrics
from tiercel.server.http.pace import Pace
from tiercel.server.http.traces import Traces
from tiercel.server.live import feed, page, status
from tiercel.server.live.recent import Recent
from tiercel.server.operations import aborts, store
from tiercel.server.options import ServerOptions


def create_app(
    service: Service, options: ServerOptions, traces: Traces | None = None, pace: Pace | None = None
) -> FastAPI:
    """A new application. Two in one process share nothing. The caller starts and stops the service. `pace`:
    the pace of the connections that requests come from."""
    app = FastAPI(
        title="tiercel",
        summary="A language model on a tiered KV cache: OpenAI's calls and SGLang's.",
        version=version("tiercel"),
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; `page` has its own
        redoc_url=None,
    )
    metrics = Metrics()
    api = Api(service, options, metrics, Aside(pace or Pace()))
    rooms = (openai_api, responses, anthropic, native, tokens, aborts, status, store)
    recent = Recent(service.explain)
    app.state.feed = feed.Feed(api, recent)
    routers = [*(room.router(api) for room in rooms), feed.router(app.state.feed), page.router()]
    for router in routers:
        app.include_router(router)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    _expect_calls(routes, metrics, options)
    traced = None if traces is None else partial(traces.ended, service)
    app.add_middleware(
        Border, metrics=metrics, ended=recent.add, access_log=options.access_log, traced=traced
    )
    if options.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-ignored-fields", "retry-after"],
        )
    errors.install(app)
    models: list[type[BaseModel]] = [*schema.bodies_of(routes), errors.ErrorBody, AnthropicErrorBody]
    schema.install(app, models, schema.limits_of(api))
    return app


def _expect_calls(routes: Sequence[APIRoute], metrics: Metrics, options: ServerOptions) -> None:
    answers = [route.path for route in routes if schema.can_stream(route)]
    names = options.tenants.by_name if options.tenants else ()
    metrics.expect([route.path for route in routes], answers=answers, tenants=names)
