"""Goal: a model of the Hub is fetched once and whole, without what is not needed; what goes wrong is said in
words that help. Method: the real `huggingface_hub` in processes of their own, and a Hub on loopback."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hub import TOKEN, Hub, files_in, running_hub
from tests.models.qwen3 import write_qwen3
from tiercel.models.hub import is_hub_name, parts_of, why_not

NAME = "someone/small-qwen3"
COPIES = ["pytorch_model.bin", "small.gguf", "onnx/model.onnx", "consolidated.safetensors", "README.md"]
FETCH = """
import contextlib, json, logging, sys
from tiercel.errors import TiercelError
from tiercel.models import hub

logging.basicConfig(format="%(message)s")

@contextlib.contextmanager
def counted(what, size):
    told.append([what, size, 0])
    def done(more):
        told[-1][2] += more
    yield done

hub.progress = counted
for name in sys.argv[1:]:
    told = []
    try:
        outcome = {"folder": str(hub.snapshot_of(name, len).folder)}
    except TiercelError as error:
        outcome = {"error": str(error)}
    print(json.dumps({"error": "", **outcome, "progress": told}))
"""
COMMANDS = """
import contextlib, io, json, os, sys
from tiercel.cli import main
for token, *arguments in json.loads(sys.argv.pop()):
    os.environ["HF_TOKEN"], sys.argv[1:] = token, arguments
    code = 0
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def run_at(hub: Hub, home: Path, program: str, *asked: str, **environment: str) -> tuple[list[Any], str]:
    """What a program prints, and what it says on stderr."""
    own = {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_TOKEN": "", **environment}
    command = [sys.executable, "-c", program, *asked]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def fetch(hub: Hub, home: Path, *names: str, **environment: str) -> list[Path]:
    told, _ = run_at(hub, home, FETCH, *names, **environment)
    assert not any(each["error"] for each in told), told
    return [Path(each["folder"]) for each in told]


@pytest.fixture(scope="module")
def needed(tmp_path_factory):
    """A model in four files of weights."""
    folder = write_qwen3(tmp_path_factory.mktemp("model"), shards_of="300KB")
    (folder / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    return files_in(folder)


@pytest.fixture(scope="module")
def hub(needed):
    """The model, and what else people put beside one."""
    with running_hub() as own:
        own.add(NAME, needed | dict.fromkeys(COPIES, b"not needed" * 1000))
        yield own


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def fetched(hub, home):
    """The model in the cache at `home`: what was said of it, and what was asked of the Hub."""
    [told], _ = run_at(hub, home, FETCH, NAME)
    return told, [*hub.asked]


@pytest.fixture(autouse=True)
def asked(hub, fetched):
    hub.asked.clear()
    return hub.asked


def test_a_name_has_an_owner_and_what_is_here_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (NAME, f"{NAME}@v1", "Qwen/Qwen3-0.6B@refs/pr/7"):
        assert is_hub_name(name)
    for path in ("tiny-v4", "a/b/c", "./someone/small", "../small", "/someone/small", f"{NAME}/", f"{NAME}@"):
        assert not is_hub_name(path)
    Path(NAME).mkdir(parents=True)
    assert not is_hub_name(NAME) and is_hub_name(f"{NAME}@v1")
    assert parts_of(f"{NAME}@refs/pr/7") == (NAME, "refs/pr/7")


def test_what_is_needed_is_fetched_and_nothing_else(hub, needed, fetched):
    told, asked = fetched
    folder = Path(told["folder"])
    assert folder.name == hub.models[NAME].refs["main"]
    assert files_in(folder) == needed
    assert not any(name in each for name in COPIES for each in asked)
    small, large = told["progress"]
    assert small[0] == large[0] == f"{NAME} from the Hub" and small[1] == small[2] > 0
    assert large[1] == large[2] == sum(len(needed[name]) for name in needed if name.endswith("safetensors"))


def test_what_was_fetched_is_not_fetched_again_and_needs_no_hub(hub, home, fetched, asked):
    folder = Path(fetched[0]["folder"])
    assert fetch(hub, home, NAME, NAME) == [folder] * 2
    once = [f"GET /api/models/{NAME}", f"HEAD /{NAME}/resolve/main/config.json"]
    assert asked == once, "in one process a name means one commit"
    asked.clear()
    assert fetch(hub, home, NAME, HF_HUB_OFFLINE="1") == [folder] and not asked
    [told], err = run_at(hub, home, FETCH, NAME, HF_ENDPOINT="http://127.0.0.1:9")
    assert told["folder"] == str(folder)
    assert f"{NAME} is taken from the cache: http://127.0.0.1:9 can not be reached: " in err


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, needed, tmp_path):
    """One file of weights goes before an index, as in a folder."""
    single = {name: data for name, data in needed.items() if name.startswith(("config", "tokenizer"))}
    single["model.safetensors"] = b"one file"
    old = hub.models[NAME].commit({**needed, **single}, "v1", "refs/pr/7")
    folders = fetch(hub, tmp_path, *(f"{NAME}@{each}" for each in ("v1", "refs/pr/7", old)))
    assert {each.name for each in folders} == {old}
    assert not hub.asked_for("model-0000") and files_in(folders[0]).keys() >= single.keys()


def test_a_file_goes_on_where_its_connection_ended(hub, tmp_path):
    """So does a start while somebody pushes: all files are of one commit."""
    weights = bytes(range(256)) * 45_000  # more than a piece of `huggingface_hub`, which is 10 MiB
    old = {"config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors": b"before"}
    files = {"config.json": b'{"a": 1}', "tokenizer.json": b"[]", "model.safetensors": weights}
    hub.add("someone/large", old).pushed = files
    hub.breaks["model.safetensors"] = 11_000_000
    [told], _ = run_at(hub, tmp_path, FETCH, "someone/large")
    assert files_in(Path(told["folder"])) == files
    assert [each.partition("bytes=")[2] for each in hub.asked_for("GET /cdn")] == ["", f"{10 << 20}-"]
    [(_, size, counted)] = told["progress"]
    assert size == counted == len(weights) + 2


def test_what_had_come_before_a_fetch_failed_is_not_fetched_again(hub, needed, tmp_path, asked):
    last = max(name for name in needed if name.endswith(".safetensors"))
    hub.fails.add(last)
    [told], _ = run_at(hub, tmp_path, FETCH, NAME)
    assert told["error"] == f"model = {NAME!r}: {hub.url} answered 500: Internal Server Error"
    had = {each.name for each in tmp_path.rglob("snapshots/*/*")}
    assert had >= {"config.json", "tokenizer.json"} and last not in had
    [told], _ = run_at(hub, tmp_path, FETCH, NAME, HF_HUB_OFFLINE="1")
    assert "is not whole in the cache, and HF_HUB_OFFLINE is set" in told["error"]
    hub.fails.clear()
    asked.clear()
    assert files_in(fetch(hub, tmp_path, NAME)[0]) == needed
    assert {each.rpartition("/")[2] for each in hub.asked_for("GET /cdn")} == needed.keys() - had


def test_what_can_not_be_run_is_refused_before_its_weights_are_fetched(hub, tmp_path):
    config, tokenizer, weights = (
        {"config.json": b"{}"},
        {"tokenizer.json": b"[]"},
        {"model.safetensors": b"w"},
    )
    hub.add("someone/pickled", {**config, **tokenizer, "pytorch_model.bin": b"w"})
    hub.add("someone/wordless", {**config, **weights})
    hub.add("someone/huge", {**config, **tokenizer, **weights}).claims["model.safetensors"] = 10**18
    index = {"model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}'}
    hub.add("someone/torn", {**config, **tokenizer, **index})
    names = [f"someone/{each}" for each in ("pickled", "wordless", "huge", "torn")]
    pickled, wordless, huge, torn = (each["error"] for each in run_at(hub, tmp_path, FETCH, *names)[0])
    assert "can not be run: there is no model.safetensors, or model.safetensors.index.json" in pickled
    assert "can not be run: there is no tokenizer.json" in wordless
    assert "takes 1000000000.00 GB more, and " in huge and huge.endswith("(HF_HOME names another place)")
    assert "can not be run: there is no model-1.safetensors" in torn
    fetched = {each.rpartition("/")[2] for each in hub.asked_for("GET /someone")}
    assert fetched == {"config.json", *tokenizer, *index}


def test_a_full_disk_is_told():
    assert "is full (HF_HOME names another place)" in why_not(OSError(errno.ENOSPC, "no"), NAME, None)
    assert "it can not be fetched into" in why_not(PermissionError(errno.EACCES, "no"), NAME, None)


OTHER = {"config.json": b'{"model_type": "llama", "num_hidden_layers": 2}', "tokenizer.json": b"{}"}
PRIVATE = "{url} has no such model; if it is private, set HF_TOKEN to a token that may read it"
MISTAKES = [
    ("", "someone/nothing", f"is no folder here, and {PRIVATE}"),
    (TOKEN, "someone/nothing", f"is no folder here, and {PRIVATE}"),
    ("hf_wrong", NAME, "{url} knows no such token"),
    ("", "someone/private", PRIVATE),
    (TOKEN, "someone/gated", "accept its terms at {url}/someone/gated, and set HF_TOKEN to a token of your"),
    ("", f"{NAME}@v9", "{url}/someone/small-qwen3 has no branch, tag or commit 'v9'"),
    ("", "someone/pictures", "{url}/someone/pictures has no config.json"),
    ("", "some..one/small", "is no folder here, and no name of the Hub"),
]


def test_spec_needs_a_config_only_and_a_mistake_is_one_line_that_says_what_to_do(hub, tmp_path):
    hub.add("someone/private", OTHER, "private")
    hub.add("someone/gated", OTHER, "gated")
    hub.add("someone/pictures", {"README.md": b"pictures"})
    asked = [(token, "spec", name) for token, name, _ in MISTAKES]
    asked += [("", "spec", NAME, "--json"), (TOKEN, "spec", "someone/private")]
    (*mistakes, spec, private), _ = run_at(hub, tmp_path, COMMANDS, json.dumps(asked))
    for (code, _, err), (_, name, message) in zip(mistakes, MISTAKES, strict=True):
        assert code == 2 and err.startswith(f"tiercel: model = {name!r}: ") and err.count("\n") == 1, err
        assert message.format(url=hub.url) in err, err
    assert "hidden_size = None" in private[2], "with a token its config is read"
    told = json.loads(spec[1])
    assert (told["model"], told["bytes_per_token"]) == (NAME, 3 * 2 * 2 * 20 * 2)
    assert {each.name for each in tmp_path.rglob("snapshots/*/*")} == {"config.json"}


def test_a_server_refuses_what_it_can_before_it_fetches(hub, tmp_path):
    """For a device that is not there nothing is asked; of a family that is not served only its config."""
    hub.add("someone/llama", {**OTHER, "model.safetensors": b"weights"})
    serve = ("", "serve", "--port", "0")
    asked = [(*serve, NAME, "--device", "rocm"), (*serve, "--draft", "someone/nothing")]
    outcomes, _ = run_at(hub, tmp_path, COMMANDS, json.dumps([*asked, (*serve, "someone/llama")]))
    device, draft, family = (err for code, _, err in outcomes if code == 2)
    assert "device = 'rocm'" in device and not hub.asked_for(NAME)
    assert "draft = 'someone/nothing': is no folder here, and" in draft
    assert "model_type = ['llama']: is none of deepseek_v4, qwen3, qwen3_moe" in family
    assert {each.rpartition("/")[2] for each in hub.asked_for("someone/llama", "resolve")} == {"config.json"}
