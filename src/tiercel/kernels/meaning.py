"""A digest of what source files say, not of their bytes.

What no compiler reads is left out: comments, blank lines, where a line breaks, spaces between words. Of
Python also what has no effect: `pass`, and a constant that is a whole statement, such as a docstring.
Everything else counts, even what changes no number: a name, the order of functions, an annotation, because
dataclasses and Triton read them. So the digest changes with whatever is computed, and sometimes without need.
The sources must not read their own docstrings or line numbers.

Imports the standard library only: `setup.py` runs this file before anything is installed.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path


def digest_of(*words: str, files: Iterable[Path] = ()) -> str:
    """A digest of `words` and of what the files say. The names of the files do not matter."""
    whole = hashlib.sha256()
    for part in (*words, *map(_file_digest, sorted(files))):
        whole.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return whole.hexdigest()


@cache  # a process runs the source that it has loaded, and a file takes some ms
def _file_digest(file: Path) -> str:
    meaning = {".py": python_meaning, ".c": c_meaning, ".h": c_meaning}[file.suffix]
    return hashlib.sha256(meaning(file.read_bytes()).encode()).hexdigest()


# Python: the syntax tree. `ast.dump` writes it too, but each version of Python writes it in another way.

UNREAD = {"ctx", "kind", "type_comment", "type_ignores"}
"""Fields that say nothing more about what is computed."""


def python_meaning(source: bytes) -> str:
    """A text that is equal for sources that say the same, on every version of Python."""
    out: list[str] = []
    _write(ast.parse(source), out)
    return "".join(out)


def _write(value: object, out: list[str]) -> None:
    """kind(field=value…), [value…], or a name or number. Fields without a value are left out: another version
    of Python has more of them, or fewer."""
    if isinstance(value, (ast.Constant, ast.MatchSingleton)):
        _write_constant(value.value, out)
    elif isinstance(value, ast.JoinedStr):
        _write_pieces(value.values, out)
    elif isinstance(value, ast.Delete):
        out.append("Delete(")
        _write_deleted(value.targets, out)
        out.append(")")
    elif isinstance(value, ast.AST):
        begin, fields = _form(type(value).__name__, value._fields)
        out.append(begin)
        for name, written in fields:
            if field := getattr(value, name):
                out.append(written)
                _write(field, out)
        out.append(")")
    elif isinstance(value, list):
        out.append("[")
        for each in value:
            if not _idle(each):
                _write(each, out)
        out.append("]")
    else:
        out.append(f"{ascii(value)},")


@cache
def _form(kind: str, fields: tuple[str, ...]) -> tuple[str, list[tuple[str, str]]]:
    """The beginning of a node's text, and for each field its name and how it is written."""
    return f"{kind}(", [(name, f"{name}=") for name in sorted(set(fields) - UNREAD)]


def _idle(value: object) -> bool:
    """Whether it is a statement without an effect."""
    return isinstance(value, ast.Pass) or (
        isinstance(value, ast.Expr) and isinstance(value.value, ast.Constant)
    )


def _write_constant(value: object, out: list[str]) -> None:
    out.append(f"{type(value).__name__} {ascii(value)},")  # repr escapes other letters in another version


def _write_pieces(values: list[ast.expr], out: list[str]) -> None:
    """The pieces of an f-string. Texts side by side are one text: versions differ in where they cut it."""
    out.append("JoinedStr(")
    text = ""
    for each in values:
        if isinstance(each, ast.Constant):
            text += str(each.value)
        else:
            _write_constant(text, out)
            _write(each, out)
            text = ""
    _write_constant(text, out)
    out.append(")")


def _write_deleted(targets: list[ast.expr], out: list[str]) -> None:
    """`del (a, b)` is `del a, b`: formatters add the brackets where a line is long."""
    for each in targets:
        if isinstance(each, ast.Tuple):
            _write_deleted(each.elts, out)
        else:
            _write(each, out)


# C: the tokens. The end of a line is one of them after a directive, and only there.

_STRING = r"""(?:u8|[uUL])?(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|/\*.*?\*/", re.DOTALL)
_TOKEN = re.compile(
    rf"""
    (?P<end> \n)
  | (?P<directive> ^[ \t]* \# [ \t]* (?: define [ \t]+ \w+ \(? )? )
  | {_STRING}
  | \.?\d (?: [eEpP][+-] | [\w.] )*
  | \w+
  | <<= | >>= | \.\.\. | -> | \+\+ | -- | << | >> | && | \|\| | \#\# | [-+*/%&|^<>=!]=
  | \S
    """,
    re.VERBOSE | re.MULTILINE,
)


def c_meaning(source: bytes) -> str:
    """A text that is equal for sources that say the same: one token on a line."""
    text = re.sub(r"\\[ \t]*\n", "", source.decode().replace("\r\n", "\n"))
    text = _COMMENT.sub(lambda found: found[1] or " ", text)
    out, directive = [], False
    for found in _TOKEN.finditer(text + "\n"):
        if found["end"]:
            out += [""] * directive
            directive = False
        elif found["directive"]:
            out.append("".join(found[0].split()))
            directive = True
        elif found[0] == "#":
            return text  # a macro makes strings of tokens, so spaces count
        else:
            out.append(found[0])
    return "\n".join(out)
