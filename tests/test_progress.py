"""Goal: what takes long is shown by a bar if somebody looks, and all is told in one line of the log."""

import io
import re

import pytest

from tests.wait import until
from tiercel.progress import is_shown, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stderr", [Terminal, io.StringIO])
def test_there_is_a_bar_on_a_terminal_only(stderr, monkeypatch, caplog):
    out = stderr()
    monkeypatch.setattr("tiercel.progress.PROGRESS_S", 0.0)
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    with caplog.at_level("INFO", "tiercel"), progress("weights", 4 * 10**9) as done:
        done(10**9)
        if stderr is Terminal:
            until(lambda: "1.0/4.0 GB" in out.getvalue(), "the bar")
    assert ("weights" in out.getvalue()) == (stderr is Terminal)
    assert [record.message.startswith("weights: 4.00 GB in ") for record in caplog.records] == [True]


def test_what_is_not_bytes_is_counted_by_its_name(monkeypatch, caplog):
    out = Terminal()
    monkeypatch.setattr("tiercel.progress.PROGRESS_S", 0.0)
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    with caplog.at_level("INFO", "tiercel"), progress("reading", 4000, counted="lines") as done:
        done(1000)
        until(lambda: "1000/4000" in out.getvalue(), "the bar")
    assert caplog.records[0].message.startswith("reading: 4,000 lines in ")


def shown(out):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def test_the_time_left_is_told_as_soon_as_something_is_done(monkeypatch):
    out = Terminal()
    monkeypatch.setattr("tiercel.progress.PROGRESS_S", 0.0)
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    with progress("reading", 2, counted="parts") as done:
        until(lambda: "0/2" in out.getvalue(), "the bar")
        assert "left" not in shown(out) and "-:--" not in shown(out)
        done(1)
        until(lambda: re.search(r"1/2 0:00:0\d left", shown(out)), "the time left")
    with progress("listing", None, counted="things") as done:
        done(3)
        until(lambda: "3/?" in out.getvalue(), "a bar without an end")
    assert "left" not in shown(out).rpartition("listing")[2]


def test_a_part_has_its_bar_below_that_of_the_whole(monkeypatch, caplog):
    out = Terminal()
    monkeypatch.setattr("tiercel.progress.PROGRESS_S", 0.0)
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    with caplog.at_level("INFO", "tiercel"), progress("host (4 of 5)", 60, counted="texts") as done:
        assert is_shown()
        with progress("weights", 4 * 10**9) as read:
            read(10**9)
            until(
                lambda: re.search(r"host \(4 of 5\).* 0/60.*\n.*weights.* 1\.0/4\.0 GB", shown(out)), "both"
            )
        done(7)
        until(lambda: " 7/60" in out.getvalue(), "the whole goes on")
        assert "weights" not in shown(out).rpartition("7/60")[0].rpartition("host")[2]
    assert [record.message.split(" in ")[0] for record in caplog.records] == [
        "weights: 4.00 GB",
        "host (4 of 5): 60 texts",
    ]
    assert not is_shown()


def test_there_is_no_bar_for_what_is_short(monkeypatch, caplog):
    out = Terminal()
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setattr("tiercel.progress.PROGRESS_S", 1000.0)
    with caplog.at_level("INFO", "tiercel"), progress("weights", 10**7) as done:
        done(10**7)
    assert not out.getvalue() and "weights: 0.01 GB in " in caplog.text


def test_a_bar_ends_with_an_error_too(monkeypatch, caplog):
    out = Terminal()
    monkeypatch.setattr("tiercel.progress.PROGRESS_S", 0.0)
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(OSError, match="no more"), progress("weights", 9):
        until(lambda: "weights" in out.getvalue(), "the bar")
        raise OSError("no more")
    assert out.getvalue().endswith("\x1b[2K"), "the line is erased, and nothing follows"
    assert not caplog.records
