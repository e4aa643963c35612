"""The LatHAdapter recipe from end to end on small synthetic features."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPConfig, CLIPModel

from leafward.cli.dispatch import main
from leafward.config import checked, replace
from leafward.data.fewshot import Exam, FeatureSet, episodes, read_feature_set, seeded_split, write_feature_set
from leafward.data.taxonomy import class_taxonomy
from leafward.encoders import load_encoder
from leafward.errors import DataError, UsageError
from leafward.hierarchy import Taxonomy
from leafward.report import read_run
from leafward.stats.intervals import share_interval
from leafward.systems.lathadapter import config as lathadapter
from leafward.systems.lathadapter import methods as training
from leafward.systems.lathadapter import train
from leafward.systems.lathadapter.config import Config
from leafward.systems.lathadapter.images import Pixels, image_set, open_clip_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "adapters"))
from radial_toys import make

CLASSES, WIDTH = 8, 16


def settings(**chosen: Any) -> Config:
    """Those of the first preset with others by their short names."""
    return replace(Config(), **chosen)


def synthetic(seed: int = 0, noise: float = 1.2, teacher: bool = False) -> FeatureSet:
    """Images around class features that their texts know but roughly: there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3.0 * torch.randn(CLASSES, WIDTH, generator=generator)
    labels = torch.arange(CLASSES * 40) % CLASSES
    images = centres[labels] + noise * 3.0 * torch.randn(len(labels), WIDTH, generator=generator)
    texts = centres + 3.0 * torch.randn(CLASSES, WIDTH, generator=generator)
    larger = (torch.cat([images, images[:, :4]], dim=1), torch.cat([centres, centres[:, :4]], dim=1)) if teacher else ()
    names = tuple(f"class {number}" for number in range(CLASSES))
    return FeatureSet("toy", images, labels, texts, names, seeded_split(labels), *larger)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("features") / "toy.npz"
    write_feature_set(path, synthetic())
    return path


@pytest.fixture(scope="module")
def small(file: Path) -> Config:
    return settings(features=file, hosts=("coop",), seeds=2, shots=(8,), max_steps=40, attributes=(6,), queue=32)


@pytest.fixture(scope="module")
def finished(small: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    taxonomy = tmp_path_factory.mktemp("taxonomy") / "tree.csv"
    rows = [f"class {number},{'even' if number % 2 == 0 else 'odd'}" for number in range(CLASSES)]
    taxonomy.write_text("\n".join([*rows, "even,root", "odd,root"]))
    out = tmp_path_factory.mktemp("run") / "run"
    return out, train.run(replace(small, taxonomy=taxonomy), out)


METHODS = ["zero-shot", "clip-adapter", "tip-adapter", "coop", "coop + LatHAdapter", "coop + Euclidean twin"]


def test_base_to_new_scores_every_method(finished: tuple[Path, dict[str, Any]]) -> None:
    _, result = finished
    cells = {(row["method"], row["test"]): row for row in result["table"]}
    assert set(cells) == {(method, test) for method in METHODS for test in ("base", "new", "harmonic mean")}
    for row in result["scores"]:
        assert 0 <= row["accuracy"] <= 100
        if row["test"] != "harmonic mean":
            assert row["hierarchy"]["lca_height"] >= 0
            assert 0 <= row["hierarchy"]["decided_f1"] <= 1
    # Trained methods know the base classes better than zero-shot; the baseline without training is exact.
    assert cells["coop", "base"]["accuracy"] > cells["zero-shot", "base"]["accuracy"]
    assert cells["zero-shot", "new"]["interval"] is None  # no seed changes it
    assert cells["tip-adapter", "new"]["accuracy"] == pytest.approx(cells["zero-shot", "new"]["accuracy"])


def test_zero_shot_is_what_the_features_say(finished: tuple[Path, dict[str, Any]], file: Path) -> None:
    _, result = finished
    data = read_feature_set(file)
    _, new = episodes("base-to-new", data, [], [1], [0])[0].exams
    cosine = (
        torch.nn.functional.normalize(data.images[new.rows], dim=1)
        @ torch.nn.functional.normalize(data.texts[new.classes], dim=1).mT
    )
    expected = 100 * float((cosine.argmax(dim=1) == new.targets).double().mean())
    found = next(row for row in result["table"] if (row["method"], row["test"]) == ("zero-shot", "new"))
    assert found["accuracy"] == pytest.approx(expected)


def test_an_evaluation_holds_a_few_logits_at_once(
    finished: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A hundred times the images of ten logits at once: the same scores, taxonomy included."""
    run, result = finished
    held = []
    parts = training.Trained.parts

    def seen(self: Any, exam: Any) -> Any:
        for rows, logits in parts(self, exam):
            held.append(logits.numel())
            yield rows, logits

    monkeypatch.setattr(training, "MOST", 10)
    monkeypatch.setattr(training.Trained, "parts", seen)
    assert main(["evaluate", str(run), "--out", str(tmp_path / "again.json")]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert max(held) <= 10
    assert len(held) > 100
    for ours, theirs in zip(again["scores"], result["scores"], strict=True):
        assert ours["accuracy"] == theirs["accuracy"]
        assert ours["hierarchy"] == (theirs["hierarchy"] and pytest.approx(theirs["hierarchy"]))


def test_differences_are_paired_by_seed(finished: tuple[Path, dict[str, Any]]) -> None:
    _, result = finished
    by = {(row["method"], row["seed"], row["test"]): row["accuracy"] for row in result["scores"]}
    gains = [by["coop + LatHAdapter", seed, "base"] - by["coop", seed, "base"] for seed in (0, 1)]
    found = next(row for row in result["differences"] if row["gain"] == "over the host alone" and row["test"] == "base")
    assert found["difference"] == pytest.approx(sum(gains) / 2)
    assert {row["gain"] for row in result["differences"]} == {"over the host alone", "over the Euclidean twin"}


def test_the_run_directory(finished: tuple[Path, dict[str, Any]], small: Config) -> None:
    out, result = finished
    assert json.loads((out / "result.json").read_text())["headline"] == json.loads(json.dumps(result["headline"]))
    page = (out / "report.html").read_text()
    for text in ("What the hierarchy adds", "Mistakes in the taxonomy", "coop + Euclidean twin"):
        assert text in page
    assert read_run(out).headline[0].twin is not None
    with pytest.raises(UsageError, match="finished run"):
        train.run(small, out)


def test_the_explorer_names_the_feature_file_of_a_run(
    finished: tuple[Path, dict[str, Any]], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explore", str(finished[0])]) == 1
    assert f"leafward explore {file}" in capsys.readouterr().err.replace("\n", "")


def test_the_twin_begins_alike_and_sees_the_same_shots(small: Config, file: Path) -> None:
    episode = episodes("few-shot", read_feature_set(file), [], [4], [0])[0]
    states = []
    for geometry in (None, "lorentz", "euclidean"):
        torch.manual_seed(0)
        method = training.Method("promptsrc", geometry, 6 if geometry else None)
        states.append(training.build(small, method, episode, None).state_dict())
    assert states[1].keys() == states[2].keys()
    for name, value in states[1].items():
        torch.testing.assert_close(states[2][name], value)
        if name in states[0]:
            torch.testing.assert_close(states[0][name], value)


def test_a_stopped_run_goes_on_where_it_was(small: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(small, baselines=(), seeds=1)
    whole = train.run(config, tmp_path / "whole")
    trained, train_loop = [], training.train_loop

    def stop(host, *rest):
        trained.append(1)
        if len(trained) == 3:  # the host alone, with LatHAdapter, and then the twin
            raise KeyboardInterrupt
        return train_loop(host, *rest)

    monkeypatch.setattr(training, "train_loop", stop)
    with pytest.raises(KeyboardInterrupt):
        train.run(config, tmp_path / "parts")
    again = train.run(config, tmp_path / "parts", resume=True)
    assert len(trained) == 4  # only the twin was missing
    assert [row["accuracy"] for row in again["scores"]] == [row["accuracy"] for row in whole["scores"]]


def test_features_that_have_changed_since_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, data = tmp_path / "own.npz", synthetic()
    write_feature_set(own, data)
    short = settings(features=own, shots=(1,), seeds=1, epochs=1, hosts=(), baselines=("clip-adapter",))
    train.run(short, tmp_path / "run")
    write_feature_set(own, dataclasses.replace(data, images=data.images[:, :8], texts=data.texts[:, :8]))
    assert main(["evaluate", str(tmp_path / "run")]) == 1
    assert "was trained on features or a model of other sizes than own has now" in capsys.readouterr().err


def test_promptkd_with_a_larger_teacher(tmp_path: Path) -> None:
    write_feature_set(tmp_path / "two.safetensors", synthetic(teacher=True))
    config = settings(
        features=tmp_path / "two.safetensors",
        hosts=("promptkd",),
        baselines=("zero-shot",),
        seeds=1,
        shots=(8,),
        max_steps=30,
        attributes=(6,),
        twin=False,
    )
    result = train.run(config, tmp_path / "run")
    assert {row["method"] for row in result["scores"]} == {"zero-shot", "promptkd", "promptkd + LatHAdapter"}
    assert (tmp_path / "run" / "members" / "teacher-promptsrc-8-shots-0" / "model").is_dir()


def test_promptkd_learns_from_all_training_images_without_their_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its student sees every training image of every class; labels are those of the shots, for the hierarchy alone."""
    data = synthetic(teacher=True)
    file = tmp_path / "two.npz"
    write_feature_set(file, data)
    batches: list[tuple[Any, ...]] = []
    forward = training.PromptKD.forward

    def seen(self: Any, images: Any, labels: Any = None, classes: Any = None, teacher: Any = None) -> Any:
        if teacher is not None:
            batches.append((images, labels, teacher))
        return forward(self, images, labels, classes, teacher)

    monkeypatch.setattr(training.PromptKD, "forward", seen)
    config = settings(features=file, hosts=("promptkd",), baselines=(), seeds=1, shots=(2,), attributes=(6,))
    config = replace(config, twin=False, epochs=1, batch_size=20)
    train.run(config, tmp_path / "run")
    whole = {tuple(row) for row in data.images[data.split == 0].tolist()}
    for alone in (True, False):
        mine = [images[: len(teacher)] for images, labels, teacher in batches if (labels is None) == alone]
        assert {tuple(row) for row in torch.cat(mine).tolist()} == whole
    (episode,) = episodes("base-to-new", data, [], (2,), [0])
    shots = {tuple(data.images[row].tolist()): int(data.labels[row]) for row in episode.train}
    assert len(shots) == 8
    for images, labels, teacher in batches:
        if labels is not None:
            assert len(labels) == len(images) == 2 * len(teacher)
            assert bool((labels[: len(teacher)] == -1).all())
            for row, label in zip(images[len(teacher) :], labels[len(teacher) :], strict=True):
                assert shots[tuple(row.tolist())] == int(label)


def test_a_finished_run_of_an_earlier_version_is_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which kept its trainings in checkpoints/cells."""
    write_feature_set(tmp_path / "two.npz", synthetic(teacher=True))
    options: Any = {"hosts": ("promptkd",), "baselines": ("clip-adapter",), "seeds": 1, "shots": (4,), "max_steps": 3}
    result = train.run(settings(features=tmp_path / "two.npz", attributes=(6,), **options), tmp_path / "run")
    earlier = {
        "clip-adapter-4-shots-0": "clip-adapter-4-shots-seed-0",
        "promptkd-4-shots-0": "promptkd-4-shots-seed-0",
        "promptkd-LatHAdapter-4-shots-6-attributes-0": "promptkd-LatHAdapter-4-shots-seed-0-6-attributes",
        "promptkd-Euclidean-twin-4-shots-6-attributes-0": "promptkd-Euclidean-twin-4-shots-seed-0-6-attributes",
        "teacher-promptsrc-4-shots-0": "teacher/promptsrc-4-shots-seed-0",
    }
    (tmp_path / "run" / "checkpoints" / "cells" / "teacher").mkdir(parents=True)
    for now, then in earlier.items():
        (tmp_path / "run" / "members" / now).rename(tmp_path / "run" / "checkpoints" / "cells" / then)
    (tmp_path / "run" / "members").rmdir()
    monkeypatch.setattr(training, "train_loop", None)
    assert scores_of(["evaluate", str(tmp_path / "run")], capsys) == json.loads(json.dumps(result["scores"]))


def test_the_number_of_attributes_is_chosen_on_validation(small: Config, tmp_path: Path) -> None:
    config = replace(small, attributes=(4, 8), baselines=(), seeds=1, twin=False, protocol="few-shot")
    result = train.run(config, tmp_path / "run")
    chosen = {row["attributes"] for row in result["scores"] if row["geometry"]}
    assert len(chosen) == 1
    assert chosen <= {4, 8}
    assert any("chosen on validation" in note for note in result["notes"])


def test_other_data_sets(small: Config, tmp_path: Path) -> None:
    write_feature_set(tmp_path / "far.npz", dataclasses.replace(synthetic(seed=1), name="far"))
    config = replace(
        small, protocol="cross-dataset", targets=(tmp_path / "far.npz",), hosts=("maple",), baselines=(), seeds=1
    )
    result = train.run(config, tmp_path / "run")
    assert {row["test"] for row in result["scores"]} == {"toy", "far"}


def test_the_cache_of_tip_adapter_serves_its_classes_in_another_domain(small: Config, tmp_path: Path) -> None:
    """The same pictures under another name, their classes in another order, get the same answers."""
    data = synthetic()
    order = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(0))
    names = tuple(data.class_names[place] for place in order.tolist())
    other = dataclasses.replace(
        data, name="other", texts=data.texts[order], class_names=names, labels=order.argsort()[data.labels]
    )
    (episode,) = episodes("domain", data, [other], [4], [0])
    trained = training.open_trained(small, training.Method("tip-adapter"), episode, tmp_path)
    own, elsewhere = (trained.logits(exam) for exam in episode.exams)
    torch.testing.assert_close(elsewhere, own[:, order])
    zero_shot = training.open_trained(small, training.Method("zero-shot"), episode, tmp_path).logits(episode.exams[1])
    assert (elsewhere - zero_shot).abs().max() > 0.1


def test_refusals(small: Config, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="features is missing"):
        train.run(Config(), tmp_path / "run")
    for options, message in [
        ({"shots": ()}, "shots must be a list with at least one entry"),
        ({"attributes": (1,)}, r"attributes\[0\] must be an integer ≥ 2"),
        ({"lr": 0.0}, "lr must be a finite number > 0"),
        ({"seeds": 0}, "seeds must be an integer from 1"),
        ({"hosts": (), "baselines": ()}, "hosts must be at least one"),
        ({"hosts": ("coop", "coop")}, "hosts must be a list without repeats"),
        ({"template": "a {} or {}"}, "template must be a text with {} once"),
    ]:
        with pytest.raises(UsageError, match=message):
            checked(Config, options)
    taxonomy = tmp_path / "tree.csv"
    taxonomy.write_text("class 0,root\n")
    with pytest.raises(DataError, match="lacks 7 of the classes, for example 'class 1'"):
        train.run(replace(small, taxonomy=taxonomy), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", lathadapter.PRESETS)
def test_presets_are_configurations(name: str) -> None:
    assert isinstance(lathadapter.PRESETS[name](), Config)


def test_a_target_without_the_teachers_features_is_refused(tmp_path: Path) -> None:
    write_feature_set(tmp_path / "two.npz", synthetic(teacher=True))
    write_feature_set(tmp_path / "far.npz", dataclasses.replace(synthetic(seed=1), name="far"))
    config = settings(
        features=tmp_path / "two.npz",
        targets=(tmp_path / "far.npz",),
        protocol="cross-dataset",
        hosts=("promptkd",),
        baselines=(),
        seeds=1,
        max_steps=2,
        attributes=(4,),
        twin=False,
    )
    with pytest.raises(DataError, match="needs teacher_text_features"):
        train.run(config, tmp_path / "run")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CLIP and noisy squares of one colour for each of four classes."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    colours = {"dog": (230, 40, 40), "car": (40, 230, 40), "pizza": (40, 40, 230), "grass": (200, 200, 40)}
    for name, colour in colours.items():
        (root / "images" / name).mkdir(parents=True)
        for number in range(8):
            pixels = np.clip(np.array(colour) + rng.normal(0, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / "images" / name / f"{number}.png")
    make("clip", root)
    return root


def test_every_host_learns_tokens_inside_a_model_from_images(pictures: Path, tmp_path: Path) -> None:
    config = settings(
        images=pictures / "images",
        model=str(pictures / "clip"),
        template="a photo of {}",
        tokens=2,
        hosts=("coop", "maple", "promptsrc", "promptkd"),
        protocol="few-shot",
        shots=(4,),
        seeds=1,
        attributes=(4,),
        twin=False,
        max_steps=3,
        batch_size=8,
    )
    result = train.run(config, tmp_path / "run")
    hosts = ("coop", "maple", "promptsrc", "promptkd")
    expected = {*config.baselines, *hosts, *(f"{host} + LatHAdapter" for host in hosts)}
    assert {row["method"] for row in result["scores"]} == expected
    # Zero-shot is that of the model itself.
    encoder = load_encoder(pictures / "clip")
    data = image_set(pictures / "images", encoder, config.data.template)  # pyright: ignore[reportArgumentType]
    rows = data.part(2)
    files = [data.images.files[row] for row in rows.tolist()]  # pyright: ignore[reportAttributeAccessIssue]
    texts = encoder.encode_text([config.data.template.format(name) for name in data.class_names])
    right = (encoder.encode_image(files) @ texts.mT).argmax(dim=1) == data.labels[rows]
    zero_shot = next(row for row in result["scores"] if row["method"] == "zero-shot")
    assert zero_shot["accuracy"] == pytest.approx(100 * float(right.double().mean()))
    # A cell holds the prompts and not the model.
    saved = load_file(tmp_path / "run/members/coop-4-shots-0/model/model.safetensors")
    assert list(saved) == ["encoder.text_tokens"]


def test_promptkd_has_a_teacher_of_its_own_on_images(pictures: Path, tmp_path: Path) -> None:
    """Another model, of another width; the texts of both are averaged over the templates of a file."""
    make("clip", tmp_path)
    loaded = CLIPConfig.from_pretrained(tmp_path / "clip")
    loaded.projection_dim = 24
    torch.manual_seed(8)
    CLIPModel(loaded).save_pretrained(tmp_path / "clip")
    (tmp_path / "templates.txt").write_text("a photo of {}\nthe {}\n")
    config = settings(
        images=pictures / "images",
        model=str(pictures / "clip"),
        teacher=str(tmp_path / "clip"),
        templates=tmp_path / "templates.txt",
        template="a photo of {}",
        tokens=2,
        hosts=("promptkd",),
        baselines=(),
        shots=(2,),
        seeds=1,
        attributes=(4,),
        twin=False,
        max_steps=2,
        batch_size=4,
    )
    result = train.run(config, tmp_path / "run")
    assert {row["method"] for row in result["scores"]} == {"promptkd", "promptkd + LatHAdapter"}
    student = load_file(tmp_path / "run/members/promptkd-2-shots-0/model/model.safetensors")
    assert student["projector.skip.weight"].shape[0] == 24
    assert (tmp_path / "run/members/teacher-promptsrc-2-shots-0/model").is_dir()
    assert main(["evaluate", str(tmp_path / "run"), "--out", str(tmp_path / "again.json")]) == 0
    again = json.loads((tmp_path / "again.json").read_text())["scores"]
    assert [row["accuracy"] for row in again] == [row["accuracy"] for row in result["scores"]]
    with pytest.raises(UsageError, match="teacher is for promptkd"):
        train.run(replace(config, hosts=("coop",)), tmp_path / "other")
    sets = training.read_sets(config)
    data = training.of_teacher(training.episodes(config, sets)[0]).data
    teacher = load_encoder(tmp_path / "clip")
    for place, name in enumerate(data.class_names):
        expected = teacher.encode_text([f"a photo of {name}", f"the {name}"], unit=False).mean(dim=0)
        assert data.diverse_texts is not None
        torch.testing.assert_close(data.diverse_texts[place], expected, rtol=1e-4, atol=1e-5)


def test_training_crops_follow_from_the_seed(pictures: Path) -> None:
    encoder = open_clip_model(str(pictures / "clip"))
    pixels: Any = image_set(pictures / "images", encoder, "a photo of {}").images

    def drawn(seed: int) -> list[bytes]:
        torch.manual_seed(seed)
        views = pixels.views(torch.arange(4), 16)
        assert {view.size for view in views} == {(16, 16)}
        return [view.tobytes() for view in views]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert drawn(0) != [picture.tobytes() for picture in pixels.opened(torch.arange(4))]


def test_images_of_another_set_and_what_is_refused(pictures: Path, tmp_path: Path) -> None:
    given = {"images": pictures / "images", "model": str(pictures / "clip"), "tokens": 2, "hosts": ("maple",)}
    config = settings(
        **given,
        protocol="cross-dataset",
        targets=(pictures / "images",),
        baselines=("tip-adapter",),
        shots=(2,),
        seeds=1,
        max_steps=1,
        attributes=(4,),
        twin=False,
    )
    result = train.run(config, tmp_path / "run")
    assert {row["test"] for row in result["scores"]} == {"images", "images (2)"}  # the same set, told apart
    with pytest.raises(UsageError, match="model is missing"):
        train.run(replace(config, model=None), tmp_path / "other")
    with pytest.raises(UsageError, match="features and images exclude each other"):
        train.run(replace(config, features=tmp_path / "x.npz"), tmp_path / "other")
    make("siglip", tmp_path)
    with pytest.raises(UsageError, match="need a Hugging Face CLIP model, not 'siglip'"):
        train.run(replace(config, model=str(tmp_path / "siglip")), tmp_path / "other")


def test_too_many_tokens_are_refused_before_anything_is_encoded(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    monkeypatch.setattr(Pixels, "__getitem__", lambda self, rows: encoded.append(rows))
    monkeypatch.setattr(CLIPModel, "get_text_features", lambda self, **given: encoded.append(given))
    words = open_clip_model(str(pictures / "clip")).tokenizer("a photo of a", add_special_tokens=False)["input_ids"]
    config = settings(
        images=pictures / "images", model=str(pictures / "clip"), tokens=len(words) + 1, shots=(2,), seeds=1
    )
    with pytest.raises(UsageError, match=rf"tokens must be from 1 to {len(words)}, .*, got {len(words) + 1}"):
        train.run(config, tmp_path / "run")
    assert encoded == []
    assert not (tmp_path / "run").exists()


def test_an_evaluation_shows_means_over_seeds(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, evaluation_shown: Any
) -> None:
    out, result = finished
    assert main(["evaluate", str(out), "--out", str(tmp_path / "again.json")]) == 0
    found, text = evaluation_shown(tmp_path / "again.json", tmp_path / "again.html")
    assert found["headline"] == json.loads(json.dumps(result["headline"]))
    (number,) = found["headline"]
    means = [
        row["accuracy"] for row in found["scores"] if (row["method"], row["test"]) == (METHODS[4], "harmonic mean")
    ]
    half = 12.706204736 * abs(means[0] - means[1]) / 2  # Student's t with one degree of freedom
    centre = sum(means) / 2
    ends = [max(0.0, centre - half), min(100.0, centre + half)]
    assert number["interval"] == (pytest.approx(ends) if half else None)
    for words in (*METHODS, "What the hierarchy adds", "Mistakes in the taxonomy"):
        assert words in text


def test_one_seed_has_intervals_over_the_test_images(small: Config, tmp_path: Path, evaluation_shown: Any) -> None:
    config = replace(small, baselines=("zero-shot",), hosts=(), seeds=1, protocol="few-shot")
    train.run(config, tmp_path / "run")
    write_feature_set(tmp_path / "other.npz", synthetic(seed=1))
    words = ["evaluate", str(tmp_path / "run"), "--features", str(tmp_path / "other.npz")]
    assert main([*words, "--out", str(tmp_path / "far")]) == 0
    found, text = evaluation_shown(tmp_path / "far" / "evaluation.json", tmp_path / "far" / "report.html")
    (row,) = found["scores"]
    right = round(row["accuracy"] / 100 * row["images"])
    assert row["images"] == int((synthetic(seed=1).split == 2).sum())
    assert found["headline"][0]["interval"] == pytest.approx(
        [100 * end for end in share_interval(right, row["images"])]
    )
    assert "Wilson's interval over the test images" in text


def test_a_run_is_scored_again_by_its_own_protocol(
    finished: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, result = finished
    assert main(["evaluate", str(out), "--protocol", "base-to-new", "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["protocol"] == "base-to-new"
    assert [row["accuracy"] for row in again["scores"]] == [row["accuracy"] for row in result["scores"]]
    for words, message in [
        (["--protocol", "few-shot"], "needs a run of leafward train lathadapter --protocol few-shot"),
        (["--protocol", "domain"], "--protocol domain needs --features"),
        (["--images", "x"], "--images: "),
        (["--taxonomy", "nothing.csv"], "nothing.csv"),
        (["--protocol", "base-to-new", "--features", "x.npz"], "leave --features out"),
    ]:
        assert main(["evaluate", str(out), *words]) in (1, 2)
        assert message in " ".join(capsys.readouterr().err.split())


def tree(folder: Path, names: Sequence[str], name: str = "tree.csv") -> Path:
    """A taxonomy of two groups by turns."""
    rows = [f"{each},{'even' if place % 2 == 0 else 'odd'}" for place, each in enumerate(names)]
    (folder / name).write_text("\n".join([*rows, "even,root", "odd,root"]))
    return folder / name


@pytest.fixture(scope="module")
def in_pictures(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config, dict[str, Any]]:
    """A run on images, with prompts inside the model, made with paths of another directory."""
    config = settings(
        images=Path(os.path.relpath(pictures / "images")),
        model=os.path.relpath(pictures / "clip"),
        tokens=2,
        hosts=("coop", "promptkd"),
        baselines=("zero-shot", "tip-adapter"),
        shots=(2,),
        seeds=1,
        max_steps=2,
        attributes=(4,),
        twin=False,
        batch_size=4,
    )
    out = tmp_path_factory.mktemp("in-pictures") / "run"
    return out, config, train.run(config, out)


def scores_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["scores"]


def test_a_run_on_images_is_scored_again_from_anywhere(
    in_pictures: tuple[Path, Config, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, config, result = in_pictures
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "train_loop", None)  # nothing is trained again
    again = scores_of(["evaluate", str(out)], capsys)
    assert again == json.loads(json.dumps(result["scores"]))
    assert main(["evaluate", str(out), "--features", "x.npz"]) == 2
    assert "give other data sets with --images" in " ".join(capsys.readouterr().err.split())
    assert main(["evaluate", str(out), "--protocol", "domain"]) == 2
    assert "--protocol domain needs --images" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UsageError, match="features is missing"):
        train.run(replace(config, images=None), tmp_path / "other")


@pytest.mark.parametrize("protocol", ["cross-dataset", "domain"])
def test_a_run_on_images_is_scored_on_other_pictures(
    protocol: str,
    in_pictures: tuple[Path, Config, dict[str, Any]],
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a taxonomy of those pictures; the accuracy of zero-shot is that of the model itself."""
    out, config, _ = in_pictures
    names = ["car", "dog", "grass"] if protocol == "domain" else ["dog", "bread", "red_bus"]
    rng = np.random.default_rng(1)
    for name in names:
        (tmp_path / "others" / name).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(
                tmp_path / "others" / name / f"{number}.png"
            )
    monkeypatch.setattr(training, "train_loop", None)
    words = ["evaluate", str(out), "--protocol", protocol, "--images", str(tmp_path / "others")]
    rows = scores_of([*words, "--taxonomy", str(tree(tmp_path, sorted(names)))], capsys)
    assert {row["method"] for row in rows} == {
        *config.baselines,
        "coop",
        "coop + LatHAdapter",
        "promptkd",
        "promptkd + LatHAdapter",
    }
    assert {row["test"] for row in rows} == {"others"}
    encoder = load_encoder(pictures / "clip")
    data = image_set(tmp_path / "others", encoder, config.data.template)  # pyright: ignore[reportArgumentType]
    files = [data.images.files[row] for row in data.part(2).tolist()]  # pyright: ignore[reportAttributeAccessIssue]
    texts = encoder.encode_text([config.data.template.format(name.replace("_", " ")) for name in data.class_names])
    answers = (encoder.encode_image(files) @ texts.mT).argmax(dim=1)
    truth = data.labels[data.part(2)]
    zero_shot = next(row for row in rows if row["method"] == "zero-shot")
    assert zero_shot["accuracy"] == pytest.approx(100 * float((answers == truth).double().mean()))
    # In the tree a wrong answer of the same group is one edge up, any other two.
    wrong = answers != truth
    heights = torch.where((answers - truth) % 2 == 0, 1.0, 2.0)[wrong]
    assert zero_shot["hierarchy"]["mistake_severity"] == pytest.approx(float(heights.mean()))
    assert 0 <= zero_shot["hierarchy"]["backed_true"] <= 100


def test_a_run_on_features_is_scored_with_another_taxonomy(
    small: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained without one. Of the data sets that are scored, those whose classes it lacks go without."""
    write_feature_set(tmp_path / "far.npz", dataclasses.replace(synthetic(seed=1), name="far"))
    strange = dataclasses.replace(
        synthetic(seed=2), class_names=tuple(f"strange {number}" for number in range(CLASSES))
    )
    write_feature_set(tmp_path / "strange.npz", strange)
    config = replace(small, protocol="cross-dataset", hosts=("coop",), baselines=("zero-shot",), seeds=1, max_steps=5)
    given = replace(config, targets=(tmp_path / "far.npz",))
    train.run(given, tmp_path / "run")
    run, source = str(tmp_path / "run"), str(tree(tmp_path, synthetic().class_names))
    assert all("hierarchy" not in row for row in scores_of(["evaluate", run], capsys))
    rows = scores_of(["evaluate", run, "--taxonomy", source], capsys)
    assert {row["test"] for row in rows} == {"toy", "far"}
    assert all(row["hierarchy"]["lca_height"] >= 0 for row in rows)
    # The few-shot score of the same trainings, which have seen all classes.
    few = scores_of(["evaluate", run, "--protocol", "few-shot"], capsys)
    own = [row["accuracy"] for row in rows if row["test"] == "toy"]
    assert [row["accuracy"] for row in few] == own

    files = [str(tmp_path / "far.npz"), str(tmp_path / "strange.npz")]
    assert main(["evaluate", run, "--features", *files, "--taxonomy", source, "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "The taxonomy lacks classes of strange" in page
    assert "Mistakes in the taxonomy" in page
    assert "Mistakes in the taxonomy" in " ".join(capsys.readouterr().out.split())
    assert main(["evaluate", run, "--features", files[1], "--taxonomy", source]) == 1
    assert "lacks 8 of the classes, for example 'strange 0'" in " ".join(capsys.readouterr().err.split())


def test_the_taxonomy_of_a_run_may_lack_the_classes_of_other_data(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = dataclasses.replace(
        synthetic(seed=2), class_names=tuple(f"strange {number}" for number in range(CLASSES))
    )
    write_feature_set(tmp_path / "strange.npz", strange)
    rows = scores_of(["evaluate", str(finished[0]), "--features", str(tmp_path / "strange.npz")], capsys)
    assert {row["test"] for row in rows} == {"strange"}
    assert all("hierarchy" not in row for row in rows)


def test_classes_are_found_in_wordnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first sense of their names; what is above them stays, what is beside them goes."""
    (tmp_path / "nouns.csv").write_text(
        "child,parent\nentity.n.01,\nanimal.n.01,entity.n.01\ndog.n.01,animal.n.01\npoodle.n.01,dog.n.01\n"
        "cat.n.01,animal.n.01\nred_bus.n.01,entity.n.01\ndog.n.02,entity.n.01\n"
    )
    monkeypatch.setattr(Taxonomy, "from_wordnet", lambda: Taxonomy.load(tmp_path / "nouns.csv"))
    tax = class_taxonomy("wordnet", ["Dog", "cat.n.01", "red bus"], ["dog", "unicorn"])
    assert set(tax.names) == {"entity.n.01", "animal.n.01", "Dog", "cat.n.01", "red bus"}
    assert int(tax.distance("Dog", "cat.n.01")) == 2
    assert set(class_taxonomy("wordnet:animal.n.01", ["dog", "poodle"]).names) == {"animal.n.01", "dog", "poodle"}
    with pytest.raises(DataError, match="wordnet lacks 1 of the classes, for example 'unicorn'"):
        class_taxonomy("wordnet", ["dog", "unicorn"])
    with pytest.raises(DataError, match=r"'dog' and 'dog\.n\.01' are the same node"):
        class_taxonomy("wordnet", ["dog", "dog.n.01"])


def test_zero_shot_takes_wordnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    names = tuple(f"class {number}" for number in range(CLASSES))
    rows = [f"class_{number}.n.01,{'even' if number % 2 == 0 else 'odd'}" for number in range(CLASSES)]
    (tmp_path / "nouns.csv").write_text("\n".join([*rows, "even,root", "odd,root", "beside,root"]))
    monkeypatch.setattr(Taxonomy, "from_wordnet", lambda: Taxonomy.load(tmp_path / "nouns.csv"))
    write_feature_set(tmp_path / "toy.npz", synthetic())
    found = []
    for source in ("wordnet", str(tree(tmp_path, names))):
        words = ["evaluate", "--task", "zeroshot", "--features", str(tmp_path / "toy.npz"), "--taxonomy", source]
        assert main([*words, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert found[0]["hierarchical"] == found[1]["hierarchical"]
    assert found[0]["least_expected_distance"] == found[1]["least_expected_distance"]


def test_an_ablation_and_a_grid_by_the_command(file: Path, tmp_path: Path) -> None:
    words = ["train", "lathadapter", "--data", str(file), "--protocol", "few-shot", "--shots", "2", "--hosts", "coop"]
    words += ["--baselines", "zero-shot", "--seeds", "1", "--steps", "2", "--attributes", "4", "--ablate", "parts"]
    assert main([*words, "--grid", "margin=0.1,0.2", "--device", "cpu", "--out", str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    parts = {"both": {}, "refinement-alone": {"hierarchy_weight": 0.0}, "losses-alone": {"refinement": 0.0}}
    assert {each["cell"]: each["settings"] for each in result["cells"]} == {
        f"{name},margin={margin}": {f"hierarchy.{key}": value for key, value in (changes | {"margin": margin}).items()}
        for name, changes in parts.items()
        for margin in (0.1, 0.2)
    }
    assert {each["headline"][0]["twin"] is not None for each in result["cells"]} == {True}
    assert set(result["best"]) == {"value", "twin"}


@pytest.mark.parametrize("name", lathadapter.ABLATIONS)
def test_ablations_are_settings(name: str) -> None:
    variants = [settings(**changes) for changes in lathadapter.ABLATIONS[name].values()]
    assert len({repr(each) for each in variants}) == len(variants) > 1


def test_training_that_watches_validation_images_keeps_the_best(small: Config, tmp_path: Path) -> None:
    config = replace(small, baselines=(), twin=False, seeds=1, steps=60, eval_every=3, patience=2, precision="bfloat16")
    train.run(replace(config, checkpoint_activations=True, ema=0.5), tmp_path / "run")
    run = tmp_path / "run" / "members" / "coop-8-shots-0"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert 2 < len(accuracies) < 20
    assert max(accuracies[-2:]) <= max(accuracies[:-2])  # two without improvement ended it
    data = read_feature_set(small.data.features)  # pyright: ignore[reportArgumentType]
    (episode,) = episodes("base-to-new", data, [], (8,), [0])
    trained = training.open_trained(config, training.Method("coop"), episode, tmp_path / "run")
    exam = Exam("validation", data, episode.classes, episode.validation)
    assert training.score(trained, exam, None)["accuracy"] == pytest.approx(max(accuracies))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"micro_batch": 4}, "loop.micro_batch must be None, because the losses compare"),
        ({"strategy": "fsdp"}, "loop.strategy must be auto or ddp"),
        ({"workers": 2}, "loop.workers must be 0"),
        ({"ema": 0.9, "hosts": ("promptkd",)}, "loop.ema must be None with PromptSRC"),
    ],
)
def test_what_a_loop_cannot_mean_here_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings(**options)


def test_epochs_are_whole_batches_up_to_max_steps_and_steps_are_steps() -> None:
    """The count of earlier versions: whole batches of an epoch, at least one."""
    for count, steps in ((70, 60), (20, 30), (320, 300), (64_000, 2000)):
        assert training.loop_of(Config(), 0, count).steps == steps
    assert training.loop_of(settings(steps=5000), 0, 20).steps == 5000
    assert training.loop_of(Config(), 0, 20).batch_size == 20


def test_a_compiled_host_learns_the_same(small: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    config = replace(small, baselines=("zero-shot",), twin=False, seeds=1, steps=3)
    plain = train.run(config, tmp_path / "plain")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    found = train.run(replace(config, compile=True), tmp_path / "compiled")
    assert graphs
    assert [row["accuracy"] for row in found["scores"]] == [row["accuracy"] for row in plain["scores"]]
