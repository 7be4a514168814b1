"""Asks: from what a call wants to what an engine is asked. Pure; everything wrong is found here.

What the engine checks it calls by its own names; `spelling` says how the call of the client spells them.
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
"""What clients of SGLang call a server's only model if they name none."""


def model_names(service: Service, options: ServerOptions) -> tuple[str, ...]:
    """What a client may call the model; the first is what the server calls it."""
    path = () if options.model_path is None else (options.model_path,)
    return tuple(dict.fromkeys((service.model_name, *options.model_names, *path, DEFAULT_MODEL)))


def namespace_of(cache_salt: str | None) -> Namespace:
    """Requests with different salts never share a page; those without one share among themselves."""
    return (cache_salt,) if cache_salt else ()


def stop_of(stop: str | Sequence[str] | None, field: str, options: ServerOptions) -> tuple[str, ...]:
    """Stop strings, within the limits."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > options.stop_max:
        raise refusal(field, strings, f"has {len(strings)} stop strings, {options.stop_max} are allowed")
    for string in strings:
        if len(string) > options.stop_chars_max:
            raise refusal(field, string, f"is longer than {options.stop_chars_max} characters")
    return strings


def bias_of(bias: Mapping[str, float] | None, field: str, service: Service) -> dict[int, float]:
    """JSON has only text as keys."""
    by_token = {int(token): value for token, value in (bias or {}).items()}
    for token in by_token:
        if token >= service.text.vocab_size:
            raise _no_token(f"{field}.{token}", token, service)
    return by_token


def _no_token(field: str, token: int, service: Service) -> ApiError:
    why = f"is not a token: the vocabulary has {service.text.vocab_size}"
    return refusal(field, token, why, code="not_a_token")


def room(service: Service, prompt: Sequence[int], field: str) -> int:
    """How many tokens an answer may have. Checks the prompt."""
    if not prompt:
        raise refusal(field, [], "has no tokens")
    vocab_size = service.text.vocab_size
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        at = next(i for i, token in enumerate(prompt) if not 0 <= token < vocab_size)
        raise _no_token(f"{field}[{at}]", prompt[at], service)
    if len(prompt) > service.context_tokens:
        message = f"{field} has {len(prompt)} tokens, the longest context has {service.context_tokens}"
        raise ApiError(400, message, param=field, code="context_length_exceeded")
    return service.context_tokens - len(prompt)


def check(service: Service, ask: Ask, spelling: Mapping[str, str]) -> Ask:
    """The ask, if it can be answered as it is. Its prompt went through `room`."""
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
            f"{field} = {ask.sampling.max_tokens}: the prompt has {len(ask.prompt)} tokens and the longest "
            f"context {service.context_tokens}, which leaves {left}"
        )
        raise ApiError(400, message, param=field, code="context_length_exceeded")
    return ask


def own_id(request_id: str, owner: str, cache_salt: str | None) -> str:
    """An id as the engine knows it. It belongs to the key and the salt it came with: two tenants may choose
    the same, and neither learns of the other's."""
    if not owner and not cache_salt:
        return request_id
    digest = hashlib.blake2b(json.dumps([owner, cache_salt or ""]).encode(), digest_size=8).hexdigest()
    return f"{digest}/{request_id}"


def public_id(own: str) -> str:
    """As its owner knows it. Nobody can choose an id with a slash."""
    return own.rpartition("/")[2]


def priority_of(priority: int | None, options: ServerOptions) -> int:
    """Within what whoever runs the server allows."""
    if abs(priority or 0) > options.priority_max:
        most = options.priority_max
        why = f"must be from {-most} to {most} (--priority-max)" if most else "is not taken (--priority-max)"
        raise refusal("priority", priority, why)
    return priority or 0


def member_id(request_id: str, index: int) -> str:
    """Of one prompt of several. The first keeps the name."""
    return f"{request_id}.{index}" if index else request_id


def siblings(ask: Ask, n: int, options: ServerOptions, field: str = "n") -> tuple[Ask, ...]:
    """The same prompt n times: other names, other seeds, and the prompt's logprobs only once."""
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
    """By a digest: the second answer of seed 1 is not the first of seed 2."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
