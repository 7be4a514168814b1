"""Hyper-connections, which no other family has: a token is n streams of d channels. Attention, experts and
the head are sites. A site reads the streams as one, and its output is written into all of them."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from tiercel.kernels.choice import Kernels
from tiercel.kernels.reference.hyper import Site
from tiercel.models.base import Weights
from tiercel.models.deepseek_v4.config import V4Config


class Hyper(Protocol):
    """The module `hyper` of a kernel set; `kernels/reference/hyper.py` documents its functions."""

    def read(self, x: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]: ...
    def write(self, x: Tensor, y: Tensor, place: Tensor, mix: Tensor) -> Tensor: ...
    def head(self, x: Tensor, site: Site) -> Tensor: ...


def hyper_of(kernels: Kernels) -> Hyper:
    """The functions of the set that a model runs on."""
    return cast("Hyper", import_module(f"tiercel.kernels.{kernels.NAME}.hyper"))


def site_of(config: V4Config, kernels: Kernels, weights: Weights, norm: Tensor) -> Site:
    """A hyper-connection: how a layer's attention or experts read the streams, or how the head reads them.

    `norm` is the weight of the norm behind it.
    """
    n, scale = config.hc_mult, weights["scale"]
    if len(scale) == 3:  # collapse, place and mix; the head has only the first
        scale = scale.repeat_interleave(torch.tensor([n, n, n * n], device=scale.device))
    fn, eps = kernels.pack(weights["fn"]), config.rms_norm_eps
    return Site(fn, scale, weights["base"], norm, n, config.hc_sinkhorn_iters, config.hc_eps, eps)
