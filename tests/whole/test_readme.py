"""Goal: README's samples do what README says. Method: each is taken from it and run: Python as it stands,
with the address of a real server; commands with folders, ports and classes that exist here."""

import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.servers import free_port
from tests.whole.process import Server, running

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TIERCEL = f"{shlex.quote(sys.executable)} -m tiercel.cli"


def samples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def run(*command: str, shell: bool = False) -> str:
    ran = subprocess.run(
        command[0] if shell else command, shell=shell, capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_conversation_gets_right_answers_and_the_second_comes_from_the_cache():
    (sample,) = [each for each in samples("python") if "openai" in each]
    with running("--device-memory", "24MiB", "--host-memory", "128MiB") as server:
        right_answers(run(sys.executable, "-c", sample.replace("http://127.0.0.1:8000", server.url)))


def right_answers(told: str) -> None:
    answers, cached = told.splitlines()
    assert answers.split() == ["fire", "water", "silver", "gold"]
    count, prompt = re.fullmatch(r"(\d+) of (\d+) tokens from the cache", cached).groups()
    assert 128 <= int(count) < int(prompt)


def test_answers_without_a_server_share_what_they_have_in_common():
    (sample,) = [each for each in samples("python") if "Offline" in each]
    assert int(re.search(r"(\d+) tokens from the cache$", run(sys.executable, "-c", sample))[1]) >= 128


def test_no_python_sample_is_forgotten():
    assert len(samples("python")) == 2


COMMANDS = [line.partition("    #")[0] for each in samples("sh") for line in each.splitlines() if line]


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("make ")])
def test_what_is_made_can_be_made(command):
    """Make only says what it would do: this test is part of one of them."""
    assert run("make", "--dry-run", *command.split()[1:])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The folder of README's server with a store, which was started, asked and stopped."""
    (serve,) = [line for line in COMMANDS if "tiercel serve" in line and "--store" in line]
    folder = tmp_path_factory.mktemp("store") / "tiercel"
    options = shlex.split(serve.replace("/var/cache/tiercel", str(folder)).replace("200GiB", "1GiB"))
    assert options[:2] == [".venv/bin/tiercel", "serve"]
    with running("--device-memory", "24MiB", *options[2:]) as server:
        assert httpx.get(f"{server.url}/v1/cache/store").json()["attached"]
    return folder


def test_a_server_starts_with_a_store_and_the_store_can_be_looked_into(store):
    (line,) = [line for line in COMMANDS if " store stat|" in line]
    before, verbs, url = re.fullmatch(r"(.*) (\S+\|\S+) (URL)", line).groups()
    for verb in verbs.split("|"):
        sure = " --yes" if verb == "clear" else ""
        run(f"{before.replace('.venv/bin/tiercel', TIERCEL)} {verb}{sure} file://{store}", shell=True)


def test_a_server_that_guesses_starts():
    (serve,) = [line for line in COMMANDS if "tiercel serve" in line and "--speculate" in line]
    with running("--device-memory", "24MiB", *shlex.split(serve)[2:]) as server:
        assert httpx.get(f"{server.url}/get_server_info").raise_for_status()


def test_two_servers_one_of_which_reads_the_pages_of_the_other():
    pairs = [line for line in COMMANDS if "--share-pages" in line or "--peer" in line]
    assert len(pairs) == 4
    ports = (str(free_port()), str(free_port()))
    lines = [re.sub(r"--port \d+", "", line).replace("9001", ports[i // 2]) for i, line in enumerate(pairs)]
    with ExitStack() as running_all, ThreadPoolExecutor() as starters:
        memory = ("--device-memory", "24MiB", "--host-memory", "64MiB")
        starting = [starters.submit(Server, *memory, *shlex.split(line)[2:]) for line in lines]
        for each in starting:
            running_all.callback(each.result().stop)
        for each in starting:
            assert httpx.get(f"{each.result().url}/get_server_info").raise_for_status()


@pytest.mark.parametrize("command", [line for line in COMMANDS if "conformance" in line or " spec " in line])
def test_other_commands_run(command):
    command = command.replace(
        "my_package.my_module:MyStore?path=/somewhere/empty", "tiercel.storage.memory:MemoryStore"
    )
    assert run(command.replace(".venv/bin/tiercel", TIERCEL), shell=True)


def test_no_command_is_forgotten():
    """`tiercel verify` takes minutes; `tests/engine/test_exact.py` and `test_server.py` run what it runs.
    `test_clients.py` starts the router, `test_package.py` installs `openai`, `test_stages.py` starts stages,
    `test_qwen3.py` a model by its name, `test_bench.py` a load, `tests/test_examples.py` the examples."""
    served = "make ", "tiercel serve", " store stat|", "conformance", " spec "
    run_above = *served, "examples/", "pip install", "tiercel bench"
    others = [line for line in COMMANDS if not any(word in line for word in run_above)]
    verify = ".venv/bin/tiercel verify"
    assert [line for line in others if "sglang_router" not in line] == [verify, f"{verify} --sparse"]
