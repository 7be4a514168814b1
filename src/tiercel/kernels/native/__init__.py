"""The kernels of `reference/` in C for the CPU: faster, and with the same bits for every batch."""

from pathlib import Path

import torch

from tiercel.kernels.draw import greedy as greedy
from tiercel.kernels.draw import masked as masked
from tiercel.kernels.draw import sample as sample
from tiercel.kernels.hot import gather as gather
from tiercel.kernels.hot import resolve as resolve
from tiercel.kernels.hot import stage as stage
from tiercel.kernels.native.grouped import gated as gated
from tiercel.kernels.native.grouped import grouped_attention as grouped_attention
from tiercel.kernels.native.grouped import route_softmax as route_softmax
from tiercel.kernels.native.grouped import store_heads as store_heads
from tiercel.kernels.native.layers import PackedMatrix as PackedMatrix
from tiercel.kernels.native.layers import experts as experts
from tiercel.kernels.native.layers import linear as linear
from tiercel.kernels.native.layers import linear_groups as linear_groups
from tiercel.kernels.native.layers import norm as norm
from tiercel.kernels.native.layers import norm_rotate as norm_rotate
from tiercel.kernels.native.layers import pack as pack
from tiercel.kernels.native.layers import pack_all as pack_all
from tiercel.kernels.native.layers import route as route
from tiercel.kernels.native.library import AVAILABLE as AVAILABLE
from tiercel.kernels.native.library import built_from as built_from
from tiercel.kernels.native.library import level as level
from tiercel.kernels.native.library import use_level as use_level
from tiercel.kernels.native.rows import attention as attention
from tiercel.kernels.native.rows import best_rows as best_rows
from tiercel.kernels.native.rows import compress_store as compress_store
from tiercel.kernels.native.rows import keep as keep
from tiercel.kernels.native.rows import store_window as store_window
from tiercel.kernels.reference.rows import restore as restore
from tiercel.kernels.reference.rows import row_before as row_before
from tiercel.kernels.reference.rows import write_tails as write_tails

NAME = "native"
EXACT = True
"""The result for a token depends on that token's own inputs only."""

FP8_MATRICES = False
QUEUES = False
SOURCES = (*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "reference" / "rows.py")

dtype = torch.float32
