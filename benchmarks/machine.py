"""What a figure was measured on, and how figures are told."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from typing import Any

import torch


def describe() -> str:
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
