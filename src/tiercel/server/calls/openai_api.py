"""OpenAI's calls: chat, completions, models."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tiercel.asks.ask import Ask, Prefiller, Sampling
from tiercel.errors import AskError
from tiercel.server.calls import asks, prefiller, schema
from tiercel.server.calls.grammars import chat_grammar, text_grammar
from tiercel.server.calls.openai_replies import ChatReply, CompletionReply
from tiercel.server.calls.protocol import (
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    ModelCard,
    ModelList,
    OpenAIRequest,
)
from tiercel.server.calls.reply import Api, AskGroup, Reply, respond
from tiercel.server.calls.schema import gives
from tiercel.server.http import keys
from tiercel.server.http.border import visit_of
from tiercel.server.http.errors import ApiError, conflict
from tiercel.text.grammar import Grammar
from tiercel.text.text import Prompt

COMPLETION_TOKENS = 16
"""OpenAI's default for completions. A chat may fill the context."""

SPELLING = {"stop_tokens": "stop_token_ids"}
CHAT_SPELLING = SPELLING | {"logprobs": "top_logprobs"}


class OpenAI:
    """The three calls of one server."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.service = api.service
        self.created = int(time.time())

    async def chat(self, request: Request) -> Response:
        """Continue a conversation. With `stream`, as server-sent events."""
        return await self.converse(request, await self.api.read_ask(request, ChatRequest), ChatReply)

    async def converse(self, request: Request, body: ChatRequest, reply_of: Callable[..., Reply]) -> Response:
        """A chat, whatever call it came from; the reply is that call's."""
        own_id = self._named(request, body)
        if body.top_logprobs and not body.logprobs:
            raise conflict("top_logprobs", body.top_logprobs, "needs logprobs to be true")
        text, tools = self.service.text, body.callable_tools
        if tools and not text.calls:
            why = "the tool call format of this model is not supported"
            raise ApiError(400, f"tools: {why}", param="tools", code="no_tools")
        prompt = await self.rendered(body)
        trying = self.api.trying(request)
        grammar = await chat_grammar(body, body.chat_tools, text, trying, thinks=prompt.thinks)
        room = asks.room(self.service, prompt.tokens, "messages")
        asked, spelling = body.max_tokens, CHAT_SPELLING
        if body.max_completion_tokens is not None:
            asked = body.max_completion_tokens
            spelling = CHAT_SPELLING | {"max_tokens": "max_completion_tokens"}
        group = self._group(
            body,
            spelling,
            request_id=own_id,
            prompt=prompt.tokens,
            turn_ends=prompt.turn_ends,
            sampling=self._sampling(
                body,
                max_tokens=room if asked is None else asked,
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                grammar=grammar,
            ),
            prompt_logprobs_from=None if body.prompt_logprobs is None else 0,
            prefiller=self._prefillers(body, min(body.n or 1, self.api.options.n_max), own_id)[0],
        )
        thinks = prompt.thinks and body.separate_reasoning is not False
        reply = reply_of(
            visit_of(request).request_id,
            text,
            body,
            thinks,
            text.calls if tools else None,
            handover=_handover(body, group),
        )
        return await respond(self.api, request, [group], reply, stream=bool(body.stream))

    async def rendered(self, body: ChatRequest) -> Prompt:
        """The conversation as the model reads it."""
        if body.continue_final_message and body.add_generation_prompt:
            raise conflict("continue_final_message", True, "not together with add_generation_prompt")

        def render() -> Prompt:
            return self.service.text.chat(
                [message.as_dict() for message in body.messages],
                tools=body.callable_tools,
                kwargs=body.template_kwargs,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
                tokens_max=self.service.context_tokens,
            )

        try:
            return await self.api.off_loop(render)
        except AskError as error:
            if error.field == "continue_final_message":  # the messages do not fit it
                raise conflict(error.field, error.value, error.why) from error
            raise

    async def completions(self, request: Request) -> Response:
        """Continue one text or several. With `stream`, as server-sent events."""
        body = await self.api.read_ask(request, CompletionRequest)
        own_id = self._named(request, body)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise conflict("best_of", body.best_of, f"must be equal to n, which is {body.n or 1}")
        prompts = asks.given_prompts("prompt", body.prompt, self.api.options)
        prefillers = self._prefillers(body, len(prompts), own_id)
        text = self.service.text
        grammar = await text_grammar(body, self.api.trying(request))

        def made() -> tuple[list[AskGroup], list[str]]:
            ids = [asks.member_id(own_id, index) for index in range(len(prompts))]
            every = zip(ids, prompts, prefillers, strict=True)
            groups = [self._completion(*each, body, grammar) for each in every]
            return groups, [given.written(text) if body.echo else "" for given in prompts]

        groups, echoes = await self.api.off_loop(made)
        handover = _handover(body, groups[0])
        reply = CompletionReply(visit_of(request).request_id, text, body, echoes, handover=handover)
        return await respond(self.api, request, groups, reply, stream=bool(body.stream))

    def _completion(
        self,
        request_id: str,
        given: asks.GivenPrompt,
        prefiller: Prefiller | None,
        body: CompletionRequest,
        grammar: Grammar | None,
    ) -> AskGroup:
        tokens = given.tokens(self.service)
        room = asks.room(self.service, tokens, given.field)
        max_tokens = min(COMPLETION_TOKENS, room) if body.max_tokens is None else body.max_tokens
        about_prompt = body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)
        return self._group(
            body,
            SPELLING,
            request_id=request_id,
            prompt=tokens,
            sampling=self._sampling(body, max_tokens=max_tokens, logprobs=body.logprobs, grammar=grammar),
            prompt_logprobs_from=0 if about_prompt else None,
            prefiller=prefiller,
        )

    async def models(self) -> Response:
        """The served model, once under each of its names."""
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self.api.names]})

    async def model(self, model: str) -> Response:
        """The served model, by one of its names."""
        self.api.check_model(model)
        return JSONResponse(self._card(model))

    def _named(self, request: Request, body: OpenAIRequest) -> str:
        """The engine's id of the request, reserved until the answer is sent. Also checks the model's name,
        and sets it if the client gave none."""
        if body.model is None:
            body.model = self.service.model_name
        self.api.check_model(body.model)
        wanted, visit = body.rid or body.request_id, visit_of(request)
        own = partial(asks.own_id, owner=visit.owner, cache_salt=body.cache_salt)
        if not visit.name(wanted, lambda name: [own(name)]):
            raise conflict("rid" if body.rid else "request_id", wanted, "is in use")
        return own(visit.request_id)

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "tiercel",
            "root": self.api.options.model_path or self.service.model_name,
            "parent": None,
            "max_model_len": self.service.context_tokens,
        }

    def _sampling(
        self, body: OpenAIRequest, *, max_tokens: int, logprobs: int | None, grammar: Grammar | None
    ) -> Sampling:
        counts = [count for count in (logprobs, body.prompt_logprobs) if count is not None]
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            seed=body.sampling_seed if body.seed is None else body.seed,
            keep_stop=bool(body.include_stop_str_in_output),
            logprobs=max(counts, default=None),
            grammar=grammar,
        )

    def _prefillers(self, body: OpenAIRequest, count: int, own_id: str) -> list[Prefiller | None]:
        """The prefiller of each of `count` prompts."""
        options = self.api.options
        by_transfer = prefiller.by_transfer(body.kv_transfer_params, asks.public_id(own_id), options)
        return [by_transfer or each for each in prefiller.by_bootstrap(body, count, options)]

    def _group(self, body: OpenAIRequest, spelling: dict[str, str], **fields: Any) -> AskGroup:
        namespace = asks.namespace_of(body.cache_salt)
        priority = asks.priority_of(body.priority, self.api.options)
        ask = Ask(namespace=namespace, priority=priority, **fields)
        return asks.group_of(self.api, ask, body, spelling)


def _handover(body: OpenAIRequest, group: AskGroup) -> Prefiller | None:
    asked = body.kv_transfer_params
    return group[0].prefiller if asked is not None and asked.do_remote_decode else None


def router(api: Api) -> APIRouter:
    calls = OpenAI(api)
    routes = APIRouter(prefix="/v1", tags=["OpenAI"], dependencies=keys.user(api.options))
    for path, call, body, answer in (
        ("/chat/completions", calls.chat, ChatRequest, ChatResponse),
        ("/completions", calls.completions, CompletionRequest, CompletionResponse),
    ):
        routes.add_api_route(
            path,
            call,
            methods=["POST"],
            responses=gives(answer, 400, 401, 404, 413, 429, 503, media_type=schema.STREAM),
            openapi_extra=schema.Reads(body),
        )
    routes.add_api_route("/models", calls.models, responses=gives(ModelList, 401))
    routes.add_api_route("/models/{model:path}", calls.model, responses=gives(ModelCard, 401, 404))
    return routes
