"""Compute-optimal allocation, tables of losses, broken laws, and width fits with depth and data."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from leafward.cli.dispatch import main
from leafward.errors import DataError, UsageError
from leafward.stats.power_laws import compare_laws, compute_laws, fit_joint_law, fit_width
from leafward.stats.power_laws.compute import optimum
from leafward.stats.power_laws.tables import read_table

LAW = (0.34, 0.28, 406.4, 410.7, 1.69)  # α, β, A, B, E of Hoffmann et al. 2022
POINTS = Path(__file__).parents[4] / "shared" / "data" / "scaling_tables" / "chinchilla_svg_extracted_data.csv"


def loss(n: np.ndarray, d: np.ndarray) -> np.ndarray:
    alpha, beta, a, b, e = LAW
    return e + a * n**-alpha + b * d**-beta


def runs(noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Five IsoFLOP curves of nine sizes each, as in the published design."""
    compute = np.geomspace(1e19, 1e21, 5)
    n, d = [], []
    for budget in compute:
        best = optimum(budget, np.array([LAW]))[0][0]
        size = best * np.geomspace(0.25, 4, 9)
        n.append(size)
        d.append(budget / 6 / size)
    size, tokens = np.concatenate(n), np.concatenate(d)
    return size, tokens, loss(size, tokens) * np.exp(noise * np.random.default_rng(seed).normal(size=len(size)))


def test_the_optimum_is_the_least_loss_at_that_compute() -> None:
    n, d, least = (float(each[0]) for each in optimum(5.76e23, np.array([LAW])))
    assert 6 * n * d == pytest.approx(5.76e23)
    sizes = n * np.geomspace(0.5, 2, 2001)
    found = loss(sizes, 5.76e23 / 6 / sizes)
    assert sizes[found.argmin()] == pytest.approx(n, rel=1e-3)
    assert least == pytest.approx(found.min())


def test_all_approaches_find_the_law_that_made_the_runs() -> None:
    found, missing = compute_laws(*runs(1e-4), budgets=[1e22], resamples=60)
    assert not missing
    truth = LAW[1] / (LAW[0] + LAW[1])
    best = optimum(1e22, np.array([LAW]))
    assert [each.approach for each in found] == ["1", "2", "3, variable projection", "3, Huber"]
    for each in found[1:]:
        assert each.exponent == pytest.approx(truth, abs=0.02)
        assert each.allocations[0].size == pytest.approx(best[0][0], rel=0.15)
        assert each.allocations[0].size * each.allocations[0].tokens == pytest.approx(1e22 / 6)
    for each in found[2:]:
        assert each.parameters is not None
        np.testing.assert_allclose(list(each.parameters.values()), LAW, rtol=0.25)
        assert each.allocations[0].loss == pytest.approx(best[2][0], rel=1e-3)


def test_the_interval_of_the_allocation_covers_as_often_as_it_says() -> None:
    truth = LAW[1] / (LAW[0] + LAW[1])
    inside = 0
    for seed in range(30):
        n, d, y = runs(0.003, seed)
        from leafward.stats.power_laws.compute import varpro_law

        inside += truth in varpro_law(n, d, y, np.array([]), 100, 0.95, seed).interval
    assert inside >= 24


def test_a_table_without_isoflop_curves_says_so() -> None:
    rng = np.random.default_rng(1)
    n, d = np.exp(rng.uniform(16, 20, 12)), np.exp(rng.uniform(20, 24, 12))
    _, missing = compute_laws(n, d, loss(n, d), resamples=20)
    assert any("approach 2 needs at least 3 IsoFLOP curves" in each for each in missing)
    _, missing = compute_laws(n, 20 * n, loss(n, 20 * n), resamples=20)
    assert any("N and D that vary independently" in each for each in missing)


@pytest.mark.skipif(not POINTS.is_file(), reason="the published points are not here")
def test_the_published_points_give_the_replication_s_law() -> None:
    """Besiroglu et al. 2024, without the five worst rows: α .3478, β .3658, A 482.0, B 2085.4, E 1.8172."""
    table = read_table(POINTS)
    keep = np.argsort(-table.numbers["loss"])[5:]
    found, _ = compute_laws(*(table.numbers[name][keep] for name in ("N", "D", "loss")), resamples=20)
    parameters = found[-1].parameters
    assert parameters is not None
    np.testing.assert_allclose([parameters[k] for k in ("α", "β", "E")], [0.3478, 0.3658, 1.8172], rtol=0.01)


def test_a_broken_power_law_is_told_from_a_plain_one() -> None:
    x = np.geomspace(1, 1000, 16)
    noise = np.exp(0.01 * np.random.default_rng(2).normal(size=16))
    kinked = np.where(x < 30, x**-0.2, 30**0.6 * x**-0.8) * noise
    found = compare_laws(x, kinked, broken=True)
    assert found.best.name == "broken"
    assert found.best.parameters["a"] == pytest.approx(0.2, abs=0.08)
    assert found.best.parameters["b"] == pytest.approx(0.8, abs=0.08)
    assert compare_laws(x, x**-0.5 * noise, broken=True).best.name == "power"
    with pytest.raises(UsageError, match="at least 8"):
        compare_laws(x[:6], kinked[:6], broken=True)


def table_of(depths: list[int]) -> dict[str, list]:
    widths = [32, 48, 64, 96, 128, 192, 256, 384, 64, 128]
    rows = [
        (f"g{i}", corpus, m, depth, 20 / m**0.9 + 3 / depth + offset)
        for i, (m, depth) in enumerate(zip(widths, depths, strict=True))
        for corpus, offset in (("a", 1.0), ("b", 1.5))
    ]
    names = ("models", "corpora", "m", "depth", "loss")
    return {name: [row[k] for row in rows] for k, name in enumerate(names)}


def test_depth_is_in_the_width_fit_and_not_passed_over() -> None:
    """20/m^.9 + 3/depth was fitted as .754 without a word."""
    table = table_of([2, 8, 4, 2, 8, 4, 6, 3, 12, 3])
    found = fit_width(**table, resamples=100)
    assert found.exponent == pytest.approx(0.9, abs=1e-3)
    assert found.joint is not None
    assert found.joint.exponents["depth"] == pytest.approx(1.0, abs=1e-3)
    assert "beside depth" in found.summary()
    predicted = found.joint.predict({"m": [64.0], "depth": [4.0]}, ["b"])
    assert predicted[0] == pytest.approx(20 / 64**0.9 + 3 / 4 + 1.5, rel=1e-4)
    alone = fit_width(**{name: column for name, column in table.items() if name != "depth"}, resamples=100)
    assert abs(alone.exponent - 0.9) > 0.1


def test_a_column_that_cannot_be_told_from_the_width_is_refused_by_name() -> None:
    table = table_of([2, 3, 4, 6, 8, 12, 16, 24, 4, 8])
    with pytest.raises(DataError, match=r"depth: the models differ in it.*depth follows from the other columns"):
        fit_width(**table)
    constant = fit_width(**table_of([6] * 10), resamples=100)
    assert constant.joint is None
    assert "depth is 6 for all models and is not in the fit" in constant.summary()


def test_the_product_of_growth_and_size_predicts_the_width_exponent() -> None:
    table = table_of([6] * 10)
    m = np.array(table["m"], dtype=float)
    found = fit_width(**table, params=100 * m**2.5, resamples=100)
    assert found.growth == pytest.approx(2.5)
    assert found.product == pytest.approx(0.9, rel=0.02)


def test_joint_laws_take_an_offset_for_each_group() -> None:
    rng = np.random.default_rng(3)
    n, d = np.exp(rng.uniform(14, 20, 60)), np.exp(rng.uniform(18, 24, 60))
    groups = np.array(["a", "b", "c"] * 20)
    y = 400 * n**-0.34 + 410 * d**-0.28 + np.where(groups == "a", 1.0, np.where(groups == "b", 1.4, 2.0))
    found = fit_joint_law({"N": n, "D": d}, y, groups=groups)
    assert found.offsets == pytest.approx({"a": 1.0, "b": 1.4, "c": 2.0}, abs=1e-3)
    np.testing.assert_allclose(found.predict({"N": n, "D": d}, groups), y, rtol=1e-5)
    with pytest.raises(UsageError, match="'z' was not in the fit"):
        found.predict({"N": [1e6], "D": [1e9]}, ["z"])
    with pytest.raises(UsageError, match="groups is needed"):
        found.predict({"N": [1e6], "D": [1e9]})


def written(folder: Path, header: str, rows: list[tuple]) -> Path:
    path = folder / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(header.split(";"))
        writer.writerows(rows)
    return path


def test_tables_are_read_by_what_people_call_their_columns(tmp_path: Path) -> None:
    path = written(tmp_path, "Model Size;Training FLOP;eval;note", [(1e8, 6e18, 3.0, "x"), (2e8, 6e18, 2.9, "y")])
    table = read_table(path, {"loss": "eval"})
    np.testing.assert_allclose(table.numbers["D"], [1e10, 5e9])
    assert table.unused == ("note",)
    with pytest.raises(DataError, match="has no column of losses"):
        read_table(path)
    with pytest.raises(UsageError, match="no column 'evil'; did you mean 'eval'"):
        read_table(path, {"loss": "evil"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("N,loss\n", "no rows below its header"),
        ("N,loss\n1\n", "line 2: expected 2 fields"),
        ("N,loss\n1,-2\n", "line 2: loss must be a positive number, got '-2'"),
        ("N,loss\n1,nan\n", "must be a positive number"),
        ("N,N,loss\n1,1,2\n", "names a column twice"),
    ],
)
def test_broken_tables_get_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_table(tmp_path / "t.csv")


def test_the_command_writes_the_law_its_allocation_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    n, d, y = runs(0.001)
    path = written(tmp_path, "params;tokens;loss", list(zip(n, d, y, strict=True)))
    words = ["fit", str(path), "--budget", "1e22", "--resamples", "100", "--out", str(tmp_path / "out"), "--json"]
    assert main(words) == 0
    from leafward.files import read_record

    found = read_record(tmp_path / "out" / "fit.json")
    assert found["law"]["exponents"]["N"] == pytest.approx(0.34, abs=0.06)
    assert [each["approach"] for each in found["compute_optimal"]][:2] == ["1", "2"]
    assert found["extrapolation"]["error"] < 0.02
    assert "Compute-optimal" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    for wrong, message in (
        (["--x", "Q"], "--x Q"),
        (["--x", "depth"], "has no such column"),
        (["--columns", "N"], "write NAME=COLUMN"),
        (["--budget", "-1"], "--budget must be positive"),
    ):
        assert main(["fit", str(path), *wrong, "--out", str(tmp_path / "no")]) in (1, 2)
        assert message in " ".join(capsys.readouterr().err.split())
