"""The HyperCLIP recipe on coloured squares with a tiny random CLIP."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import t as student

from leafward.adapters import adapters, attach, from_pretrained, merge, save_pretrained
from leafward.adapters.low_rank import LowRankConfig
from leafward.cli.dispatch import main
from leafward.config import checked, replace
from leafward.encoders import load_encoder
from leafward.errors import UsageError
from leafward.systems.hyperclip import methods as training
from leafward.systems.hyperclip import report, train
from leafward.systems.hyperclip.config import Config, trainable

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "adapters"))
from radial_toys import make

COLOURS = {"dog": (230, 40, 40), "car": (40, 230, 40), "pizza": (40, 40, 230)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CLIP and noisy squares of one colour for each class."""
    from PIL import Image

    root = tmp_path_factory.mktemp("hyperclip")
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (root / "images" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.clip(np.array(colour) + rng.normal(0, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / "images" / name / f"{number}.png")
    make("clip", root)
    return root


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    given = {"data": folder / "images", "model": folder / "clip", "block_size": 8, "scale": 20.0}
    return replace(Config(), **given, steps=25, batch_size=12, lr=3e-2)


@pytest.fixture(scope="module")
def finished(config: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, train.run(replace(config, compare=True), out)


def test_every_method_is_trained_under_the_same_budget(finished: tuple[Path, dict[str, Any]]) -> None:
    _, result = finished
    rows = {row["method"]: row for row in result["methods"]}
    assert list(rows) == list(trainable())
    assert len({row["accuracy_before"] for row in rows.values()}) == 1  # adapters begin as the identity
    assert rows["frozen"]["trainable"] == 0
    assert rows["frozen"]["accuracy"] == rows["frozen"]["accuracy_before"]
    blocks = 2 * 2 * 3 * 4 * 8 * 8  # encoders, layers, projections, blocks
    assert rows["block-scale"]["trainable"] == blocks
    assert abs(rows["lora"]["trainable"] - blocks) <= 0.35 * blocks
    assert rows["attention"]["trainable"] == 2 * 2 * 3 * 32 * 32
    for name in ("block-scale", "lora"):
        assert rows[name]["accuracy"] > rows[name]["accuracy_before"] + 20


def test_the_radius_is_reported_and_the_cosine_is_blind_to_it(finished: tuple[Path, dict[str, Any]]) -> None:
    out, result = finished
    for row in result["methods"]:
        assert len({point["accuracy"] for point in row["sweep"]["cosine"]}) == 1
        for side in ("image", "text"):
            before, after = row["radius"][side]["before"], row["radius"][side]["after"]
            assert before["mean"] > 0
            assert (before["mean"] == after["mean"]) == (row["method"] == "frozen")
    page = (out / "report.html").read_text()
    assert "Hyperbolic radius of the features" in page
    assert "orthogonal" in page


def test_the_adapter_of_a_run_is_exported_merged(
    finished: tuple[Path, dict[str, Any]], config: Config, tmp_path: Path
) -> None:
    out, result = finished
    assert main(["export", str(out), "--to", str(tmp_path / "merged"), "--merged"]) == 0
    merged = load_encoder(tmp_path / "merged")
    data = training.read(config)
    dual = training.Dual(merged, config, data.names)
    accuracy = training.accuracy(
        dual, training._Images(merged, data, 16).features(dual, data.test), data.labels[data.test]
    )
    expected = next(row for row in result["methods"] if row["method"] == "block-scale")
    assert accuracy == pytest.approx(expected["accuracy"])


def test_a_run_is_scored_on_its_own_test_images(
    finished: tuple[Path, dict[str, Any]], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, result = finished
    assert main(["evaluate", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    row = next(row for row in result["methods"] if row["method"] == "block-scale")
    assert (100 * found["top1"], found["images"]) == (pytest.approx(row["accuracy"]), row["images"])
    assert main(["evaluate", str(folder / "clip"), "--task", "zeroshot"]) == 2
    assert "--data must name the labelled images" in " ".join(capsys.readouterr().err.split())
    assert main(["evaluate", str(out), "--split", "train"]) == 2
    assert "--split goes with --data" in capsys.readouterr().err
    words = ["train", "hyperclip", "--data", str(folder / "images"), "--model", str(out), "--block-size", "8"]
    assert main([*words, "--out", str(tmp_path / "second")]) == 2
    assert "holds an adapter already; train on the merged one" in " ".join(capsys.readouterr().err.split())


def test_a_run_is_scored_over_all_its_classes_by_its_own_score_and_text(
    config: Config, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A class of one image has it in training and none in the test; it is an answer all the same."""
    images = shutil.copytree(folder / "images", tmp_path / "images")
    for extra in ("truck", "bus", "bread", "cat", "kitten"):
        (images / extra).mkdir()
        shutil.copy(images / "dog" / "0.png", images / extra)
    # Braces that are no place for a name are letters like any others.
    own = replace(config, data=images, score="lorentz", template="a small {x} photo of the {}", steps=2, c=0.5)
    row = train.run(own, tmp_path / "run")["methods"][0]
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["score"], found["classes"], found["images"]) == ("lorentz", 8, row["images"])
    assert 100 * found["top1"] == pytest.approx(row["accuracy"])
    data = training.read(own)
    for file in [data.files[place] for place in data.train.tolist()]:
        file.unlink()
    for extra in ("truck", "bus", "bread", "cat", "kitten"):
        (images / extra).rmdir()
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(images), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["score"], found["classes"]) == ("lorentz", 3)


def test_a_hyperbolic_score_with_its_twin(config: Config, tmp_path: Path) -> None:
    result = train.run(replace(config, score="lorentz", twin=True, steps=3), tmp_path / "run")
    assert [row["method"] for row in result["methods"]] == ["block-scale, lorentz", "block-scale"]
    assert len({row["trainable"] for row in result["methods"]}) == 1
    (number,) = result["headline"]
    assert number["twin"] is not None


def test_a_stopped_run_keeps_what_is_done(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = replace(config, compare=True, steps=2)
    monkeypatch.setattr(training, "trainable", lambda: ("frozen", "block-scale", "lora"))
    train_loop, count = training.train_loop, []

    def stop(*arguments: Any) -> Any:
        count.append(1)
        if len(count) == 2:
            raise KeyboardInterrupt
        return train_loop(*arguments)

    monkeypatch.setattr(training, "train_loop", stop)
    with pytest.raises(KeyboardInterrupt):
        train.run(several, tmp_path / "run")
    result = train.run(several, tmp_path / "run", resume=True)
    assert len(count) == 3
    assert [row["method"] for row in result["methods"]] == ["frozen", "block-scale", "lora"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["data"] == result["data"]


def test_seeds_give_intervals(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "trainable", lambda: ("frozen", "lora"))
    several = replace(config, compare=True, shots=2, steps=2, seeds=3, seed=5)
    result = train.run(several, tmp_path / "run")
    rows = [row for row in result["methods"] if row["method"] == "lora"]
    assert [row["seed"] for row in rows] == [5, 6, 7]
    draws = [training.read(replace(several, seed=seed)).train for seed in (5, 6, 7)]
    assert len({tuple(draw.tolist()) for draw in draws}) == 3
    assert "Means over 3 seeds" in (tmp_path / "run" / "report.html").read_text()

    values = [61.0, 70.0, 74.0]
    told = [row | {"accuracy": value} for row, value in zip(rows, values, strict=True)]
    (number,) = report.result(several, training.read(several), told).to_json()["headline"]
    assert number["value"] == pytest.approx(np.mean(values))
    ends = student.interval(0.95, 2, np.mean(values), np.std(values, ddof=1) / 3**0.5)
    assert number["interval"] == pytest.approx(ends)


def losses(out: Path) -> list[float]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [record["train/loss"] for record in map(json.loads, lines) if "train/loss" in record]


def test_accumulated_gradients_are_those_of_the_whole_batch(config: Config, tmp_path: Path) -> None:
    exact = replace(config, precision="float64", steps=4, log_every=1)
    train.run(exact, tmp_path / "whole")
    train.run(replace(exact, micro_batch=3), tmp_path / "parts")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)


@pytest.mark.parametrize("method", ["block-scale", "lora", "full"])
def test_bfloat16_learns_what_float32_learns(config: Config, tmp_path: Path, method: str) -> None:
    """The forward pass in bfloat16 differs by its rounding; parameters, geometry and the scores stay in float32."""
    one = replace(config, method=method, steps=10, log_every=1)
    train.run(one, tmp_path / "float32")
    (row,) = train.run(replace(one, precision="bfloat16", micro_batch=4), tmp_path / "bfloat16")["methods"]
    found, exact = losses(tmp_path / "bfloat16"), losses(tmp_path / "float32")
    assert found != exact
    assert found[:3] == pytest.approx(exact[:3], rel=0.05)
    assert found[-1] < 0.8 * found[0]
    kept = (
        tmp_path / "bfloat16" / ("model/model.safetensors" if method == "full" else "adapter/adapter_model.safetensors")
    )
    assert {tensor.dtype for tensor in load_file(kept).values()} == {torch.float32}
    # Scored in float32, as an evaluation does.
    assert main(["evaluate", str(tmp_path / "bfloat16"), "--json", "--out", str(tmp_path / "e.json")]) == 0
    assert 100 * json.loads((tmp_path / "e.json").read_text())["top1"] == pytest.approx(row["accuracy"])


def test_evaluations_are_of_validation_images_and_the_best_is_kept(config: Config, tmp_path: Path) -> None:
    """At a rate at which training falls apart after its first steps."""
    watched = replace(config, steps=12, lr=0.3, eval_every=2, patience=2, ema=None)
    row = train.run(watched, tmp_path / "run")["methods"][0]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = {record["step"]: record["eval/accuracy"] for record in records if "eval/accuracy" in record}
    best = max(seen, key=lambda step: (seen[step], -step))
    assert max(seen) == min(12, best + 4)  # two more evaluations without a better one
    data = training.read(watched)
    assert not {*data.validation.tolist()} & {*data.train.tolist(), *data.test.tolist()}
    encoder = from_pretrained(load_encoder(config.model).model, tmp_path / "run" / "adapter")  # pyright: ignore
    held = load_encoder(config.model)  # pyright: ignore[reportArgumentType]
    held.model = encoder
    dual, task = training.Dual(held, watched, data.names), training._Images(held, data, 16)
    for rows, expected in ((data.validation, seen[best]), (data.test, row["accuracy"])):
        assert training.accuracy(dual, task.features(dual, rows), data.labels[rows]) == pytest.approx(expected)


def test_an_ablation_and_a_grid_have_a_run_for_each_variant(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", str(config.data.source), "--model", str(config.model), "--block-size", "8", "--steps", "2"]
    words += ["--ablate", "encoder", "--grid", "lr=1e-3,1e-2", "--out", str(tmp_path / "run")]
    assert main(["train", "hyperclip", *words]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert len(result["cells"]) == 6
    for cell in result["cells"]:
        own = json.loads((tmp_path / "run" / cell["run"] / "result.json").read_text())
        assert cell["headline"] == own["headline"]
        encoder = cell["settings"]["adapt.encoder"]
        tensors = load_file(tmp_path / "run" / cell["run"] / "adapter" / "adapter_model.safetensors")
        sides = {"text": any("text_model" in key for key in tensors), "image": any("vision" in key for key in tensors)}
        assert sides == {side: encoder in (side, "both") for side in ("text", "image")}
    assert "6 variants" in (tmp_path / "run" / "report.html").read_text()


def test_settings_of_earlier_versions_open(folder: Path) -> None:
    flat = {"images": str(folder), "batch": 7, "method": "lora", "seed": 3, "seeds": 2, "compare": True, "shots": 4}
    config = checked(
        Config, flat | {"template": "the {}", "twin": True, "score": "lorentz", "steps": 9, "device": "cpu"}
    )
    assert (config.data.source, config.data.shots, config.data.template) == (folder, 4, "the {}")
    assert (config.loop.batch_size, config.loop.seed, config.loop.steps, config.loop.device) == (7, 3, 9, "cpu")
    assert (config.arms.seeds, config.arms.compare, config.arms.twin) == (2, True, True)
    assert (config.adapt.method, config.adapt.score) == ("lora", "lorentz")


def test_trained_weights_of_the_model_are_kept(config: Config, tmp_path: Path) -> None:
    """Without an adapter the model itself is what was learned."""
    result = train.run(replace(config, method="attention", steps=5), tmp_path / "run")
    (row,) = result["methods"]
    data = training.read(config)
    encoder = load_encoder(tmp_path / "run")
    dual = training.Dual(encoder, config, data.names)
    image, text = training._Images(encoder, data, 16).features(dual, data.test)
    assert float(2 * text.norm(dim=1).mean()) == pytest.approx(row["radius"]["text"]["after"]["mean"], rel=1e-5)
    assert float(2 * image.norm(dim=1).mean()) == pytest.approx(row["radius"]["image"]["after"]["mean"], rel=1e-5)
    assert row["radius"]["image"]["before"] != row["radius"]["image"]["after"]


def test_a_run_that_trained_nothing_is_scored_with_its_model(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = train.run(replace(config, method="frozen"), tmp_path / "run")["methods"][0]
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 100 * found["top1"] == pytest.approx(row["accuracy"])


def test_low_rank_round_trip(folder: Path, tmp_path: Path) -> None:
    encoder = load_encoder(folder / "clip")
    before = encoder.encode_text(["a small dog"])
    attach(encoder.model, LowRankConfig(rank=3, alpha=6.0))
    torch.testing.assert_close(encoder.encode_text(["a small dog"]), before, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in adapters(encoder.model)["default"].parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    adapted = encoder.encode_text(["a small dog"])
    assert (adapted - before).abs().max() > 1e-3
    save_pretrained(encoder.model, tmp_path)
    fresh = load_encoder(folder / "clip")
    weight = fresh.model.text_model.encoder.layers[0].self_attn.q_proj.weight.detach().double()
    merge(from_pretrained(fresh.model, tmp_path))
    torch.testing.assert_close(fresh.encode_text(["a small dog"]), adapted, rtol=1e-5, atol=1e-6)
    held = adapters(encoder.model)["default"]
    key = "text_model/encoder/layers/0/self_attn/q_proj"
    expected = weight + 2.0 * held.b[key].double() @ held.a[key].double()  # pyright: ignore
    found = fresh.model.text_model.encoder.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    for options in ({"rank": 0}, {"rank": 2.5}, {"rank": True}, {"alpha": 0.0}, {"alpha": float("inf")}, {"seed": -1}):
        with pytest.raises(UsageError, match=f"{next(iter(options))} must be"):
            checked(LowRankConfig, options)


def test_refusals(config: Config, folder: Path, tmp_path: Path) -> None:
    for name, value in (("data", {"source": None}), ("model", None)):
        with pytest.raises(UsageError, match=f"{name} is missing: give --{name}"):
            train.run(replace(config, **{name: value}), tmp_path / "run")
    for options, message in [
        ({"block_size": 0}, "block_size must be"),
        ({"template": "a photo"}, "template must be a text with {}"),
        ({"rank": 0}, "rank must be"),
        ({"seeds": 0}, "seeds must be"),
        ({"lr": -1.0}, "lr must be"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"method": "loral"}, "adapt.method must be one of .* got 'loral'; did you mean 'lora'"),
        ({"twin": True}, "arms.twin must be off with the cosine"),
        ({"strategy": "fsdp"}, "loop.strategy must be auto or ddp"),
        ({"patience": 2}, "loop.patience must be None where loop.eval_every is, got 2"),
    ]:
        with pytest.raises(UsageError, match=message):
            checked(Config, options)
    with pytest.raises(UsageError, match="has no image side"):
        train.run(replace(config, model=str(make("sentence", tmp_path))), tmp_path / "run")
