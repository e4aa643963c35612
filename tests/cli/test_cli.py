"""The command line as a person meets it: help, wrong words, JSON, exit status. Run in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from leafward import __version__
from leafward.cli import COMMANDS, main
from leafward.data import embedded

TINY = ["--features", "40", "--widths", "4", "6", "8", "--decays", "-1", "1", "--laws", "power:1"]
TINY += ["--steps", "30", "--batch", "32", "--workers", "0"]


def leafward(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    return subprocess.run(
        [sys.executable, "-m", "leafward.cli", *words], capture_output=True, text=True, cwd=cwd, env=environment
    )


def last_json(done: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(done.stdout.splitlines()[-1])


def test_overview_lists_every_command_and_each_has_help():
    done = leafward("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"  {name} " in done.stdout
    assert leafward("--version").stdout.strip() == f"leafward {__version__}"


@pytest.mark.parametrize(
    "words",
    [["--help"], ["train", "--help"], ["train", "superposition", "--help"], ["audit", "--help"], ["report", "-h"]],
)
def test_help_imports_nothing_heavy(words):
    code = (
        "import sys\nfrom leafward.cli import main\n"
        f"try:\n    status = main({words!r})\nexcept SystemExit as stop:\n    status = stop.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "assert not status and not heavy, (status, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        (["trian"], 2, "did you mean 'train'?"),
        (["train", "superpositon"], 2, "did you mean 'superposition'?"),
        (["train", "superposition", "--preset", "quik"], 2, "did you mean 'quick'?"),
        (["train", "superposition", "--preset", "quick", "--config", "x.yaml"], 2, "not both"),
        (["train", "superposition", "--config", "missing.yaml"], 1, "missing.yaml"),
        (["train", "superposition", "--widths", "0"], 2, "widths"),
        (["train", "superposition", "--stepz", "3"], 2, "--stepz"),
        (["train", "superposition", "--steps", "many"], 2, "steps"),
        (["audit"], 2, "TARGET"),
        (["audit", "no-such-file.npy"], 1, "no-such-file.npy"),
        (["audit", str(embedded("stories260k_embedding.npy")), "--device", "tpu"], 2, "device"),
        (["report"], 2, "RUN is missing"),
        (["report", "no-such-run", "--out", "x.html"], 1, "no-such-run"),
        (["bench", "geometri"], 2, "did you mean 'geometry'?"),
        (["completion", "fish"], 2, "fish"),
    ],
)
def test_wrong_usage_says_what_is_wrong_without_a_traceback(words, status, named, tmp_path):
    done = leafward(*words, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_errors_are_json_too_and_debug_shows_the_traceback(tmp_path):
    done = leafward("audit", "nothing.npy", "--json", "--debug", cwd=tmp_path)
    assert done.returncode == 1
    assert "nothing.npy" in last_json(done)["error"]
    assert "Traceback" in done.stderr


def test_train_writes_a_run_and_refuses_to_overwrite_it(tmp_path):
    done = leafward("train", "superposition", *TINY, "--out", "run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = last_json(done)
    assert result["run"] == "run"
    assert result["headline"]
    run = tmp_path / "run"
    for name in ("config.yaml", "env.json", "result.json", "report.html"):
        assert (run / name).is_file()
    again = leafward("train", "superposition", *TINY, "--out", "run", cwd=tmp_path)
    assert again.returncode != 0
    assert "--overwrite" in again.stderr or "overwrite" in again.stderr
    saved = leafward("train", "superposition", "--config", "run/config.yaml", "--out", "second", "--json", cwd=tmp_path)
    assert saved.returncode == 0, saved.stderr
    assert last_json(saved)["headline"] == result["headline"]
    page = leafward("report", "run", "second", "--out", "both.html", "--json", cwd=tmp_path)
    assert page.returncode == 0, page.stderr
    HTMLParser().feed((tmp_path / "both.html").read_text(encoding="utf-8"))


def test_audit_prints_a_verdict_and_writes_its_page(tmp_path):
    target = str(embedded("stories260k_embedding.npy"))
    done = leafward("audit", target, "--exact", "--out", "seen", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "verdict:" in done.stdout
    rows = np.load(target)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    gram = unit @ unit.T
    n = len(rows)
    expected = ((gram**2).sum() - n) / (n * (n - 1))
    saved = json.loads((tmp_path / "seen" / "audit.json").read_text(encoding="utf-8"))
    assert saved["audits"][0]["raw"]["mean_squared_overlap"] == pytest.approx(expected, rel=1e-5)
    assert "<svg" in (tmp_path / "seen" / "report.html").read_text(encoding="utf-8")


def test_audit_of_a_family_fits_its_losses(tmp_path):
    generator = np.random.default_rng(0)
    lines = ["model,corpus,m,loss,params"]
    for m in (16, 24, 32, 48):
        np.save(tmp_path / f"m{m}.npy", generator.standard_normal((200, m)).astype("f4"))
        for corpus, offset in (("a", 1.0), ("b", 1.5)):
            lines.append(f"m{m},{corpus},{m},{offset + 20 / m},{100 * m**2.5}")
    (tmp_path / "losses.csv").write_text("\n".join(lines))
    files = [f"m{m}.npy" for m in (16, 24, 32, 48)]
    done = leafward("audit", *files, "--losses", "losses.csv", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    fit = last_json(done)["family"]["width_fit"]
    assert fit["loss"]["exponent"] == pytest.approx(1.0, abs=1e-3)
    assert fit["growth"] == pytest.approx(2.5, abs=1e-6)


def test_list_and_completion():
    assert last_json(leafward("list", "--json"))["recipes"]["superposition"][0] == "quick"
    script = leafward("completion", "bash").stdout
    check = f"{script}\nCOMP_WORDS=(leafward tr) COMP_CWORD=1; _leafward; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", check], capture_output=True, text=True)
    assert done.stdout.strip() == "train"


def test_an_unexpected_error_is_one_line(monkeypatch, capsys):
    def broken(args, console):
        raise RuntimeError("boom")

    monkeypatch.setattr("leafward.commands.list.run", broken)
    assert main(["list"]) == 1
    assert "unexpected RuntimeError: boom (--debug shows where)" in capsys.readouterr().err
