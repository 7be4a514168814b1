"""These tests run in environments of their own, one for each engine: `make engines`. Elsewhere they are
skipped."""

from importlib.util import find_spec

import torch

if find_spec("sglang") is not None:
    # SGLang imports these, and does not call them without a GPU: its torchvision is a build for CUDA.
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
