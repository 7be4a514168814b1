"""A picture in a file, by matplotlib. The ending of the file says which kind of picture it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiercel.errors import ConfigError


def check_plot(file: str) -> None:
    """Raises an error if no picture can be drawn into this file. Called before anything takes long."""
    figure_for(file)
    if not Path(file).parent.is_dir():
        raise ConfigError("--plot", file, "its folder does not exist")


def figure_for(file: str, **options: Any) -> Any:
    try:
        from matplotlib.figure import Figure  # here: an optional package
    except ImportError as error:
        raise ConfigError("--plot", file, "needs matplotlib: pip install matplotlib") from error
    figure = Figure(layout="constrained", **options)
    kinds = figure.canvas.get_supported_filetypes()
    if Path(file).suffix.removeprefix(".") not in kinds:
        raise ConfigError("--plot", file, f"must end with one of .{', .'.join(sorted(kinds))}")
    return figure


def save(figure: Any, file: str) -> None:
    try:
        figure.savefig(file)
    except OSError as error:
        raise ConfigError("--plot", file, f"can not be written: {error}") from error
