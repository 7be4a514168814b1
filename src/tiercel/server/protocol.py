"""OpenAI's words: requests as they are checked, answers as the official client reads them.

Fields that this server knows and does not serve are in the tables of `known`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tiercel.server import known
from tiercel.server.fields import (
    Bias,
    Body,
    Count,
    MaxTokens,
    Penalty,
    Priority,
    Repetition,
    RequestId,
    Salt,
    Seed,
    Share,
    Stop,
    TokenId,
    Tokens,
    TopK,
    TopLogprobs,
    TopP,
    Written,
    limit,
)

# --- requests ---


class StreamOptions(Body):
    known = known.STREAM_OPTIONS

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Wish(Body):
    """What chat and completions share."""

    model: Annotated[str, limit(enum="models")] | None = None
    max_tokens: MaxTokens | None = None
    n: Count | None = None
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None

    # Beyond OpenAI, with the names vLLM and SGLang gave them.
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: Repetition | None = None
    ignore_eos: bool | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    prompt_logprobs: TopLogprobs | None = None
    rid: RequestId | None = None
    request_id: RequestId | None = None
    return_cached_tokens_details: bool | None = None

    @property
    def answered_as(self) -> str:
        """The model's name in the answer. The call has put it where the client gave none."""
        assert self.model is not None
        return self.model


class CacheControl(Body):
    """A point after which the text may go on differently, as Anthropic's clients mark it."""

    known = known.CACHE_CONTROL

    type: Literal["ephemeral"]


class TextPart(Body):
    known = known.TEXT_PART

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Message(Body):
    known = known.MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    cache_control: CacheControl | None = None

    def as_dict(self) -> dict[str, Any]:
        """What a chat template is given."""
        return self.model_dump(include={"role", "content", "cache_control"}, exclude_unset=True)


class ChatRequest(Wish):
    known = known.CHAT

    # The best tokens are told only beside the token itself.
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"top_logprobs": {"enum": [0, None]}}},
                {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
            ]
        }
    )

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


PromptField = (
    Written
    | Annotated[list[Written], Field(min_length=1, fail_fast=True), limit(maxItems="batch")]
    | Tokens
    | Annotated[list[Tokens], Field(min_length=1, fail_fast=True), limit(maxItems="batch")]
)


class CompletionRequest(Wish):
    known = known.COMPLETION

    prompt: PromptField
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None


# --- answers ---


class CachedDetails(BaseModel):
    cached_tokens: int


class CachedByTier(BaseModel):
    device: int
    host: int
    storage: int


class SglExt(BaseModel):
    """What SGLang adds to an answer."""

    cached_tokens_details: CachedByTier


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


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageOut
    prompt_logprobs: PromptLogprobs | None = None
    sglext: SglExt | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageOut | None = None
    prompt_logprobs: PromptLogprobs | None = None
    sglext: SglExt | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(BaseModel):
    """Whole, or one piece of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageOut | None = None
    sglext: SglExt | None = None


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
