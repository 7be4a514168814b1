"""The kernels of the models in plain torch, on any device: they define what each kernel computes.

`native/` has the same functions in C for the CPU, `cuda/` in Triton. A model runs on any set.
"""

from pathlib import Path

import torch

from tiercel.kernels.draw import greedy as greedy
from tiercel.kernels.draw import masked as masked
from tiercel.kernels.draw import sample as sample
from tiercel.kernels.hot import gather as gather
from tiercel.kernels.hot import resolve as resolve
from tiercel.kernels.hot import stage as stage
from tiercel.kernels.reference.grouped import gated as gated
from tiercel.kernels.reference.grouped import grouped_attention as grouped_attention
from tiercel.kernels.reference.grouped import route_softmax as route_softmax
from tiercel.kernels.reference.grouped import store_heads as store_heads
from tiercel.kernels.reference.layers import CosSin as CosSin
from tiercel.kernels.reference.layers import Matrix as Matrix
from tiercel.kernels.reference.layers import experts as experts
from tiercel.kernels.reference.layers import linear as linear
from tiercel.kernels.reference.layers import linear_groups as linear_groups
from tiercel.kernels.reference.layers import norm as norm
from tiercel.kernels.reference.layers import norm_rotate as norm_rotate
from tiercel.kernels.reference.layers import pack as pack
from tiercel.kernels.reference.layers import pack_all as pack_all
from tiercel.kernels.reference.layers import route as route
from tiercel.kernels.reference.rows import attention as attention
from tiercel.kernels.reference.rows import best_rows as best_rows
from tiercel.kernels.reference.rows import compress_store as compress_store
from tiercel.kernels.reference.rows import keep as keep
from tiercel.kernels.reference.rows import restore as restore
from tiercel.kernels.reference.rows import row_before as row_before
from tiercel.kernels.reference.rows import store_window as store_window
from tiercel.kernels.reference.rows import write_tails as write_tails

NAME = "reference"
EXACT = False
"""False: torch sums in another order for another shape, so a row's bits depend on the number of rows."""

FP8_MATRICES = False
QUEUES = False
SOURCES = (*sorted(Path(__file__).parent.glob("*.py")),)

dtype = torch.float32
"""The type of activations and matrices."""


def built_from() -> tuple[str, ...]:
    """What the results depend on besides these files and torch."""
    return ()
