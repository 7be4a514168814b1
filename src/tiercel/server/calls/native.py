"""SGLang's `/generate`.

A request is one prompt or a batch. Most fields are one value for all prompts, or a list with one for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from tiercel.asks.ask import Answer, Ask, Delta, Prefiller, Sampling, TokenOut
from tiercel.server.calls import asks, schema
from tiercel.server.calls.grammars import NamedGrammars, text_grammar
from tiercel.server.calls.openai_replies import cached_by_tier, finite
from tiercel.server.calls.prefiller import BootstrapFields, by_bootstrap, each, is_elsewhere
from tiercel.server.calls.protocol import CachedByTier
from tiercel.server.calls.reply import Api, AskGroup, DataEvents, finish_reason, respond, to_json
from tiercel.server.calls.schema import gives
from tiercel.server.http import keys, known
from tiercel.server.http.body import (
    EachOf,
    Priority,
    RequestId,
    Salt,
    SamplingFields,
    Seed,
    Texts,
    TokenCount,
    TokenLists,
    Tokens,
    TopLogprobs,
    Written,
    limit,
)
from tiercel.server.http.border import Visit, visit_of
from tiercel.server.http.errors import conflict
from tiercel.text.grammar import Grammar
from tiercel.text.text import Text

MAX_NEW_TOKENS = 128
"""SGLang's default."""

SMALL_CHARS = 16 << 10
"""Up to this size every token is an event: about 1,600 tokens of text, or 20 with 20 logprobs each."""

GROWTH = 1 / 16
"""Growth between larger events: together they are at most 17 times the last one."""

Triple = tuple[float | None, int, str | None]
"""SGLang's form: logprob, token, and its text if requested."""

SPELLING = {name: f"sampling_params.{name}" for name in SamplingFields.model_fields} | {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "stop_tokens": "sampling_params.stop_token_ids",
    "logprobs": "top_logprobs_num",
}

# --- the request ---


class SamplingParams(SamplingFields, NamedGrammars):
    known = known.SAMPLING_PARAMS

    max_new_tokens: TokenCount | None = None
    min_new_tokens: TokenCount | None = None
    sampling_seed: Seed | None = None


StartLen = Annotated[int, Field(ge=-1), limit(maximum="context_tokens")]


class GenerateRequest(BootstrapFields):
    known = known.GENERATE

    # Either `text` or `input_ids`.
    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": [one], "properties": {one: {"not": {"type": "null"}}, other: {"type": "null"}}}
                for one, other in (("text", "input_ids"), ("input_ids", "text"))
            ]
        }
    )

    text: Written | Texts | None = None
    input_ids: Tokens | TokenLists | None = None
    sampling_params: SamplingParams | EachOf[SamplingParams] | None = None
    return_logprob: bool | EachOf[bool] | None = None
    logprob_start_len: StartLen | EachOf[StartLen] | None = None
    top_logprobs_num: TopLogprobs | EachOf[TopLogprobs] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: RequestId | EachOf[RequestId] | None = None
    cache_salt: Salt | EachOf[Salt] | None = None
    priority: Priority | None = None


# --- the answer: only for the schema. `Growing` writes it as JSON ---


class FinishReason(BaseModel):
    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    length: int | None = None
    message: str | None = None


class MetaInfo(BaseModel):
    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_details: CachedByTier
    replayed_tokens: int
    """Not SGLang's: tokens that were found and computed again. They are not among the cached ones."""
    e2e_latency: float
    input_token_logprobs: list[Triple] | None = None
    output_token_logprobs: list[Triple] | None = None
    input_top_logprobs: list[list[Triple] | None] | None = None
    output_top_logprobs: list[list[Triple] | None] | None = None


class Generated(BaseModel):
    """A complete answer, or the answer so far as an event of a stream."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None


# --- from request to answer ---


@dataclass(frozen=True)
class Item:
    """One prompt of a request with its own fields."""

    given: asks.GivenPrompt
    params: SamplingParams
    logprob: bool
    start: int
    top: int
    salt: str
    request_id: str
    prefiller: Prefiller | None


@dataclass
class NativeReply(DataEvents):
    """Formats answers as SGLang does: complete, or as events that grow."""

    text: Text | None
    """Gives the text of tokens in logprobs; None: they have none."""
    items: Sequence[Item]
    """The prompt of each answer."""
    alone: bool
    """One prompt and one answer: the response is not a list."""
    visit: Visit
    _growing: dict[int, Growing] = field(default_factory=dict)

    def whole(self, answers: Sequence[Answer]) -> str:
        every = []
        for index, answer in enumerate(answers):
            tokens, prompt = tuple(answer.tokens), tuple(answer.prompt)
            everything = Delta(answer.request_id, answer.usage, tokens, answer.text, prompt)
            every.append(self._grown(index, everything).written(self._meta(answer)))
        return every[0] if self.alone else f"[{','.join(every)}]"

    def piece(self, index: int, answer: Answer, delta: Delta) -> Iterator[str]:
        growing = self._grown(index, delta)
        if delta.finish or ((delta.tokens or delta.text) and growing.due):
            yield growing.written(self._meta(answer), "" if self.alone else f',"index":{index}')

    def last(self, answers: Sequence[Answer]) -> Sequence[str]:  # noqa: ARG002 (of the contract)
        return ()

    def _grown(self, index: int, delta: Delta) -> Growing:
        if index not in self._growing:
            item = self.items[index]
            self._growing[index] = Growing(self.text, logged=item.logprob, top=item.top)
        self._growing[index].add(delta)
        return self._growing[index]

    def _meta(self, answer: Answer) -> str:
        """The fields of `meta_info` that `Growing` does not write."""
        usage = answer.usage
        meta = {
            "id": asks.public_id(answer.request_id),
            "finish_reason": _finish(answer),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_details": cached_by_tier(usage),
            "replayed_tokens": usage.replayed_tokens,
            "e2e_latency": self.visit.age_s,
        }
        return to_json(meta)


def _finish(answer: Answer) -> dict[str, Any] | None:
    match finish_reason(answer):
        case "length":
            return {"type": "length", "length": answer.usage.completion_tokens}
        case "stop":
            return {"type": "stop", "matched": answer.stopped_by}
        case "abort":
            return {"type": "abort", "message": "Aborted"}
    return None


@dataclass
class JsonParts:
    """A JSON list or string that grows at its end."""

    pieces: list[str] = field(default_factory=list)
    chars: int = 0

    def add(self, pieces: Sequence[str]) -> None:
        self.pieces += pieces
        self.chars += sum(map(len, pieces))

    def joined(self, between: str) -> str:
        whole = between.join(self.pieces)
        self.pieces = [whole] if whole else []
        return whole


class Growing:
    """The growing fields of one answer, as JSON: every event holds all text, tokens and logprobs so far.

    If every token caused such an event, work and bytes would be quadratic in the length of the answer. So
    each token is turned into JSON once, and a large event is sent only after the answer has grown by a
    fraction of its size. Then all events together are a constant times the last one. SGLang's clients read
    the last event, or the difference between events.
    """

    def __init__(self, text: Text | None, *, logged: bool, top: int) -> None:
        """`text`: gives the text of tokens in logprobs; None: they have none."""
        self._text = text
        self._logged = logged
        self._top = top
        self._said, self._ids = JsonParts(), JsonParts()
        names = ["input_token_logprobs", "output_token_logprobs"] if logged else []
        names += ["input_top_logprobs", "output_top_logprobs"] if logged and top else []
        self._lists = {name: JsonParts() for name in names}
        self._sent = 0

    def add(self, delta: Delta) -> None:
        self._said.add([to_json(delta.text)[1:-1]])
        self._ids.add([str(out.token) for out in delta.tokens])
        if self._logged:
            self._log("input", delta.prompt)
            self._log("output", delta.tokens)

    def _log(self, side: str, tokens: Sequence[TokenOut]) -> None:
        self._lists[f"{side}_token_logprobs"].add(
            [to_json(triple) for triple in _triples(self._text, tokens)]
        )
        if self._top:
            best = _top_triples(self._text, tokens, self._top)
            self._lists[f"{side}_top_logprobs"].add([to_json(triples) for triples in best])

    @property
    def due(self) -> bool:
        """Whether to send the next event. (The last event is always sent.)"""
        chars = sum(parts.chars for parts in (self._said, self._ids, *self._lists.values()))
        if chars > SMALL_CHARS and chars < self._sent * (1 + GROWTH):
            return False
        self._sent = chars
        return True

    def written(self, meta: str, more: str = "") -> str:
        """The answer so far. `meta` (a JSON object) and `more` (JSON fields) are new for each event."""
        lists = "".join(f',"{name}":[{parts.joined(",")}]' for name, parts in self._lists.items())
        own = f'"text":"{self._said.joined("")}","output_ids":[{self._ids.joined(",")}]'
        return f'{{{own},"meta_info":{meta[:-1]}{lists}}}{more}}}'


def _triples(text: Text | None, tokens: Iterable[TokenOut]) -> list[Triple]:
    """SGLang's triples. Without `text` they have no text."""
    return [_triple(text, out.token, out.logprob) for out in tokens]


def _top_triples(text: Text | None, tokens: Iterable[TokenOut], top: int) -> list[list[Triple] | None]:
    return [
        None if out.logprob is None else [_triple(text, *each) for each in out.top[:top]] for out in tokens
    ]


def _triple(text: Text | None, token: int, logprob: float | None) -> Triple:
    return finite(logprob), token, text.piece(token) if text else None


class Native:
    """The call of one server."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.service = api.service

    async def generate(self, request: Request) -> Response:
        """Continue one text or several. With `stream`, as server-sent events."""
        body = await self.api.read_ask(request, GenerateRequest)
        items = self._items(body, visit_of(request))
        trying = self.api.trying(request)
        held = [await text_grammar(item.params, trying, "sampling_params.") for item in items]
        every = list(zip(items, held, strict=True))
        groups = await self.api.off_loop(lambda: [self._group(*each, body) for each in every])
        of_answers = [item for item, group in zip(items, groups, strict=True) for _ in group]
        reply = NativeReply(
            text=self.service.text if body.return_text_in_logprobs else None,
            items=of_answers,
            alone=len(of_answers) == 1 and items[0].given.field in ("text", "input_ids"),
            visit=visit_of(request),
        )
        return await respond(self.api, request, groups, reply, stream=bool(body.stream))

    def _items(self, body: GenerateRequest, visit: Visit) -> list[Item]:
        """Each prompt with its fields."""
        name, given = ("text", body.text) if body.input_ids is None else ("input_ids", body.input_ids)
        if given is None or (body.text is not None and body.input_ids is not None):
            raise conflict("text", body.text, "either text or input_ids must be given, not both")
        prompts = asks.given_prompts(name, given, self.api.options)
        count = len(prompts)
        salts = each("cache_salt", body.cache_salt, "", count)
        every = zip(
            prompts,
            each("sampling_params", body.sampling_params, SamplingParams(), count),
            each("return_logprob", body.return_logprob, False, count),
            each("logprob_start_len", body.logprob_start_len, -1, count),
            each("top_logprobs_num", body.top_logprobs_num, 0, count),
            salts,
            _ids(body.rid, salts, visit),
            by_bootstrap(body, count, self.api.options),
            strict=True,
        )
        return [Item(*each) for each in every]

    def _group(self, item: Item, grammar: Grammar | None, body: GenerateRequest) -> AskGroup:
        prompt = item.given.tokens(self.service)
        room = asks.room(self.service, prompt, item.given.field)
        asked = item.params.max_new_tokens
        ask = Ask(
            request_id=item.request_id,
            prompt=prompt,
            sampling=Sampling(
                max_tokens=min(MAX_NEW_TOKENS, room) if asked is None else asked,
                min_tokens=item.params.min_new_tokens or 0,
                seed=item.params.sampling_seed,
                logprobs=item.top if item.logprob else None,
                grammar=grammar,
            ),
            namespace=asks.namespace_of(item.salt),
            priority=asks.priority_of(body.priority, self.api.options),
            prompt_logprobs_from=self._start(item, len(prompt), merged=not body.stream),
            prefiller=item.prefiller,
        )
        return asks.group_of(self.api, ask, item.params, SPELLING)

    def _start(self, item: Item, tokens: int, *, merged: bool) -> int | None:
        """`merged`: the router puts the logprobs of a prompt that another server computes before ours."""
        if merged and is_elsewhere(item.prefiller, self.api.options):
            return None
        if item.logprob and item.start > tokens:
            raise conflict("logprob_start_len", item.start, f"is after the prompt, which has {tokens} tokens")
        return item.start if item.logprob and 0 <= item.start < tokens else None


def _ids(rid: str | list[str] | None, salts: Sequence[str], visit: Visit) -> list[str]:
    """The engine's id of each prompt, from the client's `rid` if given. They are in use until the answer is
    sent."""

    def own(names: Sequence[str]) -> list[str]:
        return [asks.own_id(name, visit.owner, salt) for name, salt in zip(names, salts, strict=True)]

    def members(name: str) -> list[str]:
        return own([asks.member_id(name, index) for index in range(len(salts))])

    if not isinstance(rid, list):
        if not visit.name(rid, members):
            raise conflict("rid", rid, "is in use")
        return members(visit.request_id)
    names = each("rid", rid, "", len(salts))
    own_ids = own(names)
    for index, own_id in enumerate(own_ids):
        if not visit.claim([own_id]):
            first = own_ids.index(own_id)
            why = "is in use" if first == index else f"is the same as rid[{first}]"
            raise conflict(f"rid[{index}]", names[index], why)
    visit.request_id = names[0]
    return own_ids


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["native"], dependencies=keys.user(api.options))
    routes.add_api_route(
        "/generate",
        Native(api).generate,
        methods=["POST"],
        responses=gives(Generated | list[Generated], 400, 401, 413, 429, 503, media_type=schema.STREAM),
        openapi_extra=schema.Reads(GenerateRequest),
    )
    return routes
