"""A name for weights: the digest of all their bytes, computed once and remembered.

    beside the files         .tiercel-digests.json, or, if the folder is read-only,
    in the user's cache      $XDG_CACHE_HOME/tiercel/digests/

A remembered digest counts while the file's size, mtime, ctime and inode are the same. The file system sets
ctime and inode itself, so digests that were copied with a folder are not believed: the files are read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash

BESIDE = ".tiercel-digests.json"
READERS = 8
"""Files that are read at a time: enough for a fast disk."""

SETTLED_S = 2.0
"""Younger files are not remembered: their next change may have the same time stamp."""


State = tuple[int, ...]
"""A file's size, mtime, ctime and inode."""


def weights_digest(files: Sequence[Path]) -> str:
    """The digest of files of one folder. It changes with any bit of any file, and with their names. Raises
    OSError."""
    places = _places(files[0].parent)
    known = {key: digest for place in places for key, digest in _load(place).items()}

    def look(file: Path) -> tuple[State, str]:
        state = _state(file)
        return state, known.get((file.name, *state)) or hash_file(file)

    with ThreadPoolExecutor(min(READERS, len(files))) as readers:
        seen = dict(zip(files, readers.map(look, files), strict=True))
    lasting = {file.name: (*state, digest) for file, (state, digest) in seen.items() if _lasts(file, state)}
    if any((name, *state) not in known for name, (*state, _) in lasting.items()):
        _save(places, lasting)
    text = json.dumps([(file.name, digest) for file, (_, digest) in seen.items()])
    return xxhash.xxh3_128(text.encode()).hexdigest()


def _state(file: Path) -> State:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _lasts(file: Path, state: State) -> bool:
    """Whether the file is still what was read, and old enough that a change would show."""
    _, mtime_ns, ctime_ns, _ = state
    return time.time() - max(mtime_ns, ctime_ns) / 1e9 > SETTLED_S and _state(file) == state


def hash_file(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()


def _places(folder: Path) -> list[Path]:
    """The files that may remember digests, the preferred one first."""
    places = [folder / BESIDE]
    with suppress(RuntimeError, OSError):  # the user has no home
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        cache = given if given.is_absolute() else Path.home() / ".cache"
        name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
        places.append(cache / "tiercel" / "digests" / f"{name}.json")
    return places


def _load(place: Path) -> dict[tuple[str | int, ...], str]:
    """(name, *state) → digest, as remembered; nothing, if the file is missing or damaged."""
    try:
        text = json.loads(place.read_text(encoding="utf-8"))
        known = {(name, *state): str(digest) for name, (*state, digest) in text["files"].items()}
        return known if text["check"] == _check(text["files"]) else {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}


def _save(places: Sequence[Path], files: Mapping[str, object]) -> None:
    """Writes the first place that can be written. If none can, the next start reads the files again."""
    text = json.dumps({"files": files, "check": _check(files)}, indent=1)
    for place in places:
        written = place.with_name(f"{place.name}.{os.getpid()}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(text, encoding="utf-8")
            written.replace(place)
            return
        except OSError:
            with suppress(OSError):
                written.unlink()


def _check(files: Mapping[str, object]) -> str:
    return xxhash.xxh3_64(json.dumps(files, sort_keys=True).encode()).hexdigest()
