"""What a model stores: streams, pages, tails, and the builders for the models we know."""

from tiercel.spec.attention import Heads, Recurrence, mha, mla, mla_indexer, recurrent, sliding_window
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.capacity import capacity_of
from tiercel.spec.deepseek_v4 import deepseek_v4, deepseek_v4_mtp
from tiercel.spec.identity import Identity
from tiercel.spec.presets import PRESETS, load
from tiercel.spec.stream import PREFIX, Keep, Part, Prefix, State, Stream, Window

__all__ = [
    "PREFIX",
    "PRESETS",
    "CacheSpec",
    "Heads",
    "Identity",
    "Keep",
    "Part",
    "Prefix",
    "Recurrence",
    "State",
    "Stream",
    "Window",
    "capacity_of",
    "deepseek_v4",
    "deepseek_v4_mtp",
    "load",
    "mha",
    "mla",
    "mla_indexer",
    "recurrent",
    "sliding_window",
]
