"""Goal: weights are read once, and whatever changes in them is seen. Method: real files; the real hash, which
counts the files that it reads; what is remembered is damaged, moved and made up."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tiercel.models import digest
from tiercel.models.digest import BESIDE, weights_digest

NAMES = ["model-1.safetensors", "model-2.safetensors"]


@pytest.fixture
def read(monkeypatch):
    """The names of the files that are read, as it happens."""
    names, real = [], digest.hash_file
    monkeypatch.setattr(digest, "hash_file", lambda file: names.append(file.name) or real(file))
    monkeypatch.setattr(digest, "SETTLED_S", 0.0)
    return names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    for name in NAMES:
        (tmp_path / "model" / name).write_bytes(name.encode() * 100)
    return tmp_path / "model"


def look(folder: Path) -> str:
    return weights_digest([folder / name for name in NAMES])


def tick() -> None:
    """Until a change has another time than the one before: a disk's clock ticks each 10 ms at the slowest."""
    time.sleep(0.02)


def flip(file: Path) -> None:
    tick()
    data = bytearray(file.read_bytes())
    data[50] ^= 1
    file.write_bytes(data)


def test_files_are_read_once(folder, read):
    first = look(folder)
    assert sorted(read) == NAMES and (folder / BESIDE).exists()
    assert look(folder) == first and len(read) == 2


def test_a_changed_file_is_read_again_and_no_other(folder, read):
    first = look(folder)
    flip(folder / NAMES[1])
    second = look(folder)
    assert second != first and read[2:] == [NAMES[1]]
    flip(folder / NAMES[1])
    assert look(folder) == first, "the bytes count, not the times"


def test_a_change_shows_even_if_size_and_mtime_are_put_back(folder, read):
    first, file = look(folder), folder / NAMES[0]
    told = file.stat()
    flip(file)
    os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (told.st_size, told.st_mtime_ns)
    assert look(folder) != first


def test_files_that_changed_places_are_another_model(folder, read):
    first, aside = look(folder), folder / "aside"
    (folder / NAMES[0]).rename(aside)
    (folder / NAMES[1]).rename(folder / NAMES[0])
    aside.rename(folder / NAMES[1])
    assert look(folder) != first


def test_a_copy_has_the_same_name_and_does_not_believe_what_came_with_it(folder, read, tmp_path):
    first = look(folder)
    copy = shutil.copytree(folder, tmp_path / "copy")  # with its times, and with what is remembered
    assert (copy / BESIDE).exists()
    assert look(copy) == first and len(read) == 4


def test_made_up_digests_that_come_with_a_folder_are_not_believed(folder, read):
    """Size and time are as they are; whoever sends a folder does not know the rest."""
    first = look(folder)
    made_up = {}
    for name in NAMES:
        told = (folder / name).stat()
        made_up[name] = (told.st_size, told.st_mtime_ns, told.st_mtime_ns - 1, 7, "0" * 32)
    (folder / BESIDE).write_text(json.dumps({"files": made_up, "check": digest._check(made_up)}))
    assert len(digest._load(folder / BESIDE)) == len(NAMES)
    assert look(folder) == first and len(read) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: text.replace("digest", "digset").replace("files", "flies"),
        lambda text: "[1, 2]",
        lambda text: '{"files": {"model-1.safetensors": 7}, "check": ""}',
        lambda text: '{"files": [], "check": ""}',
        lambda text: "\udcff",
    ],
)
def test_what_is_not_whole_is_not_believed(folder, read, damage):
    first = look(folder)
    kept = folder / BESIDE
    kept.write_text(damage(kept.read_text()), errors="surrogateescape")
    assert look(folder) == first and len(read) == 4
    assert look(folder) == first and len(read) == 4, "it is whole again"


def test_a_digest_that_is_not_what_was_written_is_not_believed(folder, read):
    first = look(folder)
    kept = folder / BESIDE
    told = json.loads(kept.read_text())
    told["files"][NAMES[0]][-1] = "0" * 32
    kept.write_text(json.dumps(told))
    assert look(folder) == first and len(read) == 4


def test_where_nothing_can_be_written_the_users_cache_remembers(folder, read, tmp_path):
    (folder / BESIDE).mkdir()  # a file can not take its place, whoever tries
    first = look(folder)
    assert len(list((tmp_path / "cache" / "tiercel" / "digests").iterdir())) == 1
    assert look(folder) == first and len(read) == 2
    flip(folder / NAMES[0])
    assert look(folder) != first and len(read) == 3
    assert sorted(each.name for each in folder.iterdir()) == sorted([*NAMES, BESIDE])


def test_where_nothing_can_be_remembered_it_is_read_each_time(folder, read, tmp_path):
    (folder / BESIDE).mkdir()
    (tmp_path / "cache").write_text("a file, not a folder")
    assert look(folder) == look(folder) and len(read) == 4


def test_a_young_file_is_not_remembered(folder, read, monkeypatch):
    monkeypatch.setattr(digest, "SETTLED_S", 3600.0)
    assert look(folder) == look(folder)
    assert len(read) == 4 and not (folder / BESIDE).exists()


def test_a_file_that_changes_while_it_is_read_is_not_remembered(folder, read, monkeypatch):
    real = digest.hash_file

    def slow(file):
        told = real(file)
        if file.name == NAMES[0]:
            flip(file)
        return told

    monkeypatch.setattr(digest, "hash_file", slow)
    look(folder)
    monkeypatch.setattr(digest, "hash_file", real)
    del read[:]
    look(folder)
    assert read == [NAMES[0]]
