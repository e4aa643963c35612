"""The audit of feature files: both kinds of file, either side, the hyperbolic radii before and after, and the sweep."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from leafward.cli.dispatch import main
from leafward.data.fewshot import TEST, FeatureSet, read_feature_set, seeded_split, write_feature_set
from leafward.errors import DataError, UsageError
from leafward.geometry import poincare
from leafward.measure import audit
from leafward.measure.matrices import open_matrix

CLASSES, WIDTH = 5, 8


def features(text_length: float = 1.0, seed: int = 0) -> FeatureSet:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(60) % CLASSES
    texts = torch.randn(CLASSES, WIDTH, generator=generator)
    images = texts[labels] + 1.5 * torch.randn(60, WIDTH, generator=generator)
    names = tuple(f"class {number}" for number in range(CLASSES))
    return FeatureSet("toy", images, labels, text_length * texts, names, seeded_split(labels))


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_either_side_of_a_feature_file_is_audited(ending: str, tmp_path: Path) -> None:
    path, data = tmp_path / f"pets{ending}", features()
    write_feature_set(path, data)
    matrix = open_matrix(path)
    assert (matrix.tensor, matrix.rows, matrix.width) == ("text_features", CLASSES, WIDTH)
    assert any("--tensor image_features" in note for note in matrix.notes)
    ((_, rows),) = open_matrix(path, tensor="image_features").slices(torch.device("cpu"))
    assert torch.equal(rows, data.images)
    unit = torch.nn.functional.normalize(data.images.double(), dim=1)
    gram = (unit @ unit.mT) ** 2
    expected = float((gram.sum() - len(unit)) / (len(unit) * (len(unit) - 1)))
    assert audit(path, tensor="image_features").mean_squared_overlap == pytest.approx(expected, rel=1e-5)


def test_archives_of_other_arrays(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((6, 4)).astype("f4")
    path = tmp_path / "a.npz"
    np.savez_compressed(path, weights=rows, counts=np.arange(6))
    assert open_matrix(path).tensor == "weights"  # the only matrix
    np.savez(path, first=rows, second=rows)
    with pytest.raises(UsageError, match="holds 2 matrices: choose one with --tensor; first, second"):
        open_matrix(path)
    with pytest.raises(UsageError, match=r"--tensor: .*a\.npz holds no 'sceond'; did you mean 'second'"):
        open_matrix(path, tensor="sceond")
    np.savez(path, counts=np.arange(6))
    with pytest.raises(DataError, match="holds no 2-D floating tensor"):
        open_matrix(path)
    with pytest.raises(DataError, match=r"counts has shape \[6\]"):
        open_matrix(path, tensor="counts")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cannot read .*a\.npz: not a valid archive"):
        open_matrix(path)


def test_radii_before_and_after_and_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each against the exponential map and distance of the ball at the curvature that is named."""
    for name, length in (("before", 1.0), ("after", 0.3)):
        write_feature_set(tmp_path / f"{name}.npz", features(length))
    files = [str(tmp_path / f"{name}.npz") for name in ("before", "after")]
    words = ["audit", *files, "--radius", "--c", "0.5", "--out", str(tmp_path / "out"), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {(row["name"], row["side"]): row for row in found["radius"]}
    assert list(rows) == [(name, side) for name in ("before", "after") for side in ("image", "text")]
    for name, path in zip(("before", "after"), files, strict=True):
        data = read_feature_set(path)
        for side, vectors in (("image", data.images), ("text", data.texts)):
            points = poincare.expmap0(vectors.double(), 0.01)  # any curvature: the radius does not depend on it
            far = poincare.dist(points, torch.zeros_like(points), 0.01)
            assert rows[name, side]["mean"] == pytest.approx(float(far.mean()), rel=1e-5)
            assert rows[name, side]["high"] == pytest.approx(float(far.quantile(0.95)), rel=1e-5)
    assert rows["after", "text"]["mean"] == pytest.approx(0.3 * rows["before", "text"]["mean"], rel=1e-5)

    swept = {each["name"]: each for each in found["radius_sweep"]}
    for name, path in zip(("before", "after"), files, strict=True):
        data = read_feature_set(path)
        test = data.part(TEST)
        assert swept[name]["images"] == len(test)
        sweep = swept[name]["sweep"]
        assert list(sweep) == ["cosine", "lorentz", "cosine+radius"]
        assert len({point["accuracy"] for point in sweep["cosine"]}) == 1
        for factor, point in zip((0.25, 0.5, 1.0, 2.0, 4.0), sweep["lorentz"], strict=True):
            image = poincare.expmap0(data.images[test].double(), 0.5)[:, None]
            text = poincare.expmap0(factor * data.texts.double(), 0.5)[None]
            nearest = poincare.dist(image, text, 0.5).argmin(dim=1)
            assert point["accuracy"] == pytest.approx(float((nearest == data.labels[test]).double().mean()))
    assert len({point["accuracy"] for point in swept["before"]["sweep"]["lorentz"]}) > 1
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for text in ("Hyperbolic radius of the rows", "Radius sweep", "Score cosine+radius"):
        assert text in page


def test_what_the_audit_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.safetensors"
    save_file({"a": torch.randn(4, 3), "b": torch.randn(4, 3)}, path)
    halves = tmp_path / "halves.npz"
    np.savez(halves, image_features=np.eye(4, dtype="f4"), text_features=np.eye(4, dtype="f4")[:3])
    for words, code, message in [
        ([str(path), "--tensor", "c"], 2, "--tensor:"),
        ([str(path), "--tensor", "a", "--fold-norm"], 2, "--fold-norm"),
        ([str(path), "--tensor", "a", "--c", "0"], 2, "--c must be a positive number, got 0.0"),
        ([str(path), "--tensor", "a", "--radius-weight", "-1"], 2, "--radius-weight must be a number ≥ 0"),
        ([str(halves), "--radius"], 1, "lacks the class names"),
    ]:
        assert main(["audit", *words, "--out", str(tmp_path / "out")]) == code
        assert message in " ".join(capsys.readouterr().err.split())
