"""The README is executed: every Python block runs, every shell block's leafward commands parse and run."""

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
COMMANDS = [
    line
    for language, body in BLOCKS
    if language == "bash"
    for line in body.splitlines()
    if line.startswith("leafward ") and "demo" not in line  # the demo is the suite's own work at another size
]


@pytest.mark.parametrize("index", range(len(PYTHON)))
def test_python_blocks_run(index, tmp_path):
    done = subprocess.run([sys.executable, "-c", PYTHON[index]], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_there_is_something_to_execute():
    assert len(PYTHON) >= 3
    assert len(COMMANDS) >= 3


def test_commands_run_in_order(tmp_path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    (tmp_path / "src").symlink_to(README.parent / "src")
    for line in COMMANDS:
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
