"""Files of recorded traffic, read into texts of named blocks (`replay.trace`).

    Mooncake       JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`
    agents         one JSON object: `block_size`, `requests` with `t` (s), `in`, `out`, `hash_ids`; nested
    tiercel        JSON lines that `tiercel serve --trace` wrote (`replay.record`)
    token ids      JSON lines: `prompt_token_ids` or `input_ids`, `output_len` or `output_ids`, `timestamp`

Results of SGLang's `bench_serving` and of `vllm bench serve` hold lengths and times, but not which prompts
begin alike: they are refused. An error names the file, the line, and what is missing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercel.errors import TraceError
from tiercel.progress import progress
from tiercel.replay.server import TracedServer
from tiercel.replay.trace import TOLD_EVERY, Recorded, Text, Trace, make_trace

MOONCAKE_TOKENS = 512
"""Tokens of one block of Mooncake's traces."""

TOKENS_MOST = 2**24
"""The most tokens of one prompt or answer: more than any model reads. Every page of a text gets a name when a
trace is read, whether the text fits into the tiers or not. So a length that is a mistake is refused here."""

HEAD = '{"tiercel_trace"'
"""How the first line begins that a server writes at each start."""

Lines = Iterable[tuple[int, Mapping[str, Any]]]


def read_trace(files: Sequence[str | Path], page_tokens: int, *, session_every_s: float = 0.0) -> Trace:
    """All requests of these files, in the order of their times.

    Each file begins at its own time 0. `session_every_s`: each following file begins this much later. Equal
    names of blocks mean equal blocks only within one file, except in Mooncake's.
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
    content = _content(file)
    head = content.lstrip()[:1]
    if head != "{":
        raise TraceError(file, "is no trace: it begins with no JSON object")
    lines = _lines(file, content)
    first = next(iter(lines), (0, {}))[1]
    for known, read in _FORMATS:
        if known <= first.keys():
            return list(read(file, lines))
    raise TraceError(file, f"is no trace that is known here; its fields: {', '.join(first) or 'none'}", 1)


def servers_of(files: Sequence[str | Path]) -> list[TracedServer]:
    """The servers that wrote these files, one for each start; none for files of other formats."""
    found: list[TracedServer] = []
    for file in map(Path, files):
        for line, text in enumerate(_content(file).splitlines(), 1):
            if text.startswith(HEAD):
                try:
                    row = json.loads(text)
                except ValueError as error:
                    raise TraceError(file, f"is not JSON: {error}", line) from error
                found.append(TracedServer.from_head(file, line, row))
    return found


def _content(file: Path) -> str:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(file, f"can not be read: {error}") from error


def _lines(file: Path, content: str) -> list[tuple[int, Mapping[str, Any]]]:
    """The JSON objects of a file with their line numbers: one, or one in each line."""
    try:
        whole = json.loads(content)
    except ValueError:
        rows = [(n, row) for n, row in enumerate(content.splitlines(), 1) if row.strip()]
    else:
        return [(1, whole)]
    lines: list[tuple[int, Mapping[str, Any]]] = []
    with progress(f"reading {file.name}", len(rows), counted="lines") as done:
        for number, row in rows:
            try:
                value = json.loads(row)
            except ValueError as error:
                raise TraceError(file, f"is not JSON: {error}", number) from error
            if not isinstance(value, dict):
                raise TraceError(file, "must be a JSON object", number)
            lines.append((number, value))
            if len(lines) % TOLD_EVERY == 0:
                done(TOLD_EVERY)
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


def tokens_of(file: Path, line: int, row: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    """A field that must be a length of a text."""
    tokens = count_of(file, line, row, name, least=least)
    if tokens > TOKENS_MOST:
        raise TraceError(file, f"{name} = {tokens}: a text has at most {TOKENS_MOST:,} tokens", line)
    return tokens


def _ids(file: Path, line: int, row: Mapping[str, Any], tokens: int, block_tokens: int) -> list[int]:
    """`hash_ids`: one for each block of a prompt of `tokens` tokens; a last block that is not full may have
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
        tokens = tokens_of(file, line, row, "input_length", least=1)
        yield Text(
            number_of(file, line, row, "timestamp") / 1000,
            "mooncake",
            _ids(file, line, row, tokens, MOONCAKE_TOKENS),
            MOONCAKE_TOKENS,
            tokens,
            tokens_of(file, line, row, "output_length"),
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
            tokens = tokens_of(file, line, request, "in", least=1)
            ids = _ids(file, line, request, tokens, block_tokens)
            out = tokens_of(file, line, request, "out")
            yield Text(number_of(file, line, request, "t"), scope, ids, block_tokens, tokens, out)


def _own(file: Path, lines: Lines) -> Iterator[Text]:
    """Each start of the server begins a run with names of its own."""
    began_s: float | None = None
    run, page_tokens, later_s = 0, 0, 0.0
    for line, row in lines:
        if "tiercel_trace" in row:
            run += 1
            page_tokens = TracedServer.from_head(file, line, row).page_tokens
            at_s = number_of(file, line, row, "began_s")
            began_s = at_s if began_s is None else began_s
            later_s = max(0.0, at_s - began_s)
            continue
        pages = row.get("pages")
        if not isinstance(pages, list) or not all(isinstance(each, str) for each in pages):
            raise TraceError(file, "pages must be a list of names", line)
        ends = row.get("turn_ends", [])
        if not isinstance(ends, list) or not all(isinstance(each, int) for each in ends):
            raise TraceError(file, "turn_ends must be a list of whole numbers", line)
        reused = [count_of(file, line, row, name) for name in ("device", "host", "store")]
        times = (row.get("prefill_s"), row.get("decode_s"))
        priority = row.get("priority", 0)
        if not isinstance(priority, int):
            raise TraceError(file, f"priority = {priority!r}: must be a whole number", line)
        yield Text(
            number_of(file, line, row, "time_s") + later_s,
            (str(file), run),
            pages,
            page_tokens,
            tokens_of(file, line, row, "prompt_tokens", least=1),
            tokens_of(file, line, row, "output_tokens"),
            True,
            tuple(end * page_tokens for end in ends),
            priority,
            Recorded(*reused, *(each if isinstance(each, float) else None for each in times)),
        )


def _token_ids(file: Path, lines: Lines) -> Iterator[Text]:
    """A block is one token: so a page is named by its tokens."""
    for number, (line, row) in enumerate(lines):
        prompt = row.get("prompt_token_ids", row.get("input_ids"))
        answer = row.get("output_ids", [])
        if not (isinstance(prompt, list) and prompt and isinstance(answer, list)):
            raise TraceError(file, "token ids must be lists of whole numbers, the prompt's not empty", line)
        if not all(isinstance(each, int) for each in (*prompt, *answer)):
            raise TraceError(file, "token ids must be whole numbers", line)
        out = len(answer) if "output_ids" in row else tokens_of(file, line, row, "output_len")
        at_s = number_of(file, line, row, "timestamp") if "timestamp" in row else float(number)
        yield Text(at_s, "tokens", [*prompt, *answer], 1, len(prompt), out, "output_ids" in row)


def _benchmark(file: Path, lines: Lines) -> Iterator[Text]:  # noqa: ARG001 - it is refused whatever it holds
    why = (
        "is a benchmark's result: it has lengths and times, but no token ids of the prompts, nor their hashes"
    )
    raise TraceError(file, f"{why}, so nobody can tell which prompts begin alike", 1)


Reader = Callable[[Path, Lines], Iterator[Text]]

_FORMATS: Sequence[tuple[frozenset[str], Reader]] = (
    (frozenset({"hash_ids", "input_length"}), _mooncake),
    (frozenset({"block_size", "requests"}), _agents),
    (frozenset({"tiercel_trace"}), _own),
    (frozenset({"prompt_token_ids"}), _token_ids),
    (frozenset({"input_ids"}), _token_ids),
    (frozenset({"input_lens"}), _benchmark),
    (frozenset({"request_throughput"}), _benchmark),
)
"""The format follows from the fields of a file's first object."""
