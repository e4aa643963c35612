"""HyperLex: its files, and Spearman's ρ of angles against a plain computation."""

from __future__ import annotations

import math
import zipfile

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from leafward.errors import DataError
from leafward.systems.radial.hyperlex import PARTS, read_hyperlex, score, words

HEADER = "WORD1 WORD2 POS TYPE AVG_SCORE AVG_SCORE_0_10 STD SCORES..\n"
LINES = ["dog animal N hyp-1 5.9 9.8 0.1 6", "animal dog N r-hyp-1 1.2 2.0 0.5 1", "dog cat N cohyp 0.5 0.8 0.2 1"]
LINES += ["run move V hyp-1 5.5 9.2 0.4 6", "puppy animal N hyp-2 5.8 9.6 0.3 6"]


@pytest.fixture
def archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "hyperlex.zip", "w") as file:
        for name in PARTS.values():
            file.writestr(name, HEADER + "\n".join(LINES) + "\n")
    return tmp_path / "hyperlex.zip"


def test_archive_folder_and_single_file_read_alike(archive, tmp_path):
    parts = read_hyperlex(archive)
    assert list(parts) == list(PARTS)
    assert parts["all"].specific == ("dog", "animal", "dog", "run", "puppy")
    assert parts["all"].general == ("animal", "dog", "cat", "move", "animal")
    assert parts["all"].rating.tolist() == [5.9, 1.2, 0.5, 5.5, 5.8]
    with zipfile.ZipFile(archive) as file:
        file.extractall(tmp_path / "folder")
    assert list(read_hyperlex(tmp_path / "folder")) == list(PARTS)
    assert list(read_hyperlex(tmp_path / "folder" / "hyperlex-all.txt")) == ["all"]
    assert words(parts) == ["dog", "animal", "cat", "run", "move", "puppy"]


def test_rho_is_that_of_the_ranks_of_the_angles(archive):
    parts = read_hyperlex(archive)
    names = words(parts)
    generator = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(
        torch.randn(len(names), 5, generator=generator, dtype=torch.double), dim=-1
    )
    root = torch.nn.functional.normalize(torch.randn(5, generator=generator, dtype=torch.double), dim=-1)
    vector = dict(zip(names, features.numpy(), strict=True))
    angles = []
    for line in LINES:
        specific, general = line.split()[:2]
        a, b = vector[general] - root.numpy(), vector[specific] - vector[general]
        angles.append(-math.acos(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
    rating = [float(line.split()[4]) for line in LINES]
    expected = np.corrcoef(rankdata(angles), rankdata(rating))[0, 1]
    found = score(parts, features, root)
    assert found["all"]["angle"] == pytest.approx(expected)
    assert found["all"]["pairs"] == 5
    flat = score(parts, features, root, "lorentz", 1e-9)
    assert flat["all"]["angle"] == pytest.approx(expected)


def test_the_direction_counts_for_the_angle_and_not_for_the_cosine(archive):
    """A word behind another, seen from the root, is a type of it; the pair turned round is not."""
    parts = {"all": read_hyperlex(archive)["all"]}
    # Unit vectors at growing angles from the root (0°): animal 30°, dog 60°, puppy 90°, cat 60° on the other side …
    degrees = {"dog": 60, "animal": 30, "cat": -60, "run": 120, "move": 90, "puppy": 91}
    radians = torch.tensor([math.radians(degrees[word]) for word in words(parts)], dtype=torch.double)
    features = torch.stack([radians.cos(), radians.sin()], dim=1)
    found = score(parts, features, torch.tensor([1.0, 0.0], dtype=torch.double))
    assert found["all"]["angle"] > found["all"]["cosine"]
    assert found["all"]["angle"] > 0.7


def test_bad_files_are_refused(tmp_path, archive):
    (tmp_path / "short.txt").write_text(HEADER + "dog animal N\n")
    with pytest.raises(DataError, match="line 2"):
        read_hyperlex(tmp_path / "short.txt")
    with pytest.raises(DataError, match="cannot read"):
        read_hyperlex(tmp_path / "missing.zip")
    with pytest.raises(DataError, match="6 words"):
        score(read_hyperlex(archive), torch.eye(4), torch.ones(4))


def test_the_published_counts(shared_data):
    parts = read_hyperlex(shared_data / "hyperlex" / "hyperlex-data.zip")
    assert [len(parts[name].rating) for name in ("all", "nouns", "verbs")] == [2616, 2163, 453]
    assert len(parts["lexical_test"].rating) > 200
