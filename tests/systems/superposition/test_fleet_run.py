"""A fleet as a whole: packing, snapshots, resuming, errors."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import leafward.systems.superposition
from leafward.errors import DataError, UsageError
from leafward.systems.superposition import Fleet, FleetOptions, ModelSpec, log_steps, width_scaled_rates

SETTINGS: dict[str, Any] = {"features": 50, "batch": 64, "steps": 40}
MIXED = [
    ModelSpec(width=9, decay=-0.556),
    ModelSpec(width=4, decay=0.333, lr=0.02, bias_lr=0.05),
    ModelSpec(width=9, decay=1.0, law="power:2", seed=1),
    ModelSpec(width=4, decay=-1.0, law="uniform", density=2.0, seed=1),
    ModelSpec(width=17, decay=0.0),
    ModelSpec(width=1, decay=-0.1),
]


def distance(fleet: Fleet, index: int, other: Fleet, other_index: int) -> float:
    pairs = zip(fleet.weights(index), other.weights(other_index), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("optimiser", ["adamw", "adam", "sgd", "muon"])
@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_packed_run_equals_separate_runs(optimiser, loss):
    models = [ModelSpec(m.width, 0.0, m.law, m.density, m.seed) for m in MIXED] if optimiser == "adam" else MIXED
    settings = SETTINGS | {"optimiser": optimiser, "loss": loss, "precision": "float64"}
    fleet = Fleet(models, **settings)
    fleet.run()
    for index, model in enumerate(models):
        alone = Fleet([model], **settings)
        alone.run()
        assert distance(fleet, index, alone, 0) < 1e-10


def test_packed_run_equals_separate_runs_in_single_precision():
    fleet = Fleet(MIXED, **SETTINGS)
    fleet.run(10)
    for index, model in enumerate(MIXED):
        alone = Fleet([model], **SETTINGS)
        alone.run(10)
        assert distance(fleet, index, alone, 0) < 1e-6


@pytest.mark.parametrize("threads", [1, 2])
def test_many_models_in_several_packs_and_threads(threads):
    """More models than one pack holds, with threads: nothing is lost or mixed up, and the setting is restored."""
    models = [ModelSpec(width, decay) for width, decay in itertools.product((3, 5, 8), (-1.0, -0.5, 0.5, 1.0, 0.1))]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fleet = Fleet(models, precision="float64", **SETTINGS)
        fleet.run(12)
        table = fleet.measure(rows=256)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert [(row["width"], row["decay"]) for row in table] == [(m.width, m.decay) for m in models]
    alone = Fleet([models[7]], precision="float64", **SETTINGS)
    alone.run(12)
    assert distance(fleet, 7, alone, 0) < 1e-11
    assert alone.measure(rows=256)[0]["loss"] == pytest.approx(table[7]["loss"], rel=1e-10)


@pytest.mark.parametrize("optimiser", ["adamw", "sgd", "muon"])
def test_resume_is_bit_for_bit(optimiser):
    settings = SETTINGS | {"optimiser": optimiser, "dataset_rows": 100, "correlation": "block:5:0.3"}
    whole = Fleet(MIXED, **settings)
    whole.run()
    first = Fleet(MIXED, **settings)
    first.run(13)  # in the middle of the batches that are drawn together
    second = Fleet(MIXED, **settings)
    second.load_state_dict(first.state_dict())
    assert second.step == 13
    second.run()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_state_of_another_fleet_is_refused():
    fleet = Fleet(MIXED, **SETTINGS)
    with pytest.raises(DataError, match="another fleet"):
        fleet.load_state_dict(Fleet(MIXED[:2], **SETTINGS).state_dict())
    with pytest.raises(DataError, match="another fleet"):
        fleet.load_state_dict(Fleet(MIXED, optimiser="sgd", **SETTINGS).state_dict())


def test_callback_at_snapshots_and_at_the_end():
    seen: list[int] = []
    fleet = Fleet(MIXED[:1], **SETTINGS)
    fleet.run(callback=lambda f: seen.append(f.step), at=[1, 7, 40, 99])
    assert seen == [1, 7, 40]
    fleet.run(callback=lambda f: seen.append(f.step))
    assert fleet.step == 40
    assert log_steps(1000, 4) == [1, 10, 100, 1000]
    assert log_steps(3, 10) == [1, 2, 3]


def test_snapshots_do_not_change_the_training():
    plain, watched = Fleet(MIXED, **SETTINGS), Fleet(MIXED, **SETTINGS)
    plain.run()
    watched.run(callback=lambda f: f.measure(rows=64), at=log_steps(40, 5))
    for index in range(len(MIXED)):
        assert distance(plain, index, watched, index) == 0


def test_same_seed_means_same_start_and_paired_data():
    fleet = Fleet([ModelSpec(5, -1.0), ModelSpec(5, 1.0), ModelSpec(5, 1.0, seed=1)], **SETTINGS)
    assert distance(fleet, 0, fleet, 1) == 0
    assert distance(fleet, 0, fleet, 2) > 0.1
    weights, bias = fleet.weights(0)
    assert float(weights.var()) == pytest.approx(1 / 5, rel=0.2)
    assert float(bias.var()) == pytest.approx(1.0, rel=0.5)


def test_training_loss_is_of_the_parameters_before_the_step():
    fleet = Fleet(MIXED[:1], precision="float64", **SETTINGS)
    weights, bias = fleet.weights(0)
    x = next(iter(fleet._packs[0].stream.training(0, 1))).dense()
    expected = (torch.relu(x @ weights @ weights.t() + bias) - x).square().sum(1).mean()
    fleet.run(1)
    assert fleet.measure(rows=64)[0]["train_loss"] == pytest.approx(float(expected))


def test_rates_of_the_large_experiment():
    assert width_scaled_rates(8) == {"lr": 0.02, "bias_lr": 0.25}
    assert width_scaled_rates(128)["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("models", "changes", "message"),
    [
        ([], {}, "at least one model"),
        ([ModelSpec(0)], {}, "model 0: width"),
        ([ModelSpec(51)], {}, "model 0: width"),
        ([ModelSpec(5, float("nan"))], {}, "decay must be finite"),
        ([ModelSpec(5), ModelSpec(5, lr=0.0)], {}, "model 1: lr"),
        ([ModelSpec(5, bias_lr=-1.0)], {}, "bias_lr"),
        ([ModelSpec(5, seed=-1)], {}, "seed"),
        ([ModelSpec(5, 0.5)], {"optimiser": "adam"}, "'adamw'"),
        ([ModelSpec(5, 0.5)], {"constraint": "sphere"}, "sphere"),
        ([ModelSpec(5)], {"optimiser": "admw"}, "did you mean 'adam"),
        ([ModelSpec(5)], {"loss": "hinge"}, "allowed: ce, mse"),
        ([ModelSpec(5)], {"constraint": "spere"}, "did you mean 'sphere'"),
        ([ModelSpec(5)], {"precision": "bfloat16"}, "precision"),
        ([ModelSpec(5)], {"precision": "tf32"}, "cuda"),
        ([ModelSpec(5)], {"device": "meta"}, "device"),
        ([ModelSpec(5)], {"device": "gpu"}, "device"),
        ([ModelSpec(5)], {"device": "cuda:99"}, "device='cuda:99'"),
        ([ModelSpec(5)], {"batch": 0}, "batch"),
        ([ModelSpec(5)], {"steps": 0}, "steps"),
        ([ModelSpec(5)], {"dataset_rows": 0}, "dataset_rows"),
        ([ModelSpec(5)], {"warmup": 1.5}, "warmup"),
        ([ModelSpec(5)], {"loss_scale": 0.0}, "loss_scale"),
        ([ModelSpec(5)], {"correlation": "block:2"}, "block:SIZE:RHO"),
        ([ModelSpec(5)], {"feature": 7}, "did you mean 'features'"),
        ([ModelSpec(5, law="cubic")], {}, "law"),
    ],
)
def test_bad_input_is_refused_by_name(models, changes, message):
    with pytest.raises(UsageError, match=message):
        Fleet(models, FleetOptions(**SETTINGS), **changes)


def test_bad_requests_of_a_fleet():
    fleet = Fleet(MIXED, **SETTINGS)
    with pytest.raises(UsageError, match="index"):
        fleet.weights(6)
    with pytest.raises(UsageError, match="rows"):
        fleet.measure(rows=0)
    with pytest.raises(UsageError, match="steps"):
        fleet.run(-1)


def test_a_vector_as_law():
    p = np.linspace(0.2, 0.01, 50)
    fleet = Fleet([ModelSpec(5, law=p, density=None)], **SETTINGS)
    fleet.run(2)
    row = fleet.measure(rows=64)[0]
    assert row["law"] == "given"
    assert row["density"] == pytest.approx(p.sum())


def test_public_names_are_lazy_and_listed():
    assert set(leafward.systems.superposition.__all__) <= set(dir(leafward.systems.superposition))
    for name in leafward.systems.superposition.__all__:
        assert callable(getattr(leafward.systems.superposition, name)), name
    with pytest.raises(AttributeError, match="fleets"):
        _ = leafward.systems.superposition.fleets  # type: ignore[attr-defined]
