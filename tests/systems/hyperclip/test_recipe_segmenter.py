"""The segmentation recipe on two-coloured scenes with a tiny random CLIP: train, evaluate, explain."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from leafward.adapters import adapters, from_pretrained
from leafward.cli.dispatch import main
from leafward.config import checked, replace
from leafward.data.scenes import load_scenes
from leafward.encoders import load_encoder
from leafward.engine import parameter_groups
from leafward.errors import DataError, UsageError
from leafward.systems.hyperclip.segment import model as _segmenter
from leafward.systems.hyperclip.segment import train
from leafward.systems.hyperclip.segment import train as _segmenter_training
from leafward.systems.hyperclip.segment.config import Config
from leafward.systems.hyperclip.segment.figures import overlay, palette
from leafward.systems.hyperclip.segment.task import OpenVocabularyTask, measure

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "adapters"))
from radial_toys import make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes of two halves, red dog and blue car, with a strip that does not count; and a tiny CLIP."""
    from PIL import Image

    root = tmp_path_factory.mktemp("segmenter")
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (root / "scenes" / name).mkdir(parents=True)
    for number in range(12):
        mask = np.zeros((32, 32), np.uint8)
        edge = int(rng.integers(8, 24))
        mask[:, edge:] = 1
        mask = mask.T.copy() if number % 2 else mask
        colours = np.array([[220, 30, 30], [30, 30, 220]])[mask]
        image = np.clip(colours + rng.normal(0, 20, (32, 32, 3)), 0, 255).astype(np.uint8)
        mask[:2] = 255
        Image.fromarray(image).save(root / "scenes" / "images" / f"{number}.png")
        Image.fromarray(mask).save(root / "scenes" / "masks" / f"{number}.png")
    (root / "scenes" / "classes.txt").write_text("dog\ncar\n")
    make("clip", root)
    return root


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    here = {"data": os.path.relpath(folder / "scenes"), "model": os.path.relpath(folder / "clip")}
    config = replace(Config(), **here, block_size=8, size=32, channels=16, window=2, steps=60, lr=5e-3)
    result = train.run(config, folder / "run")
    assert result["metrics"]["miou"] > 0.6
    return folder / "run"


def test_a_run_keeps_what_was_learned(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = json.loads((run / "result.json").read_text())
    assert (run / "adapter" / "adapter_config.json").is_file()
    assert (run / "decoder" / "model.safetensors").is_file()
    assert "Open-vocabulary segmentation" in (run / "report.html").read_text()
    # The same scenes, scored again from the files; the run was made with paths of another directory.
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(run), "--data", str(run.parent / "scenes"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["miou"] == pytest.approx(result["metrics"]["miou"], abs=1e-6)
    assert main(["evaluate", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == again


def test_the_scenes_of_a_run_are_scored_as_the_run_scored_them(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """With its own number of ignored pixels, and with the scenes that its seed held out."""
    scenes = shutil.copytree(folder / "scenes", tmp_path / "scenes")
    for path in (scenes / "masks").iterdir():
        from PIL import Image

        mask = np.array(Image.open(path))
        mask[mask == 255] = 7
        Image.fromarray(mask).save(path)
    config = replace(_short(folder, "frozen"), data=scenes, ignore=7, seed=3)
    expected = train.run(config, tmp_path / "run")
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["iou"] == expected["iou"]
    assert found["data"] == str(scenes)
    assert main(["evaluate", str(tmp_path / "run"), "--ignore", "255"]) == 1
    assert "has label 7" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), "--most", "0"]) == 2
    assert "--most must be" in capsys.readouterr().err
    shutil.rmtree(scenes)
    assert main(["evaluate", str(tmp_path / "run")]) == 1
    assert str(scenes) in " ".join(capsys.readouterr().err.split())


def test_a_model_that_is_gone_is_named(folder: Path, tmp_path: Path, capsys: Any) -> None:
    clip = shutil.copytree(folder / "clip", tmp_path / "clip")
    train.run(replace(_short(folder, "block-scale"), model=str(clip)), tmp_path / "run")
    clip.rename(tmp_path / "elsewhere")
    assert main(["evaluate", str(tmp_path / "run")]) == 1
    assert f"there is no folder {clip}, where a model should be" in " ".join(capsys.readouterr().err.split())


def test_methods_are_compared_under_one_budget(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    config = replace(_short(folder, "lora"), compare=True)
    # Stopped in the third training, and taken up again.
    train_loop, count = _segmenter_training.train_loop, []

    def stop(*arguments: Any) -> Any:
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return train_loop(*arguments)

    monkeypatch.setattr(_segmenter_training, "train_loop", stop)
    with pytest.raises(KeyboardInterrupt):
        train.run(config, tmp_path / "run")
    result = train.run(config, tmp_path / "run", resume=True)
    assert len(count) == 1 + 6
    rows = {row["method"]: row for row in result["methods"]}
    assert list(rows) == ["frozen", "block-scale", "orthogonal", "lora", "attention", "full"]
    assert rows["frozen"]["trainable"] == 0
    assert rows["block-scale"]["trainable"] == 2 * 2 * 3 * 4 * 8 * 8  # encoders, layers, projections, blocks
    assert rows["attention"]["trainable"] == 2 * 2 * 3 * 32 * 32
    # Each as it would be alone, and the one that was named is kept.
    alone = train.run(_short(folder, "lora"), tmp_path / "alone")
    assert result["metrics"] == alone["metrics"] == rows["lora"]["metrics"]
    assert [number["name"] for number in result["headline"]] == [f"{name}: mIoU" for name in rows]
    assert result["headline"][3]["value"] == alone["headline"][0]["value"]
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["miou"] == pytest.approx(alone["metrics"]["miou"], abs=1e-6)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Methods under the same budget" in page
    assert "Methods under the same budget" not in (tmp_path / "alone" / "report.html").read_text()


def test_an_overwritten_run_holds_no_adapter_of_the_one_before(folder: Path, tmp_path: Path) -> None:
    train.run(_short(folder, "block-scale"), tmp_path / "run")
    train.run(_short(folder, "frozen"), tmp_path / "run", overwrite=True)
    assert not adapters(_segmenter.open_run(tmp_path / "run")[1].encoder.model)


def test_an_evaluation_shows_every_class(run: Path, tmp_path: Path, evaluation_shown: Any) -> None:
    words = [
        "evaluate",
        str(run),
        "--data",
        str(run.parent / "scenes"),
        "--most",
        "1",
        "--out",
        str(tmp_path / "found"),
    ]
    assert main(words) == 0
    found, text = evaluation_shown(tmp_path / "found" / "evaluation.json", tmp_path / "found" / "report.html")
    ious = {row["class"]: row["iou"] for row in found["iou"]}
    assert found["miou"] == pytest.approx(sum(ious.values()) / 2)
    assert [number["value"] for number in found["headline"]] == [100 * found["miou"], 100 * found["pixel_accuracy"]]
    assert "1 held-out scene; 2 classes" in text
    for name, iou in ious.items():
        assert float(text.partition(f"IoU.{name} ")[2].split()[0]) == pytest.approx(iou, abs=1e-3)


def test_explain_draws_any_words(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    photo = run.parent / "scenes" / "images" / "0.png"
    words = ["--words", "dog", "car", "pizza", "--out", str(tmp_path), "--json"]
    assert main(["explain", str(run), str(photo), *words]) == 0
    (drawn,) = json.loads(capsys.readouterr().out.splitlines()[-1])["images"]
    assert sum(drawn["shares"].values()) == pytest.approx(1.0)
    with Image.open(drawn["picture"]) as picture:
        assert picture.size == (32, 32)
    assert "pizza" in (tmp_path / "index.html").read_text()
    # Photos of different folders may be called alike.
    elsewhere = tmp_path / "elsewhere" / photo.name
    elsewhere.parent.mkdir()
    Image.new("RGB", (20, 24)).save(elsewhere)
    assert main(["explain", str(run), str(photo), str(elsewhere), *words]) == 0
    both = json.loads(capsys.readouterr().out.splitlines()[-1])["images"]
    sizes = [Image.open(each["picture"]).size for each in both]
    assert sizes == [(32, 32), (20, 24)]
    for wrong in (["dog", "dog"], ["dog", " "]):
        assert main(["explain", str(run), str(photo), "--words", *wrong, "--out", str(tmp_path)]) == 2
        assert "--words must be different words, none of them empty" in " ".join(capsys.readouterr().err.split())
    assert main(["explain", str(run), str(photo), "--out", str(tmp_path)]) == 2
    assert "give at least one photo and --words" in capsys.readouterr().err
    assert main(["explain", str(run), str(photo), "--words", "dog", "--background", "2"]) == 2
    assert "--background must be in 0…1, got 2.0" in capsys.readouterr().err


def test_overlay_leaves_the_background_alone() -> None:
    image = np.full((2, 2, 3), 100, np.uint8)
    drawn = overlay(image, np.array([[0, -1], [1, 1]]), 2)
    np.testing.assert_array_equal(drawn[0, 1], [100, 100, 100])
    np.testing.assert_array_equal(drawn[0, 0], (100 + palette(2)[0].astype(int)) // 2)


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="data is missing"):
        train.run(Config(), tmp_path / "run")
    given = {"data": folder / "scenes", "model": str(folder / "clip")}
    with pytest.raises(UsageError, match=r"data\.size must be a multiple of the model's patch size 8, got 20"):
        train.run(replace(Config(), **given, size=20), tmp_path / "run")
    few = shutil.copytree(folder / "scenes", tmp_path / "few")
    (few / "classes.txt").write_text("dog\n")
    with pytest.raises(DataError, match=r"masks/\d+\.png has label 1, of 1 classes"):
        train.run(replace(_short(folder, "block-scale"), data=few), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for options, message in [
        ({"channels": 20}, "channels must be a multiple of 16"),
        ({"steps": 0}, "steps must be"),
        ({"lr": 0.0}, "lr must be"),
        ({"most_scored": 0}, "most_scored must be"),
    ]:
        with pytest.raises(UsageError, match=message):
            checked(Config, options)


@pytest.mark.parametrize("method", ["attention", "full", "frozen"])
def test_methods_without_an_adapter_are_kept_and_opened(folder: Path, tmp_path: Path, method: str) -> None:
    config = _short(folder, method)
    result = train.run(config, tmp_path / "run")
    assert (tmp_path / "run" / "model").is_dir() == (method != "frozen")
    assert not (tmp_path / "run" / "adapter").exists()
    _, model = _segmenter.open_run(tmp_path / "run")
    scenes = load_scenes(folder / "scenes", 255)
    assert measure(model, scenes, 32)["miou"] == pytest.approx(result["metrics"]["miou"], abs=1e-6)
    base = load_encoder(folder / "clip").model
    moved = {
        name for name, weight in model.encoder.model.named_parameters() if not weight.equal(base.get_parameter(name))
    }
    if method == "attention":
        assert moved
        assert all(name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") for name in moved)
    else:
        assert bool(moved) == (method == "full")


def test_clip_learns_at_its_own_rate(folder: Path) -> None:
    """The authors' CLIP has 0.075 of the decoder's learning rate."""
    model = _segmenter.build(_short(folder, "lora"))
    groups = parameter_groups(model, 0.1)
    adapter = {id(parameter) for parameter in model.encoder.parameters() if parameter.requires_grad}
    for group in groups:
        inside = {id(parameter) in adapter for parameter in group["params"]}
        assert inside == {group.get("lr_ratio", 1.0) == 0.075}
    assert {group.get("lr_ratio") for group in groups} == {None, 0.075}


def test_a_stopped_run_with_two_rates_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(_short(folder, "block-scale"), steps=8)
    whole = train.run(config, tmp_path / "whole")
    loss = OpenVocabularyTask.loss
    calls = []

    def stop(task, model, batch):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return loss(task, model, batch)

    monkeypatch.setattr(OpenVocabularyTask, "loss", stop)
    with pytest.raises(KeyboardInterrupt):
        train.run(config, tmp_path / "parts")
    monkeypatch.setattr(OpenVocabularyTask, "loss", loss)
    assert train.run(config, tmp_path / "parts", resume=True)["metrics"] == whole["metrics"]


def test_a_run_is_a_model_for_other_commands(run: Path) -> None:
    """Of a run that holds an adapter alone the base model is found."""
    encoder = load_encoder(run)
    assert adapters(encoder.model)
    plain = load_encoder(run.parent / "clip")
    text = encoder.encode_text(["dog", "car"])
    assert not torch.allclose(text, plain.encode_text(["dog", "car"]))
    from_pretrained(plain.model, run / "adapter")
    assert torch.equal(text, plain.encode_text(["dog", "car"]))


def _losses(out: Path) -> list[float]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [record["train/loss"] for record in map(json.loads, lines) if "train/loss" in record]


def test_accumulated_gradients_are_those_of_the_whole_batch(folder: Path, tmp_path: Path) -> None:
    """Crops have pixels that do not count, and not all as many."""
    exact = replace(_short(folder, "block-scale"), precision="float64", steps=3, log_every=1, batch_size=4)
    train.run(exact, tmp_path / "whole")
    train.run(replace(exact, micro_batch=1), tmp_path / "parts")
    assert _losses(tmp_path / "parts") == pytest.approx(_losses(tmp_path / "whole"), rel=1e-10)


@pytest.mark.parametrize("score", ["cosine", "lorentz"])
def test_bfloat16_learns_what_float32_learns(folder: Path, tmp_path: Path, capsys: Any, score: Any) -> None:
    one = replace(_short(folder, "block-scale"), steps=20, log_every=1, lr=5e-3, score=score)
    train.run(one, tmp_path / "float32")
    result = train.run(replace(one, precision="bfloat16", micro_batch=2), tmp_path / "bfloat16")
    found, exact = _losses(tmp_path / "bfloat16"), _losses(tmp_path / "float32")
    assert found != exact
    assert found == pytest.approx(exact, rel=0.02)
    assert found[-1] < found[0] - 0.005
    assert main(["evaluate", str(tmp_path / "bfloat16"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["miou"] == pytest.approx(result["metrics"]["miou"], abs=1e-6)


def test_seeds_give_intervals_beside_the_twin_with_the_cosine(folder: Path, tmp_path: Path, capsys: Any) -> None:
    several = replace(_short(folder, "block-scale"), score="lorentz", twin=True, seeds=2, seed=3)
    result = train.run(several, tmp_path / "run")
    names = ["block-scale-lorentz-3", "block-scale-lorentz-4", "block-scale-3", "block-scale-4"]
    assert sorted(path.name for path in (tmp_path / "run" / "members").iterdir()) == sorted(names)
    assert [(row["method"], row["seed"]) for row in result["methods"]] == [
        *(("block-scale, lorentz", seed) for seed in (3, 4)),
        *(("block-scale", seed) for seed in (3, 4)),
    ]
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["miou"] == pytest.approx(result["methods"][0]["metrics"]["miou"], abs=1e-6)
    number = result["headline"][0]
    for ends, key, rows in (
        ("interval", "value", result["methods"][:2]),
        ("twin_interval", "twin", result["methods"][2:]),
    ):
        values = [100 * row["metrics"]["miou"] for row in rows]
        assert number[key] == pytest.approx(np.mean(values))
        low, high = student.interval(0.95, 1, np.mean(values), np.std(values, ddof=1) / 2**0.5)
        assert number[ends] == pytest.approx([max(low, 0), min(high, 100)])
    assert "Means over 2 seeds" in (tmp_path / "run" / "report.html").read_text()
    assert result["metrics"]["miou"] == pytest.approx(number["value"] / 100)


def test_an_ablation_has_a_run_for_each_variant(folder: Path, tmp_path: Path) -> None:
    result = train.run(replace(_short(folder, "block-scale"), ablate="encoder"), tmp_path / "run")
    assert [cell["cell"] for cell in result["cells"]] == ["both", "text", "image"]
    assert all((tmp_path / "run" / cell["run"] / "decoder").is_dir() for cell in result["cells"])


def _short(folder: Path, method: Any) -> Config:
    given = {"data": folder / "scenes", "model": str(folder / "clip"), "method": method}
    return replace(Config(), **given, block_size=8, size=32, channels=16, window=2, steps=2)
