"""Goal: an engine whose interface has changed is told so at the start, by the name of what has changed.
Method: interfaces that lack something, or have more; versions as distributions have them."""

from importlib.metadata import PackageNotFoundError

import pytest

from tiercel.errors import ConfigError
from tiercel.integrations import hooks
from tiercel.integrations.hooks import check_hooks


class Interface:
    limit = 3

    def put(self): ...
    def get(self): ...
    def clear(self): ...
    def _own(self): ...


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    versions = {"engine": "0.5.0", "built-cpu": "0.6.0+cpu.1"}

    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(hooks, "version", version)


def check(package, known, *, tested=("0.5.0", "0.6.0"), left=("clear",)):
    check_hooks(package, Interface, known, tested=tested, left=left)


@pytest.mark.parametrize("package", ["engine", "built"])
def test_a_known_interface_is_used_without_a_word(package, caplog):
    check(package, ["put", "get"])
    assert not caplog.text


def test_what_is_gone_is_refused():
    with pytest.raises(
        ConfigError, match=r"engine = '0\.5\.0': has no flush, sync any more; .* with 0\.5\.0, 0\.6\.0"
    ):
        check("engine", ["put", "sync", "get", "flush"])


def test_what_is_new_and_versions_that_were_not_tested_are_told(caplog):
    check("engine", ["put"], tested=["0.6.0"])
    assert "engine 0.5.0 has calls that are not answered: get\n" in caplog.text
    assert "engine 0.5.0 was not tested; these were: 0.6.0" in caplog.text
    check("nobody", ["put", "get"])
    assert "nobody unknown was not tested" in caplog.text
