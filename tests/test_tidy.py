"""Goal: taste that a machine can check. Method: read the source as text."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "tiercel").rglob("*.py"))
NAMES = [str(path.relative_to(ROOT / "src" / "tiercel")) for path in SOURCES]


def test_every_file_has_a_line_in_the_architecture_and_every_line_a_file():
    told = set(re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE))
    assert told == {name for name in NAMES if not name.endswith("__init__.py")}


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_a_module_is_one_room_and_its_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 475, "500 is the limit, and a module close to it is two"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            assert node.end_lineno - node.lineno < 70, f"{node.name} is too long"


BANNED = {
    r"\bhasattr\(": "a capability belongs on the contract",
    r"\bTODO\b|\bFIXME\b": "an issue, not a comment",
    r"\bslots?\b(?!=True)": "place",
    r"\boffload|\bbackup\b|\bsidecar": "save, load",
}


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_words_are_those_of_the_architecture(path):
    for line in path.read_text().splitlines():
        for pattern, instead in BANNED.items():
            assert not re.search(pattern, line), f"{line.strip()!r}: {instead}"


def test_layout_names_are_known_in_two_places_only():
    where = [
        name
        for name, path in zip(NAMES, SOURCES, strict=True)
        if re.search(r'"(layer_first|page_first|page_first_direct)"', path.read_text())
    ]
    assert where == ["config.py", "memory/buffers.py", "memory/layout.py"], "the device itself is layer first"


@pytest.mark.parametrize(
    "document", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")), ids=str
)
def test_links_in_documents_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target
