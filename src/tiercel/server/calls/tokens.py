"""`/tokenize` and `/detokenize`, with the fields of vLLM's and SGLang's."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.calls import schema
from tiercel.server.calls.openai_api import OpenAI
from tiercel.server.calls.protocol import AnyMessage, ChatRequest, Tool
from tiercel.server.calls.reply import Api, to_json
from tiercel.server.calls.schema import gives
from tiercel.server.http import keys, known
from tiercel.server.http.body import Body, ListOf, SomeOf, TokenId, checked, limit
from tiercel.server.http.errors import conflict, refusal

Ids = Annotated[list[TokenId], Field(fail_fast=True)]


class TokenizeRequest(Body):
    known = known.TOKENIZE

    # Either `prompt` or `messages`.
    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": [one], "properties": {one: {"not": {"type": "null"}}, other: {"type": "null"}}}
                for one, other in (("prompt", "messages"), ("messages", "prompt"))
            ]
        }
    )

    model: Annotated[str, limit(enum="models")] | None = None
    prompt: str | Annotated[list[str], Field(fail_fast=True), limit(maxItems="batch")] | None = None
    messages: SomeOf[AnyMessage] | None = None
    tools: ListOf[Tool] | None = None
    add_special_tokens: bool | None = None
    """For a prompt true if it is not given. A chat template writes its special tokens itself."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class Tokenized(BaseModel):
    """If a list of prompts was sent, the fields are lists."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | list[list[str]] | None = None


class DetokenizeRequest(Body):
    model: Annotated[str, limit(enum="models")] | None = None
    tokens: Ids | Annotated[list[Ids], Field(fail_fast=True), limit(maxItems="batch")]
    skip_special_tokens: bool | None = None
    """For SGLang's `text`; true if it is not given."""


class Detokenized(BaseModel):
    """If a list of lists was sent, the fields are lists."""

    text: str | list[str]
    """SGLang's."""
    prompt: str | list[str]
    """vLLM's: with special tokens."""


class Tokens:
    """The calls of one server."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.service = api.service
        self.chats = OpenAI(api)

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text, of several, or of a conversation as the model reads it."""
        body = await self.api.read(request, TokenizeRequest)
        self.api.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise conflict("prompt", body.prompt, "either prompt or messages must be given, not both")
        if body.messages is not None:
            many = [await self._chat(body)]
        else:
            prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
            if len(prompts) > self.api.options.batch_max:
                raise refusal("prompt", len(prompts), f"{self.api.options.batch_max} prompts are allowed")
            many = await self.api.off_loop(lambda: [self._encoded(each, body) for each in prompts])

        def answer() -> Response:
            answer: dict[str, Any] = {"tokens": many, "count": [len(tokens) for tokens in many]}
            if body.return_token_strs:
                answer["token_strs"] = [
                    [self.service.text.piece(token) for token in tokens] for tokens in many
                ]
            if not isinstance(body.prompt, list):
                answer = {name: each for name, (each,) in answer.items()}
            return _json(answer | {"max_model_len": self.service.context_tokens})

        return await self.api.off_loop(answer)

    def _encoded(self, prompt: str, body: TokenizeRequest) -> list[int]:
        return self.service.text.encode(
            prompt,
            field="prompt",
            tokens_max=self.service.context_tokens,
            add_special_tokens=body.add_special_tokens is not False,
        )

    async def _chat(self, body: TokenizeRequest) -> list[int]:
        if body.add_special_tokens:
            raise conflict("add_special_tokens", True, "a chat template writes its special tokens itself")
        shared = (
            "messages",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
        )
        chat = checked({name: getattr(body, name) for name in shared}, ChatRequest)
        return list((await self.chats.rendered(chat)).tokens)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, or of several lists of them."""
        body = await self.api.read(request, DetokenizeRequest)
        self.api.check_model(body.model)
        single = not body.tokens or isinstance(body.tokens[0], int)
        many: list[Any] = [body.tokens] if single else list(body.tokens)
        if len(many) > self.api.options.batch_max:
            raise refusal("tokens", len(many), f"{self.api.options.batch_max} lists are allowed")

        def decoded(skip: bool) -> list[str]:
            return [self.service.text.decode(tokens, skip_special_tokens=skip) for tokens in many]

        def answer() -> Response:
            vocab_size = self.service.vocab_size
            most = max((max(tokens) for tokens in many if tokens), default=0)
            if most >= vocab_size:
                why = f"is not a token: the vocabulary has {vocab_size}"
                raise refusal("tokens", most, why, code="not_a_token")
            texts, prompts = decoded(body.skip_special_tokens is not False), decoded(False)
            return _json({"text": texts[0] if single else texts, "prompt": prompts[0] if single else prompts})

        return await self.api.off_loop(answer)


def _json(answer: dict[str, Any]) -> Response:
    return Response(to_json(answer), media_type="application/json")


def router(api: Api) -> APIRouter:
    calls = Tokens(api)
    routes = APIRouter(tags=["tokens"], dependencies=keys.user(api.options))
    for prefix in ("", "/v1"):
        for path, call, body, answer in (
            ("/tokenize", calls.tokenize, TokenizeRequest, Tokenized),
            ("/detokenize", calls.detokenize, DetokenizeRequest, Detokenized),
        ):
            routes.add_api_route(
                prefix + path,
                call,
                methods=["POST"],
                include_in_schema=not prefix,
                responses=gives(answer, 400, 401, 404, 413, 503),
                openapi_extra=schema.Reads(body),
            )
    return routes
