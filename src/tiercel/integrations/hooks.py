"""Whether an engine's interface is still the one that an integration was written for.

An engine that calls a method which is not there, or no longer calls one, would fail late or lose hits in
silence. So an integration compares, when it is loaded, what there is with what it knows.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from tiercel.errors import ConfigError

log = logging.getLogger(__name__)


def check_hooks(
    package: str,
    interface: type,
    known: Collection[str],
    *,
    tested: Collection[str],
    left: Collection[str] = (),
) -> None:
    """Refuses an interface that lacks a method which the integration overrides (`known`), because it would
    not be called. Warns of methods that it neither overrides nor has `left` alone on purpose, and of versions
    that were not tested."""
    there = {name for name, value in vars(interface).items() if callable(value) and not name.startswith("_")}
    if missing := sorted(set(known) - there):
        why = f"has no {', '.join(missing)} any more; this integration was tested with {', '.join(tested)}"
        raise ConfigError(package, _version(package), why)
    if new := sorted(there - {*known, *left}):
        log.warning("%s %s has calls that are not answered: %s", package, _version(package), ", ".join(new))
    if _version(package) not in tested:
        log.warning("%s %s was not tested; these were: %s", package, _version(package), ", ".join(tested))


def _version(package: str) -> str:
    """Without what a build adds to it (`0.32.0+cpu`)."""
    for name in (package, f"{package}-cpu"):
        with suppress(PackageNotFoundError):
            return version(name).partition("+")[0]
    return "unknown"
