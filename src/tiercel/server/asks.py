"""From the fields of a call to an `Ask`. Pure functions; every mistake is found here.

The engine's checks use the engine's field names; `spelling` maps them to the names in the client's call.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tiercel.engine.ask import Ask
from tiercel.engine.sampling import check as check_sampling
from tiercel.errors import InputError
from tiercel.server.errors import ApiError, refusal
from tiercel.server.options import ServerOptions
from tiercel.server.service import Service
from tiercel.types import Namespace

DEFAULT_MODEL = "default"
"""SGLang's clients send this if they name no model."""


def model_names(service: Service, options: ServerOptions) -> tuple[str, ...]:
    """The names by which a client may call the model; the first is the server's own."""
    path = () if options.model_path is None else (options.model_path,)
    return tuple(dict.fromkeys((service.model_name, *options.model_names, *path, DEFAULT_MODEL)))


def namespace_of(cache_salt: str | None) -> Namespace:
    """Requests with different salts never share a page; those without a salt share with each other."""
    return (cache_salt,) if cache_salt else ()


def stop_of(stop: str | Sequence[str] | None, field: str, options: ServerOptions) -> tuple[str, ...]:
    """Stop strings, checked against the limits."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > options.stop_max:
        raise refusal(field, strings, f"has {len(strings)} stop strings, {options.stop_max} are allowed")
    for string in strings:
        if len(string) > options.stop_chars_max:
            raise refusal(field, string, f"is longer than {options.stop_chars_max} characters")
    return strings


def bias_of(bias: Mapping[str, float] | None, field: str, service: Service) -> dict[int, float]:
    """The bias by token id. (JSON keys are strings.)"""
    by_token = {int(token): value for token, value in (bias or {}).items()}
    for token in by_token:
        if token >= service.text.vocab_size:
            raise _no_token(f"{field}.{token}", token, service)
    return by_token


def _no_token(field: str, token: int, service: Service) -> ApiError:
    why = f"is not a token: the vocabulary has {service.text.vocab_size}"
    return refusal(field, token, why, code="not_a_token")


def room(service: Service, prompt: Sequence[int], field: str) -> int:
    """Checks the prompt, and returns how many tokens the answer may have."""
    if not prompt:
        raise refusal(field, [], "has no tokens")
    vocab_size = service.text.vocab_size
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        at = next(i for i, token in enumerate(prompt) if not 0 <= token < vocab_size)
        raise _no_token(f"{field}[{at}]", prompt[at], service)
    if len(prompt) > service.context_tokens:
        message = f"{field} has {len(prompt)} tokens, but the context is {service.context_tokens} tokens long"
        raise ApiError(400, message, param=field, code="context_length_exceeded")
    return service.context_tokens - len(prompt)


def check(service: Service, ask: Ask, spelling: Mapping[str, str]) -> Ask:
    """Returns the ask if it can be answered. `room` has checked its prompt."""
    try:
        check_sampling(ask.sampling, service.text.vocab_size)
    except InputError as error:
        name, bracket, index = error.field.partition("[")
        field = spelling.get(name, name) + bracket + index
        raise refusal(field, error.value, error.why) from error
    left = service.context_tokens - len(ask.prompt)
    if ask.sampling.max_tokens > left:
        field = spelling.get("max_tokens", "max_tokens")
        message = (
            f"{field} = {ask.sampling.max_tokens}: the prompt has {len(ask.prompt)} tokens and the context "
            f"{service.context_tokens}, which leaves {left}"
        )
        raise ApiError(400, message, param=field, code="context_length_exceeded")
    return ask


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


def priority_of(priority: int | None, options: ServerOptions) -> int:
    """The priority, checked against the operator's limit."""
    if abs(priority or 0) > options.priority_max:
        most = options.priority_max
        why = f"must be from {-most} to {most} (--priority-max)" if most else "must be 0 (--priority-max)"
        raise refusal("priority", priority, why)
    return priority or 0


def member_id(request_id: str, index: int) -> str:
    """The id of one prompt of a batch. The first prompt keeps the request's id."""
    return f"{request_id}.{index}" if index else request_id


def siblings(ask: Ask, n: int, options: ServerOptions, field: str = "n") -> tuple[Ask, ...]:
    """The same ask n times, with other ids and seeds. Only the first asks for the prompt's logprobs."""
    if n > options.n_max:
        raise refusal(field, n, f"must be at most {options.n_max}")
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
    """A digest, not a sum: the second answer of seed 1 must not be the first of seed 2."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
