"""A request's life as OpenTelemetry spans, where `OTEL_EXPORTER_OTLP_ENDPOINT` names a collector.

    POST /v1/chat/completions ──────────────────────────────────────────────
      queue ──── fetch ──── match ── load ── prefill ──── decode ───────────

The engine notes when a request passed its stages (`asks.times`); spans are made of that when the answer has
ended. A span of the caller (`traceparent`) is the parent. The standard variables of OpenTelemetry say where
spans go and how many. The packages are in the extra `otel`.
"""

from __future__ import annotations

import os
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from tiercel.asks.ask import Explanation
from tiercel.asks.service import Service
from tiercel.errors import ConfigError
from tiercel.server.http.border import Visit

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NAME = "OTEL_SERVICE_NAME"


def open_traces() -> Traces | None:
    """None: no collector is configured, or OpenTelemetry is disabled."""
    endpoint = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        return Traces()
    except ImportError as error:
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        why = f"needs OpenTelemetry, pip install {packages}: {error}"
        raise ConfigError(endpoint, os.environ[endpoint], why) from error


class Traces:
    """Makes the spans of one server. A thread of OpenTelemetry's sends them."""

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = {} if os.environ.get(NAME) else {"service.name": "tiercel"}
        self._provider = TracerProvider(resource=Resource.create(named))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("tiercel")

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()

    def ended(self, service: Service, scope: Scope, visit: Visit, call: str) -> None:
        """The answer of a call was sent or given up. Calls without an ask have no span."""
        if not visit.asks:
            return
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now_ns = time.time_ns()
        offset_ns = now_ns - int(1e9 * time.monotonic())  # read once: spans of one request are on one clock
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        root = self._tracer.start_span(
            f"{scope['method']} {call}",
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            attributes=_about(scope, visit, call, service.model_name),
            start_time=offset_ns + int(1e9 * visit.started_s),
        )
        if root.is_recording():
            inside = set_span_in_context(root)
            for ask in visit.asks:
                known = service.explain(ask.request_id)
                if known is not None:
                    self._stages(known, inside, offset_ns, len(visit.asks) > 1 and ask.request_id)
        if visit.status is None or visit.status >= 500:
            from opentelemetry.trace import StatusCode

            root.set_status(StatusCode.ERROR)
        root.end(now_ns)

    def _stages(self, known: Explanation, inside: Any, offset_ns: int, ask: str | bool) -> None:
        """The spans of one ask. The engine's clock is `time.monotonic`."""
        for stage in known.times.stages() if known.times is not None else ():
            about = _STAGES.get(stage.name, lambda _: {})(known)
            if ask:
                about |= {"tiercel.ask": ask}
            span = self._tracer.start_span(
                stage.name,
                context=inside,
                attributes=about,
                start_time=offset_ns + int(1e9 * stage.start_s),
            )
            span.end(offset_ns + int(1e9 * stage.end_s))


def _about(scope: Scope, visit: Visit, call: str, model: str) -> dict[str, Any]:
    used = visit.usage
    about = {
        "http.request.method": scope["method"],
        "http.route": call,
        "http.response.status_code": visit.status or 499,
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": used.prompt_tokens,
        "gen_ai.usage.output_tokens": used.completion_tokens,
        "tiercel.request_id": visit.request_id,
        "tiercel.tokens.cached": used.cached_tokens,
        "tiercel.tokens.replayed": used.replayed_tokens,
    }
    return about if visit.tenant is None else about | {"tiercel.tenant": visit.tenant.name}


_STAGES: dict[str, Any] = {
    "fetch": lambda known: {"tiercel.tokens.store": known.reuse.store_tokens},
    "match": lambda known: {
        "tiercel.tokens.prompt": known.reuse.prompt_tokens,
        "tiercel.tokens.found": known.reuse.found_tokens,
        "tiercel.why_not_more": known.reuse.why.value,
    },
    "load": lambda known: {
        "tiercel.tokens.host": known.reuse.host_tokens,
        "tiercel.tokens.store": known.reuse.store_tokens,
    },
    "prefill": lambda known: {
        "tiercel.tokens.device": known.reuse.device_tokens,
        "tiercel.tokens.replayed": known.reuse.replay_tokens,
        "tiercel.tokens.computed": known.reuse.computed_tokens,
    },
}
"""What the span of a stage has besides its times."""
