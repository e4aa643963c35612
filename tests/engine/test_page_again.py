"""`leafward report RUN` draws the page of a run again, from any folder, and touches nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import crashes
import golden_cases as golden
import golden_data
import golden_runs
import pytest

from leafward.cli.dispatch import main

CASES = {
    "taxonomy": golden.NODES | {"twin": True, "epochs": 2},
    "lathadapter": golden.CACHED | {"hosts": ["coop"], "max_steps": 2},
}


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on data that were named from their own folder."""
    folder = tmp_path_factory.mktemp("report")
    golden_data.make_all(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        golden_runs.train(request.param, CASES[request.param], Path(), Path("run"))
    return folder / "run"


def test_the_page_is_drawn_again_from_another_folder(run: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, page = crashes.left(run), (run / "report.html").read_text(encoding="utf-8")
    (run / "report.html").write_text("spoilt", encoding="utf-8")
    assert main(["report", str(run)]) == 0
    title = page[: page.index("</h1>")]
    assert (run / "report.html").read_text(encoding="utf-8").startswith(title)
    assert crashes.left(run) == before


def test_what_cannot_be_drawn_stays_as_it_is(run: Path, tmp_path: Path, capsys) -> None:
    member = next((run / "members").iterdir())
    assert main(["report", str(member)]) == 2
    result = run / "result.json"
    kept = result.read_bytes()
    result.unlink()
    assert main(["report", str(run)]) == 2
    assert "is not finished" in capsys.readouterr().err
    result.write_bytes(kept)
    (data,) = (Path(each["path"]) for each in json.loads((run / "inputs.json").read_text()).values())
    before = crashes.left(run)
    data.write_bytes(data.read_bytes() + b"\n")
    assert main(["report", str(run)]) == 2
    assert f"{data} has changed" in capsys.readouterr().err
    assert crashes.left(run) == before
