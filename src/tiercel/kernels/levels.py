"""The levels that the C kernels are built for, a library each, and which of them a CPU can run.

A level is what its code needs of a CPU. Its bits are its own: the order of some sums depends on the width of
vectors, and v2 can not fuse a product and a sum. On x86-64 `v2`, `v3` and `v4` run on every CPU of that level
(SSE4.2; AVX2 and FMA; AVX-512). On ARM there is one: the C code uses nothing that ARMv8 does not always have.

Imports the standard library only: `setup.py` runs this file before anything is installed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping

_V2 = ("sse4.2", "popcnt")
_V3 = (*_V2, "avx", "avx2", "fma")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_MACHINES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "x86_64": ("-march=x86-64", {"v2": _V2, "v3": _V3, "v4": _V4}),
    "aarch64": ("-march=armv8-a", {"v8": ()}),
}

_BASE, LEVELS = _MACHINES.get(platform.machine(), ("", {"base": ()}))
"""The levels of this kind of machine, lowest first, and what each needs of a CPU. gcc has these words as
options (-mavx2) and as questions (`cpu.c`)."""

MACHINE = "machine"
"""A library for CPUs like that of the machine which built it, and no others. It is chosen where it is."""

BUILD = "BUILD_TIERCEL_LEVELS"
"""The variable that names the levels to build: some of `LEVELS`, or `machine`. Without it: all `LEVELS`."""


def levels_to_build(environment: Mapping[str, str] = os.environ) -> list[str]:
    levels = environment.get(BUILD, "").split() or list(LEVELS)
    if unknown := set(levels) - {*LEVELS, MACHINE}:
        known = ", ".join([*LEVELS, MACHINE])
        raise SystemExit(f"{BUILD}: {', '.join(sorted(unknown))} is none of the levels {known}")
    return levels


def options_of(level: str) -> list[str]:
    """What the compiler is told. The first option takes back what the environment says of the CPU."""
    if level == MACHINE:
        return ["-march=native" if platform.machine() == "x86_64" else "-mcpu=native"]
    return [_BASE] * bool(_BASE) + [f"-m{each}" for each in LEVELS[level]]


def runnable(built: Collection[str], features: Collection[str]) -> list[str]:
    """Of the levels that were built those that a CPU with these features can run, lowest first."""
    fit = [level for level, needs in LEVELS.items() if set(needs) <= set(features)]
    return [level for level in (*fit, MACHINE) if level in built]
