"""A process that tries the grammars of clients, so that the server need not.

    server ── a socket for each trial ──► this process ── fork ──► one trial: source, compile, masks
       ▲                                                              │
       └─────────────── the source, or what is wrong ◄────────────────┘

The author of a grammar decides how long it takes to compile, how much memory that needs, and whether
llguidance survives it. So every trial is a process with a limit of CPU time, of memory and of stack. It is
killed when the server closes its socket. What a trial could do within its limits, the server can do as well.

All trials share one core, at a low priority. This process loads the vocabulary once, and ends when the server
does.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import numpy as np

from tiercel.errors import GrammarError
from tiercel.text import calls, grammar
from tiercel.text.answer import CallFormat
from tiercel.text.grammar import Asked, Grammar, Grammars, Vocabulary, fill_masks

CPU_S = 1.0
"""CPU time of a trial. The largest schema that is allowed (500 properties, or 128 KiB of choices) takes 0.2
s."""
BYTES_MOST = 128 << 20
"""Memory that a trial may need besides the vocabulary."""
STACK_BYTES = 1 << 20
"""Less than a thread of the server has: too deep nesting ends the trial, not the server."""
TOKENS_WALKED, CHOICES = 48, 8
"""A trial follows the grammar for `TOKENS_WALKED` tokens: their masks must not take too long either. For each
token it tries up to `CHOICES` times to find one that does not end the answer."""
NICE = 5
"""A trial gets a third of the time of another process that wants the same core. At 10 (a tenth), good
grammars had no time on a machine that was busy with other work."""
LOOKS_MS = 20
"""How often the host looks whether a trial has ended without a result."""
ENDED = {
    signal.SIGPROF: f"it takes more than {CPU_S:g} s to compile",
    signal.SIGSEGV: "it is nested too deeply",
    signal.SIGABRT: f"it needs more than {BYTES_MOST >> 20} MiB to compile",
}
"""What is wrong with a grammar whose trial was ended by a signal."""

Recipe = Mapping[str, Any]
"""What a client asked for, as JSON: `make` is a name of `MAKERS`, `given` and `how` its arguments. `parts`:
other recipes; if the whole can not be used, the first of them that can not either is named."""


# The two ends


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(struct.pack("<I", len(message)) + message)


def receive(connection: socket.socket) -> bytes:
    """Receive a message. Empty: the other end has closed the connection."""
    head = _exactly(connection, 4)
    return _exactly(connection, struct.unpack("<I", head)[0]) if head else b""


def _exactly(connection: socket.socket, count: int) -> bytes:
    read = bytearray()
    while len(read) < count:
        more = connection.recv(min(count - len(read), 1 << 20))
        if not more:
            return b""
        read += more
    return bytes(read)


@dataclass(frozen=True)
class Pieces:
    """A vocabulary in another process: the bytes of its tokens."""

    pieces: Sequence[bytes]
    eos: frozenset[int]
    control: frozenset[int]

    @property
    def token_ids(self) -> int:
        return len(self.pieces)

    def piece_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def tokens_within(self, text: str) -> list[int]:
        """Any tokens that make up the text. (The tokenizer might choose others.)"""
        raw, tokens, ids = text.encode(), [], self._ids
        while raw:
            lengths = range(min(self._longest, len(raw)), 0, -1)
            length = next((length for length in lengths if raw[:length] in ids), 0)
            tokens += [ids[raw[:length]]] if length else []
            raw = raw[length or 1 :]
        return tokens

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {piece: token for token, piece in enumerate(self.pieces)}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.pieces))


def pieces_of(text: Vocabulary) -> Pieces:
    pieces = [text.piece_bytes(token) for token in range(text.token_ids)]
    return Pieces(pieces, frozenset(text.eos), frozenset(text.control))


# One trial


def json_text(schema: str | Mapping[str, Any], *, lenient: bool = False) -> str:
    return grammar.json_schema(schema_of(schema), lenient=lenient)


def schema_of(value: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """A JSON schema, or its text."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise GrammarError(f"it is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object")
    return schema


def _forced_calls(form: str, functions: Sequence[calls.Function], *, several: bool) -> str:
    return calls.forced_calls(CallFormat(form), functions, several=several)


def _free_calls(form: str, functions: Sequence[calls.Function], answer: Any = None) -> str:
    rule = None if answer is None else grammar.json_rule(schema_of(answer))
    return calls.free_calls(CallFormat(form), functions, answer=rule)


MAKERS: Mapping[str, Callable[..., str]] = {
    "json": json_text,
    "regex": grammar.regex,
    "choice": grammar.choice,
    "ebnf": grammar.ebnf,
    "forced_calls": _forced_calls,
    "free_calls": _free_calls,
}


def source_of(recipe: Recipe) -> str:
    """The grammar in the language of llguidance. Raises `GrammarError`."""
    return MAKERS[recipe["make"]](*recipe["given"], **recipe["how"])


def tried(recipe: Recipe, grammars: Grammars) -> dict[str, Any]:
    """The source and what it costs, or what is wrong with it."""
    try:
        before = _memory_bytes()
        source = source_of(recipe)
        wanted = Grammar(source)
        grammars.check(wanted)
        _walk(wanted, grammars)
        return {"source": source, "bytes": max(0, _memory_bytes() - before)}
    except GrammarError as error:
        for number, part in enumerate(recipe.get("parts", ())):
            verdict = tried(part, grammars)
            if "error" in verdict:
                return verdict | {"part": number}
        return {"error": str(error)}
    except RecursionError:
        return {"error": ENDED[signal.SIGSEGV]}
    except MemoryError:
        return {"error": ENDED[signal.SIGABRT]}


def _walk(wanted: Grammar, grammars: Grammars) -> None:
    """Follow the grammar with any tokens. Raises `GrammarError` if it becomes too complex or too slow."""
    ends = grammars.text.eos
    matcher, random = grammars.matcher(wanted, ends), Random(0)
    masks = np.empty((1, matcher.words), np.int32)
    for _ in range(TOKENS_WALKED):
        fill_masks(masks, [Asked(matcher, 0)])
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little"))
        chosen = [int(allowed[random.randrange(len(allowed))]) for _ in range(CHOICES if len(allowed) else 0)]
        token = next((token for token in chosen if token not in ends), None)
        if token is None:
            return
        matcher.take(token)


def _memory_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123 - nothing more is wanted here
        return int(file.read().split()[1]) * resource.getpagesize()


def _limit() -> None:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        size = int(file.read().split()[0]) * resource.getpagesize()
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_AS, size + BYTES_MOST),
    ):
        resource.setrlimit(what, (most, most))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)


def _run_trial(connection: socket.socket, grammars: Grammars) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # keep a panic of llguidance out of the server's log
    os.nice(NICE)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    recipe = json.loads(receive(connection))
    _limit()
    try:
        verdict = tried(recipe, grammars)
    except BaseException as error:  # noqa: BLE001 - a panic is none of the ordinary ones
        verdict = {"error": f"it can not be compiled: {type(error).__name__}"}
    signal.setitimer(signal.ITIMER_PROF, 0)
    send(connection, json.dumps(verdict).encode())


# All trials


class Host:
    """The process that starts trials and ends them."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._grammars = Grammars(pickle.loads(receive(control)))  # noqa: S301 - of the server
        self._grammars.check(Grammar(grammar.choice(["a"])))  # every trial has the vocabulary
        gc.collect()
        gc.freeze()
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._trials: dict[int, tuple[int, socket.socket]] = {}
        """The process and the socket of each trial, by the socket's number."""

    def run(self) -> None:
        """Run until the server closes its end."""
        while True:
            for number, _ in self._poll.poll(LOOKS_MS if self._trials else None):
                if number == self._control.fileno():
                    _, numbers, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not numbers:
                        return self._end_all()
                    self._start(socket.socket(fileno=numbers[0]))
                elif number in self._trials:  # its client has left
                    os.kill(self._trials[number][0], signal.SIGKILL)
                    self._reap(number, os.waitpid(self._trials[number][0], 0)[1])
            for number, (process, _) in list(self._trials.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    self._reap(number, status)

    def _start(self, connection: socket.socket) -> None:
        process = os.fork()
        if not process:
            try:
                self._control.close()
                for _, other in self._trials.values():
                    other.close()
                _run_trial(connection, self._grammars)
            finally:
                os._exit(0)
        self._poll.register(connection, 0)  # tells when the other end is closed
        self._trials[connection.fileno()] = process, connection

    def _reap(self, number: int, status: int) -> None:
        _, connection = self._trials.pop(number)
        self._poll.unregister(number)
        if os.WIFSIGNALED(status):
            verdict = {"error": ENDED.get(signal.Signals(os.WTERMSIG(status)), "")}
            with suppress(OSError):  # nobody waits for it
                send(connection, json.dumps(verdict).encode())
        connection.close()

    def _end_all(self) -> None:
        for process, _ in self._trials.values():
            os.kill(process, signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")
    Host(socket.socket(fileno=int(sys.argv[1]))).run()
