"""Goal: a folder is read as it is, and what is broken in it is named. Method: folders, broken by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.folders import make_config, write_folder, write_index, write_shards
from tiercel.errors import WeightsError
from tiercel.models.checkpoint import Checkpoint, listed

A, B = torch.arange(6.0).view(2, 3), torch.arange(4, dtype=torch.int64)
FIRST, SECOND, INDEX = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", {"a": A, "b": B})


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "model", {FIRST: {"a": A}, SECOND: {"b": B}})


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_tensors_are_listed_without_being_read_and_read_as_stored(
    kind: str, request: pytest.FixtureRequest
) -> None:
    checkpoint = Checkpoint(request.getfixturevalue(kind))
    assert checkpoint.config == make_config()
    told = {name: (each.dtype, each.shape) for name, each in checkpoint.tensors.items()}
    assert told == {"a": ("F32", (2, 3)), "b": ("I64", (4,))}
    assert torch.equal(checkpoint.read("a"), A)
    assert torch.equal(checkpoint.read("b"), B)


def test_a_tensor_says_which_file_it_is_in(sharded: Path) -> None:
    tensors = Checkpoint(sharded).tensors
    assert {name: each.file for name, each in tensors.items()} == {
        "a": sharded / FIRST,
        "b": sharded / SECOND,
    }


def test_a_single_file_goes_before_an_index(single: Path) -> None:
    write_index(single, {"a": "gone.safetensors"})
    assert set(Checkpoint(single).tensors) == {"a", "b"}


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="nowhere: is no folder"):
        Checkpoint(tmp_path / "nowhere")


def test_a_folder_without_weights_is_named(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has neither model\.safetensors nor model\.safetensors\.index"):
        Checkpoint(single)


def test_a_missing_config_is_named(single: Path) -> None:
    (single / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"config\.json: is missing"):
        Checkpoint(single)


@pytest.mark.parametrize(
    ("text", "why"), [("{", "is not JSON"), ("[]", "one JSON object"), ("\xff", "is not")]
)
def test_a_config_that_can_not_be_read_is_named(single: Path, text: str, why: str) -> None:
    (single / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(WeightsError, match=rf"config\.json: .*{why}"):
        Checkpoint(single)


@pytest.mark.parametrize("left", [-1, 40, 8, 3, 0])
def test_a_truncated_file_is_named(single: Path, left: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(WeightsError, match=r"model\.safetensors: is no whole safetensors file") as caught:
        Checkpoint(single)
    assert caught.value.file == str(file)


def test_a_file_of_something_else_is_named(single: Path) -> None:
    (single / "model.safetensors").write_bytes(b"\x80\x04 a pickle, and a long one, " * 9)
    with pytest.raises(WeightsError, match=r"model\.safetensors: is no whole safetensors file"):
        Checkpoint(single)


def test_a_folder_in_place_of_a_file_is_named(single: Path) -> None:
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").mkdir()
    with pytest.raises(WeightsError, match=r"model\.safetensors: is no whole safetensors file"):
        Checkpoint(single)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    file = sharded / SECOND
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(WeightsError, match=f"{SECOND}: is no whole"):
        Checkpoint(sharded)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=r"index\.json: has no weight_map"):
        Checkpoint(sharded)


def test_an_index_that_is_not_json_is_named(sharded: Path) -> None:
    (sharded / INDEX).write_text("weight_map")
    with pytest.raises(WeightsError, match=r"index\.json: is not JSON"):
        Checkpoint(sharded)


def test_a_shard_that_is_not_there_is_named(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(WeightsError, match=f"{SECOND}: is missing"):
        Checkpoint(sharded)


def test_a_tensor_that_is_not_in_its_shard_is_named(sharded: Path) -> None:
    write_index(sharded, {"a": FIRST, "b": SECOND, "c": SECOND})
    with pytest.raises(WeightsError, match=f"{SECOND}: does not hold what .* says: c$") as caught:
        Checkpoint(sharded)
    assert caught.value.tensors == ("c",)


def test_a_tensor_that_is_not_in_the_index_is_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, {FIRST: {"a": A, "c": A + 1}})
    write_index(folder, {"a": FIRST})
    with pytest.raises(WeightsError, match=f"{FIRST}: holds what .* does not say: c$"):
        Checkpoint(folder)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", 7, "", ".."])
def test_an_index_leads_only_to_files_of_its_folder(sharded: Path, file: object) -> None:
    write_index(sharded, {"a": file})  # type: ignore[dict-item]
    with pytest.raises(WeightsError, match=r"a is in .*, which is no file of this folder"):
        Checkpoint(sharded)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SECOND, INDEX])
def test_a_git_lfs_pointer_is_told_as_such(sharded: Path, name: str) -> None:
    (sharded / name).write_bytes(POINTER)
    with pytest.raises(WeightsError, match=rf"{name}: is a git-lfs pointer, .*git lfs pull"):
        Checkpoint(sharded)


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", SECOND, INDEX, "model.safetensors"])
def test_a_link_to_nothing_is_told_with_its_target(sharded: Path, name: str) -> None:
    (sharded / name).unlink(missing_ok=True)
    (sharded / name).symlink_to("../blobs/4d7a21")
    with pytest.raises(WeightsError, match=rf"{name}: is a link to \.\./blobs/4d7a21, which is not there"):
        Checkpoint(sharded)


def test_links_to_files_are_read(sharded: Path, tmp_path: Path) -> None:
    for file in list(sharded.iterdir()):
        moved = file.rename(tmp_path / f"blob-{file.name}")
        file.symlink_to(moved)
    assert set(Checkpoint(sharded).tensors) == {"a", "b"}


def test_a_list_of_names_stays_short() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed(list("abcde")) == "a, b, c, d, e"
    assert listed(list("abcdefgh")) == "a, b, c, d, e and 3 more"
