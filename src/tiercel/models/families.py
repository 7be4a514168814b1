"""Which models run here: one line for each family, by the `model_type` that `config.json` names.

A family's package is imported when a model of it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tiercel.models.hub import is_hub_name, parts_of, snapshot_of
from tiercel.spec.cache_spec import CacheSpec
from tiercel.spec.hf_fields import family_name

if TYPE_CHECKING:  # the command line reads names here, and torch takes seconds to import
    from torch import Tensor

    from tiercel.kernels.choice import Kernels
    from tiercel.memory.buffers import DeviceMemory
    from tiercel.models.base import Model, Stage
    from tiercel.models.checkpoint import Checkpoint
    from tiercel.models.loading import WeightSpec

FAMILIES = {
    "deepseek_v4": "tiercel.models.deepseek_v4.model",
    "qwen3": "tiercel.models.qwen3.model",
    "qwen3_moe": "tiercel.models.qwen3.model",
}

EMBEDDED = "tiny-v4"
"""The model that comes with the package."""

FOLDERS = {EMBEDDED: "tiny_v4", "v4-flash-8e": "v4_flash_8e"}
"""Models by name. The second has the dimensions of V4-Flash with 8 experts, and random weights: it is for
measurements, and its answers make no sense."""

SHARED_SOURCES = (
    "models/apart.py",
    "models/beside.py",
    "models/draft_model.py",
    "models/flat.py",
    "models/frame.py",
    "models/graphs.py",
    "models/grouped.py",
    "models/loading.py",
    "models/quantized.py",
    "models/rotary.py",
    "models/rows.py",
    "kernels/entries.py",
)
"""Source files that all families compute with, besides the kernels."""


class DraftOffer(NamedTuple):
    """The draft that a checkpoint has."""

    declare: Callable[[int, str], CacheSpec]
    """(page tokens, format of entries) → what the draft caches."""
    share: float
    """What one guess takes to compute, as a share of what a token of the target takes."""


@dataclass(frozen=True)
class Family:
    """How models of one architecture are opened. Each step checks what it reads and names what is wrong."""

    read: Callable[[Mapping[str, Any]], Any]
    """`config.json` → `Dimensions`."""
    declare: Callable[[Mapping[str, Any], int, str], CacheSpec]
    """(`config.json`, page tokens, format of entries) → what is cached."""
    weights: WeightSpec
    """Which weights there are."""
    build: Callable[[Any, dict[str, Tensor], DeviceMemory, int, Kernels, int, Stage | None], Model]
    """(dimensions, weights, device memory, running requests at most, kernels, guesses at most, stage) → a
    model, or a stage of it; None: all of it."""
    format: str = "bf16"
    """How entries are kept on a GPU, unless something else is asked for."""
    draft: Callable[[Checkpoint, Any], DraftOffer | None] = lambda *_: None
    """The draft that a checkpoint has, whole."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a `config.json` names."""
    family: Family = import_module(FAMILIES[family_name(config, FAMILIES)]).FAMILY
    return family


def sources_of(config: Mapping[str, Any]) -> list[Path]:
    """The source files that decide what a model of this family computes, and how entries are rounded."""
    own = find_spec(FAMILIES[family_name(config, FAMILIES)])
    assert own is not None and own.origin is not None
    package = Path(__file__).parents[1]
    return [*(package / name for name in SHARED_SOURCES), *Path(own.origin).parent.glob("*.py")]


def folder_of(model: str) -> Path:
    """The folder of a model that a user names: one of `FOLDERS`, a path, or a name of the Hub, from which it
    is fetched."""
    if model in FOLDERS:
        return Path(__file__).parent / FOLDERS[model]
    return snapshot_of(model, _check_config).folder if is_hub_name(model) else Path(model)


def name_of(model: str) -> str:
    """What clients call the model that a user names."""
    if model in FOLDERS:
        return model
    return parts_of(model)[0] if is_hub_name(model) else folder_of(model).absolute().name


def local_name_of(model: str) -> str:
    """A name for another process: it fetches nothing, and opens the same files."""
    return model if model in FOLDERS else str(folder_of(model))


def _check_config(config: Mapping[str, Any]) -> None:
    family_of(config).read(config)


def text_folder_of(model: str) -> Path:
    """The folder of the model's tokenizer. Random weights need none of their own."""
    return folder_of(EMBEDDED if model in FOLDERS else model)
