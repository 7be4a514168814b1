"""tiercel inside vLLM, in two ways: `Tier`, a store behind vLLM's own CPU tier; `TiercelConnector`, a host
tier of ours and a store in place of it. vLLM imports one of them by its name here."""

from importlib import import_module
from typing import Any

_HOME = {"Tier": "tier", "TiercelConnector": "connector"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
