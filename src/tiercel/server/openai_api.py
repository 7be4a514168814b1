"""OpenAI's calls: chat, completions, models."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tiercel.engine.ask import Ask, Sampling
from tiercel.server import asks, keys, schema
from tiercel.server.answers import AskGroup
from tiercel.server.border import visit_of
from tiercel.server.chat import ChatReply
from tiercel.server.completions import CompletionReply
from tiercel.server.errors import ApiError, conflict
from tiercel.server.protocol import (
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    ModelCard,
    ModelList,
    OpenAIRequest,
)
from tiercel.server.reply import Front, respond
from tiercel.server.schema import gives
from tiercel.server.service import Service
from tiercel.text.text import Text

COMPLETION_TOKENS = 16
"""OpenAI's default for completions. A chat may fill the context."""

Asked = TypeVar("Asked", bound=OpenAIRequest)

SPELLING = {"stop_tokens": "stop_token_ids"}
CHAT_SPELLING = SPELLING | {"logprobs": "top_logprobs"}


class OpenAI:
    """The three calls of one server."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.service = front.service
        self.names = tuple(dict.fromkeys((front.service.model_name, *front.options.model_names)))
        self.created = int(time.time())

    async def chat(self, request: Request) -> Response:
        """Continue a conversation. With `stream`, as server-sent events."""
        body = await self._read(request, ChatRequest)
        if body.top_logprobs and not body.logprobs:
            raise conflict("top_logprobs", body.top_logprobs, "needs logprobs to be true")
        tools = body.callable_tools
        if tools and not self.service.text.calls:
            why = "the tool call format of this model is not supported"
            raise ApiError(400, f"tools: {why}", param="tools", code="no_tools")
        prompt = await self.front.off_loop(
            partial(
                self.service.text.chat,
                [message.as_dict() for message in body.messages],
                tools=tools,
                kwargs=body.template_kwargs,
                tokens_max=self.service.context_tokens,
            )
        )
        room = asks.room(self.service, prompt.tokens, "messages")
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        ask = Ask(
            request_id=self._own_id(request, body),
            prompt=prompt.tokens,
            turn_ends=prompt.turn_ends,
            sampling=self._sampling(
                body,
                max_tokens=room if asked is None else asked,
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            ),
            namespace=asks.namespace_of(body.cache_salt),
            priority=asks.priority_of(body.priority, self.front.options),
            prompt_logprobs_from=None if body.prompt_logprobs is None else 0,
        )
        spelling = CHAT_SPELLING
        if body.max_completion_tokens is not None:
            spelling = CHAT_SPELLING | {"max_tokens": "max_completion_tokens"}
        asks.check(self.service, ask, spelling)
        group = asks.siblings(ask, body.n or 1, self.front.options)
        thinks = prompt.thinks and body.separate_reasoning is not False
        reply = ChatReply(
            visit_of(request).request_id, self.service.text, body, thinks=thinks, calls=bool(tools)
        )
        return await respond(self.front, request, [group], reply, stream=bool(body.stream))

    async def completions(self, request: Request) -> Response:
        """Continue one text or several. With `stream`, as server-sent events."""
        body = await self._read(request, CompletionRequest)
        n = body.n or 1
        if body.best_of is not None and body.best_of != n:
            raise conflict("best_of", body.best_of, f"must be equal to n, which is {n}")
        prompts = _given(body.prompt)
        self.front.check_batch("prompt", len(prompts))
        own_id, text = self._own_id(request, body), self.service.text

        def made() -> tuple[list[AskGroup], list[str]]:
            groups: list[AskGroup] = []
            for index, given in enumerate(prompts):
                ask = self._completion(asks.member_id(own_id, index), body, given)
                groups.append(asks.siblings(ask, n, self.front.options))
            return groups, [given.written(text) if body.echo else "" for given in prompts]

        groups, echoes = await self.front.off_loop(made)
        reply = CompletionReply(visit_of(request).request_id, text, body, echoes)
        return await respond(self.front, request, groups, reply, stream=bool(body.stream))

    def _completion(self, request_id: str, body: CompletionRequest, given: GivenPrompt) -> Ask:
        tokens = given.tokens(self.service)
        room = asks.room(self.service, tokens, given.field)
        max_tokens = min(COMPLETION_TOKENS, room) if body.max_tokens is None else body.max_tokens
        about_prompt = body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)
        ask = Ask(
            request_id=request_id,
            prompt=tokens,
            sampling=self._sampling(body, max_tokens=max_tokens, logprobs=body.logprobs),
            namespace=asks.namespace_of(body.cache_salt),
            priority=asks.priority_of(body.priority, self.front.options),
            prompt_logprobs_from=0 if about_prompt else None,
        )
        return asks.check(self.service, ask, SPELLING)

    async def models(self) -> Response:
        """The served model, once under each of its names."""
        cards = [self._card(name) for name in self.names]
        return JSONResponse(ModelList(object="list", data=cards).model_dump())

    async def model(self, model: str) -> Response:
        """The served model, by one of its names."""
        self._check_model(model)
        return JSONResponse(self._card(model).model_dump())

    async def _read(self, request: Request, model: type[Asked]) -> Asked:
        self.front.check_ready()
        body = await self.front.read(request, model)
        if body.model is None:
            body.model = self.service.model_name
        self._check_model(body.model)
        wanted = body.rid or body.request_id
        visit = visit_of(request)
        if not visit.name(wanted, lambda name: [asks.own_id(name, visit.owner, body.cache_salt)]):
            raise conflict("rid" if body.rid else "request_id", wanted, "is in use")
        return body

    def _own_id(self, request: Request, body: OpenAIRequest) -> str:
        visit = visit_of(request)
        return asks.own_id(visit.request_id, visit.owner, body.cache_salt)

    def _check_model(self, name: str) -> None:
        if name not in asks.model_names(self.service, self.front.options):
            listed = ", ".join(map(repr, self.names))
            message = f"model {name[:100]!r} is not served here; the served model has the names {listed}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name,
            object="model",
            created=self.created,
            owned_by="tiercel",
            root=self.front.options.model_path or self.service.model_name,
            parent=None,
            max_model_len=self.service.context_tokens,
        )

    def _sampling(self, body: OpenAIRequest, *, max_tokens: int, logprobs: int | None) -> Sampling:
        """Fields that are not given have the defaults of `Sampling`, which are OpenAI's."""
        counts = [count for count in (logprobs, body.prompt_logprobs) if count is not None]
        given = {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": None if body.top_k is None else max(body.top_k, 0),
            "min_p": body.min_p,
            "seed": body.seed,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "repetition_penalty": body.repetition_penalty,
            "ignore_eos": body.ignore_eos,
            "keep_stop": body.no_stop_trim or body.include_stop_str_in_output,
            "logprobs": max(counts, default=None),
        }
        return Sampling(
            max_tokens=max_tokens,
            stop=asks.stop_of(body.stop, "stop", self.front.options),
            stop_tokens=frozenset(body.stop_token_ids or ()),
            logit_bias=asks.bias_of(body.logit_bias, "logit_bias", self.service),
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class GivenPrompt:
    """One prompt of a request, and the field it stands in."""

    field: str
    prompt: str | list[int]

    def tokens(self, service: Service) -> tuple[int, ...]:
        if isinstance(self.prompt, str):
            return tuple(
                service.text.encode(self.prompt, field=self.field, tokens_max=service.context_tokens)
            )
        return tuple(self.prompt)

    def written(self, text: Text) -> str:
        return self.prompt if isinstance(self.prompt, str) else text.decode(self.prompt)


def _given(prompt: str | list[str] | list[int] | list[list[int]]) -> list[GivenPrompt]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [GivenPrompt("prompt", prompt)]
    many = cast(list[str | list[int]], prompt)
    return [GivenPrompt(f"prompt[{index}]", each) for index, each in enumerate(many)]


def router(front: Front) -> APIRouter:
    calls = OpenAI(front)
    routes = APIRouter(prefix="/v1", tags=["OpenAI"], dependencies=keys.user(front.options))
    problems = (400, 401, 404, 413, 429, 503)
    routes.add_api_route(
        "/chat/completions",
        calls.chat,
        methods=["POST"],
        responses=gives(ChatResponse, *problems, media_type="text/event-stream"),
        openapi_extra=schema.body(ChatRequest),
    )
    routes.add_api_route(
        "/completions",
        calls.completions,
        methods=["POST"],
        responses=gives(CompletionResponse, *problems, media_type="text/event-stream"),
        openapi_extra=schema.body(CompletionRequest),
    )
    routes.add_api_route("/models", calls.models, responses=gives(ModelList, 401))
    routes.add_api_route("/models/{model:path}", calls.model, responses=gives(ModelCard, 401, 404))
    return routes
