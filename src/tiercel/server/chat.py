"""The answer to `/v1/chat/completions`: messages, or pieces of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercel.engine.ask import Delta, TokenOut
from tiercel.server import logprobs
from tiercel.server.answers import Answer
from tiercel.server.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
)
from tiercel.server.service import Text
from tiercel.server.usage import sglext, usage_of, usage_so_far, wants_usage


@dataclass
class ChatReply:
    """Writes answers as OpenAI does. All of them answer one prompt."""

    request_id: str
    text: Text
    body: ChatRequest
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)

    def whole(self, answers: Sequence[Answer]) -> ChatResponse:
        return ChatResponse(
            id=self.request_id,
            object="chat.completion",
            created=self.created,
            model=self.body.answered_as,
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            usage=usage_of(answers, len(answers)),
            **self._prompt(answers[0].prompt),
            **sglext(self.body, answers),
        )

    def piece(self, index: int, answer: Answer, delta: Delta) -> Iterator[ChatChunk]:
        first = index not in self._begun
        self._begun.add(index)
        logged = self._logprobs(delta.tokens) if delta.tokens else None
        if not (first or delta.text or logged or delta.finish):
            return
        words: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        if delta.text:
            words["content"] = delta.text
        choice = ChatChunkChoice(
            index=index, delta=ChatDelta(**words), logprobs=logged, finish_reason=answer.finish_reason
        )
        prompt = self._prompt(delta.prompt if index == 0 else ())
        yield self._chunk([choice], **prompt, **usage_so_far(self.body, answer))

    def last(self, answers: Sequence[Answer]) -> Iterator[ChatChunk]:
        more: dict[str, Any] = {**sglext(self.body, answers)}
        if wants_usage(self.body):
            more["usage"] = usage_of(answers, len(answers))
        if more:
            yield self._chunk([], **more)

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        assert answer.finish_reason is not None
        return ChatChoice(
            index=index,
            message=ChatMessage(role="assistant", content=answer.text, refusal=None),
            logprobs=self._logprobs(answer.tokens),
            finish_reason=answer.finish_reason,
        )

    def _chunk(self, choices: list[ChatChunkChoice], **more: Any) -> ChatChunk:
        return ChatChunk(
            id=self.request_id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.body.answered_as,
            choices=choices,
            **more,
        )

    def _logprobs(self, tokens: Sequence[TokenOut]) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return logprobs.of_chat(self.text, tokens, self.body.top_logprobs or 0)

    def _prompt(self, tokens: Sequence[TokenOut]) -> dict[str, Any]:
        if self.body.prompt_logprobs is None or not tokens:
            return {}
        return {"prompt_logprobs": logprobs.of_prompt(self.text, tokens, self.body.prompt_logprobs)}
