"""Goal: no benchmark rots. Method: every module of `benchmarks/` that is a command runs in its quick form, in
this process, and what it prints is read. Parts for CUDA run on the CPU where they can."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
ALL = sorted(path.stem for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text())
MORE = {
    "gpu": ["--device", "cpu", "--model", "tiny-v4"],
    "products_cuda": ["--device", "cpu"],
    "sparse": ["--device", "cpu", "--model", "tiny-v4"],
}
"""Options without which a benchmark needs a GPU."""


def numbers_of(figures: object) -> Iterator[float]:
    if isinstance(figures, Mapping):
        figures = list(figures.values())
    if isinstance(figures, list):
        for each in figures:
            yield from numbers_of(each)
    elif isinstance(figures, int | float) and not isinstance(figures, bool):
        yield figures


def run(name, monkeypatch, capsys, *options):
    """What it prints. Leaving with an error is an error."""
    module = import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--json", *options])
    try:
        module.main()
    except SystemExit as ended:
        assert not ended.code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ALL)
def test_every_benchmark_runs_and_tells_figures(name, monkeypatch, capsys):
    on_cpu = MORE.get(name, []) if not torch.cuda.is_available() else []
    figures = run(name, monkeypatch, capsys, *on_cpu)
    assert "failed" not in figures
    found = list(numbers_of(figures))
    assert found and all(map(math.isfinite, found)) and any(figure > 0 for figure in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_copies_of_a_device_are_measured(monkeypatch, capsys):
    assert all(figure > 0 for figure in numbers_of(run("copy", monkeypatch, capsys, "--device", "cuda")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize(("name", "options"), [("copy", ["--device", "cuda"]), ("products_cuda", [])])
def test_what_needs_a_device_says_so(name, options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *options])
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2 and "torch sees no CUDA device" in capsys.readouterr().err


def test_a_command_has_the_options_that_all_have():
    """`machine.parser_of` has them, so a new benchmark can not be without."""
    for name in ALL:
        assert "parser_of(" in (FOLDER / f"{name}.py").read_text(), name
