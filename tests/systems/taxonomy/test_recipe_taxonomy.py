"""The taxonomy recipe from end to end: files, twin, resume, refusals; what it saves can be indexed and searched."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from scipy import stats

from leafward.cli.dispatch import main
from leafward.config import checked, replace, to_dict
from leafward.engine import Interrupted, RunDirectory
from leafward.errors import DataError, UsageError
from leafward.geometry import Lorentz
from leafward.hierarchy import Taxonomy
from leafward.hierarchy.embedding import TaxonomyEmbedding
from leafward.report import new_figure, read_run
from leafward.systems.taxonomy import embed as training
from leafward.systems.taxonomy import evaluate_search, train
from leafward.systems.taxonomy import figures as _taxonomy_report
from leafward.systems.taxonomy import index as data_index
from leafward.systems.taxonomy.config import Config

NODES = 31


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A binary tree of 31 nodes as a CSV."""
    path = tmp_path_factory.mktemp("tree") / "tree.csv"
    path.write_text("child,parent\n" + "".join(f"n{i},{f'n{(i - 1) // 2}' if i else ''}\n" for i in range(NODES)))
    return path


def config_of(tree: Path, **more) -> Config:
    chosen = {"data": str(tree), "dim": 3, "epochs": 60, "batch_size": 16, "log_every": 2, "device": "cpu", **more}
    return replace(Config(), **chosen)


@pytest.fixture(scope="module")
def finished(tree, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("taxonomy") / "run"
    config = config_of(tree, twin=True, seeds=2)
    return out, config, train.run(config, out)


def test_ancestors_come_first_and_the_twin_is_beside(finished):
    out, _, result = finished
    run = read_run(out)
    found = {number.name: number for number in run.headline}
    precision = found["mean average precision"]
    assert precision.value > 0.9
    assert precision.twin is not None
    assert precision.number > precision.twin.number
    values = [m["mean_average_precision"] for m in result["members"] if m["geometry"] == "lorentz"]
    others = [m["mean_average_precision"] for m in result["members"] if m["geometry"] == "euclidean"]
    assert precision.value == pytest.approx(np.mean(values))
    gaps = np.subtract(values, others)
    reach = stats.t.ppf(0.975, 1) * gaps.std(ddof=1) / np.sqrt(2)
    paired = result["paired"]["mean_average_precision"]
    assert paired["difference"] == pytest.approx(gaps.mean())
    assert paired["interval"] == pytest.approx([gaps.mean() - reach, gaps.mean() + reach])
    assert found["τ of radius against level"].value > 0.9
    assert [(m["geometry"], m["seed"]) for m in result["members"]] == [
        ("lorentz", 0),
        ("lorentz", 1),
        ("euclidean", 0),
        ("euclidean", 1),
    ]
    assert result["parameters"] == NODES * 3
    assert result["pairs"] == sum(int(depth) for depth in Taxonomy.from_csv(finished[1].data.source).depth)


def test_the_run_directory_holds_embeddings_and_a_page(finished):
    out, config, result = finished
    assert json.loads((out / "result.json").read_text()) == result
    tax = Taxonomy.from_csv(config.data.source)
    assert json.loads((out / "names.json").read_text()) == list(tax.names)
    table = load_file(out / "embeddings.safetensors")["tangent"]
    assert table.shape == (NODES, 3)
    assert RunDirectory.open(out).recipe == "taxonomy"
    losses = [record["lorentz-0/train/loss"] for record in RunDirectory.open(out).metrics()]
    assert len(losses) == 59  # 60 epochs of 31 nodes are 117 steps
    assert losses[-1] < 0.5 * losses[0]
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "euclidean" in page
    assert ">n0</text>" in page.partition("</svg>")[0]  # the most general nodes are named in the picture
    for name in ("lorentz-1", "euclidean-0", "euclidean-1"):
        assert (out / "members" / name / "embeddings.safetensors").is_file()
    assert checked(Config, to_dict(config)) == config
    with pytest.raises(UsageError, match="finished"):
        train.run(config, out)


def test_the_lines_of_the_disk_are_geodesics():
    """A geodesic of the unit disk lies on a circle that meets the rim at right angles: |z|² + 1 = 2 ⟨a, z⟩."""
    tax = Taxonomy.from_edges([("a", "r"), ("b", "r"), ("c", "a"), ("d", "a"), ("e", "b")])
    tangent = torch.randn(len(tax), 4, generator=torch.Generator().manual_seed(0)) * 3
    (axes,) = _taxonomy_report.disk(tax, tangent).axes
    arcs = [np.asarray(segment) for segment in axes.collections[0].get_segments()]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(arcs) == 5
    for z in arcs:
        square = (z**2).sum(axis=1) + 1
        centre, *_ = np.linalg.lstsq(2 * z, square, rcond=None)
        assert 2 * z @ centre == pytest.approx(square, abs=1e-6)
    names = [text.get_text() for text in axes.texts]
    assert len(names) == len(set(names)) <= len(tax)
    assert names[0] == "r"


def test_a_name_that_would_cover_another_is_left_out():
    _, axes = new_figure()
    _taxonomy_report._label(axes, ["first", "second", "third"], np.array([[0.0, 0.0], [0.01, 0.0], [0.0, 0.5]]))
    assert [text.get_text() for text in axes.texts] == ["first", "third"]


def test_the_measured_numbers_are_those_of_the_saved_embedding(finished):
    """Mean average precision again, from the file alone and with no code of the recipe."""
    out, config, result = finished
    tax = Taxonomy.from_csv(config.data.source)
    manifold = Lorentz(1.0)
    points = manifold.expmap0(load_file(out / "embeddings.safetensors")["tangent"].double())
    distance = manifold.dist(points[:, None], points[None]).numpy()
    precision = []
    for node in range(NODES):
        above = {int(i) for i in np.flatnonzero(tax.ancestors[[node]].toarray())} - {node}
        order = [i for i in np.argsort(distance[node]).tolist() if i != node]
        hits = [place for place, other in enumerate(order, start=1) if other in above]
        if above:
            precision.append(np.mean([k / place for k, place in enumerate(hits, start=1)]))
    assert result["members"][0]["mean_average_precision"] == pytest.approx(np.mean(precision), abs=1e-3)


def test_what_a_run_saves_can_be_searched(finished, tmp_path):
    out, config, _ = finished
    data_index.run(data_index.Args(out, tmp_path / "index", taxonomy=config.data.source), Console(quiet=True))
    args = evaluate_search.Args(tmp_path / "index", like=("n15",), k=4)
    found = evaluate_search.run(args, Console(quiet=True))["queries"][0]["neighbours"]
    assert len({near["name"] for near in found} & {"n7", "n3", "n1", "n0"}) >= 3


def test_an_index_takes_the_curvature_of_the_run(tree, tmp_path):
    train.run(config_of(tree, epochs=1, c=0.25), tmp_path / "run")
    for given, c in ((None, 0.25), (2.0, 2.0)):
        args = data_index.Args(tmp_path / "run", tmp_path / f"index-{c}", taxonomy=str(tree), c=given)
        data_index.run(args, Console(quiet=True))
        assert data_index.load(tmp_path / f"index-{c}")[0].c == c


@pytest.mark.parametrize("geometry", ["poincare", "euclidean"])
def test_cones_in_every_geometry(tree, tmp_path, geometry):
    result = train.run(config_of(tree, geometry=geometry, objective="cones", epochs=80), tmp_path / "run")
    assert result["members"][0]["mean_average_precision"] > 0.8
    assert result["members"][0]["entailment_auc"] > 0.95
    assert "One seed" in result["notes"][0]


def test_lorentz_and_poincare_are_one_space(tree, tmp_path):
    """Two charts of one space with the same steps: the same embedding up to rounding."""
    found = {}
    for geometry in ("lorentz", "poincare"):
        run = RunDirectory.create(tmp_path / geometry, {})
        config = config_of(tree, geometry=geometry, epochs=5)
        found[geometry] = training.train(config, Taxonomy.from_csv(tree), run).weight.detach()
    torch.testing.assert_close(found["lorentz"], found["poincare"], rtol=1e-3, atol=1e-3)


def test_the_smallest_taxonomy_is_measured():
    """Of three nodes chance may draw no pair that is not of a node and its ancestor."""
    tax = Taxonomy.from_edges([("root", None), ("a", "root"), ("b", "root")])
    for seed in range(20):
        labels = training.entailment_pairs(tax, np.random.default_rng(seed))[2]
        assert labels.any()
        assert not labels.all()


def test_a_stopped_run_continues_bit_for_bit(tree, tmp_path, monkeypatch):
    config = config_of(tree, epochs=10, twin=True)
    whole = train.run(config, tmp_path / "whole")
    calls, forward = [0], TaxonomyEmbedding.forward

    def stopping(self, batch):
        calls[0] += 1
        if calls[0] == 33:  # in the middle of the twin: 20 steps come before it
            signal.raise_signal(signal.SIGTERM)
        return forward(self, batch)

    monkeypatch.setattr(TaxonomyEmbedding, "forward", stopping)
    with pytest.raises(Interrupted):
        train.run(config, tmp_path / "part")
    assert not (tmp_path / "part/result.json").exists()
    result = train.run(config, tmp_path / "part", resume=True)
    for member, other in zip(result["members"], whole["members"], strict=True):
        assert {**member, "time": None} == {**other, "time": None}
    with pytest.raises(UsageError, match="finished"):
        train.run(replace(config, epochs=3), tmp_path / "part", resume=True)
    assert train.run(replace(config, epochs=3, twin=False), tmp_path / "part", overwrite=True)["paired"] == {}


def test_it_stops_once_it_gets_no_better_and_keeps_the_best(tree, tmp_path):
    """With a rate far too high for the first good steps to last."""
    config = config_of(tree, epochs=200, eval_every=4, patience=3, lr=4.0, ema=0.5, precision="bfloat16")
    result = train.run(config, tmp_path / "run")
    measured = [r for r in RunDirectory.open(tmp_path / "run").metrics() if "eval/mean_average_precision" in r]
    values = [record["eval/mean_average_precision"] for record in measured]
    assert len(values) == np.argmax(values) + 1 + 3 < 96
    assert result["members"][0]["mean_average_precision"] == max(values)
    assert result["members"][0]["time"]["seconds_per_epoch"] > 0


def test_settings_of_earlier_versions_open(tree):
    old = {"data": str(tree), "root": "top", "epochs": 7, "batch": 9, "lr": None, "seed": 3, "seeds": 2, "twin": True}
    config = checked(Config, old | {"dim": 2, "eval_nodes": 50, "precision": "float32", "device": "cpu"})
    assert (config.data.source, config.data.root, config.arms.seeds, config.arms.twin) == (str(tree), "top", 2, True)
    assert (config.loop.epochs, config.loop.batch_size, config.loop.seed, config.optim.lr) == (7, 9, 3, None)


def test_large_taxonomies_are_measured_on_a_sample(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "PAIRS", 50)
    result = train.run(config_of(tree, epochs=1, eval_nodes=5), tmp_path / "run")
    assert any("random sample of 5 of the 31 nodes" in note for note in result["notes"])
    first, second = training.some_pairs(NODES, np.random.default_rng(0))
    assert len(first) == 50
    assert (first != second).all()
    below, above, labels = training.entailment_pairs(Taxonomy.from_csv(tree), np.random.default_rng(0))
    assert Taxonomy.from_csv(tree).entails(above, below).tolist() == labels.astype(bool).tolist()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dim": 0}, "dim must be an integer ≥ 1, got 0"),
        ({"epochs": 0}, "loop.epochs must be"),
        ({"c": -1.0}, "c must be a finite number > 0, got -1.0"),
        ({"lr": 0.0}, "optim.lr must be a finite number > 0"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"seed": -1}, "loop.seed must be"),
        ({"geometry": "euclidean", "twin": True}, "arms.twin must be left out"),
        ({"micro_batch": 8}, "loop.micro_batch must be None, as a node's negatives"),
        ({"checkpoint_activations": True}, "loop.checkpoint_activations must be off"),
        ({"strategy": "fsdp"}, "loop.strategy must be auto, as each rank"),
        ({"patience": 3}, "loop.patience must be None where loop.eval_every is"),
    ],
)
def test_bad_settings_are_named(tree, more, message):
    with pytest.raises(UsageError, match=message):
        config_of(tree, **more)


def test_bad_taxonomies_are_named(tmp_path):
    (tmp_path / "cycle.csv").write_text("child,parent\na,b\nb,a\n")
    (tmp_path / "two.csv").write_text("child,parent\na,b\nc,d\n")
    (tmp_path / "small.csv").write_text("child,parent\na,b\n")
    for name, error, message in (
        ("cycle.csv", DataError, "cycle.csv: cycle"),
        ("two.csv", DataError, "two.csv: 2 roots"),
        ("small.csv", UsageError, "small.csv has 2 nodes"),
        ("absent.csv", DataError, "cannot read .*absent.csv"),
        ("tree.xml", UsageError, "path must end in"),
        ("", UsageError, "data is missing"),
    ):
        with pytest.raises(error, match=message):
            train.run(replace(Config(), data=str(tmp_path / name) if name else ""), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    forest = train.run(config_of(tmp_path / "two.csv", root="top", epochs=1), tmp_path / "run")
    assert "5 nodes" in forest["taxonomy"]


def test_command_line(tree, tmp_path, capsys):
    words = ["train", "taxonomy", "--data", str(tree), "--preset", "disk", "--epochs", "2", "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["parameters"] == NODES * 2
    assert main(["train", "taxonomy", "--out", str(tmp_path / "none")]) == 2
    assert "data is missing" in capsys.readouterr().err
