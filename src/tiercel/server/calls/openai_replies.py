"""OpenAI's answers as JSON: complete, or as the events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

from tiercel.asks.ask import Answer, Delta, Prefiller, TokenOut, Usage
from tiercel.server.calls.prefiller import transfer_params
from tiercel.server.calls.protocol import ChatRequest, CompletionRequest, OpenAIRequest
from tiercel.server.calls.reply import DataEvents, finish_reason, to_json
from tiercel.text.answer import AnswerDelta, AnswerReader, CallFormat, CallPart
from tiercel.text.text import Text

Fields = dict[str, Any]

LEAST = -9999.0
"""OpenAI's value for a token with probability 0: JSON has no infinity."""


def usage_of(answers: Sequence[Answer], n: int) -> Fields:
    """The usage of a call. A prompt counts once; its first answer says what was cached."""
    firsts = answers[::n]
    prompt = sum(answer.usage.prompt_tokens for answer in firsts)
    completion = sum(answer.usage.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(answer.usage.cached_tokens for answer in firsts)},
    }


def cached_by_tier(usage: Usage) -> Fields:
    return {"device": usage.device_tokens, "host": usage.host_tokens, "storage": usage.store_tokens}


@dataclass
class OpenAIReply(DataEvents):
    """The common part of chat and completions: n answers for each prompt, in the order of the prompts."""

    event: ClassVar[str]
    """The kind of object that an event of a stream is."""

    request_id: str
    text: Text
    body: OpenAIRequest
    handover: Prefiller | None = field(default=None, kw_only=True)
    """For a router that asked for the prompt to be computed for another server."""
    created: int = field(default_factory=lambda: int(time.time()), kw_only=True)
    _heads: dict[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def n(self) -> int:
        return self.body.n or 1

    def last(self, answers: Sequence[Answer]) -> Iterator[str]:
        more = self._sglext(answers)
        if self._tells_usage:
            more["usage"] = usage_of(answers, self.n)
        if more:
            yield self._written(self.event, [], **more)

    def _written(self, kind: str, choices: list[Fields], **more: Any) -> str:
        head = self._heads.get(kind) or self._head(kind)
        end = f",{to_json(more)[1:]}" if more else "}"
        return f'{head},"choices":{to_json(choices)}{end}'

    def _head(self, kind: str) -> str:
        """The beginning of an event. It is the same for all of a stream."""
        model, created = self.body.answered_as, self.created
        fields = {"id": self.request_id, "object": kind, "created": created, "model": model}
        self._heads[kind] = to_json(fields)[:-1]
        return self._heads[kind]

    @property
    def _tells_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def _usage_so_far(self, answer: Answer) -> Fields:
        """For an event: the usage so far, null if usage comes at the end, or no field."""
        if self.body.stream_options and self.body.stream_options.continuous_usage_stats:
            return {"usage": usage_of([answer], 1)}
        return {"usage": None} if self._tells_usage else {}

    def _sglext(self, answers: Sequence[Answer]) -> Fields:
        """What the first answer reused, by tier, and what it replayed, if requested."""
        if not self.body.return_cached_tokens_details:
            return {}
        usage = answers[0].usage
        details = {"cached_tokens_details": cached_by_tier(usage), "replayed_tokens": usage.replayed_tokens}
        return {"sglext": details}

    def _handover(self) -> Fields:
        return {} if self.handover is None else {"kv_transfer_params": transfer_params(self.handover)}

    def _prompt(self, tokens: Sequence[TokenOut]) -> Fields:
        top = self.body.prompt_logprobs
        return {} if top is None else {"prompt_logprobs": _prompt_logprobs(self.text, tokens, top)}


@dataclass
class ChatReply(OpenAIReply):
    """Answers of `/v1/chat/completions`. All of them answer one prompt."""

    event = "chat.completion.chunk"

    body: ChatRequest
    thinks: bool = False
    """Whether answers begin with thoughts."""
    calls: CallFormat | None = None
    """How answers call tools, if they may."""
    _readers: dict[int, AnswerReader] = field(default_factory=dict)

    def whole(self, answers: Sequence[Answer]) -> str:
        return self._written(
            "chat.completion",
            [self._choice(index, answer) for index, answer in enumerate(answers)],
            usage=usage_of(answers, self.n),
            **self._prompt(answers[0].prompt) if answers[0].prompt else {},
            **self._sglext(answers),
            **self._handover(),
        )

    def piece(self, index: int, answer: Answer, delta: Delta) -> Iterator[str]:
        first = index not in self._readers
        said = self._read(index, delta.text, final=delta.finish is not None)
        logged = self._logprobs(delta.tokens) if delta.tokens else None
        if not (first or any(said) or logged or delta.finish):
            return
        words: Fields = {"role": "assistant", "content": ""} if first else {}
        if said.reasoning:
            words["reasoning_content"] = said.reasoning
        if said.content:
            words["content"] = said.content
        if said.calls:
            words["tool_calls"] = [{"index": part.number} | _call(part) for part in said.calls]
        finish = self._finish(index, answer)
        choice = {"index": index, "delta": words, "logprobs": logged, "finish_reason": finish}
        prompt = self._prompt(delta.prompt) if delta.prompt and index == 0 else {}
        yield self._written(self.event, [choice], **prompt, **self._usage_so_far(answer))

    def _choice(self, index: int, answer: Answer) -> Fields:
        said = self._read(index, answer.text, final=True)
        message = {"role": "assistant", "content": said.content or (None if said.calls else "")}
        more: Fields = {"refusal": None}
        if self.thinks and self.body.include_reasoning is not False:
            more["reasoning_content"] = said.reasoning
        if said.calls:
            more["tool_calls"] = [_call(part) for part in said.calls]
        return {
            "index": index,
            "message": message | more,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": self._finish(index, answer),
        }

    def _read(self, index: int, text: str, *, final: bool) -> AnswerDelta:
        reader = self._readers.setdefault(index, AnswerReader(thinks=self.thinks, calls=self.calls))
        said = reader.push(text, final=final)
        if self.body.include_reasoning is False:
            said = said._replace(reasoning="")
        if self.body.parallel_tool_calls is False:
            said = said._replace(calls=said.calls[:1] if said.calls and not said.calls[0].number else ())
        return said

    def _finish(self, index: int, answer: Answer) -> str | None:
        reason = finish_reason(answer)
        return "tool_calls" if reason == "stop" and self._readers[index].called else reason

    def _logprobs(self, tokens: Sequence[TokenOut]) -> Fields | None:
        return chat_logprobs(self.text, tokens, self.body.top_logprobs or 0) if self.body.logprobs else None


def _call(part: CallPart) -> Fields:
    """A tool call. Only its first part, which has the name, has an id."""
    if part.name is None:
        return {"function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


@dataclass
class CompletionReply(OpenAIReply):
    """Answers of `/v1/completions`."""

    event = "text_completion"

    body: CompletionRequest
    echoes: Sequence[str] = ()
    """For each prompt the text before its answers: the prompt, or nothing."""
    _offsets: dict[int, int] = field(default_factory=dict)

    def whole(self, answers: Sequence[Answer]) -> str:
        choices = [
            self._choice(index, answer, answer.text, answer.prompt, answer.tokens)
            for index, answer in enumerate(answers)
        ]
        more = self._sglext(answers) | self._handover()
        return self._written(self.event, choices, usage=usage_of(answers, self.n), **more)

    def piece(self, index: int, answer: Answer, delta: Delta) -> Iterator[str]:
        logprobs = self.body.logprobs is not None and delta.tokens
        if index not in self._offsets or delta.text or logprobs or delta.finish:
            choice = self._choice(index, answer, delta.text, delta.prompt, delta.tokens)
            yield self._written(self.event, [choice], **self._usage_so_far(answer))

    def _choice(
        self, index: int, answer: Answer, text: str, prompt: Sequence[TokenOut], tokens: Sequence[TokenOut]
    ) -> Fields:
        """A choice with the new text and tokens. The first one begins with the prompt, if it is echoed."""
        more: Fields = {}
        if index not in self._offsets:
            text = self.echoes[index // self.n] + text
            tokens = (*prompt, *tokens) if self.body.echo else tokens
            more = self._prompt(prompt)
        offset = self._offsets.setdefault(index, 0)
        logged = None
        if self.body.logprobs is not None:
            logged = _completion_logprobs(self.text, tokens, self.body.logprobs, offset)
            self._offsets[index] += sum(map(len, logged["tokens"]))
        finish = finish_reason(answer)
        return {"index": index, "text": text, "logprobs": logged, "finish_reason": finish, **more}


# Logprobs: for chat, for completions, and vLLM's form for prompts


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)


def chat_logprobs(text: Text, tokens: Iterable[TokenOut], top: int) -> Fields:
    content = [
        _named(text, out.token, out.logprob)
        | {"top_logprobs": [_named(text, *each) for each in out.top[:top]]}
        for out in tokens
    ]
    return {"content": content, "refusal": None}


def _named(text: Text, token: int, logprob: float | None) -> Fields:
    raw = text.piece_bytes(token)
    return {"token": text.piece(token), "logprob": finite(logprob or 0.0), "bytes": list(raw)}


def _completion_logprobs(text: Text, tokens: Sequence[TokenOut], top: int, offset: int) -> Fields:
    """`offset`: where the first token begins in the text of the choice."""
    pieces = [text.piece(out.token) for out in tokens]
    return {
        "tokens": pieces,
        "token_logprobs": [finite(out.logprob) for out in tokens],
        "top_logprobs": [_best(text, out, top) for out in tokens],
        "text_offset": list(accumulate(map(len, pieces), initial=offset))[:-1],
    }


def _best(text: Text, out: TokenOut, top: int) -> dict[str, float | None] | None:
    """The best tokens and the token itself, by text. If two have the same text, the better one is kept."""
    if out.logprob is None:
        return None
    best: dict[str, float | None] = {}
    for token, logprob in sorted((*out.top[:top], (out.token, out.logprob)), key=lambda each: -each[1]):
        best.setdefault(text.piece(token), finite(logprob))
    return best


def _prompt_logprobs(text: Text, tokens: Iterable[TokenOut], top: int) -> list[Fields | None]:
    """Logprobs of a prompt, each by token id. Only the best tokens have a rank."""
    return [None if out.logprob is None else _by_token(text, out, out.logprob, top) for out in tokens]


def _by_token(text: Text, out: TokenOut, logprob: float, top: int) -> Fields:
    ranks = {token: rank for rank, (token, _) in enumerate(out.top, start=1)}
    chosen = {out.token: logprob} | dict(out.top[:top])
    return {
        str(token): {"logprob": finite(value), "rank": ranks.get(token), "decoded_token": text.piece(token)}
        for token, value in chosen.items()
    }
