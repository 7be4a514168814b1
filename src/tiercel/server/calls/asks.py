"""From the fields of a call to asks. Pure functions; every mistake is found here.

The engine's checks use the engine's field names; `spelling` maps them to the names in the client's call.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import cast

from tiercel.asks.ask import Ask, Sampling, check_sampling
from tiercel.asks.service import Service
from tiercel.errors import InputError
from tiercel.server.calls.reply import Api, AskGroup
from tiercel.server.http.body import SamplingFields
from tiercel.server.http.errors import ApiError, conflict, refusal
from tiercel.server.options import ServerOptions
from tiercel.text.text import Text
from tiercel.types import Namespace

_CHANGED = {"logit_bias", "stop", "top_k"}
SAME = {each.name for each in fields_of(Sampling)} & SamplingFields.model_fields.keys() - _CHANGED
"""Fields that a call passes to `Sampling` as they are. A field that is not given has the engine's default."""


@dataclass(frozen=True)
class GivenPrompt:
    """One prompt of a request, and the field it stands in."""

    field: str
    prompt: str | list[int]

    def tokens(self, service: Service) -> tuple[int, ...]:
        if not isinstance(self.prompt, str):
            return tuple(self.prompt)
        return tuple(service.text.encode(self.prompt, field=self.field, tokens_max=service.context_tokens))

    def written(self, text: Text) -> str:
        return self.prompt if isinstance(self.prompt, str) else text.decode(self.prompt)


def given_prompts(
    field: str, given: str | list[str] | list[int] | list[list[int]], options: ServerOptions
) -> list[GivenPrompt]:
    """One prompt, or one for each item of a list; then their fields have an index."""
    if isinstance(given, str) or isinstance(given[0], int):
        return [GivenPrompt(field, given)]
    if len(given) > options.batch_max:
        message = f"{field} has {len(given)} prompts, {options.batch_max} are allowed"
        raise ApiError(400, message, param=field, code="invalid_value")
    many = cast(list[str | list[int]], given)
    return [GivenPrompt(f"{field}[{index}]", each) for index, each in enumerate(many)]


def namespace_of(cache_salt: str | None) -> Namespace:
    """Requests with different salts never share a page; those without a salt share with each other."""
    return (cache_salt,) if cache_salt else ()


def priority_of(priority: int | None, options: ServerOptions) -> int:
    most = options.priority_max
    if abs(priority or 0) > most:
        why = f"must be from {-most} to {most} (--priority-max)" if most else "must be 0 (--priority-max)"
        raise refusal("priority", priority, why)
    return priority or 0


def room(service: Service, prompt: Sequence[int], field: str) -> int:
    """Checks the prompt, and returns how many tokens the answer may have."""
    if not prompt:
        raise refusal(field, [], "has no tokens")
    vocab_size = service.vocab_size
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        at = next(i for i, token in enumerate(prompt) if not 0 <= token < vocab_size)
        raise _no_token(f"{field}[{at}]", prompt[at], vocab_size)
    if len(prompt) > service.context_tokens:
        message = f"{field} has {len(prompt)} tokens, but the context is {service.context_tokens} tokens long"
        raise ApiError(400, message, param=field, code="context_length_exceeded")
    return service.context_tokens - len(prompt)


def _no_token(field: str, token: int, vocab_size: int) -> ApiError:
    return refusal(field, token, f"is not a token: the vocabulary has {vocab_size}", code="not_a_token")


def group_of(api: Api, ask: Ask, fields: SamplingFields, spelling: Mapping[str, str]) -> AskGroup:
    """The ask with the sampling fields of its call, checked, `n` times. `room` has checked its prompt."""
    given = {name: getattr(fields, name) for name in SAME}
    sampling = replace(
        ask.sampling,
        stop=_stop(fields, spelling.get("stop", "stop"), api.options),
        stop_tokens=frozenset(fields.stop_token_ids or ()),
        logit_bias=_bias(fields, spelling.get("logit_bias", "logit_bias"), api.service.vocab_size),
        keep_stop=bool(fields.no_stop_trim or ask.sampling.keep_stop),
        top_k=max(fields.top_k or 0, 0),
        **{name: value for name, value in given.items() if value is not None},
    )
    ask = replace(ask, sampling=sampling)
    _check(api.service, ask, spelling)
    return _siblings(ask, fields.n or 1, api.options.n_max, spelling.get("n", "n"))


def _stop(fields: SamplingFields, field: str, options: ServerOptions) -> tuple[str, ...]:
    strings = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if len(strings) > options.stop_max:
        raise refusal(field, strings, f"has {len(strings)} stop strings, {options.stop_max} are allowed")
    for string in strings:
        if len(string) > options.stop_chars_max:
            raise refusal(field, string, f"is longer than {options.stop_chars_max} characters")
    return strings


def _bias(fields: SamplingFields, field: str, vocab_size: int) -> dict[int, float]:
    """Bias by token id. (JSON keys are strings.)"""
    by_token = {int(token): value for token, value in (fields.logit_bias or {}).items()}
    for token in by_token:
        if token >= vocab_size:
            raise _no_token(f"{field}.{token}", token, vocab_size)
    return by_token


def _check(service: Service, ask: Ask, spelling: Mapping[str, str]) -> None:
    if ask.sampling.min_tokens > ask.sampling.max_tokens:
        least, most = (spelling.get(name, name) for name in ("min_tokens", "max_tokens"))
        why = f"is more than {most}, which is {ask.sampling.max_tokens}"
        raise conflict(least, ask.sampling.min_tokens, why)
    try:
        check_sampling(ask.sampling, service.vocab_size)
    except InputError as error:
        name, bracket, index = error.field.partition("[")
        raise refusal(spelling.get(name, name) + bracket + index, error.value, error.why) from error
    left = service.context_tokens - len(ask.prompt)
    if ask.sampling.max_tokens > left:
        field = spelling.get("max_tokens", "max_tokens")
        message = (
            f"{field} = {ask.sampling.max_tokens}: the prompt has {len(ask.prompt)} tokens and the context "
            f"{service.context_tokens}, which leaves {left}"
        )
        raise ApiError(400, message, param=field, code="context_length_exceeded")


def _siblings(ask: Ask, n: int, n_max: int, field: str) -> tuple[Ask, ...]:
    """The same ask n times, with different ids and seeds. Only the first asks for the prompt's logprobs."""
    if n > n_max:
        raise refusal(field, n, f"must be at most {n_max}")
    others = (
        replace(
            ask,
            request_id=f"{ask.request_id}.n{index}",
            sampling=replace(ask.sampling, seed=_derived(ask.sampling.seed, index)),
            prompt_logprobs_from=None,
        )
        for index in range(1, n)
    )
    return (ask, *others)


def _derived(seed: int | None, index: int) -> int | None:
    """A digest, not a sum: the second answer of seed 1 must not be the first answer of seed 2."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def own_id(request_id: str, owner: str, cache_salt: str | None) -> str:
    """A client's id as the engine knows it: with a digest of API key and salt. So two tenants may use one id,
    and neither learns about the other."""
    if not owner and not cache_salt:
        return request_id
    digest = hashlib.blake2b(json.dumps([owner, cache_salt or ""]).encode(), digest_size=8).hexdigest()
    return f"{digest}/{request_id}"


def public_id(own: str) -> str:
    """The id as its client knows it. No client can choose an id with a slash."""
    return own.rpartition("/")[2]


def member_id(request_id: str, index: int) -> str:
    """The id of one prompt of a batch. The first prompt keeps the request's id."""
    return f"{request_id}.{index}" if index else request_id
