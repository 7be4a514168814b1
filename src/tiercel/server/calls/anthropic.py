"""Anthropic's calls: `/v1/messages` and `/v1/messages/count_tokens`, translated into chats.

A `cache_control` names a point after which texts may differ, as it does in a chat. A last message of the
assistant is the beginning of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field, Tag
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tiercel.errors import InputError
from tiercel.server.calls import schema
from tiercel.server.calls.anthropic_replies import AnthropicErrorBody, MessageOut, MessageReply
from tiercel.server.calls.openai_api import OpenAI
from tiercel.server.calls.protocol import CacheControl
from tiercel.server.calls.reply import Api
from tiercel.server.calls.schema import gives
from tiercel.server.calls.translate import Fields, Messages, PassedOn, ToolName, Translated, by_type, one_of
from tiercel.server.http import keys, known
from tiercel.server.http.body import Body, ListOf, SomeOf, Stop, TokenCount, limit
from tiercel.server.http.border import visit_of
from tiercel.server.http.errors import MESSAGES_PATH, ApiError, conflict

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}

# --- the request ---


BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class TextBlock(Body):
    known = known.TEXT_BLOCK

    type: Annotated[Literal["text"], one_of(BLOCKS)]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinking(Body):
    """Thoughts of another server, which can not be read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUse(Body):
    known = known.TOOL_USE

    type: Literal["tool_use"]
    id: str
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResult(Body):
    known = known.TOOL_RESULT

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | ListOf[TextBlock] | None = None
    cache_control: CacheControl | None = None


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinking, Tag("redacted_thinking")]
    | Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")],
    by_type(BLOCKS),
]


class InMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | ListOf[AnyBlock]


class AnthropicTool(Body):
    """`strict` is not enforced. `cache_control` changes nothing: a message's end is a break point anyway."""

    known = known.ANTHROPIC_TOOL

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    strict: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """`budget_tokens` is not enforced."""

    known = known.THINKING

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """What a prompt follows from."""

    known = known.MESSAGES

    model: Annotated[str, limit(enum="models")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    messages: SomeOf[InMessage]
    system: str | ListOf[TextBlock] | None = None
    tools: ListOf[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    """It holds for the last block."""

    def translated(self) -> Translated:
        choice, thinking = self.tool_choice, self.thinking
        messages = _messages(self)
        fields: Fields = {
            "chat_template_kwargs": self.chat_template_kwargs,
            "continue_final_message": _is_begun(messages),
        }
        if self.tools:
            fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.tools]
        if choice:
            if choice.type == "tool" and choice.name is None:
                raise conflict("tool_choice.name", None, 'is missing: the type is "tool"')
            named = {"type": "function", "function": {"name": choice.name}}
            every = {"auto": "auto", "none": "none", "any": "required", "tool": named}
            fields["tool_choice"] = every[choice.type]
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if thinking:
            fields["thinking"] = {"type": "disabled" if thinking.type == "disabled" else "enabled"}
            fields["include_reasoning"] = thinking.display != "omitted"
        if self.output_config:
            fields["reasoning_effort"] = self.output_config.effort
            if self.output_config.format:
                asked = {"name": "answer", "schema": self.output_config.format.schema_}
                fields["response_format"] = {"type": "json_schema", "json_schema": asked}
        return Translated(fields, messages, NAMES)


class MessagesRequest(PassedOn, CountRequest):
    max_tokens: TokenCount
    stop_sequences: Stop | None = None

    def translated(self) -> Translated:
        translated = super().translated()
        own = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        translated.fields.update(self.passed_on() | own)
        return translated


class TokenCountOut(BaseModel):
    input_tokens: int


def _function(tool: AnthropicTool) -> Fields:
    given = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return given | {"parameters": tool.input_schema}


# --- from blocks to the messages of a chat ---


def _messages(body: CountRequest) -> Messages:
    messages = Messages()
    if body.system:
        messages.add("system", role="system", content=_content(body.system))
    for index, message in enumerate(body.messages):
        origin, content = f"messages[{index}]", message.content
        if isinstance(content, str) or not content:
            messages.add(origin, role=message.role, content=content or "")
        elif message.role == "assistant":
            _add_assistant(messages, origin, content)
        else:
            _add_blocks(messages, origin, message.role, content)
    if body.cache_control and messages.all:
        messages.all[-1]["cache_control"] = {"type": "ephemeral"}
    return messages


def _add_assistant(messages: Messages, origin: str, blocks: Sequence[Any]) -> None:
    answer = messages.assistant(origin)
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    if texts:
        answer["content"] = _content(texts)
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        answer["reasoning_content"] = "\n\n".join(thoughts)
    calls = [block for block in blocks if isinstance(block, ToolUse)]
    if calls:
        answer["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    if any(call.cache_control for call in calls):
        answer["cache_control"] = {"type": "ephemeral"}


def _add_blocks(messages: Messages, origin: str, role: str, blocks: Sequence[Any]) -> None:
    """The result of a tool is a message of its own, between the texts before and after it."""
    texts: list[TextBlock] = []

    def add_texts() -> None:
        if texts:
            messages.add(origin, role=role, content=_content(texts))
            texts.clear()

    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResult):
            add_texts()
            content = _content(block.content or "")
            place = f"{origin}.content[{index}]"
            result = messages.add(place, role="tool", tool_call_id=block.tool_use_id, content=content)
            if block.cache_control:
                result["cache_control"] = {"type": "ephemeral"}
        else:
            where = f"{origin}.content[{index}].type"
            message = f"{where} = {block.type!r}: only an assistant can say this"
            raise ApiError(400, message, param=where, code="conflicting_values")
    add_texts()


def _content(given: str | Sequence[TextBlock]) -> str | list[Fields]:
    if isinstance(given, str):
        return given
    parts = [block.model_dump(exclude_none=True) for block in given]
    return parts or ""


def _is_begun(messages: Messages) -> bool:
    """Whether the last message is the beginning of the answer."""
    last = messages.all[-1] if messages.all else {}
    return bool(last.get("role") == "assistant" and last["content"] and "tool_calls" not in last)


# --- the calls ---


class Anthropic:
    """The calls of one server."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.chats = OpenAI(api)

    async def create(self, request: Request) -> Response:
        """Continue a conversation. With `stream`, as server-sent events."""
        body = await self.api.read_ask(request, MessagesRequest)
        translated = await self.api.on_body(body.translated)
        reply = partial(MessageReply, page_tokens=self.api.service.page_tokens)
        try:
            chat = await self.api.on_body(translated.as_chat)
            response = await self.chats.converse(request, chat, reply)
        except (ApiError, InputError) as error:
            raise translated.in_clients_words(error) from error
        response.headers["request-id"] = visit_of(request).request_id
        return response

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a conversation has."""
        body = await self.api.read(request, CountRequest)
        self.api.check_model(body.model)
        translated = await self.api.on_body(body.translated)
        try:
            prompt = await self.chats.rendered(await self.api.on_body(translated.as_chat))
        except (ApiError, InputError) as error:
            raise translated.in_clients_words(error) from error
        return JSONResponse({"input_tokens": len(prompt.tokens)})


def router(api: Api) -> APIRouter:
    calls = Anthropic(api)
    routes = APIRouter(tags=["Anthropic"], dependencies=keys.user(api.options))
    problems = (400, 401, 404, 413, 429, 503)
    for path, call, body, answer, media in (
        ("", calls.create, MessagesRequest, MessageOut, schema.STREAM),
        ("/count_tokens", calls.count_tokens, CountRequest, TokenCountOut, None),
    ):
        routes.add_api_route(
            MESSAGES_PATH + path,
            call,
            methods=["POST"],
            responses=gives(answer, *problems, media_type=media, error=AnthropicErrorBody),
            openapi_extra=schema.Reads(body),
        )
    return routes
