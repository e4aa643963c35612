"""The built wheel, installed beside the packages of this environment: nothing of the source tree is missing in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*words: object, cwd: Path) -> str:
    environment = os.environ | {"PYTHONPATH": "", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves files behind."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", ".", cwd=folder)
    (found,) = (folder / "dist").glob("leafward-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of a fresh environment with the wheel, which sees the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", where, cwd=folder).strip())
    # A plain line adds the folder without what is installed there as editable, this very package.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if name.startswith("leafward/")}
    files = (path for path in (ROOT / "src" / "leafward").rglob("*") if path.is_file())
    wanted = {str(path.relative_to(ROOT / "src")) for path in files if "__pycache__" not in path.parts}
    assert wanted == shipped


def test_the_installed_program_runs_without_the_source_tree(installed: Path, tmp_path: Path) -> None:
    home = run(installed / "python", "-c", "import leafward; print(leafward.__file__)", cwd=tmp_path).strip()
    assert Path(home).is_relative_to(installed.parent)
    assert "leafward train RECIPE" in run(installed / "leafward", "--help", cwd=tmp_path)
    listed = json.loads(run(installed / "leafward", "list", "--json", cwd=tmp_path).splitlines()[-1])
    assert listed["available"]["train taxonomy"] == "yes"
    assert listed["available"]["bench"] == "from a clone: pip install -e ."
    (tmp_path / "t.csv").write_text("dog,animal\ncat,animal\npoodle,dog\ncorgi,dog\n")
    words = ["train", "taxonomy", "--data", "t.csv", "--dim", "2", "--epochs", "1", "--device", "cpu", "--out", "run"]
    run(installed / "leafward", *words, cwd=tmp_path)
    run(installed / "leafward", "explore", "run", "--export", "page.html", cwd=tmp_path)
    assert "<svg" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "page.html").stat().st_size > 50_000
