"""The audit of every matrix: exact columns against float64, verdicts of noise and of structure, files, bad input."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import leafward
import leafward.measure.survey_matrices
from leafward.cli.dispatch import main
from leafward.data.arrays import rows_of_tensor
from leafward.data.samples import embedded
from leafward.errors import DataError, UsageError
from leafward.measure import survey
from leafward.measure.columns import COLUMNS
from leafward.measure.figures import beyond
from leafward.measure.measured import Measured
from leafward.measure.moments import Rows, moments
from leafward.measure.survey_report import NOTHING


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def brute(x: np.ndarray, centred: bool = False) -> tuple[float, float, float, float]:
    """Mean overlap, m·⟨o²⟩, participation ratio and effective rank from the whole Gram matrix in float64."""
    x = x.astype(np.float64)
    x = x[np.linalg.norm(x, axis=1) > 0]
    if centred:
        x = x - x.mean(0)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    gram = unit @ unit.T
    off = gram[~np.eye(len(x), dtype=bool)]
    share = np.linalg.eigvalsh(unit.T @ unit).clip(1e-300) / len(x)
    return off.mean(), x.shape[1] * (off**2).mean(), 1 / (share**2).sum(), float(np.exp(-(share * np.log(share)).sum()))


@pytest.mark.parametrize("shape", [(700, 40), (40, 90), (64, 64)])
@pytest.mark.parametrize("size", [1.0, 1e-12, 1e12])
def test_exact_columns_are_those_of_float64(shape: tuple[int, int], size: float, monkeypatch) -> None:
    monkeypatch.setattr("leafward.measure.moments.SLICE_BYTES", 20_000)  # many slices
    x = random(*shape) * torch.linspace(2, 0.1, shape[1]) + 0.4
    x[5] = 0
    found = moments(Rows(rows_of_tensor(x * size), shape[0]), 16, 0)
    for view, centred in ((found.raw, False), (found.centred, True)):
        mean, scaled, participation, rank = brute(x.numpy(), centred)
        assert view.mean == pytest.approx(mean, abs=2e-5)
        assert view.scaled == pytest.approx(scaled, rel=2e-4)
        assert view.participation == pytest.approx(participation, rel=2e-4)
        if not centred:
            assert view.effective_rank == pytest.approx(rank, rel=1e-3)
    np.testing.assert_allclose(found.norms, np.linalg.norm(x.double(), axis=1) * size, rtol=1e-5)
    np.testing.assert_array_equal(found.sample, (x * size)[found.index])
    if size == 1.0:
        sigma = np.linalg.svd(x.double(), compute_uv=False)
        assert found.stable_rank == pytest.approx((sigma**2).sum() / sigma[0] ** 2, rel=1e-4)
        assert found.spectral == pytest.approx(sigma[0], rel=1e-4)


def test_the_package_offers_the_function_and_no_module_hides_it() -> None:
    assert callable(leafward.measure.survey)
    assert leafward.survey is survey


def test_rows_can_be_left_out() -> None:
    x, keep = random(300, 20), np.arange(300) % 3 > 0
    part = moments(Rows(rows_of_tensor(x), 300, keep), 10, 0)
    whole = moments(Rows(rows_of_tensor(x[torch.from_numpy(keep)]), 200), 10, 0)
    assert part.raw == whole.raw
    assert part.centred == whole.centred


@pytest.mark.parametrize("shape", [(900, 48), (48, 120), (400, 3)])
def test_noise_is_not_called_anything(shape: tuple[int, int]) -> None:
    for seed, unit in ((0, False), (1, True)):
        x = random(*shape, seed=seed)
        report = survey(torch.nn.functional.normalize(x) if unit else x, seed=seed)
        assert report.rows[0].calls == ()
        assert report.rows[0].verdict == NOTHING


def test_an_untrained_gpt2_is_not_called_anything(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=48, n_head=4, vocab_size=600, n_positions=64, bos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    report = survey(tmp_path, against="init")
    assert len(report.rows) == 10
    assert [row.calls for row in report.rows] == [()] * 10
    assert set(report.rows[-1].nulls) == {"spectrum", "shuffled", "isotropic", "init"}


def test_the_demo_s_head_is_two_things() -> None:
    """253 of its 512 rows are nearly equal: unused tokens. The other 259 are told apart from noise by themselves."""
    row = survey(embedded("stories260k_embedding.npy")).rows[0]
    assert [len(each.rows) for each in row.clusters] == [253]
    assert row.rows_without == 260
    assert row.values["overlap"].value == pytest.approx(20.2, abs=0.1)
    assert row.without is not None
    assert row.without["overlap"].value == pytest.approx(2.61, abs=0.02)
    assert row.calls[0] == COLUMNS["duplicates"].above
    assert "without them: the rows crowd together" in row.calls


def test_trees_are_called_tree_like() -> None:
    """Rows that are sums of independent steps along a binary tree have its distances squared: near-leaves are alike."""
    rng = np.random.default_rng(0)
    rows = np.zeros((1, 400))
    for level in range(9):
        steps = rng.normal(size=(2 * len(rows), 400)) * 0.6**level
        rows = np.repeat(rows, 2, axis=0) + steps
    row = survey(rows.astype(np.float32)).rows[0]
    assert "more tree-like" in row.calls or "without them: more tree-like" in row.calls


def test_the_one_rule() -> None:
    nulls = {"a": Measured(1.0, 0.1, 16), "b": Measured(1.2, 0.1, 16)}
    assert beyond(Measured(3.0, 0.1, 16), nulls, 0.95) == 1
    assert beyond(Measured(-1.0, 0.1, 16), nulls, 0.95) == -1
    assert beyond(Measured(1.6, 0.1, 16), nulls, 0.95) == 0
    assert beyond(Measured(0.5, 0.01, 16), {**nulls, "c": Measured(0.2, 0.1, 16)}, 0.95) == 0
    assert beyond(Measured(3.0), nulls, 0.95) == 0
    assert beyond(Measured(3.0, 0.1, 16), {}, 0.95) == 0


def test_clusters_among_more_rows_than_the_sample_are_filled_up() -> None:
    x = random(3000, 24)
    x[100:700] = x[100] + 1e-3 * random(600, 24, seed=1)
    row = survey(x, sample=512).rows[0]
    assert len(row.clusters) == 1
    np.testing.assert_array_equal(np.sort(row.clusters[0].rows), np.arange(100, 700))
    assert row.rows_without == 2401


def written(folder: Path) -> Path:
    held = {"a.weight": random(200, 16), "b.weight": random(20, 30), "nan.weight": random(10, 4)}
    held["nan.weight"][3, 1] = torch.nan
    save_file(held, folder / "m.safetensors")
    return folder / "m.safetensors"


def test_a_report_is_a_frame_a_csv_a_parquet_and_json(tmp_path: Path) -> None:
    pandas, parquet = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.parquet")
    report = survey(written(tmp_path))
    assert "1 of 10 rows with NaN" in report.row("nan.weight").verdict
    frame = report.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["matrix"].tolist() == ["a.weight", "b.weight", "nan.weight"]
    assert frame["delta_low"][0] < frame["delta"][0] < frame["delta_high"][0]
    assert frame["delta_isotropic"].notna().sum() == 2
    report.write_csv(tmp_path / "m.csv")
    with (tmp_path / "m.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["overlap"]) == pytest.approx(report.rows[0].values["overlap"].value)
    report.write_parquet(tmp_path / "m.parquet")
    assert parquet.read_table(tmp_path / "m.parquet").num_rows == 3
    said = json.loads(report.to_json())
    assert said["matrices"][0]["values"]["delta"]["low"] == pytest.approx(frame["delta_low"][0])


def test_the_command_leaves_a_page_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(written(tmp_path))
    assert main(["audit", target, "--quick", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "a.weight" in said
    assert {each.name for each in (tmp_path / "out").iterdir()} >= {"audit.json", "report.html", "matrices.csv"}
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Every matrix is a cloud of points" in page
    page_of_both = ["report", str(tmp_path / "out"), str(tmp_path / "again"), "--out", str(tmp_path / "both.html")]
    assert main(["audit", target, "--quick", "--seed", "1", "--out", str(tmp_path / "again")]) == 0
    assert main(page_of_both) == 0
    assert "a.weight" in (tmp_path / "both.html").read_text(encoding="utf-8")
    assert main(["audit", target, "--tensor", "a.weight", "--out", str(tmp_path / "one")]) == 0
    held = json.loads((tmp_path / "one" / "audit.json").read_text(encoding="utf-8"))
    assert len(held["matrices"]) == 1
    assert held["audits"][0]["tensor"] == "a.weight"


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.zeros(100, 8), "0 non-zero rows"),
        (torch.zeros(100, 1), "one column"),
        (torch.full((50, 4), torch.inf), "50 of 50 rows with NaN or values that are infinite"),
        (torch.zeros(1, 8), "at least two rows"),
        (torch.zeros(0, 8), "at least two rows"),
    ],
)
def test_what_cannot_be_measured_gets_a_sentence(matrix: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        survey(matrix)


def test_degenerate_matrices_have_no_number_that_means_nothing() -> None:
    equal = survey(torch.ones(100, 8)).rows[0]
    assert "all rows are equal" in " ".join(equal.notes)
    assert not equal.nulls
    assert equal.values["overlap"].value == pytest.approx(8)
    assert not np.isfinite(equal.values["overlap_centred"].value)
    assert "delta" not in equal.values
    line = survey(torch.arange(1, 101)[:, None] * torch.ones(1, 6)).rows[0]
    assert line.values["effective_rank"].value == pytest.approx(1, abs=1e-3)
    assert line.values["stable_rank"].value == pytest.approx(1, abs=1e-5)
    few = survey(random(3, 8)).rows[0]
    assert "fewer than 16 rows differ" in " ".join(few.notes)
    twice = survey(random(20, 6).repeat(10, 1)).rows[0]
    assert len(twice.clusters) == 20


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sample must be at least 64"):
        survey(random(100, 8), sample=3)
    with pytest.raises(UsageError, match="against must be 'init'"):
        survey(random(100, 8), against="start")
    with pytest.raises(UsageError, match="--against init: array does not say what its architecture is"):
        survey(random(100, 8), against="init")


def test_every_column_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "measure.md").read_text(encoding="utf-8")
    explained = [line for line in page.splitlines() if line.startswith("| ")]
    first = [name.strip() for line in explained for name in line.split("|")[1].split(",")]
    assert [column.title for column in COLUMNS.values() if column.title not in first] == []
