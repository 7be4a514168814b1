"""The kernel sets that a model can run on, by name, and what their results depend on."""

from __future__ import annotations

import os
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tiercel.errors import ConfigError
from tiercel.kernels import native, reference
from tiercel.kernels.entries import Entries, Flat, Numbering
from tiercel.kernels.hot import HostRows, HotRows
from tiercel.kernels.levels import MACHINE
from tiercel.kernels.meaning import digest_of
from tiercel.kernels.reference import CosSin, Matrix
from tiercel.kernels.reference.rows import Rows

NAMES = ("auto", "native", "cuda", "reference")
"""`native` may have a level (`kernels/levels.py`): native:v3."""
COMPUTE = ("auto", "fp32", "bf16")
NOT_NATIVE = "the native ones were not built, or not asked for"
TORCH_LEVELS, TORCH_VARIABLE = {"v3": "AVX2", "v4": "AVX512"}, "ATEN_CPU_CAPABILITY"
"""What torch's own operations use of a CPU. A level that is not here: nothing but what every CPU has."""


class Kernels(Protocol):
    """The functions of a kernel set that families share; `reference` documents them. Matrices are opaque."""

    NAME: str
    EXACT: bool
    FP8_MATRICES: bool
    """Whether `linear`, `linear_groups` and `experts` take fp8 matrices with scales."""
    QUEUES: bool
    """Whether calls are queued on a device: nothing is read back within a forward."""
    SOURCES: tuple[Path, ...]
    """The Python files of the set. `built_from` is about the rest."""
    dtype: torch.dtype
    """The type of activations, and of the matrices that `pack` takes."""

    def built_from(self) -> tuple[str, ...]: ...
    def pack(self, weight: Tensor) -> Matrix: ...
    def pack_all(self, weights: Tensor) -> Matrix: ...
    def linear(self, x: Tensor, weight: Matrix, *, wide: bool = ...) -> Tensor: ...
    def linear_groups(self, x: Tensor, weights: Matrix) -> Tensor: ...
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def norm_rotate(
        self,
        x: Tensor,
        rotation: CosSin,
        *,
        eps: float | None = ...,
        weight: Tensor | None = ...,
        back: bool = ...,
    ) -> Tensor: ...
    def masked(self, logits: Tensor, masks: Tensor) -> Tensor: ...
    def greedy(self, logits: Tensor) -> Tensor: ...
    def sample(self, logits: Tensor, draws: Tensor, best: Tensor) -> Tensor: ...
    def route(  # noqa: PLR0913
        self,
        logits: Tensor,
        chosen: Tensor | None,
        bias: Tensor | None,
        k: int,
        factor: float,
        position: Tensor | None = ...,
    ) -> tuple[Tensor, Tensor]: ...
    def experts(  # noqa: PLR0913
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        matrices: tuple[Matrix, Matrix],
        limit: float,
        *,
        shared: bool = ...,
    ) -> Tensor: ...
    def route_softmax(
        self, logits: Tensor, k: int, *, normed: bool, position: Tensor | None = ...
    ) -> tuple[Tensor, Tensor]: ...
    def gated(self, x: Tensor) -> Tensor: ...
    def store_heads(  # noqa: PLR0913
        self,
        key: Tensor,
        value: Tensor,
        rotation: CosSin,
        entries: Entries,
        flat: Flat,
        write_from: Tensor,
        *,
        eps: float,
        weight: Tensor | None,
    ) -> None: ...
    def grouped_attention(  # noqa: PLR0913
        self,
        q: Tensor,
        entries: Entries,
        kv_heads: int,
        flat: Flat,
        scale: float,
        longest: int,
        *,
        sinks: Tensor | None = ...,
        window: int = ...,
    ) -> Tensor: ...
    def store_window(
        self, kv: Tensor, rotation: CosSin, eps: float, weight: Tensor, new: Entries
    ) -> None: ...
    def compress_store(  # noqa: PLR0913
        self,
        recent: tuple[Tensor, Tensor],
        bias: Tensor,
        weight: Tensor,
        eps: float,
        table: CosSin,
        pages: Entries,
        flat: Flat,
        write_from: Tensor,
        ring_rows: int,
    ) -> None: ...
    def keep(self, kept: Rows, new: Rows, flat: Flat, end: Tensor, ring_rows: int) -> None: ...
    def write_tails(
        self, recent: tuple[Rows, Rows], tails: Entries, moves: Tensor, ring_rows: int
    ) -> None: ...
    def restore(self, kept: Rows, tails: Entries, moves: Tensor, ring_rows: int) -> None: ...
    def row_before(self, kept: Tensor, new: Tensor, flat: Flat, ring_rows: int) -> Tensor: ...
    def best_rows(  # noqa: PLR0913
        self,
        q: Tensor,
        weights: Tensor,
        keys: Entries,
        ratio: int,
        flat: Flat,
        k: int,
        most: int,
        to: Numbering | None = ...,
    ) -> Tensor: ...
    def resolve(  # noqa: PLR0913
        self,
        chosen: Tensor,
        flat: Flat,
        end: Tensor,
        hot: HotRows,
        layer: int,
        to: Numbering,
        per_row: int,
        most: int,
    ) -> None: ...
    def gather(
        self, hot: HotRows, flat: Flat, k: int, source: HostRows, rows: Entries, to: Numbering
    ) -> None: ...
    def stage(self, jobs: Tensor, count: Tensor, source: HostRows, rows: Entries, to: Numbering) -> None: ...
    def attention(  # noqa: PLR0913
        self,
        q: Tensor,
        recent: tuple[Entries, Entries],
        window: int,
        entries: Entries | None,
        chosen: Tensor | None,
        ratio: int,
        flat: Flat,
        sinks: Tensor,
        scale: float,
        spare: int = ...,
    ) -> Tensor: ...


def make_kernels(wish: str = "auto", device: str = "cpu", compute: str = "auto") -> Kernels:
    """The set of this name, or `auto`: the first that this device can run.

    A level of the native kernels is that of the whole process. `compute`: the type of activations and
    matrices. Only the CUDA kernels have a choice: bf16, or fp32 to compare them with a CPU.
    """
    name, colon, level = wish.partition(":")
    if name not in NAMES or (colon and name != "native"):
        raise ConfigError("kernels", wish, f"must be one of {', '.join(NAMES)}, or a level as native:v3")
    if compute not in COMPUTE:
        raise ConfigError("compute", compute, f"must be one of {', '.join(COMPUTE)}")
    wanted = NAMES[1:] if name == "auto" else (name,)
    refused = {each: _refused(each, device, asked=name == each) for each in wanted}
    found = next((each for each in wanted if not refused[each]), None)
    if found is None:
        raise ConfigError("kernels", wish, refused[name])
    if found == "cuda":
        from tiercel.kernels.cuda.kernels import CudaKernels  # here: Triton takes a second to import

        return CudaKernels(torch.float32 if compute == "fp32" else torch.bfloat16)
    if compute == "bf16":
        raise ConfigError("compute", compute, f"needs the CUDA kernels: the {found} ones compute in fp32")
    if colon:
        _take_level(wish, level)
    return native if found == "native" else reference


def _take_level(wish: str, level: str) -> None:
    """Compute on a level that was asked for: then machines with other CPUs compute the same bits. torch has
    levels of its own, with other bits. It must compute as on a CPU that can run no more than this level."""
    if level not in native.AVAILABLE:
        here = ", ".join(native.AVAILABLE)
        raise ConfigError("kernels", wish, f"of the levels that were built this CPU can run {here}")
    if level != MACHINE:
        wanted = TORCH_LEVELS.get(level, "DEFAULT")
        os.environ.setdefault(TORCH_VARIABLE, wanted.lower())
        if (found := torch.backends.cpu.get_cpu_capability()) != wanted:  # it reads the variable once
            why = (
                f"torch computes with {found} already; set {TORCH_VARIABLE}={wanted.lower()} before it starts"
            )
            raise ConfigError("kernels", wish, why)
    native.use_level(level)


def describe(kernels: Kernels) -> tuple[str, str]:
    """What the start table says of a set: its name, and why it was chosen."""
    if kernels.NAME != "native":
        why = "in Triton, for this device" if kernels.NAME == "cuda" else NOT_NATIVE
        return kernels.NAME, why
    level, highest = native.level(), native.AVAILABLE[-1]
    if level == highest:
        return f"native:{level}", "the highest level that this CPU can run"
    return f"native:{level}", f"asked for; this CPU can also run {highest}"


def _refused(name: str, device: str, *, asked: bool) -> str:
    """Why a set can not run there; empty: it can. Triton's interpreter (for tests) must be named."""
    if name == "native" and torch.device(device).type != "cpu":
        return f"run on the CPU, not on device {device}"
    if name == "native" and not native.AVAILABLE:
        return "were not built when tiercel was installed: gcc was missing, or it built no level for this CPU"
    interpreted = asked and os.environ.get("TRITON_INTERPRET") == "1"
    if name == "cuda" and torch.device(device).type != "cuda" and not interpreted:
        return f"run on CUDA, not on device {device}"
    if name == "cuda" and find_spec("triton") is None:
        return "need Triton: pip install triton"
    return ""


def check_device(name: str) -> None:
    """Refuses what is no CPU and no CUDA device, and a device that this machine does not have."""
    kind, colon, number = name.partition(":")
    if kind not in ("cpu", "cuda") or bool(colon) != number.isdecimal():
        raise ConfigError("device", name, "is not cpu, cuda, or one CUDA device as cuda:0")
    if kind == "cuda" and torch.version.cuda is None:
        why = f"needs a torch that was built for CUDA; torch {torch.__version__} here was built for CPUs"
        raise ConfigError("device", name, why)
    if kind == "cuda" and int(number or 0) >= (count := torch.cuda.device_count()):
        here = f"cuda:0 to cuda:{count - 1}" if count else "none; nvidia-smi says what the driver sees"
        raise ConfigError("device", name, f"is not there: torch sees {here}")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError("device", name, f"can not be used here: {str(error).splitlines()[0]}") from error


def kernels_digest(kernels: Kernels, device: str = "cpu") -> str:
    """Kernels with equal digests compute equal bits, as far as is known: the last bit may depend on the
    source, the compiler, the vector unit, torch's build, libm and the device."""
    machine = [platform.machine(), " ".join(platform.libc_ver()), torch.__config__.show()]
    if torch.device(device).type == "cuda":
        machine.append(torch.cuda.get_device_name(device))
    return digest_of(kernels.NAME, *kernels.built_from(), *machine, files=kernels.SOURCES)
