"""Answers of `/v1/completions`, complete or as chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercel.engine.ask import Answer, Delta, TokenOut
from tiercel.server import logprobs
from tiercel.server.answers import finish_reason
from tiercel.server.protocol import CompletionChoice, CompletionRequest, CompletionResponse
from tiercel.server.usage import sglext, usage_of, usage_so_far, wants_usage
from tiercel.text.text import Text


@dataclass
class CompletionReply:
    """Formats answers as OpenAI does: n for each prompt, in the order of the prompts."""

    request_id: str
    text: Text
    body: CompletionRequest
    echoes: Sequence[str]
    """For each prompt the text before its answers: the prompt, or nothing."""
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, int] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.body.n or 1

    def whole(self, answers: Sequence[Answer]) -> CompletionResponse:
        choices = [
            self._choice(index, answer, answer.text, answer.prompt, answer.tokens)
            for index, answer in enumerate(answers)
        ]
        return self._response(choices, usage=usage_of(answers, self.n), **sglext(self.body, answers))

    def piece(self, index: int, answer: Answer, delta: Delta) -> Iterator[CompletionResponse]:
        told = self.body.logprobs is not None and delta.tokens
        if index not in self._offsets or delta.text or told or delta.finish:
            choice = self._choice(index, answer, delta.text, delta.prompt, delta.tokens)
            yield self._response([choice], **usage_so_far(self.body, answer))

    def last(self, answers: Sequence[Answer]) -> Iterator[CompletionResponse]:
        more: dict[str, Any] = {**sglext(self.body, answers)}
        if wants_usage(self.body):
            more["usage"] = usage_of(answers, self.n)
        if more:
            yield self._response([], **more)

    def _response(self, choices: list[CompletionChoice], **more: Any) -> CompletionResponse:
        return CompletionResponse(
            id=self.request_id,
            object="text_completion",
            created=self.created,
            model=self.body.answered_as,
            choices=choices,
            **more,
        )

    def _choice(
        self,
        index: int,
        answer: Answer,
        text: str,
        prompt: Sequence[TokenOut],
        tokens: Sequence[TokenOut],
    ) -> CompletionChoice:
        """A choice with the new text and tokens. The first one begins with the prompt, if it is echoed."""
        more: dict[str, Any] = {}
        if index not in self._offsets:
            text = self.echoes[index // self.n] + text
            tokens = (*prompt, *tokens) if self.body.echo else tokens
            if self.body.prompt_logprobs is not None:
                more["prompt_logprobs"] = logprobs.of_prompt(self.text, prompt, self.body.prompt_logprobs)
        offset = self._offsets.setdefault(index, 0)
        logged = None
        if self.body.logprobs is not None:
            logged = logprobs.of_completion(self.text, tokens, self.body.logprobs, offset)
            self._offsets[index] += sum(map(len, logged.tokens))
        return CompletionChoice(
            index=index, text=text, logprobs=logged, finish_reason=finish_reason(answer), **more
        )
