"""The README is executed: every Python block and, but for `make`, every shell block, in order and in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
PYTHON = [body for language, body in BLOCKS if language == "python"]
SHELL = [body for language, body in BLOCKS if language == "bash" and not body.startswith("make ")]


def run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, f"{command[-1]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("index", range(len(PYTHON)))
def test_python_blocks_run(index, tmp_path):
    run([sys.executable, "-c", PYTHON[index]], tmp_path)


def test_there_is_something_to_execute():
    assert len(PYTHON) >= 3
    assert len(SHELL) >= 3


@pytest.mark.slow
def test_shell_blocks_run_in_order(tmp_path):
    (tmp_path / "src").symlink_to(README.parent / "src")
    for body in SHELL:
        run(["bash", "-e", "-c", body], tmp_path)
