from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tiercel.cli.serve import _bind
from tiercel.cli.traffic import Asked, opened
from tiercel.engine.build import open_engine
from tiercel.engine.config import Build, EngineConfig
from tiercel.models.families import folder_of

COMMAND = Path(sys.executable).with_name("tiercel")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Without a terminal."""
    words = [COMMAND, *arguments]
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def test_a_table_for_people_has_thousands_separators_and_is_not_cut() -> None:
    done = run("spec", "deepseek-v4-flash", "--device-memory", "40GiB", "--host-memory", "200GiB")
    assert done.returncode == 0
    for text in ("c4_index_state", "37,440", "998,208", "3,649,920", "3,899", "5,462", "11,014,656 tokens"):
        assert text in done.stdout
    assert "…" not in done.stdout


def test_json_for_programs_carries_the_same_numbers() -> None:
    done = run("spec", "deepseek-v4-flash", "--device-memory", "1GiB", "--json")
    table = json.loads(done.stdout)
    assert table["bytes_per_page"] == 998_208
    assert table["bytes_per_token"] == 3_899
    assert table["device"]["tokens"] == 2**30 // 998_208 * 256
    assert table["host"] is None


def test_page_size_format_and_draft_can_be_chosen() -> None:
    options = ("--page-tokens", "128", "--format", "bf16", "--draft", "--json")
    table = json.loads(run("spec", "deepseek-v4-flash", *options).stdout)
    assert (table["page_tokens"], table["bytes_per_token"]) == (128, 6_880)
    assert table["streams"][-1]["name"] == "draft_window"


def test_who_copies_on_a_device_is_told_for_every_layout_and_copier() -> None:
    copies = json.loads(run("spec", "deepseek-v4-flash", "--device", "cpu", "--json").stdout)["copies"]
    assert {layout: ways["auto"] for layout, ways in copies.items()} == {
        "layer_first": "direct",
        "page_first_direct": "direct",
        "page_first": "direct",
    }
    assert "on a CPU it must be one of" in copies["layer_first"]["kernel"]


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_of_openmp_spin_little_unless_a_user_says_otherwise(
    given: dict[str, str], spins: str
) -> None:
    """It is set before torch is imported, which reads it then."""
    tell = "lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    program = f"import os, sys; from tiercel.cli import commands; commands.app = {tell}; commands.main()"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=clean | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [spins, "False"]


def test_a_model_is_named_as_for_serving(tmp_path: Path) -> None:
    """The embedded model by name; a folder, or the config in it. The sizes are those of its engine."""
    tables = [
        json.loads(run("spec", model, "--page-tokens", "128", "--format", "fp32", "--json").stdout)
        for model in ("tiny-v4", folder_of("tiny-v4"), folder_of("tiny-v4") / "config.json")
    ]
    assert tables[0] == tables[1] == tables[2]
    spec = open_engine(Build(), EngineConfig())[0].cache.spec
    sizes = [tables[0][f"bytes_per_{what}"] for what in ("page", "tail", "token")]
    assert sizes == [spec.page_bytes, spec.tail_bytes, spec.page_bytes // 128]
    assert "no preset" in run("spec", tmp_path).stderr
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n')
    asked = Asked(model="tiny-v4", page_tokens=128, format="fp32")
    assert opened([str(trace)], asked, sparse=None).spec.page_bytes == spec.page_bytes, "replay"


def test_a_stream_nobody_wrote_code_for_is_declared_in_json(tmp_path: Path) -> None:
    stream = {"name": "c2", "layers": [0, 1], "parts": {"value": 100}, "tokens_per_entry": 2}
    path = tmp_path / "made_up.json"
    path.write_text(json.dumps({"model": "made-up", "page_tokens": 64, "streams": [stream]}))
    table = json.loads(run("spec", path, "--json").stdout)
    assert (table["model"], table["bytes_per_page"]) == ("made-up", 2 * 32 * 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("deepseek-v9",), "'deepseek-v9'"),
        (("deepseek-v4-flash", "--page-tokens", "200"), "page_tokens = 200"),
        (("deepseek-v4-flash", "--page-tokens", "0"), "page_tokens = 0"),
        (("deepseek-v4-flash", "--format", "fp6"), "format = 'fp6'"),
        (("deepseek-v4-flash", "--device-memory", "much"), "--device-memory = 'much'"),
        (("deepseek-v4-flash", "--device", "abacus"), "device = 'abacus'"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    done = run("spec", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_needs_its_name() -> None:
    done = run("deepseek-v4-flash")
    assert done.returncode == 2
    assert "No such command" in done.stderr


def test_the_module_is_the_same_command() -> None:
    command = [sys.executable, "-m", "tiercel.cli", "spec", "deepseek-v4-flash", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == run("spec", "deepseek-v4-flash", "--json").stdout


def test_a_server_sends_small_answers_at_once():
    """asyncio turns Nagle's algorithm off only for sockets that are named TCP."""
    with _bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_port_that_is_taken_is_named_before_anything_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("serve", "--port", str(port), "--device-memory", "1KiB")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"--port = {port}: can not listen on 127.0.0.1: " in done.stderr


def test_a_model_may_be_named_by_an_option_too(tmp_path: Path) -> None:
    done = run("serve", "--model", tmp_path / "nobody")
    assert done.returncode == 2 and "nobody" in done.stderr
