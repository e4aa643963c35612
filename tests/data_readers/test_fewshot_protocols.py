"""Feature files, splits and the four protocols."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from leafward.data.fewshot import (
    TEST,
    TRAIN,
    VALIDATION,
    FeatureSet,
    episodes,
    few_shot,
    harmonic_mean,
    read_feature_set,
    seeded_split,
    write_feature_set,
)
from leafward.errors import DataError, UsageError
from leafward.stats.intervals import mean_interval


def features(classes: int = 5, per_class: int = 20, name: str = "toy", teacher: bool = False) -> FeatureSet:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(classes * per_class) % classes
    texts = 10.0 * torch.randn(classes, 8, generator=generator)
    images = texts[labels] + torch.randn(len(labels), 8, generator=generator)
    larger = (torch.randn(len(labels), 12, generator=generator), torch.randn(classes, 12, generator=generator))
    names = tuple(f"class {number}" for number in range(classes))
    return FeatureSet(name, images, labels, texts, names, seeded_split(labels), *(larger if teacher else ()))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("teacher", [False, True])
def test_files_round_trip(suffix: str, teacher: bool, tmp_path: Path) -> None:
    data = features(teacher=teacher)
    write_feature_set(tmp_path / f"toy{suffix}", data)
    again = read_feature_set(tmp_path / f"toy{suffix}")
    assert (again.name, again.class_names) == (data.name, data.class_names)
    for name in ("images", "labels", "texts", "split", "teacher_images", "teacher_texts"):
        ours, theirs = getattr(data, name), getattr(again, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(theirs, ours, rtol=0, atol=0)  # norms included


def arrays() -> dict[str, np.ndarray]:
    data = features()
    return {
        "image_features": data.images.numpy(),
        "labels": data.labels.numpy(),
        "text_features": data.texts.numpy(),
        "class_names": np.array(data.class_names),
    }


def test_a_file_without_a_split_gets_the_same_one_every_time(tmp_path: Path) -> None:
    np.savez(tmp_path / "plain.npz", **arrays())  # pyright: ignore[reportArgumentType]
    first, second = (read_feature_set(tmp_path / "plain.npz") for _ in range(2))
    assert torch.equal(first.split, second.split)
    assert [int((first.split == part).sum()) for part in (TRAIN, VALIDATION, TEST)] == [50, 20, 30]


def without(**changes: object) -> dict[str, np.ndarray]:
    found = {**arrays(), **changes}
    return {name: value for name, value in found.items() if value is not None}  # pyright: ignore


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "holds no array 'labels'; it holds image_features, text_features"),
        ({"class_names": None}, "lacks the class names"),
        ({"class_names": np.array(["a", "b"])}, "2 class names, text_features"),
        ({"text_features": np.zeros((5, 8), np.float32)}, "text_features holds a vector that is zero"),
        ({"image_features": np.full((100, 8), np.nan, np.float32)}, "zero or not finite"),
        ({"image_features": np.zeros((100, 8), int)}, "image_features must be numbers"),
        ({"labels": np.arange(100)}, r"labels must be in 0…4, got 0…99"),
        ({"labels": np.zeros(3, int)}, "labels must be 100 integers"),
        ({"split": np.full(100, 3)}, r"split must be in 0…2"),
        ({"teacher_text_features": np.ones((5, 8), np.float32)}, "come together or not at all"),
        (
            {"teacher_text_features": np.ones((4, 8), np.float32), "teacher_image_features": np.ones((100, 8), "f")},
            "not of the same images and classes",
        ),
    ],
)
def test_bad_files_are_refused(changes: dict, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", **without(**changes))  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match=message):
        read_feature_set(tmp_path / "bad.npz")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x.pt: expected a file that ends in .npz or .safetensors"):
        read_feature_set(tmp_path / "x.pt")
    with pytest.raises(DataError, match="no such file"):
        read_feature_set(tmp_path / "missing.npz")
    # an .npz that would unpickle is refused before it runs anything
    np.savez(tmp_path / "pickle.npz", **without(class_names=np.array([{"a": 1}] * 5, dtype=object)))  # pyright: ignore
    with pytest.raises(DataError, match="allow_pickle=False"):
        read_feature_set(tmp_path / "pickle.npz")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(1, 6), st.integers(0, 20))
def test_few_shot_draws(labels: list[int], shots: int, seed: int) -> None:
    all_labels = torch.tensor(labels)
    rows = torch.arange(len(labels))[:: 2 if len(labels) > 1 else 1]
    drawn = few_shot(all_labels, rows, shots, seed)
    assert len(drawn.unique()) == len(drawn)
    assert torch.isin(drawn, rows).all()
    for label in all_labels[rows].unique():
        available = int((all_labels[rows] == label).sum())
        assert int((all_labels[drawn] == label).sum()) == min(shots, available)
    torch.testing.assert_close(few_shot(all_labels, rows, shots, seed), drawn)


def test_seeds_draw_other_shots() -> None:
    data = features()
    rows = data.part(TRAIN)
    drawn = [set(few_shot(data.labels, rows, 4, seed).tolist()) for seed in range(5)]
    assert len({frozenset(each) for each in drawn}) == 5


def test_base_to_new() -> None:
    data = features(classes=5)
    (first, _) = episodes("base-to-new", data, [], [3], [0, 1])
    assert first.classes.tolist() == [0, 1, 2]  # the larger half, as in CoOp's protocol
    assert set(data.labels[first.train].tolist()) == {0, 1, 2}
    assert len(first.train) == 9
    base, new = first.exams
    assert (base.name, base.classes.tolist()) == ("base", [0, 1, 2])
    assert (new.name, new.classes.tolist()) == ("new", [3, 4])
    assert set(new.targets.tolist()) == {0, 1}
    assert (new.targets + 3 == data.labels[new.rows]).all()
    for exam in first.exams:
        assert not set(exam.rows.tolist()) & set(first.train.tolist())
        assert (data.split[exam.rows] == TEST).all()
    assert (data.split[first.validation] == VALIDATION).all()
    assert set(data.labels[first.validation].tolist()) == {0, 1, 2}


def test_few_shot_protocol() -> None:
    found = episodes("few-shot", features(), [], [1, 2, 4], [0, 1, 2])
    assert [(each.shots, each.seed) for each in found] == [(n, s) for n in (1, 2, 4) for s in range(3)]
    assert [len(each.train) for each in found[::3]] == [5, 10, 20]
    assert all(len(each.exams[0].classes) == 5 for each in found)


def test_other_data_sets() -> None:
    data, other = features(), features(classes=3, name="other")
    (episode,) = episodes("cross-dataset", data, [other], [2], [0])
    assert [exam.name for exam in episode.exams] == ["toy", "other"]
    assert episode.exams[1].data is other
    assert len(episode.exams[1].classes) == 3
    (episode,) = episodes("domain", data, [other], [2], [0])
    assert len(episode.exams[1].classes) == 3

    with pytest.raises(UsageError, match="needs targets"):
        episodes("domain", data, [], [2], [0])
    foreign = replace(other, class_names=("class 0", "class 1", "pizza"))
    with pytest.raises(DataError, match="'pizza'"):
        episodes("domain", data, [foreign], [2], [0])
    wide = replace(other, texts=torch.ones(3, 9))
    with pytest.raises(DataError, match="width 9, but toy of width 8"):
        episodes("cross-dataset", data, [wide], [2], [0])
    with pytest.raises(UsageError, match="at least two classes"):
        episodes("base-to-new", features(classes=1), [], [2], [0])
    empty = replace(data, split=torch.zeros_like(data.split))
    with pytest.raises(DataError, match="has no test images"):
        episodes("few-shot", empty, [], [2], [0])
    with pytest.raises(UsageError, match="protocol must be"):
        episodes("all-to-all", data, [], [2], [0])  # pyright: ignore[reportArgumentType]


def test_harmonic_mean_of_the_papers_table() -> None:
    """84.68 and 76.52 have 80.39, not the 80.70 that a gain of 0.73 over 79.97 would be."""
    assert harmonic_mean(84.68, 76.52) == pytest.approx(80.39, abs=0.01)
    assert harmonic_mean(0.0, 0.0) == 0.0


def test_intervals_against_scipy() -> None:
    values = [71.2, 73.5, 70.9]
    expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert mean_interval(values)[1] == pytest.approx((expected.low, expected.high))
    assert mean_interval([1.0])[1] is None


def test_class_names_are_json_in_safetensors(tmp_path: Path) -> None:
    from safetensors import safe_open

    write_feature_set(tmp_path / "toy.safetensors", features())
    with safe_open(tmp_path / "toy.safetensors", framework="numpy") as file:
        assert json.loads(file.metadata()["class_names"])[0] == "class 0"


def test_shots_are_those_of_a_loop_over_the_classes_in_one_pass() -> None:
    labels = torch.randint(0, 500, (20_000,), generator=torch.Generator().manual_seed(5))
    rows = torch.arange(0, len(labels), 3)
    order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(7))]
    expected = torch.cat([order[labels[order] == label][:4] for label in labels[rows].unique()])
    assert torch.equal(few_shot(labels, rows, 4, 7), expected)
    assert len(few_shot(labels, rows[:0], 4, 7)) == 0
