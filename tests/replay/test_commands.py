"""Goal: the two commands tell what a replay came to, and refuse what can not be. Method: the commands, on a
few requests."""

import json
import pickle
import sys

import pytest
from typer.testing import CliRunner

from tests.replay.traffic import conversations, write_tokens
from tiercel.cli.commands import app
from tiercel.errors import ConfigError
from tiercel.replay import plan
from tiercel.replay.formats import read_trace
from tiercel.replay.plan import knee_of
from tiercel.replay.run import Serving, Sizes, replay
from tiercel.spec import load
from tiercel.spec.attention import mha


@pytest.fixture
def file(tmp_path):
    return write_tokens(tmp_path / "t.jsonl", conversations(5, 40, shared=700, turn=900, most=20_000))


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


SIZES = ("--device-memory", "100MB", "--host-memory", "100MB", "--store-memory", "1GB")


def test_replay_prints_a_table_and_json_and_draws(file, tmp_path):
    picture = tmp_path / "out.svg"
    shown = run("replay", file, *SIZES, "--one-at-a-time", "--plot", picture)
    assert shown.exit_code == 0 and "reused from store" in shown.output and "requests/s" in shown.output
    assert picture.read_text().startswith("<?xml")
    told = json.loads(run("replay", file, *SIZES, "--one-at-a-time", "--json", "--prefill-rate", 100).output)
    assert told["requests"] == 40 and sum(told["hit_tokens"].values()) > 0
    assert told["rates"]["prefill_tokens_s"] == 100 and told["first_token"]["p50_s"] > 1


def test_plan_compares_policies_and_marks_one_knee_for_each(file, tmp_path):
    hosts = [word for size in (20, 40, 80, 160) for word in ("--host-memory", f"{size}MB")]
    words = ("plan", file, "--device-memory", "100MB", *hosts, "--policy", "lru", "--policy", "slru")
    picture = tmp_path / "out.png"
    told = json.loads(run(*words, "--one-at-a-time", "--processes", 1, "--json", "--plot", picture).output)
    assert [(row["policy"], row["host_bytes"]) for row in told] == [
        (policy, size * 10**6) for policy in ("lru", "slru") for size in (20, 40, 80, 160)
    ]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    shown = run(*words, "--one-at-a-time", "--processes", 1)
    assert "1 GiB more saved" in shown.output and "a cache without an end" in shown.output


def test_it_is_told_how_many_texts_fit_whole_and_sparse(file):
    """More of them do where the host has room for them."""
    sizes = ("--device-memory", "200MB", "--text-tokens", 12_800)
    words = ("plan", file, *sizes, "--host-memory", "90MB", "--host-memory", "1GB", "--processes", 1)
    told = json.loads(run(*words, "--json").output)
    assert [row["texts"] for row in told] == [
        {"tokens": 12_800, "whole": 3, "sparse": sparse} for sparse in (1, 6)
    ]
    assert "host 0.9 GiB: texts of 12,800 tokens that fit at once: 3 whole, 6 with" in run(*words).output
    shown = run("replay", file, "--device-memory", "200MB", "--host-memory", "1GB").output
    assert f"texts of {read_trace([file], 256).longest:,} tokens that fit at once" in shown
    assert json.loads(run("replay", file, *sizes, "--host-memory", "0", "--json").output)["texts"] is None


def test_pages_of_a_replay_may_be_sparse(file, tmp_path):
    """Longer texts fit, and several at once. The whole of them is on the host."""
    words = ("replay", file, "--device-memory", "60MB", "--host-memory", "1GB", "--json")
    whole, sparse = (json.loads(run(*words, *more).output) for more in ((), ("--sparse",)))
    assert whole["counters"]["pages_sparse"] == 0 < sparse["counters"]["pages_sparse"]
    assert sum(sparse["hit_tokens"].values()) >= sum(whole["hit_tokens"].values()) * 0.95
    with pytest.raises(ConfigError, match="there is no host memory"):
        run("replay", file, "--sparse", "--host-memory", "0")
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(mha("gqa", 256, layers=2, kv_heads=2, head_dim=8).to_dict()))
    with pytest.raises(ConfigError, match="selects no entries"):
        run("plan", file, "--sparse", "--model", spec)


def test_a_process_of_a_plan_is_sent_all_that_it_needs(file, monkeypatch):
    spec = load("deepseek-v4-flash")
    state = read_trace([file], 256), spec, Serving(one_at_a_time=True)
    sizes = Sizes(10**8, 10**8)
    monkeypatch.setattr(plan, "_STATE", [])
    plan._begin(*pickle.loads(pickle.dumps(state)))
    there, here = plan._work(sizes, "slru"), replay(*state[:2], sizes, policy="slru", serving=state[2])
    assert there.hit_tokens == here.hit_tokens and there.first_token == here.first_token


@pytest.mark.parametrize(
    ("curve", "knee"),
    [
        ([(1, 0.1), (2, 0.5), (4, 0.55), (8, 0.6)], 1),
        ([(1, 0.1), (2, 0.2), (3, 0.3)], None),
        ([(1, 0.1), (2, 0.5)], None),
    ],
)
def test_the_knee_is_the_point_farthest_above_the_straight_line(curve, knee):
    assert knee_of(curve) == knee


def test_a_plot_without_matplotlib_names_the_command_that_installs_it(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'tiercel\[plot\]'"):
        run("replay", file, "--plot", "x.svg")


def test_a_picture_of_an_unknown_kind_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match="must end with one of"):
        run("replay", tmp_path / "none", "--plot", "x.doc")
