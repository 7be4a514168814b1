"""What of vLLM's configuration and requests decides which bytes are kept, and whose they are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import (
    KVCacheSpecKind,
    RSWASpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)
from vllm.version import __version__ as VERSION

from tiercel.errors import ConfigError
from tiercel.integrations.vllm.groups import Group, Groups
from tiercel.models.digest import weights_digest
from tiercel.spec.identity import Identity
from tiercel.spec.stream import PREFIX, Keep, Window

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

WHOLE = (KVCacheSpecKind.FULL_ATTENTION, KVCacheSpecKind.MLA_ATTENTION)
WINDOWS = (KVCacheSpecKind.SLIDING_WINDOW, KVCacheSpecKind.SLIDING_WINDOW_MLA)


def groups_of(config: VllmConfig, cache: KVCacheConfig) -> Groups:
    """The groups of layers of vLLM's KV cache. Raises a ConfigError for kinds that are not known."""
    found = list[Group]()
    for table, group in enumerate(cache.kv_cache_groups):
        whole = group.kv_cache_spec
        specs = whole.kv_cache_specs if isinstance(whole, UniformTypeKVCacheSpecs) else {}
        sizes = dict[int, list[str]]()
        for name in group.layer_names:
            spec = specs.get(name, whole)
            size = getattr(spec, "real_page_size_bytes", spec.page_size_bytes)
            sizes.setdefault(size, []).append(name)
        spec = next(iter(specs.values()), whole)
        for size, names in sizes.items():
            found.append(Group(table, _keep(group, spec), whole.block_size, size, tuple(names)))
    return Groups(config.model_config.model, tuple(found))


def _keep(group: Any, spec: Any) -> Keep:
    kind = get_kv_cache_spec_kind(spec)
    plain = spec.prefix_cacheable and group.enable_kv_transfer and not getattr(group, "host_resident", False)
    if plain and kind in WHOLE and not isinstance(spec, RSWASpec):
        return PREFIX
    if plain and kind in WINDOWS and not spec.extra_retained_tokens:
        return Window(spec.sliding_window)
    raise ConfigError("model", type(spec).__name__, "is a kind of layer that is not tiered yet")


def identity_of(config: VllmConfig, cache_layout: str) -> Identity:
    """What every number depends on. Weights in a folder count with every bit; others by name and revision."""
    model, folder = config.model_config, Path(config.model_config.model)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    weights = weights_digest(files) if files else f"{model.model}@{model.revision}"
    loaded = config.load_config.load_format, model.seed if config.load_config.load_format == "dummy" else 0
    about = {
        "config": model.hf_config.to_dict() | {"_name_or_path": ""},
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "entries": config.cache_config.cache_dtype,
        "layout": cache_layout,
        "loaded": [str(each) for each in loaded],
    }
    arithmetic = json.dumps(about, sort_keys=True, default=str)
    kernels = f"vllm {VERSION}, {config.device_config.device_type}, {torch.__version__}"
    return Identity(weights, hashlib.sha256(arithmetic.encode()).hexdigest(), kernels)


def namespace_of(request: Request) -> tuple[str, ...]:
    """What else every page of a text depends on."""
    words = list[str]()
    if lora := request.lora_request:
        words += ["lora", lora.lora_name, lora.lora_path]
    if request.cache_salt:
        words += ["salt", request.cache_salt]
    return tuple(words)


def extra_of(request: Request, page_tokens: int) -> dict[int, bytes]:
    """What else single pages stand for: images and the like, at their places; embeddings in place of
    tokens."""
    found = dict[int, list[bytes]]()
    for feature in request.mm_features:
        first, length = feature.mm_position.offset, feature.mm_position.length
        for page in range(first // page_tokens, -(-(first + length) // page_tokens)):
            name = json.dumps([feature.identifier, first - page * page_tokens, length])
            found.setdefault(page, []).append(name.encode())
    if request.prompt_embeds is not None:
        for page, rows in enumerate(request.prompt_embeds.split(page_tokens)):
            data = rows.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            found.setdefault(page, []).append(hashlib.sha256(str(rows.dtype).encode() + data).digest())
    return {page: b"".join(len(part).to_bytes(4, "little") + part for part in found[page]) for page in found}
