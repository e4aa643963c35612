"""The superposition recipe from end to end: one small grid, every option, refusals by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.stats import linregress

from leafward.cli.train import parse
from leafward.config import checked, replace, to_dict
from leafward.errors import UsageError
from leafward.files import read_record
from leafward.report import Result, read_run
from leafward.systems.superposition import analysis, packs, train
from leafward.systems.superposition import config as superposition
from leafward.systems.superposition.config import Config
from leafward.systems.superposition.report import _joint

# The quick preset in small: the same signs at looser bounds.
SMALL = replace(
    Config(),
    features=100,
    widths=(5, 7, 10, 14, 20),
    decays=(-1.0, 0.6),
    laws=("1", "2"),
    batch_size=128,
    steps=1500,
    processes=0,
    device="cpu",
    eval_rows=10_000,
)
TINY = replace(
    Config(),
    features=24,
    widths=(3, 4, 6, 9),
    decays=(-1.0, 0.6),
    laws=("power:1",),
    batch_size=32,
    steps=40,
    processes=0,
    device="cpu",
    eval_rows=64,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("small") / "run"
    return out, train.run(SMALL, out)


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {claim["name"]: claim["verdict"] for claim in result["claims"]}


def test_small_grid_has_the_signs_of_the_paper(finished):
    _, result = finished
    found = verdicts(result)
    assert found["strong models with φ½ ≥ 0.99, α = 1"] == "holds"
    assert found["strong − weak exponent"] == "undecided"  # of one seed
    assert found["overlaps more even than random"] == "holds"
    assert found["strong exponent, other laws"] == "not tested here"
    exponents = {(fit["law"], fit["decay"]): fit["exponent"] for fit in result["fits"]}
    assert exponents["power:1", -1.0] == pytest.approx(1.0, abs=0.4)
    assert exponents["power:2", -1.0] > exponents["power:1", -1.0] + 0.2
    slopes = {(fit["law"], fit["decay"]): fit["overlap"]["exponent"] for fit in result["fits"]}
    # Falling, but below 1/m in slope: with so few features few rows are longer than 1, and few vectors overlap less.
    assert 0.4 < slopes["power:1", -1.0] < 1.3


def test_result_holds_every_exponent_and_model(finished):
    out, result = finished
    assert json.loads((out / "result.json").read_text()) == result
    table = result["models"]
    assert len(table["width"]) == 20
    assert {len(column) for column in table.values()} == {20}
    for fit in result["fits"]:
        chosen = [i for i in range(20) if (table["law"][i], table["decay"][i]) == (fit["law"], fit["decay"])]
        widths, losses = ([table[name][i] for i in chosen] for name in ("width", "loss"))
        line = linregress(np.log(widths), np.log(losses))
        assert fit["exponent"] == pytest.approx(-line.slope)
        assert fit["standard_error"] == pytest.approx(line.stderr)
        assert fit["interval"][0] < fit["exponent"] < fit["interval"][1]
        assert fit["automatic"]["exponent"] is not None
        assert set(fit["alternatives"]["delta_aicc"]) == {"power", "exponential", "logarithmic"}
    assert sum(result["norms"]["counts"][0]) == SMALL.features


def test_run_directory_figures_and_report(finished):
    out, result = finished
    run = read_run(out)
    assert [number.name for number in run.headline] == [number["name"] for number in result["headline"]]
    assert run.series["strong loss"][1500] < run.series["weak loss"][1500]
    figures = {path.stem for path in (out / "figures").glob("*.svg")}
    assert figures == {
        "represented",
        "loss-strong",
        "loss-weak",
        "exponents",
        "norms",
        "overlaps",
        "weak-theory",
    }
    for path in (out / "figures").glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    page = (out / "report.html").read_text()
    assert page.count("<svg") == len(figures)
    assert all(claim["verdict"] in page for claim in result["claims"])


def test_finished_run_is_refused_and_its_config_reads_back(finished):
    out, _ = finished
    with pytest.raises(UsageError, match="finished"):
        train.run(SMALL, out)
    assert checked(Config, to_dict(SMALL)) == SMALL


def test_import_is_light():
    code = "import sys, leafward.systems.superposition.config as r; r.PRESETS['quick'](); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "scipy", "matplotlib", "yaml"} & set(loaded)


def test_presets():
    small, large = superposition.PRESETS["paper-small"](), superposition.PRESETS["paper-large"]()
    assert superposition.PRESETS["quick"]() == Config()
    assert len(small.widths) * len(small.decays) * len(small.laws) == 1020
    assert small.decays[2] == pytest.approx(-0.556, abs=1e-3)
    assert small.laws[0] == "power:0"
    assert small.laws[-1] == "power:2"
    models = [model for pack in packs.plan(small, "cpu") for model in pack["models"]]
    assert len(models) == 1020
    assert {(model["lr"], model["bias_lr"]) for model in models} == {(0.01, None)}
    rates = {model["width"]: (model["lr"], model["bias_lr"]) for model in packs._models(large, "linear", 0)}
    assert rates[8] == (0.02, 0.25)
    assert rates[1024] == pytest.approx((0.02 * (8 / 1024) ** 0.25, 2 / 1024))
    assert {pack["options"]["loss_scale"] for pack in packs.plan(replace(large, features=2000), "cpu")} == {100.0}


def test_packs_cover_the_grid_once_and_are_balanced():
    config = replace(Config(), seeds=2, pack=7)
    planned = packs.plan(config, "cpu")
    keys = [(m["law"], m["seed"], m["decay"], m["width"]) for pack in planned for m in pack["models"]]
    assert len(keys) == len(set(keys)) == 6 * 4 * 4 * 2
    assert max(len(pack["models"]) for pack in planned) <= 7
    assert all(len({(m["law"], m["seed"]) for m in pack["models"]}) == 1 for pack in planned)
    sizes = [sum(m["width"] for m in pack["models"]) for pack in planned]
    assert max(sizes) < 1.5 * min(sizes)
    assert len(packs.plan(config, "cuda")) > len(packs.plan(replace(config, pack=None), "cuda")) == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"laws": ("pwer:1",)}, "pwer.*power"),
        ({"laws": ("power:x",)}, "power:x"),
        ({"corr": "block:4"}, "block:SIZE:RHO"),
        ({"density": 20.0}, "density"),
    ],
)
def test_bad_laws_and_data_are_refused_before_anything_is_written(tmp_path, changes, words):
    with pytest.raises(UsageError, match=words):
        train.run(replace(TINY, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"widths": (4, 25)}, "widths.*24.*25"),
        ({"widths": ()}, "widths.*at least one"),
        ({"decays": ()}, "decays.*at least one"),
        ({"laws": ()}, "laws.*at least one"),
        ({"widths": (4, 4)}, "widths.*repeats"),
        ({"decays": (-200.0,)}, "decays.*-200"),
        ({"decays": (float("nan"),)}, "decays.*nan"),
        ({"steps": 0}, "steps.*0"),
        ({"seeds": 0}, "seeds.*0"),
        ({"lr": -1.0}, "lr.*-1"),
        ({"processes": -1}, "processes.*-1"),
        ({"axis": ("data",), "data_rows": ()}, "data_rows.*at least one"),
        ({"steps": "ten"}, "loop.steps must be an integer.*'ten'"),
        ({"widths": (4, 6.5)}, r"widths\[1\] must be an integer.*6.5"),
        ({"axis": ("depth",)}, r"axis\[0\] must be one of data, steps"),
        ({"optim": "lion"}, "optim.name must be one of"),
        ({"executor": "ray"}, "processes must be an integer ≥ 1 on Ray.*0"),
    ],
)
def test_bad_values_are_refused_by_name(changes, words):
    with pytest.raises(UsageError, match=words):
        replace(TINY, **changes)


@pytest.mark.parametrize("name", superposition.NOT_OF_A_FLEET)
def test_what_a_fleet_cannot_do_is_refused_with_its_reason(name):
    given = {"compile": True, "checkpoint_activations": True, "strategy": "fsdp", "ema": 0.9}.get(name, 7)
    allowed = superposition.NOT_OF_A_FLEET[name]
    with pytest.raises(UsageError) as caught:
        replace(TINY, **{f"loop.{name}": given})
    assert str(caught.value).startswith(f"loop.{name} must be {allowed}, got {given!r}")
    with pytest.raises(UsageError, match=r"^arms\.twin must be off, as a fleet has no geometry"):
        replace(TINY, twin=True)


def test_settings_of_earlier_versions_open():
    old = {"batch": 64, "steps": 300, "warmup": 0.2, "seeds": 2, "seed": 5, "lr": 0.02, "optim": "sgd", "workers": 3}
    config = checked(Config, old | {"bias_lr": None, "width_rates": True, "precision": "tf32", "checkpoint_every": 9})
    assert (config.loop.batch_size, config.loop.steps, config.loop.precision) == (64, 300, "tf32")
    assert (config.loop.seed, config.arms.seeds, config.processes, config.loop.workers) == (5, 2, 3, 0)
    assert config.optim == superposition.FleetOptim("sgd", 0.02, None, True, 0.2)
    assert parse(["superposition", "--optim", "muon", "--workers", "2", "--batch", "32"]).config == replace(
        Config(), optim={"name": "muon"}, processes=2, batch_size=32
    )


def test_a_grid_of_fleets_is_a_fleet_for_each_value(tmp_path):
    result = train.run(replace(TINY, steps=20, grid=["optim.lr=0.01,0.02"]), tmp_path / "run")
    assert [row["cell"] for row in result["cells"]] == ["lr=0.01", "lr=0.02"]
    for row in result["cells"]:
        models = read_record(tmp_path / "run" / row["run"] / "result.json")["models"]
        assert len(models["loss"]) == 8
    assert (tmp_path / "run" / "report.html").is_file()


def trained(config: Config, out: Path) -> dict[str, Any]:
    """The analysis of a run without figures."""
    return analysis.analyse(config, packs.train(packs.plan(config, "cpu"), out, workers=0))


@pytest.mark.parametrize("optim", ["adamw", "adam", "sgd", "muon"])
def test_optimisers(tmp_path, optim):
    result = trained(replace(TINY, optim=optim), tmp_path)
    assert all(loss > 0 for loss in result["models"]["loss"])
    assert set(result["models"]["decay"]) == ({0.0} if optim == "adam" else {-1.0, 0.6})
    assert bool(result["notes"]) == (optim == "adam")


def test_sphere_replaces_the_decays_and_counts_as_strong(tmp_path):
    result = trained(replace(TINY, constraint="sphere"), tmp_path)
    assert [fit["regime"] for fit in result["fits"]] == ["strong"]
    assert result["models"]["norm_min"] == pytest.approx([1.0] * 4, rel=1e-5)
    assert "sphere" in result["notes"][0]
    assert verdicts(result)["strong exponent, α ≤ 1"] != "not tested here"


def test_cross_entropy_is_fitted_above_its_floor(tmp_path):
    result = trained(replace(TINY, loss="ce"), tmp_path)
    table = result["models"]
    chosen = [i for i, decay in enumerate(table["decay"]) if decay == -1.0]
    above = [table["loss"][i] - table["loss_floor"][i] for i in chosen]
    slope = linregress(np.log([table["width"][i] for i in chosen]), np.log(above)).slope
    assert next(fit for fit in result["fits"] if fit["decay"] == -1.0)["exponent"] == pytest.approx(-slope)
    assert min(table["loss_floor"]) > 0
    assert "loss above the weak theory" not in verdicts(result)


def test_correlated_features_change_the_data(tmp_path):
    plain, joint = trained(TINY, tmp_path / "a"), trained(replace(TINY, corr="block:4:0.9"), tmp_path / "b")
    assert plain["models"]["loss"] != joint["models"]["loss"]


def test_steps_and_data_give_joint_laws(tmp_path):
    config = replace(TINY, axis=("steps", "data"), data_rows=(20, 60, 200), steps=200, snapshots=5, warmup_ratio=0.05)
    result = trained(config, tmp_path)
    assert len(result["joint"]) == len(result["fits"]) == 2
    fitted = [fit for fit in result["joint"] if "exponents" in fit]
    assert fitted
    for fit in fitted:
        assert fit["rows"] == 4 * 3 * 5
        assert list(fit["exponents"]) == ["m", "steps", "data"]
        for name, (low, high) in fit["intervals"].items():
            assert low <= fit["exponents"][name] <= high * (1 + 1e-12)  # both may stand at the end of the range
            assert (name in fit["undetermined"]) == (low < 0.0101 or high > 9.99)
    # An exponent that the data leave open is said to be so on the page.
    page = Result("joint")
    joint = [fitted[0] | {"undetermined": ["steps"]}, fitted[0] | {"undetermined": []}]
    _joint(page, joint)
    assert page.html().count("do not settle the exponent of steps") == 1
    # The widths themselves are fitted on fresh data alone.
    assert set(result["models"]["dataset_rows"]) == {None}


def test_snapshots_of_steps_do_not_change_the_training(tmp_path):
    plain = trained(TINY, tmp_path / "a")
    stepped = trained(replace(TINY, axis=("steps",), snapshots=4), tmp_path / "b")
    assert stepped["models"]["loss"] == plain["models"]["loss"]
    assert {fit["rows"] for fit in stepped["joint"]} == {4 * 4}


def test_seeds_give_intervals_over_seeds(tmp_path):
    result = trained(replace(TINY, seeds=3), tmp_path)
    for fit in result["fits"]:
        assert "3 clusters" in fit["interval_method"]
        assert [each["seed"] for each in fit["per_seed"]] == [0, 1, 2]
    claim = next(claim for claim in result["claims"] if claim["name"] == "strong exponent, α ≤ 1")
    assert "3 seeds" in claim["interval_method"]


def test_result_survives_a_missing_plotting_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = train.run(TINY, tmp_path / "run")
    assert "matplotlib" in result["notes"][-1]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["notes"] == result["notes"]
    assert not (tmp_path / "run" / "report.html").exists()
