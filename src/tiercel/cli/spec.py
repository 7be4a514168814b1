"""`tiercel spec`: what a model stores, and how many tokens fit in a given memory."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tiercel.cli.options import PIPE_WIDTH
from tiercel.config import COPIERS, LAYOUT_NAMES, parse_bytes
from tiercel.errors import ConfigError
from tiercel.models.families import FOLDERS, folder_of
from tiercel.models.hub import config_of, is_hub_name
from tiercel.spec import CacheSpec, capacity_of, load
from tiercel.spec.capacity import Figures

"""Columns if there is no terminal, so that the table is not cut."""

SIZES = ("bytes_per_page", "bytes_per_tail", "bytes_per_token")

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset, tiny-v4, a model's folder or its name on the Hub, a config.json or a spec in JSON.",
    ),
]


def spec(  # noqa: PLR0913
    source: Source,
    format: Annotated[str | None, typer.Option(help="Element format, such as fp8 or bf16.")] = None,
    page_tokens: Annotated[int | None, typer.Option(help="Tokens in one page.")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Such as 40GiB.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Such as 200GiB.")] = None,
    device: Annotated[str | None, typer.Option(help="Tell who copies there, such as cuda.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Include the model's draft layers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a model stores, and how many tokens fit in a given memory."""
    declared = declared_by(source, page_tokens, format, draft)
    figures = capacity_of(
        declared,
        device_bytes=None if device_memory is None else parse_bytes(device_memory, "--device-memory"),
        host_bytes=None if host_memory is None else parse_bytes(host_memory, "--host-memory"),
    )
    if device is not None:
        figures["copies"] = copies_on(device, declared)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(_stream_table(figures))
    tokens = figures["replay_tokens"]
    replay = "none: a state needs the whole prefix" if tokens is None else f"{tokens:,}"
    console.print(f"tokens to replay for a missing tail: {replay}")
    for tier in ("device", "host"):
        if fit := figures[tier]:
            tails = f", or {fit['tails']:,} tails" if fit["tails"] else ""
            held = f"{fit['tokens']:,} tokens in {fit['pages']:,} pages{tails}"
            console.print(f"{tier} memory of {fit['bytes']:,} B holds {held}")
    if device is not None:
        console.print(_copy_table(device, figures["copies"]))


def declared_by(source: str, page_tokens: int | None, format: str | None, draft: bool = False) -> CacheSpec:
    """What a user names as a model. Of a model of the Hub only `config.json` is fetched."""
    how = page_tokens, format, draft
    if source in FOLDERS:
        return load(folder_of(source), *how)
    if is_hub_name(source):
        found = config_of(source)
        return load(found.folder, *how, name=found.name)
    return load(source, *how)


def copies_on(device: str, declared: CacheSpec) -> dict[str, dict[str, str]]:
    """For each layout of host memory and each copier: how host and device memory are copied, or why they can
    not be."""
    from tiercel.kernels.choice import check_device
    from tiercel.memory.buffers import DeviceMemory, HostMemory
    from tiercel.transfer.controller import make_controller

    check_device(device)
    near = DeviceMemory(declared, 2, 2 if declared.tail_streams else 0, device)
    least = declared.place_bytes * max(2, declared.places_per_tail)
    ways: dict[str, dict[str, str]] = {}
    for layout in LAYOUT_NAMES:
        with HostMemory(declared, layout, least, pin=near.device.type == "cuda") as host:
            for copier in COPIERS:
                try:
                    controller = make_controller(copier, near, host)
                except ConfigError as error:
                    ways.setdefault(layout, {})[copier] = str(error)
                else:
                    ways.setdefault(layout, {})[copier] = controller.how
                    controller.close()
    return ways


def _copy_table(device: str, copies: dict[str, dict[str, str]]) -> Table:
    shown = Table(title=f"who copies between host memory and {device}")
    for heading in ("--layout", "--copier", "who"):
        shown.add_column(heading)
    for layout, ways in copies.items():
        for copier, who in ways.items():
            shown.add_row(layout, copier, who)
    return shown


def _stream_table(figures: Figures) -> Table:
    shown = Table(title=f"{figures['model']}, pages of {figures['page_tokens']} tokens, sizes in bytes")
    shown.add_column("stream")
    shown.add_column("keep")
    shown.add_column("read")
    for heading in ("layers", "tokens/entry", "row", "page", "tail", "token"):
        shown.add_column(heading, justify="right")
    for stream in figures["streams"]:
        counts = [f"{stream[name]:,}" for name in ("layers", "tokens_per_entry", "bytes_per_row")]
        read = f"best {stream['selected']:,}" if stream["selected"] else "all"
        shown.add_row(stream["name"], stream["keep"], read, *counts, *_size_texts(stream))
    shown.add_section()
    shown.add_row("total", *[""] * 5, *_size_texts(figures))
    return shown


def _size_texts(figures: Figures) -> list[str]:
    """The sizes; empty for 0."""
    return [f"{figures[name]:,}" if figures[name] else "" for name in SIZES]
