"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import subprocess

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
