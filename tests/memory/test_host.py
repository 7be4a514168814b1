from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tiercel.errors import BudgetError
from tiercel.memory.host import RESERVE_BYTES, HostMap, bytes_available, node_of

GIB = 1024**3


def make_machine(
    root: Path, *, available: int, groups: str = "", files: dict[str, dict[str, object]] | None = None
):
    """The files of a machine that `bytes_available` reads."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for folder, contents in (files or {}).items():
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (root / "sys/fs/cgroup" / folder / name).write_text(f"{text}\n")
    return root


def version_2(limit: object, usage: int, cache: int = 0) -> dict[str, object]:
    return {"memory.max": limit, "memory.current": usage, "memory.stat": f"anon 5\ninactive_file {cache}"}


def test_without_control_groups_the_kernels_estimate_counts(tmp_path: Path) -> None:
    assert bytes_available(make_machine(tmp_path, available=8 * GIB)) == 8 * GIB - RESERVE_BYTES


def test_the_room_in_a_control_group_counts_when_it_is_less(tmp_path: Path) -> None:
    files = {"pod": version_2(4 * GIB, GIB)}
    root = make_machine(tmp_path, available=8 * GIB, groups="0::/pod\n", files=files)
    assert bytes_available(root) == 3 * GIB - RESERVE_BYTES


def test_a_limit_above_counts_too(tmp_path: Path) -> None:
    files = {"": version_2("max", GIB), "pod": version_2(4 * GIB, 2 * GIB), "pod/app": version_2("max", GIB)}
    root = make_machine(tmp_path, available=8 * GIB, groups="0::/pod/app\n", files=files)
    assert bytes_available(root) == 2 * GIB - RESERVE_BYTES


def test_file_cache_gives_way(tmp_path: Path) -> None:
    files = {"": version_2(4 * GIB, 3 * GIB, cache=2 * GIB)}
    root = make_machine(tmp_path, available=8 * GIB, groups="0::/\n", files=files)
    assert bytes_available(root) == 3 * GIB - RESERVE_BYTES


def test_version_1_of_the_interface_is_read(tmp_path: Path) -> None:
    names = {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": GIB}
    files = {"memory/job": names | {"memory.stat": f"total_inactive_file {GIB // 2}"}}
    groups = "4:memory:/job\n1:cpu:/\n0::/\n"
    root = make_machine(tmp_path, available=8 * GIB, groups=groups, files=files)
    assert bytes_available(root) == 3 * GIB + GIB // 2 - RESERVE_BYTES


def test_a_full_machine_has_nothing(tmp_path: Path) -> None:
    assert bytes_available(make_machine(tmp_path, available=RESERVE_BYTES // 2)) == 0


def test_a_budget_the_machine_does_not_have_is_refused_with_both_numbers() -> None:
    available = bytes_available()
    with pytest.raises(BudgetError) as refused:
        HostMap(1 << 50)
    assert refused.value.bytes_asked == 1 << 50
    assert 0 < refused.value.bytes_available < 2 * available
    assert f"{1 << 50:,}" in str(refused.value)
    assert f"{refused.value.bytes_available:,}" in str(refused.value)


@pytest.mark.parametrize("size", [1, 4096, 3 * 4096 + 5, 8 * 1024**2])
@pytest.mark.parametrize("huge_pages", [False, True])
def test_memory_is_zero_and_can_be_written(size: int, huge_pages: bool) -> None:
    with closing(HostMap(size, huge_pages=huge_pages)) as memory:
        array = np.frombuffer(memory.view, np.uint8)
        assert len(array) == size and not array.any()
        array[:] = 7
        assert memory.view[size - 1] == 7
        del array
    assert memory._map.closed


def test_closing_twice_is_closing_once() -> None:
    memory = HostMap(4096)
    memory.close()
    memory.close()
    assert memory._map.closed


def test_a_view_that_outlives_close_is_not_left_dangling() -> None:
    memory = HostMap(4096)
    view = memory.view
    memory.close()
    view[0] = 5
    assert view[0] == 5 and not memory._map.closed
    view.release()
    memory.close()
    assert memory._map.closed


def test_memory_that_is_not_pinned_has_nothing_to_do_with_cuda() -> None:
    """Also on a machine with CUDA: registering all of it takes seconds, and another process may need them."""
    code = "import sys; from tiercel.memory.host import HostMap; HostMap(9); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="the kernel has no NUMA")
def test_memory_prefers_the_node_it_is_asked_for() -> None:
    with closing(HostMap(8 * 1024**2, node=0)) as memory:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
        (line,) = [each for each in lines if each.startswith(f"{memory._address:08x} ")]
    assert line.split()[1] == "prefer:0"


def test_a_node_that_is_not_there_is_told_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tiercel"), closing(HostMap(4096, node=1000)) as memory:
        assert not any(memory.view)
    assert "NUMA node 1000 was refused" in caplog.text


@pytest.mark.parametrize(("told", "node"), [("1\n", 1), ("-1\n", None), (None, None)])
def test_the_node_of_a_device_is_read_from_the_system(tmp_path: Path, told: str | None, node: int | None):
    folder = tmp_path / "sys/bus/pci/devices/0000:0f:00.0"
    folder.mkdir(parents=True)
    if told is not None:
        (folder / "numa_node").write_text(told)
    assert node_of("0000:0f:00.0", tmp_path) == node


def test_what_is_touched_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tiercel"), closing(HostMap(3 * 10**8)):
        pass
    assert "host memory: 0.30 GB in " in caplog.text
