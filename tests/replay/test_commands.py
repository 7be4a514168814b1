"""Goal: the two commands tell what a replay came to, and refuse what can not be. Method: the commands, on a
few requests."""

import json
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tests.replay.traffic import conversations, write_tokens
from tiercel.cli.commands import app
from tiercel.errors import ConfigError
from tiercel.replay.formats import read_trace
from tiercel.replay.run import Serving
from tiercel.replay.sizes import Sizes
from tiercel.replay.workers import Work, replay_all
from tiercel.spec import load
from tiercel.spec.attention import mha


@pytest.fixture
def file(tmp_path):
    return write_tokens(tmp_path / "t.jsonl", conversations(5, 40, shared=700, turn=900, most=20_000))


MB = 10**6


def each(tier, *sizes):
    return [word for size in sizes for word in (f"--{tier}-memory", size * MB)]


FLASH = load("deepseek-v4-flash")


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


def test_plan_compares_devices_and_policies_and_marks_the_cheapest_of_each(file, tmp_path):
    """Each begins with the device alone. A store is tried with host memory only."""
    words = ("plan", file, *each("device", 100, 120), *each("host", 20), *each("store", 0, 300))
    words = (*words, "--policy", "lru", "--policy", "slru", "--one-at-a-time")
    picture = tmp_path / "out.png"
    told = json.loads(run(*words, "--processes", 1, "--json", "--plot", picture).output)
    assert [(row["policy"], row["device_bytes"], row["host_bytes"], row["store_bytes"]) for row in told] == [
        (policy, device * MB, host * MB, store * MB)
        for policy in ("lru", "slru")
        for device in (100, 120)
        for host, store in [(0, 0), (20, 0), (20, 300)]
    ]
    for curve in (told[at : at + 3] for at in range(0, 12, 3)):
        (best,) = [row for row in curve if row["best"]]
        assert best["cost"] == min(row["cost"] for row in curve)
        assert curve[0]["hit_tokens"]["host"] == 0 < curve[0]["hit_tokens"]["device"]
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_plan_in_processes_is_the_same_and_tells_of_every_request(file):
    given = read_trace([file], 256), FLASH, Serving(one_at_a_time=True)
    works = [Work(Sizes(100 * MB, size * MB), "slru") for size in (0, 30, 60)]
    reports, told = [], []
    for processes in (1, 2):
        counts = []
        reports.append(replay_all(*given, works, processes=processes, progress=counts.append))
        told.append(sum(counts))
    here, there = ([replace(report, wall_s=0) for report in each] for each in reports)
    assert here == there and told == [120, 120]
    with pytest.raises(ConfigError, match="two pages and their tails take"):
        replay_all(*given, [Work(Sizes(1), "lru")] * 2, processes=2)


def test_a_plan_says_in_a_sentence_whether_host_memory_is_worth_its_price(file):
    words = ("plan", file, *each("device", 60), *each("host", 40, 80), "--processes", 1)
    shown = run(*words, "--host-price", 1e-6).output
    assert "is worth its price" in shown and "cheaper than the device alone" in shown
    shown = run(*words, "--host-price", 1e6).output
    assert "host memory does not help here" in shown and "worth its price: " not in shown
    with pytest.raises(ConfigError, match="--device-price"):
        run(*words, "--device-price", 0)


def test_a_trace_that_one_device_does_not_bear_is_told(file):
    """At 300 tokens per second, the prompts of this trace take more than the 39 s in which they come."""
    words = (file, *each("device", 100), *each("host", 100), "--one-at-a-time", "--prefill-rate", 300)
    words = (*words, "--token-time", 1e-6)
    report = json.loads(run("replay", *words, "--json").output)
    computed_s = report["computed_tokens"] / 300
    assert report["arrivals_s"] == 39 and computed_s > 2 * 39
    assert report["devices"] == -(-report["busy_s"] // 39) and 0 < report["busy_s"] - computed_s < 1
    assert report["requests_s_most"] == pytest.approx(40 / report["busy_s"])
    needs = f"overloaded: this trace needs about {report['devices']} devices"
    assert needs in run("replay", *words).output
    assert needs[:30] in run("plan", *words, "--processes", 1).output
    assert "overloaded" not in run("replay", *words, "--prefill-rate", 10**6).output


def test_it_is_told_how_many_texts_fit_whole_and_sparse(file):
    """More of them do where the host has room for them."""
    sizes = ("--device-memory", "200MB", "--text-tokens", 12_800)
    words = ("plan", file, *sizes, "--host-memory", "90MB", "--host-memory", "1GB", "--processes", 1)
    told = json.loads(run(*words, "--json").output)
    assert [row["texts"] for row in told] == [
        None,
        *({"tokens": 12_800, "whole": 3, "sparse": sparse} for sparse in (1, 6)),
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


def test_a_plot_without_matplotlib_names_the_command_that_installs_it(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib"):
        run("replay", file, "--plot", "x.svg")


def test_a_picture_of_an_unknown_kind_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match="must end with one of"):
        run("replay", tmp_path / "none", "--plot", "x.doc")
