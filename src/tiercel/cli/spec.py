"""`tiercel spec`: what a model stores, and how many tokens fit in a given memory."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tiercel.config import parse_bytes
from tiercel.spec import Capacity, Fit, capacity_of, load

PIPE_WIDTH = 120
"""Columns if there is no terminal, so that the table is not cut."""


def spec(
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME_OR_JSON", help="A preset, a Hugging Face config.json or a spec in JSON."
        ),
    ],
    format: Annotated[str | None, typer.Option(help="Element format, such as fp8 or bf16.")] = None,
    page_tokens: Annotated[int | None, typer.Option(help="Tokens in one page.")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Such as 40GiB.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Such as 200GiB.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Include the model's draft layers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a model stores, and how many tokens fit in a given memory."""
    table = capacity_of(
        load(source, page_tokens, format, draft),
        device_bytes=_bytes("--device-memory", device_memory),
        host_bytes=_bytes("--host-memory", host_memory),
    )
    if as_json:
        typer.echo(json.dumps(table.to_dict(), indent=2))
    else:
        _show(table)


def _bytes(option: str, text: str | None) -> int | None:
    return None if text is None else parse_bytes(text, option)


def _show(table: Capacity) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(_stream_table(table))
    replay = (
        "none: a state needs the whole prefix" if table.replay_tokens is None else f"{table.replay_tokens:,}"
    )
    console.print(f"tokens to replay for a missing tail: {replay}")
    for tier, fit in (("device", table.device), ("host", table.host)):
        if fit:
            console.print(_fit_text(tier, fit))


def _stream_table(table: Capacity) -> Table:
    shown = Table(title=f"{table.model}, pages of {table.page_tokens} tokens, sizes in bytes")
    shown.add_column("stream")
    shown.add_column("keep")
    for heading in ("layers", "tokens/entry", "row", "page", "tail", "token"):
        shown.add_column(heading, justify="right")
    for s in table.streams:
        sizes = (s.layers, s.tokens_per_entry, s.bytes_per_row)
        totals = (s.bytes_per_page, s.bytes_per_tail, s.bytes_per_token)
        shown.add_row(s.name, s.keep, *(f"{size:,}" for size in sizes), *map(_size_text, totals))
    shown.add_section()
    totals = (table.bytes_per_page, table.bytes_per_tail, table.bytes_per_token)
    shown.add_row("total", "", "", "", "", *map(_size_text, totals))
    return shown


def _size_text(size: int) -> str:
    """The size; empty for 0."""
    return f"{size:,}" if size else ""


def _fit_text(tier: str, fit: Fit) -> str:
    held = f"{fit.tokens:,} tokens in {fit.pages:,} pages"
    return f"{tier} memory of {fit.bytes:,} B holds {held}" + (
        f", or {fit.tails:,} tails" if fit.tails else ""
    )
