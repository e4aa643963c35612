"""Verdicts and exponents from tables whose truth is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import t

from leafward.config import replace
from leafward.systems.superposition import analysis, claims
from leafward.systems.superposition.config import Config

CONFIG = replace(
    Config(),
    features=1000,
    widths=(10, 15, 25, 39, 63, 100),
    decays=(-1.0, -5 / 9, 5 / 9, 1.0),
    laws=("power:0", "power:1", "power:1.25", "power:1.75", "power:2", "linear"),
    steps=10,
)


def row(law: str, decay: float, width: int, seed: int) -> dict[str, Any]:
    """A model exactly as the paper has it."""
    a = analysis.alpha(law)
    exponent = claims.theory(a, "strong" if decay < 0 else "weak")
    loss = width ** -(0.1 if exponent is None else exponent)
    share = 1.0 if decay < 0 else width / 1000
    return {
        "step": 10,
        "dataset_rows": None,
        "law": law,
        "decay": decay,
        "width": width,
        "seed": seed,
        "loss": loss,
        "loss_floor": 0.0,
        "weak_loss": 0.9 * loss,
        "weak_loss_leading": 0.95 * loss,
        "phi_half": share,
        "phi_one": share / 2,
        "ambiguity": 1.0 + decay,
        "strong_overlap_mean": 0.98 / width if decay < 0 else None,
        "strong_overlap_variance": 1 / width**2 if decay < 0 else None,
        "random_overlap_variance": 2 / width**2,
    }


def table(seeds: int = 1) -> list[dict[str, Any]]:
    keys = (
        (law, decay, m, seed)
        for law in CONFIG.laws
        for decay in CONFIG.decays
        for m in CONFIG.widths
        for seed in range(seeds)
    )
    return [row(*key) for key in keys]


def noisy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with exponents that differ a little from seed to seed."""
    for each in rows:
        each["loss"] *= each["width"] ** (1e-5 * (each["seed"] - 1))
        if each["strong_overlap_mean"] is not None:
            each["strong_overlap_mean"] *= each["width"] ** (1e-5 * (each["seed"] - 1))
    return rows


def result(rows: list[dict[str, Any]], config: Config = CONFIG) -> dict[str, Any]:
    return analysis.analyse(config, {"rows": rows, "norms": [], "failures": [], "time": {}})


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {claim["name"]: claim for claim in found["claims"]}


def test_a_table_as_the_paper_has_it_holds_throughout():
    found = result(noisy(table(seeds=3)), replace(CONFIG, seeds=3))
    assert {claim["verdict"] for claim in found["claims"]} == {"holds"}
    values = by_name(found)
    assert values["strong exponent, α ≤ 1"]["value"] == pytest.approx(1.0, abs=1e-4)
    assert values["strong exponent, other laws"]["value"] == pytest.approx(1.0, abs=1e-4)
    assert values["strong exponent − 2(α−1), α > 1.5"]["value"] == pytest.approx(0.0, abs=1e-4)
    assert values["weak exponent − (α−1)"]["value"] == pytest.approx(0.0, abs=1e-4)
    assert values["exponent of strong rows' overlaps"]["value"] == pytest.approx(1.0, abs=1e-4)
    assert values["strong models with φ½ ≥ 0.99, all laws"]["note"].startswith("216 of 216")
    assert len(found["headline"]) == len(found["claims"])


def spoil_strong_phi(each):
    if each["decay"] < 0 and each["width"] == 10 and each["law"] == "power:2":
        each["phi_half"] = 0.98


def spoil_weak_phi(each):
    if each["decay"] == 1.0 and each["law"] == "power:1":
        each["phi_half"] = 2.6 * each["width"] / 1000


def spoil_flat(each):
    if each["decay"] < 0 and each["alpha_"] in (0.0, 1.0):
        each["loss"] = each["width"] ** -0.7


def spoil_steep(each):
    if each["decay"] < 0 and (each["alpha_"] or 0) > 1.5:
        each["loss"] = each["width"] ** -1.05


def spoil_weak(each):
    """Errors of both signs, which must not cancel."""
    if each["decay"] > 0 and (each["alpha_"] or 0) > 1:
        each["loss"] = each["width"] ** -(each["alpha_"] - 1 + (0.3 if each["decay"] == 1.0 else -0.3))
        each["weak_loss"] = 0.5 * each["loss"]


def spoil_overlap(each):
    if each["decay"] < 0:
        each["strong_overlap_mean"] = each["width"] ** -0.5


def spoil_variance(each):
    if each["decay"] < 0 and each["width"] == 39:
        each["strong_overlap_variance"] = 3 / each["width"] ** 2


def spoil_theory(each):
    if each["decay"] > 0 and each["width"] == 39:
        each["weak_loss"] = 1.2 * each["loss"]


@pytest.mark.parametrize(
    ("spoil", "failing"),
    [
        (spoil_strong_phi, {"strong models with φ½ ≥ 0.99, all laws"}),
        (
            spoil_weak_phi,
            {"weak models with φ½ of about m/n, α = 1", "weak models with φ½ of about m/n, all laws"},
        ),
        (spoil_flat, {"strong exponent, α ≤ 1"}),
        (spoil_steep, {"strong exponent − 2(α−1), α > 1.5"}),
        (spoil_weak, {"weak exponent − (α−1)", "weak exponent − (α−1), clearest cases"}),
        (spoil_overlap, {"exponent of strong rows' overlaps"}),
        (spoil_variance, {"overlaps more even than random"}),
        (spoil_theory, {"loss above the weak theory"}),
    ],
)
def test_each_claim_fails_where_it_is_not_so(spoil, failing):
    rows = table(seeds=3)
    for each in rows:
        each["alpha_"] = analysis.alpha(each["law"])
        spoil(each)
    found = by_name(result(noisy(rows), replace(CONFIG, seeds=3)))
    assert {name for name, claim in found.items() if claim["verdict"] == "does not hold"} == failing


def test_claims_without_their_models_are_not_tested():
    rows = noisy([each for each in table(3) if each["decay"] < 0 and each["law"] == "linear"])
    found = by_name(result(rows, replace(CONFIG, seeds=3)))
    assert found["strong exponent, other laws"]["verdict"] == "holds"
    assert {name for name, claim in found.items() if claim["verdict"] != "not tested here"} == {
        "strong exponent, other laws",
        "strong models with φ½ ≥ 0.99, all laws",
        "exponent of strong rows' overlaps",
    }


def test_with_seeds_the_interval_is_that_of_the_seeds_means():
    rng = np.random.default_rng(0)
    rows = table(seeds=4)
    shift = rng.normal(0, 0.05, 4)
    for each in rows:
        each["loss"] *= each["width"] ** -shift[each["seed"]]
    claim = by_name(result(rows, replace(CONFIG, seeds=4)))["strong exponent, α ≤ 1"]
    reach = t.ppf(0.975, 3) * shift.std(ddof=1) / 2
    assert claim["value"] == pytest.approx(1 + shift.mean())
    assert claim["interval"] == pytest.approx([1 + shift.mean() - reach, 1 + shift.mean() + reach])
    assert claim["interval_method"] == "Student t over 4 seeds"


def test_models_without_a_loss_are_left_out_and_counted():
    rows = table()
    for each in rows:
        if each["width"] == 25:
            each["loss"] = None
    found = result(rows)
    assert f"{len(CONFIG.laws) * 4} models" in found["notes"][0]
    assert by_name(found)["strong exponent, α ≤ 1"]["value"] == pytest.approx(1.0)


def test_too_few_widths_give_no_exponent():
    found = result([each for each in table() if each["width"] in (10, 15)])
    assert all(fit["exponent"] is None for fit in found["fits"])
    assert by_name(found)["strong exponent, α ≤ 1"]["verdict"] == "not tested here"


@pytest.mark.parametrize(
    ("law", "decay", "low"),
    [
        ("power:1.2", -1.0, 32),
        ("linear", -1.0, 32),
        ("exponential:400", -1.0, 8),
        ("power:1.2", 0.1, 64),
        ("linear", 0.1, 8),
        ("exponential:400", 0.1, 8),
    ],
)
def test_ranges_chosen_by_eye_in_the_paper(law, decay, low):
    widths = [8, 16, 32, 64, 128, 256, 512, 1024]
    assert analysis.paper_range(law, decay, widths) == (low, 1024)


def test_the_papers_own_large_losses_give_the_papers_exponents():
    """Losses read off the paper's figure, with the exponents printed there."""
    strong = {
        "exponential:400": ([1.290, 0.941, 0.564, 0.187, 0.114, 0.0461, 0.0334, 0.0102], 1.01, 0.05),
        "power:1.2": ([0.547, 0.414, 0.312, 0.157, 0.0882, 0.029, 0.0307, 0.0088], 0.98, 0.10),
        "linear": ([1.332, 1.242, 0.956, 0.670, 0.335, 0.166, 0.0752, 0.0554], 0.89, 0.05),
    }
    widths = (8, 16, 32, 64, 128, 256, 512, 1024)
    config = replace(CONFIG, features=10_240, widths=widths, decays=(-1.0,), paper_ranges=True)
    for law, (losses, exponent, error) in strong.items():
        rows = [{**row(law, -1.0, m, 0), "loss": loss} for m, loss in zip(widths, losses, strict=True)]
        fit = analysis.fit_cell(config, law, -1.0, rows)
        assert fit["by_hand"]["exponent"] == pytest.approx(exponent, abs=0.012)
        assert fit["by_hand"]["standard_error"] == pytest.approx(error, abs=0.006)
        assert fit["automatic"]["low"] in widths
        assert fit["leave_largest_out"]["log_error"] > 0


def test_theories():
    assert [claims.theory(a, "strong") for a in (0.0, 1.4, 2.0, None)] == [1.0, 1.0, 2.0, 1.0]
    assert claims.theory(1.75, "weak") == pytest.approx(0.75)
    assert claims.theory(1.0, "weak") is None
    assert claims.theory(2.0, "none") is None
    assert math.isclose(analysis.alpha("power:1.5") or 0, 1.5)
    assert analysis.alpha("linear") is None


@pytest.mark.parametrize(
    ("exponents", "verdict"),
    [
        ((1.1, 1.1001, 1.0999), "holds"),
        ((1.0, 1.2, 1.4), "undecided"),
        ((2.1, 2.2, 2.0), "does not hold"),
        ((1.1,), "undecided"),
        ((2.1,), "undecided"),
    ],
)
def test_an_interval_over_seeds_decides_and_one_seed_does_not(exponents, verdict):
    seeds = [{"seed": seed, "exponent": exponent} for seed, exponent in enumerate(exponents)]
    mean = float(np.mean(exponents))
    cell = {"exponent": mean, "interval": (mean - 1e-3, mean + 1e-3), "interval_method": "", "alpha": 1.0}
    found = claims._near("e", "near 1", [cell | {"per_seed": seeds}], lambda cell: 0.0, centre=1.0, within=0.25)
    assert found.verdict == verdict
    assert ("--seeds 3" in found.note) == (len(exponents) == 1)
