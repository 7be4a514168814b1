"""Goal: taste that a machine can check. Method: read the source as text."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "tiercel").rglob("*.py"))
OTHERS_WORDS = ("integrations/sglang.py", "integrations/vllm/tier.py")
"""These speak the words of other engines."""
NAMES = [str(path.relative_to(ROOT / "src" / "tiercel")) for path in SOURCES]


def test_every_file_has_a_line_in_the_architecture_and_every_line_a_file():
    told = set(re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE))
    files = {name for name in NAMES if not name.endswith("__init__.py")}
    assert not files - told, f"add to the table of ARCHITECTURE.md: | `{min(files - told)}` | what it is |"
    assert not told - files, "ARCHITECTURE.md has lines of files that are not there"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_a_module_is_one_room_and_its_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 475, "500 is the limit, and a module close to it is two"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            assert node.end_lineno - node.lineno < 70, f"{node.name} is too long"


LINES_MOST, METHODS_MOST = 450, 40


def classes_of(paths):
    """Lines, methods and bases of each class, by its name."""
    found = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                bases = [name_of(base) for base in node.bases]
                found[node.name] = node.end_lineno - node.lineno + 1, methods, bases
    return found


def name_of(base):
    base = base.value if isinstance(base, ast.Subscript) else base
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def with_bases(name, classes, below=()):
    """Lines and methods of a class and of its bases."""
    if name not in classes or name in below:
        return 0, 0
    lines, methods, bases = classes[name]
    above = [with_bases(base, classes, (*below, name)) for base in bases]
    return lines + sum(each[0] for each in above), methods + sum(each[1] for each in above)


def test_an_object_is_small_with_all_its_ancestors():
    """A reader meets objects, not files: a class that is cut into ancestors is as long as all of them."""
    classes = classes_of(SOURCES)
    sizes = {name: with_bases(name, classes) for name in classes}
    large = {name: size for name, size in sizes.items() if size[0] > LINES_MOST or size[1] > METHODS_MOST}
    assert large == {}


def test_ancestors_are_counted(tmp_path):
    source = "class A:\n    def a(self): ...\n    def b(self): ...\nclass B(A[int]):\n    def c(self): ...\n"
    (tmp_path / "a.py").write_text(source)
    assert with_bases("B", classes_of([tmp_path / "a.py"])) == (5, 3)


ABOVE_THE_CACHE = [name for name in NAMES if re.match(r"engine/|server/|replay/|events|verify", name)]


@pytest.mark.parametrize("name", ABOVE_THE_CACHE)
def test_nobody_reaches_past_the_cache(name):
    text = (ROOT / "src" / "tiercel" / name).read_text()
    past = re.findall(r"cache\.(?:core|flights|places|tree|leases|sharing|host)\.\w+", text)
    assert not past, "what is needed of them belongs on the cache"


BANNED = {
    r"\bhasattr\(": "a capability belongs on the contract",
    r"\bTODO\b|\bFIXME\b": "an issue, not a comment",
    r"\bslots?\b(?!=True)": "place",
    r"\boffload|\bbackup\b|\bsidecar": "save, load",
}


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_words_are_those_of_the_architecture(path):
    for line in path.read_text().splitlines() if not str(path).endswith(OTHERS_WORDS) else ():
        for pattern, instead in BANNED.items():
            assert not re.search(pattern, line), f"{line.strip()!r}: {instead}"


def test_layout_names_are_known_in_two_places_only():
    where = [
        name
        for name, path in zip(NAMES, SOURCES, strict=True)
        if re.search(r'"(layer_first|page_first|page_first_direct)"', path.read_text())
        and name not in OTHERS_WORDS
    ]
    assert where == ["config.py", "memory/buffers.py", "memory/layout.py"], "the device itself is layer first"


@pytest.mark.parametrize(
    "document", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")), ids=str
)
def test_links_in_documents_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target
