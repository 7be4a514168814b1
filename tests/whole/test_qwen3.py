"""Goal: a Qwen3 is served as the embedded model is, from a folder or by its name on the Hub. Method: a real
server process on a small random one, and another after it on what the store has kept."""

import re

import httpx
import pytest

from tests.hub import files_in, running_hub
from tests.models.qwen3 import write_qwen3
from tests.whole.process import running

NAME = "someone/small-qwen3"
MEMORY = ("--device-memory", "24MiB", "--host-memory", "64MiB", "--page-tokens", "64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("models") / "small-qwen3")


def complete(server, tokens, model="small-qwen3"):
    body = {"model": model, "prompt": tokens, "max_tokens": 16, "temperature": 0, "logprobs": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    told = answer.json()
    return told["choices"][0], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_folder_is_served_and_its_cache_outlives_the_server(folder, tmp_path, monkeypatch):
    """Whose numbers are cached does not depend on where the files are. Stages fetch nothing."""
    store = ("--store", f"file://{tmp_path}/store?size=1GiB", "--fetch", "wait")
    prompt = [(i * i * 31 + i * 17) % 3800 + 200 for i in range(500)]
    with running(str(folder), *MEMORY, *store) as server:
        assert "qwen3, 3 layers, a vocabulary of 4,096" in server.told
        assert [each["id"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]][
            0
        ] == "small-qwen3"
        cold, cached = complete(server, prompt)
        assert cached == 0 and len(cold["logprobs"]["tokens"]) == 16
        assert complete(server, prompt) == (cold, 448)
    with running_hub() as hub:
        commit = hub.add(NAME, files_in(folder)).refs["main"]
        for name, value in {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_TOKEN": ""}.items():
            monkeypatch.setenv(name, value)
        with running(f"{NAME}@main", *MEMORY, *store, "--stages", "2") as server:
            assert complete(server, prompt, NAME) == (cold, 448)
            assert re.search(rf"commit .* {commit} .* of {NAME}@main, in ", server.told)
            assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == NAME
    fetched = [each.rpartition("/")[2] for each in hub.asked_for("GET")]
    assert len(hub.asked_for("/api/")) == 1 and len({*fetched}) == len(fetched)
