"""Goal: what takes long is shown by a bar if somebody looks, and all is told in one line of the log."""

import io

import pytest

from tests.wait import until
from tiercel.progress import progress


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
