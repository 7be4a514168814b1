"""OpenAI's requests and answers as pydantic models. Fields that are not supported are in `known`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from tiercel.server.calls.grammars import ChatTools, GrammarFields, ToolChoice
from tiercel.server.calls.prefiller import BootstrapFields, KvTransferParams
from tiercel.server.http import known
from tiercel.server.http.body import (
    Body,
    Count,
    ListOf,
    Priority,
    RequestId,
    Salt,
    SamplingFields,
    Seed,
    SomeOf,
    Texts,
    TokenCount,
    TokenLists,
    Tokens,
    TopLogprobs,
    Written,
    limit,
)

# --- requests ---


class StreamOptions(Body):
    known = known.STREAM_OPTIONS

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIRequest(SamplingFields, BootstrapFields, GrammarFields):
    """The fields that chat and completions share."""

    model: Annotated[str, limit(enum="models")] | None = None
    max_tokens: TokenCount | None = None
    min_tokens: TokenCount | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    seed: Seed | None = None

    # Not OpenAI's: named as in vLLM and SGLang.
    sampling_seed: Seed | None = None
    """The name of `seed` in SGLang's router."""
    kv_transfer_params: KvTransferParams | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    prompt_logprobs: TopLogprobs | None = None
    rid: RequestId | None = None
    request_id: RequestId | None = None
    return_cached_tokens_details: bool | None = None

    @property
    def answered_as(self) -> str:
        """The model's name in the answer. If the client gave none, the call has set it."""
        assert self.model is not None
        return self.model


class CacheControl(Body):
    """Marks a point after which texts may differ, as Anthropic's clients do."""

    known = known.CACHE_CONTROL

    type: Literal["ephemeral"]


class TextPart(Body):
    known = known.TEXT_PART

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


Content = str | SomeOf[TextPart]


class FunctionCall(Body):
    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """A call that an assistant made."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class Message(Body):
    known = known.MESSAGE

    role: Literal["system", "developer", "user", "tool"]
    content: Content
    cache_control: CacheControl | None = None
    tool_call_id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The message for a chat template."""
        names = {"role", "content", "cache_control", "tool_call_id"}
        return self.model_dump(include=names, exclude_unset=True)


class AssistantMessage(Body):
    """An earlier answer, as the client sends it back: content, reasoning, tool calls."""

    known = known.ASSISTANT_MESSAGE

    role: Literal["assistant"]
    content: Content | None = None
    cache_control: CacheControl | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's name of `reasoning_content`."""
    tool_calls: ListOf[ToolCall] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The message for a chat template."""
        given = self.model_dump(include={"role", "content", "cache_control"}, exclude_unset=True)
        more = {
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": [call.model_dump(exclude={"index"}) for call in self.tool_calls or ()],
        }
        return {"content": None} | given | {name: value for name, value in more.items() if value}


def _speaker(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return "an assistant" if role == "assistant" else "another"


AnyMessage = Annotated[
    Annotated[AssistantMessage, Tag("an assistant")] | Annotated[Message, Tag("another")],
    Discriminator(_speaker),
]


def _as_given(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    check(value)
    return value


class Function(Body):
    """A function that the model may call. `strict`: its arguments always follow `parameters`."""

    name: Annotated[str, Field(pattern=r'^[^"<>\x00-\x20]{1,128}$')]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Annotated[Function, WrapValidator(_as_given)]
    """The dictionary as it was sent: the model reads its fields in this order."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]


class Thinking(Body):
    """DeepSeek's switch."""

    type: Literal["enabled", "disabled"]


class ChatRequest(OpenAIRequest):
    known = known.CHAT

    # `top_logprobs` needs `logprobs`.
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"top_logprobs": {"enum": [0, None]}}},
                {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
            ]
        }
    )

    messages: SomeOf[AnyMessage]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    tools: ListOf[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told about."""
        if self.tool_choice == "none":
            return []
        return [{"type": tool.type, "function": cast(Any, tool.function)} for tool in self.tools or ()]

    @property
    def chat_tools(self) -> ChatTools:
        functions = [tool["function"] for tool in self.callable_tools]
        return ChatTools(functions, self.tool_choice, several=self.parallel_tool_calls is not False)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template. Templates know two names of the switch for thinking."""
        given: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            given["reasoning_effort"] = self.reasoning_effort
        if self.thinking or self.reasoning_effort == "none":
            on = self.reasoning_effort != "none" and self.thinking == Thinking(type="enabled")
            given |= {"thinking": on, "enable_thinking": on}
        return given | (self.chat_template_kwargs or {})


class CompletionRequest(OpenAIRequest):
    known = known.COMPLETION

    prompt: Written | Texts | Tokens | TokenLists
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None


# --- answers: only for the schema. `openai_replies` writes them as JSON ---


class CachedDetails(BaseModel):
    cached_tokens: int


class CachedByTier(BaseModel):
    device: int
    host: int
    storage: int


class SglExt(BaseModel):
    """SGLang's addition to an answer, and ours: tokens that were found and computed again."""

    cached_tokens_details: CachedByTier
    replayed_tokens: int


class UsageOut(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails


class TopLogprobOut(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobOut(TopLogprobOut):
    top_logprobs: list[TopLogprobOut]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprobOut]
    refusal: None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's form: by token id; null for the first token."""


class FunctionOut(BaseModel):
    name: str
    arguments: str


class ToolCallOut(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionOut


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallOut] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageOut
    prompt_logprobs: PromptLogprobs | None = None
    sglext: SglExt | None = None
    kv_transfer_params: dict[str, Any] | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(BaseModel):
    """A complete answer, or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageOut | None = None
    sglext: SglExt | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]
