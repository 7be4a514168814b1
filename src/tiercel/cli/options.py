"""Options that several commands share: which model, in which memory, with which policies."""

from __future__ import annotations

from typing import Annotated

import typer

from tiercel.config import CacheConfig, parse_bytes
from tiercel.engine.config import MIB, Build, EngineConfig
from tiercel.models.families import EMBEDDED

Model = Annotated[
    str, typer.Argument(metavar="[MODEL]", help="A Hugging Face folder; nothing: the embedded tiny-v4.")
]
DeviceMemory = Annotated[str, typer.Option(help="Of pages and tails where attention reads them.")]
HostMemory = Annotated[str, typer.Option(help="Of the host tier; 0 turns it off.")]
PageTokens = Annotated[int | None, typer.Option(help="Tokens of one page.")]
Format = Annotated[str, typer.Option(help="How entries are kept: fp32, bf16, fp8.")]
Layout = Annotated[str, typer.Option(help="Host layout: layer_first, page_first, page_first_direct.")]
Copier = Annotated[str, typer.Option(help="Who moves bytes: direct, reference.")]
Save = Annotated[str, typer.Option(help="When pages are copied to the host: through, selective, back.")]
Evict = Annotated[str, typer.Option(help="Who goes first: lru, lfu, slru, priority, module:Class.")]
TailEvery = Annotated[int, typer.Option(help="A tail at least each so many pages of a prompt.")]
Fetch = Annotated[str, typer.Option(help="Waiting for the store: best_effort, wait, deadline.")]
FetchDeadline = Annotated[float, typer.Option(help="Seconds a request waits for each 1,024 tokens.")]
Kernels = Annotated[str, typer.Option(help="auto, native, reference.")]
Exact = Annotated[bool, typer.Option("--exact", help="Refuse to start if bits depend on the batch.")]
Share = Annotated[
    str,
    typer.Option(help="With whom stored pages are shared: bits, numbers (other kernels, other last bits)."),
]

MODEL = EMBEDDED
BUILD = Build()
DEVICE_MEMORY, HOST_MEMORY = f"{BUILD.device_bytes // MIB}MiB", "1GiB"
CACHE = CacheConfig(device_pages=1)


def cache_config(
    host_memory: str, layout: str, copier: str, save: str, evict: str, tail_every: int
) -> CacheConfig:
    """The places on the device are counted later: they depend on the model."""
    return CacheConfig(
        device_pages=1,
        host_bytes=parse_bytes(host_memory, "--host-memory"),
        layout=layout,
        copier=copier,
        save=save,
        evict=evict,
        tail_every_pages=tail_every,
    )


ENGINE = EngineConfig()
