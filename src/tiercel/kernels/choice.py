"""The kernel sets that a model can run on, by name. All have the same functions."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tiercel.errors import ConfigError
from tiercel.kernels import native, reference
from tiercel.kernels.reference import CosSin, Matrix, Recent, Site

NAMES = ("auto", "native", "reference")


class Kernels(Protocol):
    """The functions of a kernel set; `reference` documents them. Matrices are opaque."""

    NAME: str
    EXACT: bool

    def digest(self) -> str:
        """Kernels with equal digests compute equal bits, as far as is known."""

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
        eps: float | None = None,
        weight: Tensor | None = None,
        back: bool = False,
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
        self,
        q: Tensor,
        weights: Tensor,
        keys: Tensor,
        rows: Tensor,
        span: Tensor,
        visible: Tensor,
        k: int,
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


def make_kernels(name: str = "auto") -> Kernels:
    """`auto`: the native kernels if they were built, or else `reference`."""
    if name not in NAMES:
        raise ConfigError("kernels", name, f"must be one of {', '.join(NAMES)}")
    if name == "native" and not native.AVAILABLE:
        raise ConfigError("kernels", name, "were not built when tiercel was installed: gcc was missing")
    return native if name == "native" or (name == "auto" and native.AVAILABLE) else reference
