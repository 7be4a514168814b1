"""Files of recorded traffic, read into texts of named blocks (`replay.trace`).

    Mooncake       JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`
    agents         one JSON object: `block_size`, `requests` with `t` (s), `in`, `out`, `hash_ids`; nested

What a file can not tell is an error that names the file, the line, and what is missing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercel.errors import TraceError
from tiercel.replay.trace import Text, Trace, make_trace

MOONCAKE_TOKENS = 512
"""Of one block of Mooncake's traces."""

Lines = Iterable[tuple[int, Mapping[str, Any]]]


def read_trace(files: Sequence[str | Path], page_tokens: int, *, session_every_s: float = 0.0) -> Trace:
    """All requests of these files, in the order of their times.

    Each file begins at its own time 0. `session_every_s`: each following file begins so much later. Names of
    blocks mean the same within a file only, except in Mooncake's.
    """
    if not files:
        raise TraceError("trace", "no file was named")
    texts: list[Text] = []
    for number, file in enumerate(files):
        begins_s = number * session_every_s
        own = read_texts(Path(file))
        texts += (text._replace(time_s=text.time_s + begins_s) for text in own) if begins_s else own
    if not texts:
        raise TraceError(files[0], "holds no request")
    return make_trace(texts, page_tokens)


def read_texts(file: Path) -> list[Text]:
    """The requests of one file, whatever its format."""
    try:
        data = file.read_bytes()
        content = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(file, f"can not be read: {error}") from error
    head = content.lstrip()[:1]
    if head != "{":
        raise TraceError(file, "is no trace: it begins with no JSON object")
    lines = _lines(file, content)
    first = next(iter(lines), (0, {}))[1]
    for known, read in _FORMATS:
        if known <= first.keys():
            return list(read(file, lines))
    raise TraceError(file, f"is no trace that is known here; its fields: {', '.join(first) or 'none'}", 1)


def _lines(file: Path, content: str) -> list[tuple[int, Mapping[str, Any]]]:
    """The JSON objects of a file with their line numbers: one, or one in each line."""
    try:
        whole = json.loads(content)
    except ValueError:
        rows = [(n, row) for n, row in enumerate(content.splitlines(), 1) if row.strip()]
    else:
        return [(1, whole)]
    lines = []
    for number, row in rows:
        try:
            value = json.loads(row)
        except ValueError as error:
            raise TraceError(file, f"is not JSON: {error}", number) from error
        if not isinstance(value, dict):
            raise TraceError(file, "must be a JSON object", number)
        lines.append((number, value))
    return lines


def number_of(file: Path, line: int, row: Mapping[str, Any], name: str, *, least: float = 0) -> float:
    """A field that must be a number."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 2**53:
        why = f"{name} = {value!r}: must be a number of at least {least:g}"
        raise TraceError(file, f"has no {name}" if name not in row else why, line)
    return value


def count_of(file: Path, line: int, row: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    """A field that must be a whole number."""
    value = number_of(file, line, row, name, least=least)
    if int(value) != value:
        raise TraceError(file, f"{name} = {value!r}: must be a whole number", line)
    return int(value)


def _ids(file: Path, line: int, row: Mapping[str, Any], tokens: int, block_tokens: int) -> list[int]:
    """`hash_ids`: one for each block of a prompt of so many tokens; a last block that is not full may have
    none."""
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise TraceError(file, "hash_ids must be a list of whole numbers", line)
    full, all_of_it = tokens // block_tokens, -(-tokens // block_tokens)
    if not full <= len(ids) <= all_of_it:
        why = f"{len(ids)} hash_ids for {tokens:,} tokens of input in blocks of {block_tokens}"
        raise TraceError(file, why, line)
    return ids


def _mooncake(file: Path, lines: Lines) -> Iterator[Text]:
    for line, row in lines:
        tokens = count_of(file, line, row, "input_length", least=1)
        yield Text(
            number_of(file, line, row, "timestamp") / 1000,
            "mooncake",
            _ids(file, line, row, tokens, MOONCAKE_TOKENS),
            MOONCAKE_TOKENS,
            tokens,
            count_of(file, line, row, "output_length"),
        )


def _agents(file: Path, lines: Lines) -> Iterator[Text]:
    for line, session in lines:
        block_tokens = count_of(file, line, session, "block_size", least=1)
        yield from _agent_requests(file, line, session, block_tokens, (str(file), session.get("id")))


def _agent_requests(
    file: Path, line: int, session: Mapping[str, Any], block_tokens: int, scope: tuple[str, Any]
) -> Iterator[Text]:
    """The requests of a session, and those of its sub-agents."""
    requests = session.get("requests")
    if not isinstance(requests, list) or not all(isinstance(each, dict) for each in requests):
        raise TraceError(file, "requests must be a list of JSON objects", line)
    for request in requests:
        if "requests" in request:
            yield from _agent_requests(file, line, request, block_tokens, scope)
        if "hash_ids" in request:
            tokens = count_of(file, line, request, "in", least=1)
            ids = _ids(file, line, request, tokens, block_tokens)
            out = count_of(file, line, request, "out")
            yield Text(number_of(file, line, request, "t"), scope, ids, block_tokens, tokens, out)


Reader = Callable[[Path, Lines], Iterator[Text]]

_FORMATS: Sequence[tuple[frozenset[str], Reader]] = (
    (frozenset({"hash_ids", "input_length"}), _mooncake),
    (frozenset({"block_size", "requests"}), _agents),
)
"""By the fields of a file's first object."""
