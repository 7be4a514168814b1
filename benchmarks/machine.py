"""What a figure was measured on, the options that every benchmark has, and how figures are told."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from typing import Any


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A benchmark's options: those that all have. The tests run every benchmark with both of them."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--quick", action="store_true", help="small: shows that it works, not more")
    return parser


def describe() -> str:
    import torch  # here: an attack of `hostile` does not wait for it

    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    commit = asked.stdout.strip() or "unknown"
    return (
        f"commit {commit}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def tell(figures: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    for name, figure in figures.items():
        print(f"{name:36} {figure:.3f}" if isinstance(figure, float) else f"{name:36} {figure}")
