"""The files of a model as Hugging Face writes them: their names, and what is read of them before any weight.

config.json
model.safetensors                    one file, or
model.safetensors.index.json         which tensor is in which file
model-00001-of-00002.safetensors …   those files
tokenizer.json …                     its text
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiercel.errors import WeightsError

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
TOKENIZER = "tokenizer.json"
TEXT = (
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""What `tiercel.text` reads besides the config. All but the tokenizer may be absent."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def check_is_itself(file: Path) -> None:
    """Refuses what a folder has in place of a file that was not downloaded: a broken link, an LFS pointer."""
    if file.is_symlink() and not file.exists():
        raise WeightsError(file, f"is a link to {file.readlink()}, which is not there")
    if file.is_file():
        with file.open("rb") as opened:
            if opened.read(len(LFS_POINTER)) == LFS_POINTER:
                why = "is a git-lfs pointer, not the file itself: `git lfs pull` brings it"
                raise WeightsError(file, why)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file that must be there."""
    try:
        check_is_itself(file)
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(file, "is missing") from error
    except OSError as error:
        raise WeightsError(file, f"can not be read: {error}") from error
    except ValueError as error:
        raise WeightsError(file, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(file, "must hold one JSON object")
    return value


def weight_map(index: Path) -> dict[str, str]:
    """Tensor → file, every file in the index's own folder."""
    given = read_json(index).get("weight_map")
    if not isinstance(given, dict) or not given:
        raise WeightsError(index, "has no weight_map")
    for name, file in given.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(SUFFIX):
            raise WeightsError(index, f"{name} is in {file!r}, which is no file of this folder", [name])
    return given
