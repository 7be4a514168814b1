"""The kernel sets that a model can run on, by name, and what their results depend on."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tiercel.errors import ConfigError
from tiercel.kernels import native, reference
from tiercel.kernels.reference import CosSin, Matrix, Recent, Site

NAMES = ("auto", "native", "reference")


class Kernels(Protocol):
    """The functions of a kernel set; `reference` documents them. Matrices are opaque."""

    NAME: str
    EXACT: bool

    def built_from(self) -> tuple[str, ...]: ...
    def pack(self, weight: Tensor) -> Matrix: ...
    def pack_all(self, weights: Tensor) -> Matrix: ...
    def linear(self, x: Tensor, weight: Matrix) -> Tensor: ...
    def linear_groups(self, x: Tensor, weights: Matrix) -> Tensor: ...
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def put_rows(self, target: Tensor, to: Tensor, source: Tensor, rows: Tensor | None = None) -> None: ...
    def norm_rotate(
        self,
        x: Tensor,
        turn: CosSin,
        *,
        eps: float | None = ...,
        weight: Tensor | None = ...,
        back: bool = ...,
    ) -> Tensor: ...
    def hyper_read(self, x: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]: ...
    def hyper_write(self, x: Tensor, y: Tensor, place: Tensor, mix: Tensor) -> Tensor: ...
    def hyper_head(self, x: Tensor, site: Site) -> Tensor: ...
    def route(
        self, logits: Tensor, chosen: Tensor | None, bias: Tensor | None, k: int, factor: float
    ) -> tuple[Tensor, Tensor]: ...
    def experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, matrices: tuple[Matrix, Matrix], limit: float
    ) -> Tensor: ...
    def compress(self, recent: Recent, rows: Tensor, bias: Tensor, dim: int) -> Tensor: ...
    def best_rows(
        self, q: Tensor, weights: Tensor, keys: Tensor, rows: Tensor, span: Tensor, visible: Tensor, k: int
    ) -> Tensor: ...
    def attention(
        self,
        q: Tensor,
        recent: Recent,
        window: Tensor,
        entries: Tensor,
        chosen: Tensor,
        sinks: Tensor,
        scale: float,
    ) -> Tensor: ...


def make_kernels(name: str = "auto", device: str = "cpu") -> Kernels:
    """`auto`: the native kernels on the CPU if they were built, or else `reference`."""
    if name not in NAMES:
        raise ConfigError("kernels", name, f"must be one of {', '.join(NAMES)}")
    on_cpu = torch.device(device).type == "cpu"
    if name == "native" and not on_cpu:
        raise ConfigError("kernels", name, f"run on the CPU, not on device {device}")
    if name == "native" and not native.AVAILABLE:
        raise ConfigError("kernels", name, "were not built when tiercel was installed: gcc was missing")
    return native if name != "reference" and on_cpu and native.AVAILABLE else reference


def check_device(name: str) -> None:
    """Refuses a device that torch does not know, or that this machine does not have."""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError("device", name, f"can not be used here: {str(error).splitlines()[0]}") from error


def digest_of(*words: str, files: Iterable[Path] = ()) -> str:
    """A digest of the words and of the files' content. The files' paths do not matter."""
    whole = hashlib.sha256()
    for part in (*(word.encode() for word in words), *(file.read_bytes() for file in sorted(files))):
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


def kernels_digest(kernels: Kernels, device: str = "cpu") -> str:
    """Kernels with equal digests compute equal bits, as far as is known: the last bit of a result may depend
    on the source, the compiler, the vector unit, torch's build, libm and the device."""
    machine = [platform.machine(), " ".join(platform.libc_ver()), torch.__config__.show()]
    if torch.device(device).type == "cuda":
        machine.append(torch.cuda.get_device_name(device))
    source = Path(__file__).with_name(f"{kernels.NAME}.py")
    return digest_of(kernels.NAME, *kernels.built_from(), *machine, files=[source])
