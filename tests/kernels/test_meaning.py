"""Goal: the digest of sources changes with what they say, and with nothing else. Method: small sources in
pairs; the real sources of models and kernels, edited at places that hypothesis draws; ruff with other lengths
of lines."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import cache, partial
from hashlib import sha256
from operator import setitem
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercel
from tiercel.kernels.meaning import c_meaning, digest_of, python_meaning

ROOT = Path(tiercel.__file__).parent
PYTHON = sorted([*(ROOT / "models").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
C = sorted((ROOT / "kernels").glob("*.c"))
LONG = [path for path in PYTHON if path.name != "__init__.py"]
NOTES = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=12)


def python(text: str) -> str:
    return python_meaning(text.encode())


def c(text: str) -> str:
    return c_meaning(text.encode())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "# why\n\nx  =  1  # this"),
        ("x = f(a, b)", "x = f(\n    a,\n    b,\n)"),
        ("x = a + b", "x = (\n    a\n    + b\n)"),
        ("x = a + b", "x = a + \\\n    b"),
        ("x = 'ab'", 'x = "a" \\\n    "b"'),
        ("x = f'a{y}b{z}'", 'x = (\n    f"a{y}"\n    "b"\n    f"{z}")'),
        ("x = 1000.0; y = 16", "x = 1e3\ny = 0x_10"),
        ("x: int = 1\ny = 2", 'x: int = 1\n"""What x is."""\ny = 2'),
        ("def f(): return 1", 'def f():\n    """One."""\n\n    return 1'),
        ("def f(): ...", 'def f():\n    """Nothing."""'),
        ("class A: pass", 'class A:\n    "A."'),
        ("x = a[1, 2]", "x = a[(1, 2)]"),
        ("del a, b", "del (\n    a,\n    b,\n)"),
    ],
)
def test_python_that_says_the_same(one, other):
    assert python(one) == python(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 2"),
        ("x = 1", "x = 1.0"),
        ("x = 1", "x = True"),
        ("x = 0.0", "x = -0.0"),
        ("x = 0", "x = None"),
        ("x = 'a'", "x = b'a'"),
        ("x = 'a'", "x = a"),
        ("x = '#a'", "x = '#b'"),
        ("x = 'a  b'", "x = 'a b'"),
        ("x = ['a', 'b']", "x = ['a' 'b']"),
        ("x = f'{a}b'", "x = f'{a}' 'c'"),
        ("x = f'{a}b'", "x = f'{a:b}'"),
        ("x = f'{a}'", "x = f'{a!r}'"),
        ("x = '{a}'", "x = f'{a}'"),
        ("x = a + b", "x = a - b"),
        ("x = a + b", "x = b + a"),
        ("x = a + b + c", "x = a + (b + c)"),
        ("x = a < b", "x = a <= b"),
        ("x += a", "x -= a"),
        ("x = not a", "x = ~a"),
        ("x = (a,)", "x = (a)"),
        ("def f(a=1): a", "def f(a=2): a"),
        ("def f(a, b=1): a", "def f(a=1, b=1): a"),
        ("def f(*, a=1, b): a", "def f(*, a, b=1): a"),
        ("def f(a, /): a", "def f(a): a"),
        ("f(*a)", "f(a)"),
        ("f(**a)", "f(*a)"),
        ("x = {**a}", "x = {a: None}"),
        ("x = a[1:]", "x = a[:1]"),
        ("if a: x\ny", "if a:\n    x\n    y"),
        ("for a in b: x\nelse: y", "for a in b: x\ny"),
        ("def f(): yield", "def f(): return"),
        ("@a\ndef f(): x", "def f(): x"),
        ("from a import b", "from .a import b"),
        ("from a import b", "from a import b as c"),
        ("class A:\n    x: int", "class A:\n    x: float"),
        ("class A:\n    x: int = 1", "class A:\n    x = 1"),
        ("def f(N: tl.constexpr): x", "def f(N): x"),
        ("match a:\n    case None: x", "match a:\n    case False: x"),
        ("global a, b", "global a\nb"),
    ],
)
def test_python_that_says_something_else(one, other):
    assert python(one) != python(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int x = 1;", "/* why */ int x\n\n  =1; // this"),
        ("int x = 1;", "int x = /* two\nlines */ 1;"),
        ("int x = 1; int y;", "int x = 1; // this \\\n goes on\nint y;"),
        ("f(a, b);", "f(a,\n  b\n);"),
        ("#define A 1\nint x;", "\n# define  A /* a\n  b */ 1   // one\n\nint x;"),
        ("#define A(x) x + 1\n", "#define A( x ) \\\n    x \\\n    + 1\n"),
        ("#define A (x)\n", "#define /* a */ A /* b */ (x)\n"),
        ("#include <a.h>\n", "#  include<a.h>   // a\n"),
        ("a b", "a/**/b"),
        ("int x;", "int x;\r\n"),
        ('char *x = "a";', 'char*x="a"/* " */;'),
        ("#if A\nx\n#endif\n", "  # if A\n  x\n#endif"),
    ],
)
def test_c_that_says_the_same(one, other):
    assert c(one) == c(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1.0f;", "x = 1.5f;"),
        ("x = 1e+5;", "x = 1e + 5;"),
        ("x = 0x1p-23f;", "x = 0x1p -23f;"),
        ("x = a + b;", "x = a - b;"),
        ("x = a + +b;", "x = a ++b;"),
        ("x = a - -b;", "x = a-- b;"),
        ("x = a < b;", "x = a <= b;"),
        ("x = a < = b;", "x = a <= b;"),
        ("x = a & &b;", "x = a && b;"),
        ("x = a / *b;", "x = a /*b*/;"),
        ("int x;", "intx;"),
        ('x = "a  b";', 'x = "a b";'),
        ('x = "// a";', 'x = "// b";'),
        ('x = "/* a */";', 'x = "";'),
        ('x = "\\"// a";', 'x = "\\"// b";'),
        ("x = '\"'; // \"\ny;", "x = '\"'; // \"\nz;"),
        ('x = L"a";', 'x = L "a";'),
        ("#define A(x) x\n", "#define A (x) x\n"),
        ("#define A x\ny\n", "#define A x y\n"),
        ("#define A x\ny\n", "#define A x\\\ny\n"),
        ("#define A x ## y\n", "#define A x # # y\n"),
        ("#define A(x) #x\nA(a b)", "#define A(x) #x\nA(ab)"),
        ("#define A(x) #x\nA(a + b)", "#define A(x) #x\nA(a+b)"),
        ("#include <a.h>\n", "#include <b.h>\n"),
        ("#if A\nx\n#endif\n", "#ifdef A\nx\n#endif\n"),
    ],
)
def test_c_that_says_something_else(one, other):
    assert c(one) != c(other)


SAMPLE = """
from __future__ import annotations
from . import a as b
@b.c(1, *d, e="\\U0001fae9 ü", **f)
class G(H, metaclass=I):
    x: int = 1_000
    async def j(self, /, k: K = 0x10, *l, m=None, n: N = ..., **o) -> list[P]:
        global q, r
        async with s as t, u: await v
        async for w, *x in y: yield {**z, 1: {2}}
        else: del a[1:, ::2, ...], b.c
        return f"a{d!r:>{e}.3f}{{" "b" f'{f:}{g=}' if h else rb"\\0", (lambda i=-1j: not i)
try: assert a < b <= c is not None, "no"
except* (D, E) as e: raise e from None
finally: f: G; g @= h // 2**-1 << i
while (j := [k for l in m if n for o in p]): continue
match q, r:
    case [1, None, {"a": S(t, u=v), **w}, *_] | -1 if True: nonlocals = (x,)
"""


def test_every_version_of_python_has_the_same_digest():
    """These words were computed with Python 3.11, 3.12 and 3.13."""
    assert sha256(python(SAMPLE).encode()).hexdigest()[:16] == "a6249915701674e8"


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_written_by_python_itself_say_the_same(path):
    text = path.read_text()
    written = ast.unparse(ast.parse(text))
    assert path.name == "__init__.py" or written != text
    assert python(written) == python(text)


@pytest.mark.parametrize("length", [60, 240])
def test_another_length_of_lines_says_the_same(tmp_path, length):
    pytest.importorskip("ruff")
    copies = {tmp_path / f"{index}.py": path for index, path in enumerate(PYTHON)}
    for copied, path in copies.items():
        copied.write_bytes(path.read_bytes())
    how = ["format.skip-magic-trailing-comma=true", "format.quote-style='single'", f"line-length={length}"]
    options = [word for each in how for word in ("--config", each)]
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--no-cache", *options, str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    changed = [copied.read_bytes() != path.read_bytes() for copied, path in copies.items()]
    assert sum(changed) > len(LONG) / 2
    for copied, path in copies.items():
        assert python_meaning(copied.read_bytes()) == python_meaning(path.read_bytes()), path


@cache
def ends_of_lines(path: Path) -> list[tuple[int, int]]:
    """Where a comment may stand: (line, column) of line ends that are in no string."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [each.start for each in tokens if each.type in (tokenize.NEWLINE, tokenize.NL)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_comments_and_blank_lines_in_the_sources_change_nothing(data):
    path = data.draw(st.sampled_from(LONG))
    lines = path.read_text().splitlines(keepends=True)
    places = st.lists(st.sampled_from(ends_of_lines(path)), min_size=1, max_size=8, unique=True)
    for line, column in data.draw(places):
        note, indent, blanks = data.draw(st.tuples(NOTES, st.integers(0, 9), st.integers(0, 3)))
        text = lines[line - 1]
        lines[line - 1] = f"{text[:column]}  #{note}{text[column:]}{' ' * indent}#{note}\n" + "\n" * blanks
    assert python("".join(lines)) == python(path.read_text())


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(LONG), NOTES)
def test_other_docstrings_in_the_sources_change_nothing(path, note):
    tree = ast.parse(path.read_text())
    alone = [each for each in ast.walk(tree) if isinstance(each, ast.Expr) and is_text(each.value)]
    lines = path.read_bytes().splitlines(keepends=True)
    for each in sorted(alone, key=lambda node: -node.lineno):
        before, behind = (
            lines[each.lineno - 1][: each.col_offset],
            lines[each.end_lineno - 1][each.end_col_offset :],
        )
        lines[each.lineno - 1 : each.end_lineno] = [before + ascii(note).encode() + behind]
    assert alone and python_meaning(b"".join(lines)) == python_meaning(path.read_bytes())


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_constant_an_operator_a_default_or_a_name_in_the_sources_changes_the_digest(data):
    path = data.draw(st.sampled_from(LONG))
    tree = ast.parse(path.read_text())
    alone = {each.value for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    changes = [change for node in ast.walk(tree) if node not in alone for change in changes_of(node)]
    data.draw(st.sampled_from(changes))()
    assert python(ast.unparse(tree)) != python(path.read_text())


def changes_of(node: ast.AST) -> Iterator[Callable[[], object]]:
    """Each changes one thing in this node."""
    if isinstance(node, ast.Constant):
        yield partial(setattr, node, "value", other_than(node.value))
    elif isinstance(node, ast.Name):
        yield partial(setattr, node, "id", f"{node.id}_")
    elif isinstance(node, ast.BinOp | ast.AugAssign):
        yield partial(setattr, node, "op", ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())
    elif isinstance(node, ast.BoolOp):
        yield partial(setattr, node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp):
        yield partial(setattr, node, "op", ast.Not() if isinstance(node.op, ast.USub) else ast.USub())
    elif isinstance(node, ast.Compare):
        yield partial(setitem, node.ops, 0, ast.LtE() if isinstance(node.ops[0], ast.Lt) else ast.Lt())
    elif isinstance(node, ast.arguments):
        for defaults in (node.defaults, node.kw_defaults):
            for index in range(len(defaults)):
                yield partial(setitem, defaults, index, ast.Name("something_else"))
        if node.defaults:
            yield partial(node.defaults.pop, 0)


def other_than(value: object) -> object:
    if isinstance(value, str | bytes):
        return value + value[:0].ljust(1)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return not value
    return 2 * value + 1


HELD = r'("[^"\n]*")|//[^\n]*|/\*.*?\*/'
"""Strings and comments of the C sources here."""


@cache
def spans_of(path: Path, what: str) -> list[tuple[int, int]]:
    """Where that is found outside strings and comments."""
    found = re.finditer(f"{HELD}|(?P<what>{what})", path.read_text(), re.DOTALL)
    return [each.span() for each in found if each["what"]]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_comments_and_white_space_in_c_change_nothing(data):
    path = data.draw(st.sampled_from(C))
    text, free = path.read_text(), spans_of(path, r"\\\n[ ]*|[ ]+|\n")
    places = data.draw(st.lists(st.sampled_from(free), min_size=1, max_size=12, unique=True))
    for at, _ in sorted(places, reverse=True):
        note = data.draw(NOTES).replace("*", "")
        more = [f"/*{note}*/", f'/* " {note}\n*/', " \\\n\t", "   "]
        if text[at] == "\n":
            more += ["\n\n", f"//{note}.", f'// " /*{note}.\n']
        text = f"{text[:at]} {data.draw(st.sampled_from(more))}{text[at:]}"
    assert c(text) == c(path.read_text())


@pytest.mark.parametrize("path", C, ids=lambda path: path.name)
@pytest.mark.parametrize("space", [" ", "\n", "\t\n\n"])
def test_c_in_one_line_or_in_a_line_for_each_word_says_the_same(path, space):
    text = re.sub(HELD, lambda found: found[1] or " ", path.read_text().replace("\\\n", " "), flags=re.DOTALL)
    pieces = []
    for line in text.splitlines():
        words = re.sub(r'("[^"\n]*")|\s+', lambda found: found[1] or space, line)
        pieces.append(f"\n{line}\n" if line.lstrip().startswith("#") else words + space)
    assert c("".join(pieces)) == c(path.read_text())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_number_an_operator_or_a_name_in_c_changes_the_digest(data):
    path = data.draw(st.sampled_from(C))
    what, other = data.draw(st.sampled_from([(r"\d+", "77"), (r"[-+*/<=]", "%"), (r"[A-Za-z]\w*", "other")]))
    start, end = data.draw(st.sampled_from(spans_of(path, what)))
    text = path.read_text()
    assert c(text[:start] + other + text[end:]) != c(text)


def test_digests_are_of_words_and_files_in_their_order(tmp_path):
    for name, text in {"a.py": "x = 1", "b.py": "y = 1", "c.py": "x = 1  # one", "d.c": "x = 1"}.items():
        (tmp_path / name).write_text(text)
    a, b, c, d = sorted(tmp_path.iterdir())
    assert digest_of("w", files=[a, b]) == digest_of("w", files=[b, a])
    assert digest_of("w", files=[a]) == digest_of("w", files=[c])
    other = [digest_of("w"), digest_of("w", ""), digest_of("v", files=[a]), digest_of("w", files=[a, b])]
    other += [digest_of("w", files=[b]), digest_of("w", files=[d]), digest_of("w", files=[b, c])]
    assert len({digest_of("w", files=[a]), *other}) == 1 + len(other)


@pytest.mark.parametrize("path", [*PYTHON, *C], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_reads_its_docstrings_or_line_numbers(path):
    assert not re.search(
        r"\b(__doc__|inspect|getdoc|f_lineno|__LINE__|__FILE__|__DATE__)\b", path.read_text()
    )
