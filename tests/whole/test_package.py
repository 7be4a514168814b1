"""Goal: who has no clone, but an sdist or a wheel, has all of tiercel. Method: both are built as for a
release; the wheel is installed into an empty environment, where README's first sample is
run as README says; the sdist is unpacked and runs tests of its own."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.whole.process import Server
from tests.whole.test_readme import README, ROOT, right_answers, samples


def run(*command, **options):
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=900, **options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with an sdist, and the wheel that was built from this sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


def test_the_wheel_alone_answers_as_readme_says(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "/." in name], "a file of this machine"
    run(sys.executable, "-m", "venv", tmp_path)
    wanted = re.search(r"^\.venv/bin/pip install (openai)\b", README, re.MULTILINE)[1]
    pip = [tmp_path / "bin" / "pip", "install", "--quiet", "--no-compile"]
    run(*pip, "--constraint", ROOT / "constraints.txt", wheel, wanted)
    tiercel = str(tmp_path / "bin" / "tiercel")
    assert f"tiercel-{run(tiercel, '--version').split()[1]}-" in wheel.name
    server = Server("--device-memory", "24MiB", as_user=True, command=(tiercel,))
    try:
        sample = samples("python")[0].replace("http://127.0.0.1:8000", server.url)
        right_answers(run(tmp_path / "bin" / "python", "-c", sample, cwd=tmp_path))
    finally:
        code, told = server.stop()
    assert code == 0, told


def test_the_sdist_tests_itself(built, tmp_path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    if (ROOT / ".git").exists():
        tracked = run("git", "ls-files", cwd=ROOT).splitlines()
        assert not [name for name in tracked if not (folder / name).is_file()], (
            "the sdist has what a clone has"
        )
    here = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(folder / "src")}}
    code = run(sys.executable, "-c", "import tiercel; print(tiercel.__file__)", **here)
    assert Path(code.strip()).is_relative_to(folder)
    own = ("tests/test_documents.py", "tests/test_tidy.py", "tests/spec", "tests/test_examples.py")
    told = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *own, **here)
    assert re.search(r"^\.+ +\[100%\]$", told, re.MULTILINE), told
