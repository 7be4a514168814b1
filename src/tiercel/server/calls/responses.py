"""OpenAI's `/v1/responses`: its requests as types, and their translation into a chat.

A request may refer to earlier answers: to an item (`item_reference`), or to a whole conversation
(`previous_response_id`). `items` remembers them for a while, unless the request says `store: false`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field, Tag, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from tiercel.errors import InputError
from tiercel.server.calls import schema
from tiercel.server.calls.items import Items, Turn, Whose
from tiercel.server.calls.openai_api import OpenAI
from tiercel.server.calls.protocol import Effort
from tiercel.server.calls.reply import Api
from tiercel.server.calls.responses_replies import ResponseOut, ResponsesReply
from tiercel.server.calls.schema import gives
from tiercel.server.calls.translate import Fields, Messages, PassedOn, ToolName, Translated, by_type, one_of
from tiercel.server.http import keys, known
from tiercel.server.http.body import Body, ListOf, Metadata, SomeOf, Stop, TokenCount, TopLogprobs
from tiercel.server.http.border import visit_of
from tiercel.server.http.errors import ApiError, shown

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}

# --- the request ---


ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


class BreakPoint(Body):
    """Marks a point after which texts may differ."""

    known = known.BREAK_POINT

    mode: Literal["explicit"]


class Part(Body):
    """A text. (Images, files and refusals are refused.)"""

    known = known.INPUT_PART

    type: Literal["input_text", "output_text", "text"]
    text: str
    prompt_cache_breakpoint: BreakPoint | None = None


Content = str | ListOf[Part]


class InputMessage(Body):
    known = known.ITEM_LABELS

    type: Annotated[Literal["message"] | None, one_of(ITEMS)] = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(Body):
    """A call that the model made."""

    known = known.CALL_ITEM

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class CallOutputItem(Body):
    """What came of a call."""

    known = known.CALL_OUTPUT_ITEM

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class Thought(Body):
    type: Literal["summary_text", "reasoning_text"]
    text: str


class ReasoningItem(Body):
    """Thoughts, as an answer had them."""

    known = known.ITEM_LABELS

    type: Literal["reasoning"]
    summary: ListOf[Thought] | None = None
    content: ListOf[Thought] | None = None
    encrypted_content: str | None = None

    @property
    def thoughts(self) -> str:
        written = self.content or self.summary
        if written or not self.encrypted_content:
            return "\n\n".join(each.text for each in written or ())
        return decoded(self.encrypted_content)


class ItemReference(Body):
    """An item of an earlier answer."""

    type: Literal["item_reference"]
    id: str


SaidItem = InputMessage | CallItem | CallOutputItem | ReasoningItem
Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    by_type(ITEMS),
]
ONE_ITEM, SEVERAL_ITEMS = TypeAdapter[Item](Item), TypeAdapter(list[Item])


class FunctionTool(Body):
    known = known.FUNCTION_TOOL

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Body):
    type: Literal["function"]
    name: ToolName


class Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextFields(Body):
    known = known.TEXT_FIELDS

    format: Format | None = None


Summary = Literal["auto", "concise", "detailed"]


class Reasoning(Body):
    known = known.REASONING

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    """The older name of `summary`."""


class ResponsesStreamOptions(Body):
    known = known.STREAM_OPTIONS


class ResponsesRequest(PassedOn):
    known = known.RESPONSES

    input: Annotated[str, Field(min_length=1)] | SomeOf[Item]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    tools: ListOf[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: Reasoning | None = None
    include: ListOf[str] | None = None
    top_logprobs: TopLogprobs | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    stream_options: ResponsesStreamOptions | None = None
    stop: Stop | None = None
    """Not OpenAI's: named as in vLLM and SGLang."""

    @property
    def summarised(self) -> bool:
        """Whether thoughts are sent as a summary: clients that ask for one look for them there."""
        return bool(self.reasoning and (self.reasoning.summary or self.reasoning.generate_summary))

    @property
    def encrypted(self) -> bool:
        """Whether thoughts are also sent as `encrypted_content`, which clients send back unchanged."""
        return ENCRYPTED in (self.include or ())

    @property
    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input

    def translated(self, earlier: Earlier | None = None) -> Translated:
        """The request as a chat. `earlier`: what it may refer to."""
        messages = _messages(self, earlier or Earlier(Items(0), Whose("", ""), 0))
        logged = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        fields: Fields = self.passed_on() | {
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "stop": self.stop,
            "logprobs": logged,
            "top_logprobs": self.top_logprobs if logged else None,
        }
        if self.tools:
            fields["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}
                for tool in self.tools
            ]
        if isinstance(self.tool_choice, NamedTool):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        else:
            fields["tool_choice"] = self.tool_choice
        if self.text and self.text.format:
            fields["response_format"] = _response_format(self.text.format)
        return Translated(fields, messages, NAMES)


def _response_format(asked: Format) -> Fields:
    given = asked.model_dump(exclude_none=True, by_alias=True)
    kind = given.pop("type")
    return {"type": kind, "json_schema": given} if kind == "json_schema" else {"type": kind}


class Earlier:
    """What one request may refer to. It may name a long item many times, so the total is limited."""

    def __init__(self, items: Items, whose: Whose, bytes_max: int) -> None:
        self._items = items
        self._whose = whose
        self._bytes_left = self._bytes_max = bytes_max

    def asked_by(self, body: ResponsesRequest) -> Iterator[tuple[str, SaidItem]]:
        """The conversation, each item with its place in the request."""
        if body.previous_response_id is not None:
            origin = "previous_response_id"
            yield from ((origin, item) for item in self._conversation(body.previous_response_id))
        one = isinstance(body.input, str)
        for index, item in enumerate(body.items):
            yield "input" if one else f"input[{index}]", self._resolved(item)

    def _conversation(self, response_id: str) -> Iterator[SaidItem]:
        turns = self._items.turns(self._whose, response_id)
        if turns is None:
            param, message = (
                "previous_response_id",
                f"Previous response with id {shown(response_id)} not found.",
            )
            raise ApiError(400, message, param=param, code="previous_response_not_found")
        for turn in turns:
            self._take(turn.size)
            for item in SEVERAL_ITEMS.validate_json(turn.asked):
                yield self._resolved(item)
            for said in turn.said.values():
                yield self._resolved(ONE_ITEM.validate_json(said))

    def _resolved(self, item: Item) -> SaidItem:
        if not isinstance(item, ItemReference):
            return item
        said = self._items.item(self._whose, item.id)
        if said is None:
            why = "Items are not persisted when `store` is set to false, and are forgotten after a while."
            message = f"Item with id {shown(item.id)} not found. {why} Send the item itself."
            raise ApiError(404, message, param="input", code="item_not_found")
        self._take(len(said))
        return self._resolved(ONE_ITEM.validate_json(said))

    def _take(self, count: int) -> None:
        self._bytes_left -= count
        if self._bytes_left < 0:
            message = f"what the request refers to is longer than {self._bytes_max:,} B"
            raise ApiError(413, message, param="input", code="request_too_large")


def asked_in(body: ResponsesRequest) -> bytes:
    """What a request asks, to be remembered."""
    return SEVERAL_ITEMS.dump_json(body.items, exclude_none=True)


def turn_of(before: str | None, asked: bytes, output: Sequence[Fields]) -> Turn:
    """A request and its answer, to be remembered: without what no conversation needs, such as logprobs."""
    said = {
        each["id"]: ONE_ITEM.dump_json(ONE_ITEM.validate_python(each), exclude_none=True) for each in output
    }
    return Turn(before, asked, said)


def _messages(body: ResponsesRequest, earlier: Earlier) -> Messages:
    messages = Messages()
    if body.instructions:
        messages.add("instructions", role="system", content=body.instructions)
    answer: Fields | None = None
    for origin, item in earlier.asked_by(body):
        match item:
            case CallOutputItem():
                content = _content(item.output)
                messages.add(origin, role="tool", tool_call_id=item.call_id, content=content)
                answer = None
            case InputMessage(role="user" | "system" | "developer"):
                messages.add(origin, role=item.role, content=_content(item.content))
                answer = None
            case _:
                answer = _answer(messages, answer, origin, item)
    return messages


def _answer(
    messages: Messages,
    answer: Fields | None,
    origin: str,
    item: InputMessage | CallItem | ReasoningItem,
) -> Fields:
    """Thoughts, words and calls of one answer are several items, but one message of a chat: `answer`, or a
    new one if the item can not belong to it."""
    closed = answer is None or answer["content"] or "tool_calls" in answer
    if answer is None or (closed and not isinstance(item, CallItem)):
        answer = messages.assistant(origin)
    match item:
        case InputMessage():
            answer["content"] = _content(item.content)
        case CallItem():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
        case ReasoningItem():
            thoughts = [answer.get("reasoning_content", ""), item.thoughts]
            answer["reasoning_content"] = "\n\n".join(filter(None, thoughts))
    return answer


def _content(given: Content) -> str | list[Fields]:
    if isinstance(given, str):
        return given
    if not any(part.prompt_cache_breakpoint for part in given) and len(given) < 2:
        return "".join(part.text for part in given)
    return [
        {"type": "text", "text": part.text}
        | ({"cache_control": {"type": "ephemeral"}} if part.prompt_cache_breakpoint else {})
        for part in given
    ]


def encoded(thoughts: str) -> str:
    return base64.b64encode(thoughts.encode()).decode()


def decoded(content: str) -> str:
    """Thoughts of this server. Those of another server can not be read; they are left out."""
    try:
        return base64.b64decode(content, validate=True).decode()
    except ValueError:
        return ""


# --- the call ---


class Responses:
    """The call of one server."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.chats = OpenAI(api)
        self.items = Items(api.options.items_bytes_max)

    async def create(self, request: Request) -> Response:
        """Answer a text or a conversation. With `stream`, as server-sent events."""
        body = await self.api.read_ask(request, ResponsesRequest)
        whose = Whose(visit_of(request).owner, body.cache_salt or "")
        earlier = Earlier(self.items, whose, self.api.options.body_bytes_max)
        translated = await self.api.on_body(body.translated, earlier)
        kept = body.store is not False and self.items.bytes_max > 0
        asked = await self.api.on_body(asked_in, body) if kept else b""

        def ended(response: Fields) -> None:
            if kept:
                turn = turn_of(body.previous_response_id, asked, response["output"])
                self.items.add(whose, response["id"], turn)

        reply = partial(
            ResponsesReply,
            echoed=await self.api.on_body(_echoed, body) | {"store": kept},
            ended_with=ended,
            page_tokens=self.api.service.page_tokens,
            summarised=body.summarised,
            encoded=encoded if body.encrypted else None,
        )
        try:
            chat = await self.api.on_body(translated.as_chat)
            return await self.chats.converse(request, chat, reply)
        except (ApiError, InputError) as error:
            raise translated.in_clients_words(error) from error


def _echoed(body: ResponsesRequest) -> Fields:
    """The fields of a response that repeat the request."""

    def given(value: BaseModel | Sequence[BaseModel] | None) -> Any:
        if isinstance(value, BaseModel):
            return value.model_dump(exclude_none=True, by_alias=True)
        return [given(each) for each in value or ()]

    reasoning = {"effort": None, "summary": None} | (given(body.reasoning) if body.reasoning else {})
    text = given(body.text) if body.text and body.text.format else {"format": {"type": "text"}}
    choice = given(body.tool_choice) if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": reasoning,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": text,
        "tool_choice": choice or "auto",
        "tools": [{"parameters": None, "strict": None} | given(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
    }


def router(api: Api) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["OpenAI"], dependencies=keys.user(api.options))
    routes.add_api_route(
        "/responses",
        Responses(api).create,
        methods=["POST"],
        responses=gives(ResponseOut, 400, 401, 404, 413, 429, 503, media_type=schema.STREAM),
        openapi_extra=schema.Reads(ResponsesRequest),
    )
    return routes
