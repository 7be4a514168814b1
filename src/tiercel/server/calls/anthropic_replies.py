"""Answers of `/v1/messages` as JSON: complete, or as the events of a stream.

message_start, ping
for each block:  content_block_start, content_block_delta …, content_block_stop
message_delta, message_stop; or error
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from tiercel.asks.ask import Answer, Delta, Usage
from tiercel.server.calls.blocks import Block, Blocks, Kind, Step, kept_tokens
from tiercel.server.calls.openai_replies import ChatReply, Fields
from tiercel.server.calls.reply import NamedEvents, finish_reason, to_json
from tiercel.server.http.errors import ApiError, anthropic_body

SIGNATURE = "tiercel"
"""The signature of all thoughts. Clients send thoughts back only with a signature; here it is not checked."""


# --- the answers: only for the schema ---


class AnthropicError(BaseModel):
    type: str
    message: str
    param: str | None
    code: str | None


class AnthropicErrorBody(BaseModel):
    """The body of an error answer."""

    type: Literal["error"]
    error: AnthropicError


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageOut(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]
    stop_sequence: str | None
    usage: MessageUsage


# --- how they are written ---


@dataclass
class MessageReply(NamedEvents, ChatReply):
    """The answer to one `/v1/messages`."""

    page_tokens: int = field(kw_only=True)
    _blocks: Blocks = field(default_factory=Blocks)

    def whole(self, answers: Sequence[Answer]) -> str:
        (answer,) = answers
        for _ in self._steps(Delta("", answer.usage, text=answer.text), answer):
            pass
        content = [
            _content(block) for block in self._blocks.all if block.kind is not Kind.CALL or block.complete
        ]
        return to_json(self._message(content, answer.usage) | self._stop(answer))

    def piece(
        self,
        index: int,  # noqa: ARG002 (of the contract)
        answer: Answer,
        delta: Delta,
    ) -> Iterator[str]:
        if 0 not in self._readers:
            yield _event("message_start", message=self._message([], answer.usage))
            yield _event("ping")
        for step in self._steps(delta, answer):
            yield from _step_events(step)

    def last(self, answers: Sequence[Answer]) -> Iterator[str]:
        (answer,) = answers
        yield _event("message_delta", delta=self._stop(answer), usage=self._usage(answer.usage))
        yield _event("message_stop")

    def failed(self, error: ApiError) -> str:
        return json.dumps(anthropic_body(error), separators=(",", ":"))

    def _steps(self, delta: Delta, answer: Answer) -> Iterator[Step]:
        """What a Delta does to the blocks. The last Delta ends the open block."""
        final = answer.finish is not None
        said = self._read(0, delta.text, final=final)
        called = self._readers[0].called
        yield from self._blocks.add(said, called=called)
        if final:
            yield from self._blocks.end(complete=called or self._blocks.open_kind is not Kind.CALL)

    def _message(self, content: list[Fields], usage: Usage) -> Fields:
        return {
            "id": self.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.body.answered_as,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(usage),
        }

    def _usage(self, usage: Usage) -> Fields:
        """As Anthropic counts: a prompt's token is read from the cache, written into it, or neither."""
        kept = kept_tokens(usage, self.page_tokens)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - kept,
            "cache_creation_input_tokens": kept,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    def _stop(self, answer: Answer) -> Fields:
        """Why the answer ended, and the stop sequence that ended it."""
        if isinstance(answer.stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped_by}
        match finish_reason(answer):
            case "length":
                reason = "max_tokens"
            case "abort":
                reason = "pause_turn"  # the one of Anthropic's reasons that lets the client go on from here
            case _:
                reason = "tool_use" if self._readers[0].called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def _content(block: Block) -> Fields:
    """A whole block; nothing for a call that is not complete."""
    match block.kind:
        case Kind.TEXT:
            return {"type": "text", "text": block.written}
        case Kind.THOUGHTS:
            return {"type": "thinking", "thinking": block.written, "signature": SIGNATURE}
        case Kind.CALL:
            return _call(block) | {"input": json.loads(block.written)}


def _call(block: Block) -> Fields:
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": {}}


def _step_events(step: Step) -> Iterator[str]:
    block = step.block
    match step.what, block.kind:
        case "begun", kind:
            empty = {
                Kind.TEXT: {"type": "text", "text": ""},
                Kind.THOUGHTS: {"type": "thinking", "thinking": "", "signature": ""},
                Kind.CALL: _call(block),
            }
            yield _event("content_block_start", index=block.index, content_block=empty[kind])
        case "grown", kind:
            delta = {
                Kind.TEXT: {"type": "text_delta", "text": step.part},
                Kind.THOUGHTS: {"type": "thinking_delta", "thinking": step.part},
                Kind.CALL: {"type": "input_json_delta", "partial_json": step.part},
            }
            yield _event("content_block_delta", index=block.index, delta=delta[kind])
        case "ended", kind:
            if kind is Kind.THOUGHTS:
                signed = {"type": "signature_delta", "signature": SIGNATURE}
                yield _event("content_block_delta", index=block.index, delta=signed)
            yield _event("content_block_stop", index=block.index)


def _event(kind: str, **fields: Any) -> str:
    return to_json({"type": kind, **fields})
