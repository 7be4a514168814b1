"""Answers of `/v1/responses` as JSON: complete, or as the events of a stream.

response.created, response.in_progress
for each item:  response.output_item.added
                response.content_part.added, response.output_text.delta …, .done, response.content_part.done
                response.output_item.done
response.completed, or response.incomplete, or response.failed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from tiercel.asks.ask import Answer, Delta, TokenOut
from tiercel.server.calls.blocks import Block, Blocks, Kind, Step, kept_tokens, thought_tokens, tokens_of
from tiercel.server.calls.openai_replies import ChatReply, Fields, chat_logprobs
from tiercel.server.calls.reply import NamedEvents, finish_reason, to_json
from tiercel.server.http.errors import ApiError

PREFIX = {Kind.THOUGHTS: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}


# --- the answer: only for the schema ---


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseOut(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float


# --- how it is written ---


@dataclass
class ResponsesReply(NamedEvents, ChatReply):
    """The answer to one `/v1/responses`."""

    echoed: Fields = field(kw_only=True)
    """Fields of the request that the response repeats."""
    summarised: bool = field(kw_only=True)
    """Whether thoughts are sent as a summary."""
    page_tokens: int = field(kw_only=True)
    encoded: Callable[[str], str] | None = field(kw_only=True)
    """Writes thoughts as `encrypted_content`, if the client asked for it."""
    ended_with: Callable[[Fields], None] = field(kw_only=True)
    """Called with the response before the client gets it: the client's next request may refer to it."""
    _blocks: Blocks = field(default_factory=Blocks)
    _tokens: dict[int, list[TokenOut]] = field(default_factory=dict)
    """The tokens of each text, for its logprobs."""
    _tokens_new: list[TokenOut] = field(default_factory=list)
    _logprobs_sent: int = 0
    _sent: int = 0

    def whole(self, answers: Sequence[Answer]) -> str:
        (answer,) = answers
        for _ in self._steps(Delta("", answer.usage, text=answer.text), answer):
            pass
        if self.body.logprobs:
            self._split(answer.tokens)
        return to_json(self._ended(answer))

    def piece(
        self,
        index: int,  # noqa: ARG002 (of the contract)
        answer: Answer,
        delta: Delta,
    ) -> Iterator[str]:
        if 0 not in self._readers:
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._response("in_progress", []))
        for step in self._steps(delta, answer):
            yield from self._step_events(step)

    def last(self, answers: Sequence[Answer]) -> Iterator[str]:
        response = self._ended(answers[0])
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> str:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        output = [self._item(block) for block in self._blocks.all]
        response = self._response("failed", output) | {"error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=response)

    def _steps(self, delta: Delta, answer: Answer) -> Iterator[Step]:
        """What a Delta does to the blocks. The last Delta ends the open block."""
        final = answer.finish is not None
        said = self._read(0, delta.text, final=final)
        called = self._readers[0].called
        self._tokens_new += delta.tokens if self.body.logprobs else ()
        for step in self._blocks.add(said, called=called):
            self._give_tokens()
            yield step
        self._give_tokens()
        if final:
            whole = called if self._blocks.open_kind is Kind.CALL else finish_reason(answer) == "stop"
            yield from self._blocks.end(complete=whole)

    def _split(self, tokens: Sequence[TokenOut]) -> None:
        """Finds the tokens of the first text of a complete answer."""
        begin = thought_tokens(self.text, tokens, self._blocks.all)
        for block in self._blocks.all:
            if block.kind is Kind.TEXT:
                count = tokens_of(self.text, tokens[begin:], block.written)
                self._tokens[block.index] = list(tokens[begin : begin + count])
                return

    def _new_logprobs(self, block: Block) -> list[Fields]:
        """Logprobs of the tokens of a text that were in no event yet."""
        tokens = self._tokens.get(block.index, [])
        new, self._logprobs_sent = tokens[self._logprobs_sent :], len(tokens)
        return self._logged(new)

    def _give_tokens(self) -> None:
        """New tokens belong to the block that is open now. Only tokens of texts are sent."""
        if self._blocks.open_kind is None:
            return
        block = self._blocks.all[-1]
        if block.kind is Kind.TEXT:
            self._tokens.setdefault(block.index, []).extend(self._tokens_new)
        self._tokens_new = []

    def _step_events(self, step: Step) -> Iterator[str]:
        block, item = step.block, self._item(step.block)
        at: Fields = {"item_id": item["id"], "output_index": block.index}
        part = self._part(block) if block.kind is not Kind.CALL else {}
        name, number = "content", "content_index"
        if block.kind is Kind.THOUGHTS and self.summarised:
            name, number = "reasoning_summary", "summary_index"
        event_name = {
            Kind.TEXT: "output_text",
            Kind.THOUGHTS: "reasoning_summary_text" if self.summarised else "reasoning_text",
            Kind.CALL: "function_call_arguments",
        }[block.kind]
        more: Fields = {}
        inside = at if block.kind is Kind.CALL else at | {number: 0}
        match step.what:
            case "begun":
                self._logprobs_sent = 0
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind is not Kind.CALL:
                    yield self._event(f"response.{name}_part.added", **inside, part=part)
            case "grown":
                if block.kind is Kind.TEXT:
                    more["logprobs"] = self._new_logprobs(block)
                yield self._event(f"response.{event_name}.delta", **inside, delta=step.part, **more)
            case "ended":
                if block.kind is Kind.CALL:
                    more = {"name": block.name, "arguments": block.written}
                else:
                    more = {"text": block.written}
                if block.kind is Kind.TEXT:
                    more["logprobs"] = part["logprobs"]
                yield self._event(f"response.{event_name}.done", **inside, **more)
                if block.kind is not Kind.CALL:
                    yield self._event(f"response.{name}_part.done", **inside, part=part)
                yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> str:
        self._sent += 1
        return to_json({"type": kind, "sequence_number": self._sent - 1, **fields})

    def _item(self, block: Block) -> Fields:
        """A block as an item of the response's output, as far as it is complete."""
        status = "completed" if block.complete else "incomplete"
        if self._blocks.open_kind is not None and block is self._blocks.all[-1]:
            status = "in_progress"
        item: Fields = {"id": f"{PREFIX[block.kind]}_{block.id}", "status": status}
        parts = [self._part(block)] if block.kind is not Kind.CALL and status != "in_progress" else []
        match block.kind:
            case Kind.TEXT:
                return item | {"type": "message", "role": "assistant", "content": parts}
            case Kind.THOUGHTS:
                summary, content = (parts, []) if self.summarised else ([], parts)
                item |= {"type": "reasoning", "summary": summary, "content": content}
                if self.encoded is not None:
                    item["encrypted_content"] = self.encoded(block.written)
                return item
            case Kind.CALL:
                call = {"type": "function_call", "call_id": f"call_{block.id}", "name": block.name}
                return item | call | {"arguments": "" if status == "in_progress" else block.written}

    def _part(self, block: Block) -> Fields:
        if block.kind is Kind.THOUGHTS:
            kind = "summary_text" if self.summarised else "reasoning_text"
            return {"type": kind, "text": block.written}
        logged = self._logged(self._tokens.get(block.index, ()))
        return {"type": "output_text", "text": block.written, "annotations": [], "logprobs": logged}

    def _logged(self, tokens: Sequence[TokenOut]) -> list[Fields]:
        logged: list[Fields] = chat_logprobs(self.text, tokens, self.body.top_logprobs or 0)["content"]
        return logged

    def _ended(self, answer: Answer) -> Fields:
        """The response, when its answer has ended."""
        blocks, usage = self._blocks.all, answer.usage
        whys = {"length": "max_output_tokens", "abort": "aborted"}
        cut = whys.get(finish_reason(answer) or "")
        response = self._response(
            "incomplete" if cut else "completed", [self._item(block) for block in blocks]
        )
        response["incomplete_details"] = {"reason": cut} if cut else None
        kept = kept_tokens(usage, self.page_tokens)
        thoughts = thought_tokens(self.text, answer.tokens, blocks)
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": kept},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        self.ended_with(response)
        return response

    def _response(self, status: str, output: list[Fields]) -> Fields:
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.body.answered_as,
            "output": output,
            "truncation": "disabled",
            "usage": None,
            **self.echoed,
        }
