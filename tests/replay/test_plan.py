"""Goal: the size that a plan marks is the cheapest one, whatever else was tried; and a plan that is told to
end ends at once. Method: reports with any numbers, and the command as a process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wait import until
from tiercel.replay.plan import curve_of, sizes_of, verdict
from tiercel.replay.prices import GIB, Prices
from tiercel.replay.report import Report, Times
from tiercel.replay.run import Rates
from tiercel.replay.sizes import Sizes, held_by
from tiercel.replay.workers import Work
from tiercel.spec import load

FLASH = load("deepseek-v4-flash")
RATES = Rates(prefill_tokens_s=1000.0)
ASKED = 10_000_000


def report(saved, arrivals_s=36_000.0):
    hits = {"device": 0, "host": saved, "store": 0}
    counts = dict.fromkeys(("replayed_tokens", "new_tokens", "loaded_bytes", "saved_bytes"), 0)
    counts |= dict.fromkeys(("store_written_bytes", "store_read_bytes", "store_used_bytes"), 0)
    busy_s = (ASKED - saved) / RATES.prefill_tokens_s
    return Report(
        **counts,
        policy="value",
        requests=100,
        refused=0,
        tokens_asked=ASKED,
        hit_tokens=hits,
        lost_tokens={},
        preemptions=0,
        first_token=Times.of([1.0]),
        busy_s=busy_s,
        arrivals_s=arrivals_s,
        simulated_s=1.0,
        wall_s=1.0,
    )


def marked(saved_by_gib, prices, arrivals_s=36_000.0):
    """The GiB of host memory that are marked. `saved_by_gib`: tokens that each size saves."""
    sizes = {0: 0, **saved_by_gib}
    found = [(Work(Sizes(1, gib * GIB), "value"), report(sizes[gib], arrivals_s)) for gib in sorted(sizes)]
    curve = [*curve_of(found, prices)]
    (best,) = [point for point in curve if point.best]
    return best.sizes.host_bytes // GIB, verdict(curve, prices, RATES)


# A GiB for ten hours costs as much as 100 s of the device: 100,000 tokens.
EVEN = Prices(device=36.0, host_gib=0.1)


def test_a_size_is_worth_it_while_the_next_gib_saves_more_than_it_costs():
    saved = {10: 3_000_000, 20: 4_100_000, 40: 5_000_000}
    best, told = marked(saved, EVEN)
    assert best == 20, "the last 20 GiB save 45,000 tokens each"
    assert told.startswith("host 20.0 GiB is worth its price: 21% cheaper than the device alone.")
    assert "A GiB must save 100,000 tokens in 10.0 h; each of these saves 205,000;" in told
    assert told.endswith("each more, up to 40.0 GiB, would save 45,000")
    best, told = marked({10: 3_000_000, 20: 4_100_000}, EVEN)
    assert best == 20 and told.endswith("It is the largest that was tried")


def test_where_the_curve_is_flat_host_memory_does_not_help():
    best, told = marked({10: 385_000, 20: 388_000, 40: 388_000}, EVEN)
    assert best == 0 and told == (
        "host memory does not help here: to be worth its price, a GiB must save 100,000 tokens in 10.0 h; "
        "10.0 GiB saves 38,500 with each"
    )


def test_each_gib_of_host_and_store_has_its_price_and_the_device_alone_costs_neither():
    sizes = Sizes(GIB, host_bytes=3 * GIB, store_bytes=50 * GIB)
    assert Prices(device=1.0, host_gib=2.0, store_gib=0.1).of_memory(sizes) == pytest.approx(3 * 2 + 50 * 0.1)
    best, told = marked({}, EVEN)
    assert best == 0 and told.startswith("only the device alone was tried: ")


def test_memory_is_paid_as_long_as_the_device_needs_where_that_is_longer_than_the_trace():
    saved = {10: 3_000_000}
    assert marked(saved, EVEN)[0] == 10
    assert marked(saved, EVEN, arrivals_s=400_000.0)[0] == 0
    assert "in 1.9 h" in marked(saved, EVEN, arrivals_s=1.0)[1]


savings = st.lists(st.integers(0, 500_000), min_size=24, max_size=24)
tried = st.sets(st.integers(1, 24), min_size=1)


@given(savings, tried, tried)
def test_a_size_that_is_added_takes_the_mark_or_leaves_it_where_it_is(gains, few, more):
    """The gains are those of each GiB."""
    saved = {gib: min(ASKED, sum(gains[:gib])) for gib in range(1, 25)}
    before, _ = marked({gib: saved[gib] for gib in few}, EVEN)
    after, _ = marked({gib: saved[gib] for gib in few | more}, EVEN)
    assert after == before or after in more - few


@given(savings, tried, tried)
def test_where_each_gib_saves_less_than_the_one_before_the_mark_moves_to_a_neighbour_at_most(
    gains, few, more
):
    gains = sorted(gains, reverse=True)
    saved = {gib: min(ASKED, sum(gains[:gib])) for gib in range(1, 25)}
    before, _ = marked({gib: saved[gib] for gib in few}, EVEN)
    after, _ = marked({gib: saved[gib] for gib in few | more}, EVEN)
    least = max((gib for gib in few if gib < before), default=0)
    most = min((gib for gib in few if gib > before), default=24)
    assert least <= after <= most


def test_the_device_alone_is_always_tried_and_a_store_only_with_host_memory():
    sizes = sizes_of([Sizes(5), Sizes(9)], [0, 20, 10], [300, 0])
    assert [(each.device_bytes, each.host_bytes, each.store_bytes) for each in sizes] == [
        (device, host, store)
        for device in (5, 9)
        for host, store in [(0, 0), (10, 0), (20, 0), (10, 300), (20, 300)]
    ]


def test_the_stage_that_keeps_the_most_of_a_page_says_how_many_fit():
    size, spec = Sizes(20 * GIB), load("deepseek-v4-flash", draft=True)
    one, two, four = (size.split(spec, stages=stages).device_pages for stages in (1, 2, 4))
    assert 1.9 < two / one <= 2.1 and 3.5 < four / one <= 4.2
    held = held_by(spec, 4)
    assert sum(each.page_bytes for each in held) == spec.page_bytes and held[-1].layers[-1] == spec.layers[-1]
    assert four == min(Sizes(20 * GIB).split(each).device_pages for each in held)


# The command as a process


def children(pid):
    """Processes that a process has started, with their command lines."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    lines = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in found}
    return [child for child, line in lines.items() if b"spawn_main" in line]


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize("at_once", [True, False], ids=["while they start", "while they replay"])
@pytest.mark.parametrize(("number", "rc"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_plan_that_is_told_to_end_leaves_no_process_and_no_traceback(tmp_path, number, rc, at_once):
    """Ctrl-C reaches all processes of a terminal, SIGTERM the first one only."""
    file = tmp_path / "m.jsonl"
    row = {"input_length": 20_480, "output_length": 100}
    rows = ({**row, "timestamp": n, "hash_ids": [*range(n * 40, n * 40 + 40)]} for n in range(5000))
    file.write_text("\n".join(map(json.dumps, rows)))
    words = (
        "plan",
        file,
        "--host-memory",
        "1GiB",
        "--host-memory",
        "2GiB",
        "--one-at-a-time",
        "--processes",
        2,
    )
    command = [sys.executable, "-m", "tiercel.cli", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **pipes)
    try:
        until(lambda: len(children(process.pid)) >= (1 if at_once else 2), "its processes", 60)
        if not at_once:
            until(
                lambda: all(memory_of(each) > 60 * 10**6 for each in children(process.pid)),
                "the trace there",
                60,
            )
        started = children(process.pid)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (rc, "") and "Traceback" not in err and "Error" not in err, err
    assert started and not any(map(is_there, started))


def memory_of(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
