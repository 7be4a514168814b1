"""Answers of `/v1/chat/completions`, complete or as chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercel.engine.ask import Answer, Delta, TokenOut
from tiercel.server import logprobs
from tiercel.server.answers import finish_reason
from tiercel.server.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatFinish,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    FunctionOut,
    ToolCallDelta,
    ToolCallOut,
)
from tiercel.server.usage import sglext, usage_of, usage_so_far, wants_usage
from tiercel.text.answer import AnswerReader, CallPart, Said
from tiercel.text.text import Text


@dataclass
class ChatReply:
    """Formats answers as OpenAI does. All of them answer one prompt."""

    request_id: str
    text: Text
    body: ChatRequest
    thinks: bool = False
    """Whether answers begin with thoughts."""
    calls: bool = False
    """Whether answers may call tools."""
    created: int = field(default_factory=lambda: int(time.time()))
    _readers: dict[int, AnswerReader] = field(default_factory=dict)

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
        first = index not in self._readers
        said = self._read(index, delta.text, final=delta.finish is not None)
        logged = self._logprobs(delta.tokens) if delta.tokens else None
        if not (first or any(said) or logged or delta.finish):
            return
        words: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        if said.reasoning:
            words["reasoning_content"] = said.reasoning
        if said.content:
            words["content"] = said.content
        if said.calls:
            words["tool_calls"] = [_call_delta(part) for part in said.calls]
        finish = self._finish(index, answer)
        choice = ChatChunkChoice(index=index, delta=ChatDelta(**words), logprobs=logged, finish_reason=finish)
        prompt = self._prompt(delta.prompt if index == 0 else ())
        yield self._chunk([choice], **prompt, **usage_so_far(self.body, answer))

    def last(self, answers: Sequence[Answer]) -> Iterator[ChatChunk]:
        more: dict[str, Any] = {**sglext(self.body, answers)}
        if wants_usage(self.body):
            more["usage"] = usage_of(answers, len(answers))
        if more:
            yield self._chunk([], **more)

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        said = self._read(index, answer.text, final=True)
        finish = self._finish(index, answer)
        assert finish is not None
        more: dict[str, Any] = {"reasoning_content": said.reasoning} if self._tells_thoughts else {}
        if said.calls:
            more["tool_calls"] = [_call(part) for part in said.calls]
        content = said.content or (None if said.calls else "")
        return ChatChoice(
            index=index,
            message=ChatMessage(role="assistant", content=content, refusal=None, **more),
            logprobs=self._logprobs(answer.tokens),
            finish_reason=finish,
        )

    @property
    def _tells_thoughts(self) -> bool:
        return self.thinks and self.body.include_reasoning is not False

    def _read(self, index: int, text: str, *, final: bool) -> Said:
        reader = self._readers.setdefault(index, AnswerReader(thinks=self.thinks, calls=self.calls))
        said = reader.push(text, final=final)
        if self.body.include_reasoning is False:
            said = said._replace(reasoning="")
        if self.body.parallel_tool_calls is False:
            said = said._replace(calls=said.calls[:1] if said.calls and not said.calls[0].number else ())
        return said

    def _finish(self, index: int, answer: Answer) -> ChatFinish | None:
        reason = finish_reason(answer)
        return "tool_calls" if reason == "stop" and self._readers[index].called else reason

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


def _call(part: CallPart) -> ToolCallOut:
    function = FunctionOut(name=part.name, arguments=part.arguments)
    return ToolCallOut(id=_call_id(), type="function", function=function)


def _call_delta(part: CallPart) -> ToolCallDelta:
    if part.name is None:
        return ToolCallDelta(index=part.number, function=FunctionOut(arguments=part.arguments))
    call = _call(part)
    return ToolCallDelta(index=part.number, id=call.id, type=call.type, function=call.function)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
