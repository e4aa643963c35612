"""The segmentation recipe on two-coloured scenes with a tiny random CLIP: train, evaluate, explain."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leafward.adapters import adapters, from_pretrained, load_encoder
from leafward.cli import main
from leafward.engine import parameter_groups
from leafward.errors import DataError, UsageError
from leafward.recipes import _segmenter, segmenter
from leafward.recipes._segmenter_drawing import overlay, palette
from leafward.recipes.segmenter import Config
from leafward.tasks.open_vocabulary import OpenVocabularyTask, measure
from leafward.tasks.segmentation import load_scenes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "adapters"))
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
    config = Config(
        data=folder / "scenes",
        model=str(folder / "clip"),
        block_size=8,
        size=32,
        channels=16,
        window=2,
        steps=60,
        lr=5e-3,
    )
    result = segmenter.run(config, folder / "run")
    assert result["metrics"]["miou"] > 0.6
    return folder / "run"


def test_a_run_keeps_what_was_learned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads((run / "result.json").read_text())
    assert (run / "adapter" / "adapter_config.json").is_file()
    assert (run / "decoder" / "model.safetensors").is_file()
    assert "Open-vocabulary segmentation" in (run / "report.html").read_text()
    # The same scenes, scored again from the files.
    assert main(["evaluate", str(run), "--data", str(run.parent / "scenes"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["miou"] == pytest.approx(result["metrics"]["miou"], abs=1e-6)


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
    assert "1 held-out scene " in text
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
    assert main(["explain", str(run), str(photo), "--out", str(tmp_path)]) == 2
    assert "give at least one photo and --words" in capsys.readouterr().err


def test_overlay_leaves_the_background_alone() -> None:
    image = np.full((2, 2, 3), 100, np.uint8)
    drawn = overlay(image, np.array([[0, -1], [1, 1]]), 2)
    np.testing.assert_array_equal(drawn[0, 1], [100, 100, 100])
    np.testing.assert_array_equal(drawn[0, 0], (100 + palette(2)[0].astype(int)) // 2)


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="data is missing"):
        segmenter.run(Config(), tmp_path / "run")
    given = {"data": folder / "scenes", "model": str(folder / "clip")}
    with pytest.raises(UsageError, match="size must be a multiple of the model's patch size 8, got 20"):
        segmenter.run(Config(**given, size=20), tmp_path / "run")
    few = shutil.copytree(folder / "scenes", tmp_path / "few")
    (few / "classes.txt").write_text("dog\n")
    with pytest.raises(DataError, match=r"masks/\d+\.png has label 1, of 1 classes"):
        segmenter.run(Config(data=few, model=str(folder / "clip"), size=32, block_size=8), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for options, message in [
        ({"channels": 20}, "channels must be a multiple of 16"),
        ({"steps": 0}, "steps must be"),
        ({"lr": 0.0}, "lr must be"),
        ({"most_scored": 0}, "most_scored must be"),
    ]:
        with pytest.raises(UsageError, match=message):
            Config(**options)


@pytest.mark.parametrize("method", ["attention", "full", "frozen"])
def test_methods_without_an_adapter_are_kept_and_opened(folder: Path, tmp_path: Path, method: str) -> None:
    config = _short(folder, method)
    result = segmenter.run(config, tmp_path / "run")
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
    whole = segmenter.run(config, tmp_path / "whole")
    loss = OpenVocabularyTask.loss
    calls = []

    def stop(task, model, batch):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return loss(task, model, batch)

    monkeypatch.setattr(OpenVocabularyTask, "loss", stop)
    with pytest.raises(KeyboardInterrupt):
        segmenter.run(config, tmp_path / "parts")
    monkeypatch.setattr(OpenVocabularyTask, "loss", loss)
    assert segmenter.run(config, tmp_path / "parts", resume=True)["metrics"] == whole["metrics"]


def test_a_run_is_a_model_for_other_commands(run: Path) -> None:
    """Of a run that holds an adapter alone the base model is found."""
    encoder = load_encoder(run)
    assert adapters(encoder.model)
    plain = load_encoder(run.parent / "clip")
    text = encoder.encode_text(["dog", "car"])
    assert not torch.allclose(text, plain.encode_text(["dog", "car"]))
    from_pretrained(plain.model, run / "adapter")
    assert torch.equal(text, plain.encode_text(["dog", "car"]))


def _short(folder: Path, method: Any) -> Config:
    return Config(
        data=folder / "scenes",
        model=str(folder / "clip"),
        method=method,
        block_size=8,
        size=32,
        channels=16,
        window=2,
        steps=2,
    )
