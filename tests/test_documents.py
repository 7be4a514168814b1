"""Goal: documents name what is there. Method: what stands between backticks in them, compared with the files,
the options of the commands and the names of the source."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path

import click
import pytest
import typer.main
import yaml  # type: ignore[import-untyped]

from tiercel.cli.commands import app
from tiercel.engine.config import SPECULATE

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "tiercel"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "log.md"),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]
"""Not those that tell of the past: the changelog and the log."""

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))

OTHERS = {
    *("openai", "instructor", "bind_tools", "with_structured_output", "generateObject", "Output.object"),
    *("Mode.TOOLS", "Mode.JSON", "Mode.JSON_SCHEMA", "bench_serving", "bench_multiturn", "xgrammar"),
    *(
        "sglang.bench_serving",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "DeepseekV4ForCausalLM",
        "latest_reminder",
    ),
    *("encoding/encoding_dsv4.py", "backendConfigs", "EXTERNAL", "Authorization", "Origin"),
    *("process_cpu_seconds_total", "process_resident_memory_bytes", "process_virtual_memory_bytes"),
    *("huggingface_hub", "HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "main"),
    *("process_start_time_seconds", "process_open_fds", "process_max_fds", "gc.freeze"),
    *("OTEL_TRACES_SAMPLER", "OTEL_EXPORTER_OTLP_HEADERS", "--mini-lb", "cache_aware"),
}
"""Names of other programs."""
OF_ENGINES = ("sglang.md", "vllm.md", "lmcache.md")
"""These are full of another engine's names."""


OWN_VARIABLES = {"PICTURES"}
"""Of the tests."""


def quoted(document: Path) -> list[str]:
    """What stands between backticks, outside of blocks of code."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@cache
def options() -> frozenset[str]:
    """Of all commands, ours and those of benchmarks, tests and training."""

    def of(command: click.Command):
        yield from chain.from_iterable((*each.opts, *each.secondary_opts) for each in command.params)
        for own in getattr(command, "commands", {}).values():
            yield from of(own)

    files = chain.from_iterable(
        (ROOT / folder).rglob("*.py") for folder in ("benchmarks", "tests", "training")
    )
    told = chain.from_iterable(re.findall(r'"(--[a-z][\w-]*)"', file.read_text()) for file in files)
    return frozenset(chain(of(typer.main.get_command(app)), told, OTHERS))


@cache
def defined() -> frozenset[str]:
    """What the source defines: modules, classes, functions, arguments, variables, fields."""
    modules = (path.relative_to(SOURCE.parent).with_suffix("").parts for path in SOURCE.rglob("*.py"))
    return names_in(SOURCE.rglob("*.py")) | {*chain.from_iterable(modules)}


def names_in(paths: Iterable[Path]) -> frozenset[str]:
    found = set[str]()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return frozenset(found)


@cache
def words() -> frozenset[str]:
    """What the source says in strings, but for docstrings: fields of calls, names of policies, values. And
    what it uses of others."""
    found = set[str]()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                found.update(re.findall(r"\w+", node.value))
            elif isinstance(node, ast.alias):
                found.update(node.name.split("."))
    for path in (SOURCE / "server" / "live" / "web").iterdir():
        found.update(re.findall(r"\w+", path.read_text()))
    return frozenset(found)


def is_there(name: str) -> bool:
    """A class, or what has a dot before it, is defined. A lone word may be a value, or another's word."""
    *before, last = name.removesuffix("()").split(".")
    if last in defined():
        return all(each in defined() | words() for each in before)
    return not before and not re.match(r"[A-Z][a-z]", last) and last in words()


@cache
def alerts() -> frozenset[str]:
    return frozenset(re.findall(r"alert: (\w+)", (ROOT / "deploy" / "alerts.yml").read_text()))


def is_file(text: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)*", text)) and text.endswith((".py", ".md", ".sh", ".c"))


@every_document
def test_files_that_are_named_are_there(document):
    for each in quoted(document):
        if is_file(each) and each not in OTHERS:
            assert any((place / each).exists() for place in (ROOT, document.parent, SOURCE)), each


@every_document
def test_options_that_are_named_exist(document):
    if document.name in OF_ENGINES:
        return
    for each in quoted(document):
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", each):
            assert option in options(), option
        for variable in re.findall(r"^TIERCEL_(\w+)", each):
            assert "--" + variable.lower().replace("_", "-") in options() or variable in OWN_VARIABLES, each


@every_document
def test_names_that_are_named_exist(document):
    """In the source, among the alerts, or in a file of tests that the document names. `docs/record-format.md`
    names fields of a format, which the source has by their places only."""
    if document.name == "record-format.md" or document.name in OF_ENGINES:
        return
    tests = (each for each in quoted(document) if re.fullmatch(r"tests/.*\.py", each))
    in_tests = names_in(ROOT / each for each in tests)
    for each in quoted(document):
        name = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?", each)
        if name and each not in OTHERS and not each.startswith(("tiercel_", "TIERCEL_")):
            own = in_tests | alerts()
            assert each in own or is_there(each) or is_file(each) or is_module(each), each


def is_module(name: str) -> bool:
    """`benchmarks.tree`, or a file as a model's folder has it."""
    return (ROOT / name.replace(".", "/")).with_suffix(".py").exists() or name.endswith(".safetensors")


def test_every_thread_has_a_line_on_the_page_of_threads():
    named = re.compile(r'"(tiercel-[a-z]+(?:-[a-z]+)*)"')
    threads = {"tiercel-load", "tiercel-save"}  # their names are made from a direction
    for path in SOURCE.rglob("*.py"):
        threads |= {*named.findall(path.read_text())}
    page = (ROOT / "docs" / "threads.md").read_text()
    assert threads == {*re.findall(r"`(tiercel-[a-z-]+)`", page)}


def test_everybody_who_can_guess_is_told():
    named = f"`--speculate {'|'.join(SPECULATE)}`"
    assert named in (ROOT / "docs" / "server.md").read_text(), f"docs/server.md must have {named}"


def test_every_alert_is_in_the_table_of_alerts():
    table = re.findall(
        r"^\| `(Tiercel\w+)` \| (\w+) \|", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE
    )
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"][0]["rules"]
    assert table == [(rule["alert"], rule["labels"]["severity"]) for rule in rules]
