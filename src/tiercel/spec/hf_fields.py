"""Reading a Hugging Face config: a field that is missing or unusable is named, never guessed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiercel.errors import SpecError


def _present(config: Mapping[str, Any], name: str) -> Any:
    value = config.get(name)
    if value is None:
        raise SpecError(name, value, "is missing in the config")
    return value


def whole(config: Mapping[str, Any], name: str, *, least: int = 1) -> int:
    """A field that is a whole number."""
    value = _present(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(name, value, f"must be a whole number of at least {least}")
    return int(value)


def number(config: Mapping[str, Any], name: str) -> float:
    """A field that is a number above 0."""
    value = _present(config, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise SpecError(name, value, "must be a number above 0")
    return float(value)


def flag(config: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false if it is not there, as in `transformers`."""
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise SpecError(name, value, "must be true or false")
    return value


def check_only(config: Mapping[str, Any], choices: Mapping[str, object]) -> None:
    """Refuses values other than these. A config may leave such a setting out."""
    for name, choice in choices.items():
        given = config.get(name)
        if given is not None and given != choice:
            raise SpecError(name, given, f"is not supported: the model has {choice!r}")


def family_name(config: Mapping[str, Any], known: Iterable[str]) -> str:
    """The family that `model_type` names, or else `architectures` (DeepseekV4ForCausalLM is deepseek_v4)."""
    names = [config.get("model_type")]
    if isinstance(config.get("architectures"), list):
        names += config["architectures"]
    by_plain_name = {name.replace("_", ""): name for name in known}
    for name in names:
        plain = str(name).replace("_", "").lower().removesuffix("forcausallm")
        if plain in by_plain_name:
            return by_plain_name[plain]
    raise SpecError("model_type", names, f"is none of {', '.join(sorted(known))}")


def per_layer(config: Mapping[str, Any], name: str, *, known: Sequence[Any], extra: int = 0) -> Sequence[Any]:
    """A list with one value per layer, one of the `known`. It may go on for up to `extra` draft layers."""
    layers, values = whole(config, "num_hidden_layers"), config.get(name)
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise SpecError(name, values, "must be a list with one value per layer")
    if not layers <= len(values) <= layers + extra:
        raise SpecError(name, values, f"has {len(values)} values for num_hidden_layers = {layers}")
    for i, value in enumerate(values[:layers]):
        if value not in known or isinstance(value, bool):
            raise SpecError(f"{name}[{i}]", value, f"is none of {', '.join(map(str, known))}")
    return values


def layers_of(kinds: Sequence[str], kind: str) -> tuple[int, ...]:
    """The ids of the layers of one kind."""
    return tuple(i for i, own in enumerate(kinds) if own == kind)
