"""One server, asked over HTTP. Each answer is a stream, and the times of its events are noted."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tiercel.errors import ConfigError

ANSWER_S = 600.0
"""How long a server may say nothing."""
ABOUT_S = 30.0
"""The same for questions about the server itself."""
FLUSH_S = 10
SOURCES = ("store", "host", "device", "cached")
"""Where tokens of a prompt may come from, the slowest first. `cached`: the server does not tell more."""


@dataclass
class Measured:
    """One request, and what came of it. Times are in seconds."""

    conversation: int
    turn: int
    began_s: float = 0.0
    """Since the run began."""
    late_s: float | None = None
    """How long after its time in the trace it began."""
    ttft_s: float | None = None
    """From before the request is sent to the first event with a text."""
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    """Between events with a text. An event may have several tokens."""
    e2e_s: float = 0.0
    text: str = ""
    request_id: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    """tiercel and SGLang: what was reused, by tier."""
    error: str = ""
    """What kind of error ended it; empty: none did."""

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens") or 0)

    @property
    def answer_tokens(self) -> int:
        """A server that tells no usage has, as far as is known, one token in each event."""
        events = 0 if self.ttft_s is None else 1 + len(self.gaps_s)
        return int(self.usage.get("completion_tokens") or events)

    @property
    def tokens_by_source(self) -> dict[str, int]:
        """Tokens of the prompt that were not computed."""
        tiers = self.details.get("cached_tokens_details") or {}
        found = {"store" if tier == "storage" else tier: int(count) for tier, count in tiers.items() if count}
        if not tiers:
            told = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            found = {"cached": int(told)} if told else {}
        return found

    @property
    def source(self) -> str:
        """The slowest source of its prompt."""
        found = self.tokens_by_source
        return next((source for source in SOURCES if source in found), "computed")

    @property
    def tpot_s(self) -> float | None:
        """The mean time from token to token, behind the first one."""
        behind = self.answer_tokens - 1
        return sum(self.gaps_s) / behind if self.gaps_s and behind > 0 else None


class Connections:
    """Connections to one server, each with a pool of its own: a pool of httpx looks at all its connections
    whenever a request begins or ends, and with 64 of them that takes seconds."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        own = {"content-type": "application/json", "accept-encoding": "identity"}
        self._make = partial(
            httpx.AsyncClient,
            base_url=url,
            headers={**own, **headers},
            timeout=httpx.Timeout(ANSWER_S, connect=ABOUT_S),
            verify=httpx.create_ssl_context(),  # reading the certificates takes longer than all else
        )
        self._all: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []

    @contextmanager
    def one(self) -> Iterator[httpx.AsyncClient]:
        """A connection that nobody else uses meanwhile."""
        if not self._idle:
            self._idle.append(self._make())
            self._all.append(self._idle[-1])
        http = self._idle.pop()
        try:
            yield http
        finally:
            self._idle.append(http)

    async def close(self) -> None:
        for http in self._all:
            await http.aclose()


class Client:
    """A server. `plain`: only OpenAI's own fields are sent, so answers may end before their length."""

    def __init__(self, connections: Connections, *, model: str, plain: bool) -> None:
        self._connections = connections
        self.model = model
        self._fields: dict[str, Any] = {"model": model, "temperature": 0, "stream": True}
        self._fields["stream_options"] = {"include_usage": True}
        if not plain:
            self._fields |= {"ignore_eos": True, "return_cached_tokens_details": True}

    def body(self, prompt: Mapping[str, Any], answer_tokens: int) -> bytes:
        fields = {**self._fields, "max_tokens": answer_tokens, **prompt}
        return json.dumps(fields, separators=(",", ":")).encode()

    async def ask(self, path: str, body: bytes, measured: Measured) -> None:
        """Send one request and read its answer into `measured`. An error is noted there, too."""
        begin = perf_counter()
        try:
            with self._connections.one() as http:
                async with http.stream("POST", path, content=body) as response:
                    measured.request_id = response.headers.get("x-request-id", "")
                    if response.is_error:
                        measured.error = _kind(response.status_code, await response.aread())
                    else:
                        await self._read(response, measured, begin)
        except httpx.HTTPError as error:
            measured.error = type(error).__name__
        except (ValueError, TypeError, AttributeError):
            measured.error = "not a stream as OpenAI's"
        measured.e2e_s = perf_counter() - begin

    async def _read(self, response: httpx.Response, measured: Measured, begin: float) -> None:
        rest, last_s, ended, words = b"", begin, False, list[str]()
        async for chunk in response.aiter_bytes():
            now_s = perf_counter()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                if line[5:].strip() == b"[DONE]":
                    ended = True
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    measured.error = _kind(response.status_code, line[5:])
                    return
                measured.usage = event.get("usage") or measured.usage
                measured.details = event.get("sglext") or measured.details
                text = _text_of(event)
                if text is None:
                    continue
                words.append(text)
                if measured.ttft_s is None:
                    measured.ttft_s = now_s - begin
                else:
                    measured.gaps_s.append(now_s - last_s)
                last_s = now_s
        measured.text = "".join(words)
        if not ended:
            measured.error = "the stream ended early"

    async def counters(self) -> dict[str, float]:
        """All counters of `/metrics`; none, if the server has no such page."""
        try:
            with self._connections.one() as http:
                response = await http.get("/metrics", timeout=ABOUT_S)
            families = list(text_string_to_metric_families(response.text if response.is_success else ""))
        except (httpx.HTTPError, ValueError):
            return {}
        return {
            sample.name + ("{" + labels + "}" if labels else ""): sample.value
            for family in families
            if family.type == "counter"
            for sample in family.samples
            if sample.name.endswith("_total")
            for labels in [",".join(f'{name}="{value}"' for name, value in sample.labels.items())]
        }

    async def flush(self) -> None:
        """Empty the server's cache (an admin call of tiercel and SGLang). Its store stays."""
        with self._connections.one() as http:
            response = await http.post(f"/flush_cache?timeout={FLUSH_S}", timeout=FLUSH_S + ABOUT_S)
        if response.is_error:
            raise ConfigError(
                "--flush", "on", f"the server answers {_kind(response.status_code, response.content)}"
            )


@asynccontextmanager
async def connected(
    url: str, headers: Mapping[str, str], *, model: str | None, plain: bool
) -> AsyncIterator[Client]:
    """A server that answers. Without a name, `model` is the first one of its list."""
    connections = Connections(url, headers)
    try:
        with connections.one() as http:
            try:
                response = await http.get("/v1/models", timeout=ABOUT_S)
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                raise ConfigError(
                    "url", url, f"no server answers: {error or type(error).__name__}"
                ) from error
        if response.is_error and (model is None or response.status_code in (401, 403)):
            raise ConfigError(
                "url", url, f"/v1/models answers {_kind(response.status_code, response.content)}"
            )
        yield Client(connections, model=model or _first_model(url, response), plain=plain)
    finally:
        await connections.close()


def _first_model(url: str, response: httpx.Response) -> str:
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError("url", url, "/v1/models lists no model; --model names one") from error


def _text_of(event: Mapping[str, Any]) -> str | None:
    """The text of an event; None, if it has no part of an answer. Thoughts count, but are not sent back."""
    for choice in event.get("choices") or ():
        said = choice.get("delta") or choice
        text, thought = (said.get("text") or said.get("content") or ""), said.get("reasoning_content") or ""
        if text or thought or said.get("tool_calls"):
            return str(text)
    return None


def _kind(status: int, body: bytes) -> str:
    """A short name of an error: the status, and the code of the server's error if it has one."""
    try:
        error = json.loads(body)["error"]
        code = error.get("code") or error.get("type") or error["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        code = ""
    return f"{status} {str(code)[:60]}".strip() if str(code) != str(status) else str(status)
