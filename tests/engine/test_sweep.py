"""Ablations and grids: each variant a run of its own, resumed after any end, both sides tuned over the same grid."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leafward.cli.dispatch import main
from leafward.config import load_yaml, replace, to_dict
from leafward.engine import Interrupted
from leafward.engine.sweep import cells_of
from leafward.engine.sweep_report import summarise, table
from leafward.errors import LeafwardError, UsageError
from leafward.hierarchy.embedding import TaxonomyEmbedding
from leafward.report import read_run
from leafward.systems.taxonomy import train
from leafward.systems.taxonomy.config import ABLATIONS, Config

NODES = 15
PROGRAM = """
import json, sys
from leafward.engine import Interrupted
from leafward.systems.taxonomy import train
try:
    train.run(json.loads(sys.argv[1]), sys.argv[2], resume=len(sys.argv) > 3)
except Interrupted as stopped:
    print(stopped)
    sys.exit(stopped.exit_code)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tree") / "tree.csv"
    path.write_text("child,parent\n" + "".join(f"n{i},{f'n{(i - 1) // 2}' if i else ''}\n" for i in range(NODES)))
    return path


@pytest.fixture
def config(tree: Path) -> Config:
    return replace(Config(), data=str(tree), dim=3, epochs=6, batch_size=8, log_every=1, device="cpu")


def scores(out: Path) -> list[Any]:
    """What result.json holds of all cells, without where and how fast."""
    return [row["headline"] for row in json.loads((out / "result.json").read_text())["cells"]]


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it ended before it could be stopped"
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def tuned(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """A grid of learning rates, the best of which lies within it for one side and at its end for the other."""
    out = tmp_path_factory.mktemp("tuned") / "run"
    small = replace(Config(), data=str(tree), dim=3, epochs=20, batch_size=8, device="cpu", twin=True)
    train.run(replace(small, grid=["optim.lr=1e-3,3e-1", "dim=2,3"]), out)
    return out, small


def test_every_cell_is_a_run_of_its_own(tuned) -> None:
    out, small = tuned
    names = ["lr=1e-3,dim=2", "lr=1e-3,dim=3", "lr=3e-1,dim=2", "lr=3e-1,dim=3"]
    assert sorted(path.name for path in (out / "cells").iterdir()) == names
    result = json.loads((out / "result.json").read_text())
    assert [row["cell"] for row in result["cells"]] == names
    assert result["cells"][2]["settings"] == {"optim.lr": 0.3, "dim": 2}
    for name, lr, dim in zip(names, (1e-3, 1e-3, 0.3, 0.3), (2, 3, 2, 3), strict=True):
        cell = out / "cells" / name
        assert load_yaml(Config, cell / "config.yaml") == replace(small, **{"optim.lr": lr}, dim=dim)
        assert {path.name for path in (cell / "members").iterdir()} == {"lorentz-0", "euclidean-0"}
        assert (cell / "report.html").is_file()
    assert {path.name for path in out.iterdir()} >= {"config.yaml", "env.json", "result.json", "report.html", "cells"}
    assert read_run(out).headline[0].name == "mean average precision"


def test_the_same_cell_alone_gives_the_same_numbers(tuned, tmp_path: Path) -> None:
    out, small = tuned
    train.run(replace(small, **{"optim.lr": 0.3}, dim=2), tmp_path / "run")
    alone = json.loads((tmp_path / "run/result.json").read_text())
    assert alone["headline"] == json.loads((out / "result.json").read_text())["cells"][2]["headline"]


def test_both_sides_are_tuned_over_the_same_grid_and_an_edge_is_said(tuned) -> None:
    out, _ = tuned
    result = json.loads((out / "result.json").read_text())
    by_cell = {row["cell"]: row["headline"][0] for row in result["cells"]}
    for side in ("value", "twin"):
        best = max(by_cell, key=lambda name: by_cell[name][side])
        assert result["best"][side] == {
            "cell": best,
            "name": "mean average precision",
            "value": by_cell[best][side],
        }
        assert result["headline"][0][side] == by_cell[best][side]
    assert by_cell["lr=3e-1,dim=3"]["value"] > by_cell["lr=1e-3,dim=3"]["value"]
    page = (out / "report.html").read_text()
    for said in ("optim.lr = 0.3 is the best tried, at the edge", "Euclidean twin: optim.lr = 0.3 is the best tried"):
        assert any(note.startswith(said) for note in result["notes"])
        assert said in page
    assert page.count("<svg") == 2  # one figure for each axis
    assert "★" in page


def row(name: str, value: float | None, twin: float | None = None, better: str = "higher", **settings: Any) -> Any:
    number = {"name": "score", "value": value, "twin": twin, "twin_name": "flat", "better": better}
    return {"cell": name, "settings": settings, "run": f"cells/{name}", "headline": [] if value is None else [number]}


def test_what_lies_within_the_grid_is_not_said_to_be_at_its_edge() -> None:
    rows = [row("a", 1.0, 3.0, lr=0.1), row("b", 2.0, 2.0, lr=1.0), row("c", 1.5, 1.0, lr=10.0)]
    found = summarise(rows)
    assert (found["best"]["value"]["cell"], found["best"]["twin"]["cell"]) == ("b", "a")
    assert found["notes"] == ["flat: lr = 0.1 is the best tried, at the edge of the grid: better may lie beyond"]
    assert (found["headline"][0]["value"], found["headline"][0]["twin"]) == (2.0, 3.0)
    assert found["headline"][0]["note"] == "each side at its best: b, its twin a"
    assert [each[0] for each in table(rows)[1]] == ["a ★ (twin)", "b ★", "c"]


def test_the_edge_is_that_of_all_that_was_tried_and_lower_can_be_better() -> None:
    """The largest rate diverged: it was tried, and the best lies below it. A flat twin knows no curvature."""
    rows = [row("a", 3.0, better="lower", lr=0.1), row("b", 2.0, better="lower", lr=1.0)]
    assert summarise(rows)["best"]["value"]["cell"] == "b"
    assert len(summarise(rows)["notes"]) == 1
    diverged = row("c", None, lr=10.0) | {"failed": "step 3: loss is not finite"}
    assert summarise([*rows, diverged])["notes"] == ["c has no result: step 3: loss is not finite"]
    assert len(table([*rows, diverged])[1]) == 3
    curved = [row("a", 1.0, 5.0, c=0.5), row("b", 2.0, 5.0, c=1.0), row("d", 1.5, 5.0, c=2.0)]
    assert summarise(curved)["notes"] == []


def test_settings_that_are_no_numbers_have_no_edge() -> None:
    rows = [row("a", 1.0, kind="x", widths=[1, 2]), row("b", 2.0, kind="y", widths=[3])]
    assert summarise(rows)["notes"] == []
    assert summarise([row("a", 1.0, better=None, lr=1.0), row("b", 2.0, better=None, lr=2.0)])["best"] == {}  # type: ignore[arg-type]


def test_a_sweep_stopped_in_the_middle_is_resumed(config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = replace(config, grid=["c=0.5,1,2"])
    train.run(grid, tmp_path / "whole")
    calls, forward = [0], TaxonomyEmbedding.forward

    def stopping(self: Any, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == 18:  # in the second cell: each has 12 steps
            signal.raise_signal(signal.SIGTERM)
        return forward(self, batch)

    monkeypatch.setattr(TaxonomyEmbedding, "forward", stopping)
    with pytest.raises(Interrupted, match=r"stopped by SIGTERM after 1 of 3 variants; all is saved in .*part: "):
        train.run(grid, tmp_path / "part")
    assert not (tmp_path / "part/result.json").exists()
    with pytest.raises(UsageError, match="unfinished run; use --resume"):
        train.run(grid, tmp_path / "part")
    with pytest.raises(UsageError, match=r"another configuration: arms\.grid"):
        train.run(replace(grid, grid=["c=0.5,1"]), tmp_path / "part", resume=True)
    train.run(grid, tmp_path / "part", resume=True)
    assert calls[0] == 3 * 12  # no step was made twice
    assert scores(tmp_path / "part") == scores(tmp_path / "whole")
    with pytest.raises(UsageError, match="finished run"):
        train.run(grid, tmp_path / "part", resume=True)


def test_overwrite_clears_the_cells(config, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train.run(replace(config, grid=["c=0.5,1"]), out)
    train.run(replace(config, grid=["dim=2,3"]), out, overwrite=True)
    assert sorted(path.name for path in (out / "cells").iterdir()) == ["dim=2", "dim=3"]
    train.run(config, out, overwrite=True)
    assert not (out / "cells").exists()
    assert (out / "embeddings.safetensors").is_file()


def test_a_lost_page_is_written_again(config, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train.run(replace(config, ablate="objective"), out)
    assert "<svg" in (out / "report.html").read_text()  # no numeric axis: the variants under one another
    (out / "report.html").unlink()
    train.run(replace(config, ablate="objective"), out, resume=True)
    assert (out / "report.html").is_file()


def test_a_variant_that_diverges_does_not_end_the_others(config, tmp_path: Path, monkeypatch) -> None:
    forward = TaxonomyEmbedding.forward
    monkeypatch.setattr(TaxonomyEmbedding, "forward", lambda self, batch: forward(self, batch) * self.margin)
    result = train.run(replace(config, grid=["margin=1,1e39"]), tmp_path / "run")
    good, bad = result["cells"]
    assert good["headline"]
    assert not bad["headline"]
    assert "not finite" in bad["failed"]
    assert any("margin=1e39 has no result" in note for note in result["notes"])
    monkeypatch.setattr(TaxonomyEmbedding, "forward", lambda self, batch: forward(self, batch) * float("inf"))
    with pytest.raises(LeafwardError, match=r"no variant came to its end; margin=1e38"):
        train.run(replace(config, grid=["margin=1e38,1e39"]), tmp_path / "none")


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ({"grid": ["lr"]}, "arms.grid must be NAME=VALUE,VALUE,…, got 'lr'"),
        ({"grid": ["lr=1,,2"]}, "arms.grid must be NAME=VALUE,VALUE,…, got 'lr=1,,2'"),
        ({"grid": ["lr="]}, "arms.grid must be NAME=VALUE,VALUE,…, got 'lr='"),
        ({"grid": ["lrr=1,2"]}, "unknown setting 'lrr'; did you mean 'lr'"),
        ({"grid": ["lr=1,fast"]}, "optim.lr must be a finite number > 0, or None, got 'fast' (in the variant lr=fast)"),
        ({"grid": ["lr=1,1.0"]}, "arms.grid must be without repeats: lr=1 and lr=1.0 are the same"),
        ({"grid": ["lr=1", "optim.lr=2"]}, "arms.grid must be of settings of one model, each named once"),
        ({"grid": ["seeds=1,2"]}, "arms.grid must be of settings of one model, each named once, got 'seeds=1,2'"),
        ({"ablate": "geometri"}, "arms.ablate 'geometri' is not an ablation; did you mean 'geometry'"),
        ({"ablate": "dim", "grid": ["dim=2,3"]}, "arms.grid must be without repeats: dim=2,dim=2 and dim=5,dim=2"),
        ({"ablate": "geometry", "twin": True}, "arms.twin must be left out, as euclidean is its own twin"),
    ],
)
def test_bad_words_are_refused_before_anything_is_written(config, tmp_path: Path, arms, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        train.run(replace(config, arms=arms), tmp_path / "run")
    assert str(caught.value).startswith(said)
    assert not (tmp_path / "run").exists()


def test_a_training_without_ablations_says_so(config) -> None:
    with pytest.raises(UsageError, match=r"arms.ablate must be left out, as this training has no ablations, got 'dim'"):
        cells_of(replace(config, ablate="dim"), {})


def test_what_the_data_refuse_leaves_nothing(config, tmp_path: Path) -> None:
    with pytest.raises(LeafwardError, match=r"gone\.csv"):
        train.run(replace(config, data="gone.csv", grid=["c=0.5,1"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_names_of_cells_are_names_of_folders(config) -> None:
    cells = cells_of(replace(config, ablate="geometry", grid=["root=../a b,.c", "c=0.5"]), ABLATIONS)
    assert [cell.name for cell in cells][:2] == ["lorentz,root=..-a-b,c=0.5", "lorentz,root=.c,c=0.5"]
    (long,) = cells_of(replace(config, grid=[f"root={'x' * 500}"]), ABLATIONS)
    assert len(long.name) < 250


def test_every_ablation_of_every_training_is_of_its_settings() -> None:
    import importlib

    from leafward.cli.train import HOMES

    for home in HOMES.values():
        settings = importlib.import_module(f"{home}.config")
        if not hasattr(settings.Config, "__struct_fields__") or "arms" not in settings.Config.__struct_fields__:
            continue
        for name in getattr(settings, "ABLATIONS", {}):
            assert cells_of(replace(settings.Config(), ablate=name), settings.ABLATIONS)


def test_jobs_in_processes_give_the_same_from_the_command_line(config, tmp_path: Path, capsys) -> None:
    grid = replace(config, grid=["c=0.5,1"])
    train.run(grid, tmp_path / "one")
    words = ["--data", config.data.source, "--dim", "3", "--epochs", "6", "--batch-size", "8", "--log-every", "1"]
    words += ["--device", "cpu", "--grid", "c=0.5,1", "--jobs", "2", "--out", str(tmp_path / "two"), "--json"]
    assert main(["train", "taxonomy", *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["cell"] for row in found["cells"]] == ["c=0.5", "c=1"]
    assert scores(tmp_path / "two") == scores(tmp_path / "one")


def test_several_flags_of_a_grid_are_one_grid() -> None:
    from leafward.cli.train import parse

    words = ["taxonomy", "--grid", "lr=1,2", "--dim", "4", "--arms.grid=c=0.5,1", "--grid", "margin=1", "temperature=2"]
    parsed = parse(words).config
    assert parsed.arms.grid == ("lr=1,2", "c=0.5,1", "margin=1", "temperature=2")
    assert parsed.dim == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.full) for each in (signal.SIGINT, signal.SIGKILL))],
)
def test_a_signal_leaves_every_cell_in_processes_resumable(
    config, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the parent alone, as `kill` sends it; whoever is killed cannot wait for its jobs, which stop by themselves."""
    out = tmp_path / "run"
    grid = replace(config, grid=["c=0.5,1,2"], jobs=2, epochs=4000, checkpoint_every=10**6, log_every=50)
    command = [sys.executable, "-c", PROGRAM, json.dumps(to_dict(grid)), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    cells = [out / "cells" / name for name in ("c=0.5", "c=1")]
    wait_for(lambda: all((cell / "metrics.jsonl").exists() for cell in cells), process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert f"stopped by {signal.Signals(number).name} after 0 of 3 variants; all is saved in {out}: " in said
    calls, forward = [0], TaxonomyEmbedding.forward

    def stopping(self: Any, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            signal.raise_signal(signal.SIGTERM)
        return forward(self, batch)

    monkeypatch.setattr(TaxonomyEmbedding, "forward", stopping)
    for cell in cells:
        end = time.monotonic() + 120
        while time.monotonic() < end and not any((cell / "checkpoints").glob("step-*")):
            time.sleep(0.05)
        (checkpoint,) = (cell / "checkpoints").glob("step-*")  # of the step of the signal: no other was due
        assert not (cell / "result.json").exists()
        calls[0] = 0
        with pytest.raises(Interrupted, match=f"after step {int(checkpoint.name[5:]) + 3};"):
            train.run(load_yaml(Config, cell / "config.yaml"), cell, resume=True)
    assert not (out / "cells" / "c=2").exists()
