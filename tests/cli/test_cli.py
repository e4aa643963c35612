"""The command line as a person meets it: help, wrong words, JSON, exit status. Run in processes of their own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from leafward import __version__
from leafward.cli import audit, train
from leafward.cli.dispatch import COMMANDS, main
from leafward.data.samples import embedded
from leafward.geometry import poincare
from leafward.systems import PREPARATIONS
from ranks import command as leafward

EMBEDDING = str(embedded("stories260k_embedding.npy"))
TINY = ["--features", "40", "--widths", "4", "6", "8", "--decays", "-1", "1", "--laws", "power:1"]
TINY += ["--steps", "30", "--batch", "32", "--workers", "0"]


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
    assert "usage" in without_heavy_imports(words, status=0).stdout


@pytest.mark.parametrize(
    ("words", "named", "status"),
    [
        ([], "--data must name the text", 2),
        (["--data", "gone.txt"], "gone.txt does not exist", 1),
        (["--data", "empty"], "empty holds no file", 1),
    ],
)
def test_missing_text_is_said_before_anything_heavy_is_imported(tmp_path, words, named, status):
    (tmp_path / "empty").mkdir()
    done = without_heavy_imports(["train", "helm", *words], status, tmp_path)
    assert named in done.stderr
    assert not (tmp_path / "runs").exists()


def without_heavy_imports(words, status, folder=None):
    """Run a command in a process of its own, which must end with `status` and without torch and its like."""
    code = (
        "import sys\nfrom leafward.cli.dispatch import main\n"
        f"try:\n    status = main({words!r})\nexcept SystemExit as stop:\n    status = stop.code or 0\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        f"assert status == {status} and not heavy, (status, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


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
        (["audit", EMBEDDING, "--device", "tpu"], 2, "device"),
        (["report"], 2, "RUN is missing"),
        (["report", "no-such-run", "--out", "x.html"], 1, "no-such-run"),
        (["report", "no-such-run", "--out", "x.pdf"], 2, "--out x.pdf: it must end in .html"),
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


@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        (["train", "superposition", "--axis", "steps,dta"], 2, "dta"),
        (["train", "superposition", "--executor", "slurm"], 2, "slurm"),
        (["train", "superposition", "--executor", "ray", "--workers", "0"], 2, "processes must be"),
        (["audit", EMBEDDING, "--losses", "losses.csv"], 2, "two or more targets"),
        (["audit", EMBEDDING, EMBEDDING], 2, "there twice"),
        (["audit", EMBEDDING, "timm:x", "--losses", "no.csv"], 1, "no.csv"),
        (["audit", EMBEDDING, "--out", EMBEDDING], 1, "is not a folder"),
        (["audit", EMBEDDING, "--token-counts", "counts.pkl"], 2, ".npy, .txt or .json"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(words, status, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("leafward.measure.audit_matrix.scan", None)  # no audit may begin
    assert main(words) == status
    assert named in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_choices_without_a_choice_are_json_too(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["exit_status"] == 2


def test_errors_are_json_too_and_debug_shows_the_traceback(tmp_path):
    done = leafward("audit", "nothing.npy", "--json", "--debug", cwd=tmp_path)
    assert done.returncode == 1
    assert "nothing.npy" in last_json(done)["error"]
    assert "Traceback" in done.stderr


def test_wrong_words_are_json_too(capsys):
    """What the parser refuses is one plain error like every other: no frame around it, and an object with --json."""
    assert main(["train", "superposition", "--stepz", "3", "--json"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("leafward: error: Unrecognized options: --stepz; did you mean '--steps'?")
    assert "─" not in said.err
    assert json.loads(said.out.splitlines()[-1])["exit_status"] == 2


def test_lists_may_be_given_with_commas(tmp_path):
    words = ["--widths", "4,6,8", "--decays=-1,1", "--axis", "steps,data", "--data-rows", "20", "40,80", "--laws", "1"]
    parsed = train.parse(["superposition", *words, "--out", str(tmp_path)]).config
    assert parsed.widths == (4, 6, 8)
    assert parsed.decays == (-1.0, 1.0)
    assert parsed.axis == ("steps", "data")
    assert parsed.data_rows == (20, 40, 80)
    # A file name may hold a comma.
    assert train.parse(["superposition", "--laws", "counts:a,b.txt"]).config.laws == ("counts:a,b.txt",)


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


def test_audit_gives_the_hyperbolic_radius(tmp_path):
    """Twice the norm, which is the distance of exp₀(z) from the origin of the ball at any curvature."""
    made = {
        name: scale * np.random.default_rng(0).normal(size=(40, 6)) for name, scale in (("text", 0.1), ("image", 0.3))
    }
    for name, rows in made.items():
        np.save(tmp_path / f"{name}.npy", rows.astype(np.float32))
    targets = tuple(str(tmp_path / f"{name}.npy") for name in made)
    plain = audit.run(audit.Args(targets, out=tmp_path / "plain"), Console(file=io.StringIO()))
    assert "radius" not in plain
    found = audit.run(audit.Args(targets, radius=True, out=tmp_path / "out"), Console(file=io.StringIO()))["radius"]
    for rows, each in zip(made.values(), found, strict=True):
        points = poincare.expmap0(torch.from_numpy(rows), 0.7)
        far = poincare.dist(points, torch.zeros_like(points), 0.7)
        assert each["mean"] == pytest.approx(float(far.mean()), rel=1e-5)
        assert each["median"] == pytest.approx(float(far.quantile(0.5)), rel=1e-5)
    assert "Hyperbolic radius of the rows" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_audit_takes_token_counts_from_every_kind_of_file(tmp_path):
    rows = np.random.default_rng(0).standard_normal((60, 8)).astype("f4")
    counts = np.arange(60)
    np.save(tmp_path / "w.npy", rows)
    np.save(tmp_path / "counts.npy", counts)
    np.savetxt(tmp_path / "counts.txt", counts)
    (tmp_path / "counts.json").write_text(json.dumps(counts.tolist()))
    seen = []
    for kind in ("npy", "txt", "json"):
        args = audit.Args((str(tmp_path / "w.npy"),), token_counts=tmp_path / f"counts.{kind}", out=tmp_path / kind)
        seen.append(audit.run(args, Console(file=io.StringIO()))["audits"][0]["frequency"])
    assert seen[0] == seen[1] == seen[2]
    expected = np.corrcoef(np.linalg.norm(rows[1:], axis=1), np.log(counts[1:]))[0, 1]
    assert seen[0]["norm_correlation"] == pytest.approx(expected, abs=1e-5)


def test_targets_of_the_same_name_are_told_apart(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "w.npy", np.random.default_rng(1).standard_normal((40, 8)).astype("f4"))
    targets = tuple(str(tmp_path / folder / "w.npy") for folder in ("a", "b"))
    found = audit.run(audit.Args(targets, out=tmp_path / "out"), Console(file=io.StringIO()))
    assert [model["model"] for model in found["family"]["models"]] == list(targets)


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
    listed = last_json(leafward("list", "--json"))
    assert listed["recipes"]["superposition"][0] == "quick"
    assert listed["tasks"]["data"].keys() == PREPARATIONS.keys()
    assert all(text for family in listed["tasks"].values() for text in family.values())
    script = leafward("completion", "bash").stdout
    for words, completed in (
        ("tr", "train"),
        ("train superp", "superposition"),
        ("bench geometry_", "geometry_accuracy"),
        ("data ind", "index"),
        ("train superposition --width-", "--width-rates"),
        ("train superposition --optim.wid", "--optim.width-rates"),
    ):
        typed = ["leafward", *words.split()]
        check = (
            f"{script}\nCOMP_WORDS=({' '.join(typed)}) COMP_CWORD={len(typed) - 1}; _leafward; echo ${{COMPREPLY[@]}}"
        )
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", check], capture_output=True, text=True, env=environment)
        assert done.stdout.strip() == completed


def test_an_unexpected_error_is_one_line(monkeypatch, capsys):
    def broken(args, console):
        raise RuntimeError("boom")

    monkeypatch.setattr("leafward.cli.list.run", broken)
    assert main(["list"]) == 1
    assert "unexpected RuntimeError: boom (--debug shows where)" in capsys.readouterr().err


def test_every_benchmark_is_told_of_in_a_whole_sentence() -> None:
    from leafward.cli.bench import names

    assert len(names()) > 10
    assert not {name: text for name, text in names().items() if not text.endswith((".", "?"))}


def test_help_of_a_command_by_its_name_and_the_module_as_a_program():
    assert leafward("help", "audit").stdout == leafward("audit", "--help").stdout
    assert leafward("help").stdout == leafward("--help").stdout
    done = subprocess.run([sys.executable, "-m", "leafward", "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == f"leafward {__version__}"


def test_a_reader_that_goes_away_sees_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m leafward.cli --help | head -c 1", shell=True, capture_output=True, text=True
    )
    assert done.stderr == ""
