"""Hyper-connections in C: `reference/hyper.py` says what each function does."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.kernels.native.layers import panels_of
from tiercel.kernels.native.library import call, dense
from tiercel.kernels.reference.hyper import Site


def read(x: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    rows, n, d = x.shape
    outs = 2 * n + n * n
    dense(x, (rows, n, d))
    dense(site.scale, (outs,))
    dense(site.base, (outs,))
    dense(site.weight, (d,))
    weights = panels_of(site.fn, outs, n * d), site.scale, site.base, site.weight
    out = torch.empty(rows, d), torch.empty(rows, n), torch.empty(rows, n, n)
    call("hyper_read", rows, x, *weights, *out, rows, n, d, site.iterations, site.hc_eps, site.eps)
    return out


def write(x: Tensor, y: Tensor, place: Tensor, mix: Tensor) -> Tensor:
    rows, n, d = x.shape
    dense(x, (rows, n, d))
    dense(y, (rows, d))
    dense(place, (rows, n))
    dense(mix, (rows, n, n))
    out = torch.empty(rows, n, d)
    call("hyper_write", rows, x, y, place, mix, out, rows, n, d)
    return out


def head(x: Tensor, site: Site) -> Tensor:
    rows, n, d = x.shape
    dense(x, (rows, n, d))
    dense(site.base, (n,))
    dense(site.weight, (d,))
    weights = panels_of(site.fn, n, n * d), site.scale.item(), site.base, site.weight
    out = torch.empty(rows, d)
    call("hyper_head", rows, x, *weights, out, rows, n, d, site.hc_eps, site.eps)
    return out
