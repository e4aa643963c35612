"""`leafward export`, `leafward data features` and `leafward evaluate --task fewshot`, from files to files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from radial_toys import make

from leafward.adapters import BlockScaleConfig, adapters, attach, save_pretrained
from leafward.cli.dispatch import main
from leafward.data.fewshot import read_feature_set
from leafward.data.image_files import read_image
from leafward.encoders import load_encoder

TEXTS = ["a small dog", "a red car on the grass", "pizza"]


def adapted(kind: str, folder: Path) -> tuple[Path, Path, torch.Tensor]:
    """Directories of a base model and of an adapter for it, and the adapted embeddings of TEXTS."""
    base = make(kind, folder)
    encoder = load_encoder(base)
    attach(encoder.model, BlockScaleConfig(block_size=8), base_model=str(base))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapters(encoder.model)["default"].parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    save_pretrained(encoder.model, folder / "adapter")
    return base, folder / "adapter", encoder.encode_text(TEXTS)


@pytest.mark.parametrize("kind", ["clip", "siglip", "sentence", "open_clip"])
def test_a_merged_export_is_a_plain_model(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter, expected = adapted(kind, tmp_path)
    assert main(["export", str(adapter), "--to", str(tmp_path / "merged"), "--merged", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["base_model"] == str(base)
    plain = load_encoder(tmp_path / "merged")
    assert not adapters(plain.model)
    torch.testing.assert_close(plain.encode_text(TEXTS), expected, rtol=1e-5, atol=1e-6)
    assert (load_encoder(base).encode_text(TEXTS) - expected).abs().max() > 1e-2
    for folder in (tmp_path / "merged", adapter):
        assert main(["evaluate", str(folder)]) == 2
        assert f"{folder} holds an encoder, which several tasks measure" in capsys.readouterr().err


def test_an_export_of_the_adapter_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, adapter, _ = adapted("sentence", tmp_path)
    (tmp_path / "run").mkdir()
    adapter.rename(tmp_path / "run" / "adapter")  # as a run directory keeps it
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--to", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert main(["export", str(tmp_path / "run"), "--to", str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "file")]) == 2
    assert "not a directory" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "new")]) == 1
    assert "holds no adapter" in capsys.readouterr().err


def images(folder: Path, names: list[str], count: int) -> list[str]:
    from PIL import Image

    rng = np.random.default_rng(0)
    files = []
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
            files.append(f"{name}/{number}.png")
    return files


def test_features_of_class_folders_train_and_transfer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a folder of images to scores on another data set, by commands alone."""
    base = make("clip", tmp_path)
    for number, names in enumerate((["cat", "dog", "car", "red_bus"], ["pizza", "bread"])):
        folder = tmp_path / f"images{number}"
        images(folder, names, 10)
        out = tmp_path / f"set{number}.npz"
        assert main(["data", "features", str(folder), "--model", str(base), "--out", str(out)]) == 0
    data = read_feature_set(tmp_path / "set0.npz")
    assert data.class_names == ("car", "cat", "dog", "red_bus")
    encoder = load_encoder(base)
    pixels = encoder.prepare_images([read_image(tmp_path / "images0" / "car" / "0.png")])
    for found, plain in (
        (data.texts[3:], encoder._text(encoder.tokenize(["a photo of a red bus."]))),
        (data.images[:1], encoder._image(pixels)),
    ):
        torch.testing.assert_close(found, plain.detach())  # with the norm, which may be read as a radius
        assert abs(float(found.norm()) - 1) > 1e-3

    run = tmp_path / "run"
    words = ["--features", str(tmp_path / "set0.npz"), "--out", str(run), "--max-steps", "5", "--seeds", "2"]
    words += ["--hosts", "coop", "--attributes", "4", "--baselines", "zero-shot"]
    assert main(["train", "lathadapter", *words]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(run), "--features", str(tmp_path / "set1.npz"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["test"] for row in result["table"]} == {"set1"}
    assert {row["method"] for row in result["table"]} == {
        "zero-shot",
        "coop",
        "coop + LatHAdapter",
        "coop + Euclidean twin",
    }
    assert main(["evaluate", str(run), "--protocol", "domain"]) == 2
    assert "--protocol domain needs --features" in " ".join(capsys.readouterr().err.split())


def test_the_usual_split_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from leafward.data.standard_sets import read_images

    files = images(tmp_path / "images", ["cat", "dog"], 3)
    rows = [[file, int(file.startswith("dog")), file.partition("/")[0]] for file in files]
    split = tmp_path / "split_zhou_Toy.json"
    split.write_text(json.dumps({"train": rows[:2], "val": rows[2:4], "test": rows[4:]}))
    found, labels, names, parts = read_images(tmp_path)
    assert found[0] == tmp_path / "images" / "cat" / "0.png"
    assert (labels, names, parts) == ([0, 0, 0, 1, 1, 1], ("cat", "dog"), [0, 0, 1, 1, 2, 2])

    base = str(make("clip", tmp_path / "model"))
    for text, message in [
        ("{}", "cannot read the split"),
        (json.dumps({"train": [["no/0.png", 0, "cat"]], "val": [], "test": []}), "names 'no/0.png', which is neither"),
        (json.dumps({"train": [["cat/0.png", 3, "cat"]], "val": [], "test": []}), "without a gap"),
    ]:
        split.write_text(text)
        assert main(["data", "features", str(tmp_path), "--model", base, "--out", str(tmp_path / "x.npz")]) == 1
        assert message in capsys.readouterr().err
    split.unlink()
    (tmp_path / "images" / "empty").mkdir()
    assert main(["data", "features", str(tmp_path / "images"), "--model", base, "--out", str(tmp_path / "x.npz")]) == 1
    assert "holds no image" in capsys.readouterr().err
    words = ["--model", base, "--out", str(tmp_path / "x.npz"), "--template", "a photo"]
    assert main(["data", "features", str(tmp_path / "images"), *words]) == 2
    assert "--template must be a text with {} once" in capsys.readouterr().err


def test_a_foreign_base_is_merged_only_when_asked_for_and_said(tmp_path: Path, capsys) -> None:
    base, adapter, _ = adapted("sentence", tmp_path)
    moved = base.rename(tmp_path / "moved")
    assert main(["export", str(adapter), "--to", str(tmp_path / "one"), "--merged", "--base", str(moved)]) == 0
    assert "note:" not in capsys.readouterr().out, "the same weights under another name"
    other = load_encoder(moved)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(0.1)
    other.save_pretrained(tmp_path / "other")
    assert (
        main(["export", str(adapter), "--to", str(tmp_path / "two"), "--merged", "--base", str(tmp_path / "other")])
        == 0
    )
    assert "belongs to another base model" in " ".join(capsys.readouterr().out.split())


def test_a_feature_file_holds_a_teacher_and_averaged_texts(tmp_path: Path) -> None:
    """What PromptKD and PromptSRC read, and the encoders' own values."""
    for label, name in enumerate(["dog", "car"]):
        (tmp_path / "images" / name).mkdir(parents=True)
        pixels = np.random.default_rng(label).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / name / "0.png")
    for folder in ("small", "large"):
        (tmp_path / folder).mkdir()
    small, large = make("clip", tmp_path / "small"), make("siglip", tmp_path / "large")
    (tmp_path / "templates.txt").write_text("a photo of {}\nthe {}\n")
    words = ["data", "features", str(tmp_path / "images"), "--model", str(small), "--teacher", str(large)]
    words += ["--templates", str(tmp_path / "templates.txt"), "--template", "the {}"]
    assert main([*words, "--out", str(tmp_path / "x.npz")]) == 0
    data = read_feature_set(tmp_path / "x.npz")
    for path, images, texts, diverse in (
        (small, data.images, data.texts, data.diverse_texts),
        (large, data.teacher_images, data.teacher_texts, data.teacher_diverse_texts),
    ):
        encoder = load_encoder(path)
        files = [tmp_path / "images" / name / "0.png" for name in data.class_names]
        torch.testing.assert_close(images, encoder.encode_image(files, unit=False), rtol=1e-4, atol=1e-5)
        for place, name in enumerate(data.class_names):
            first, second = encoder.encode_text([f"a photo of {name}", f"the {name}"], unit=False)
            assert texts is not None and diverse is not None  # noqa: PT018
            torch.testing.assert_close(texts[place], second, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(diverse[place], (first + second) / 2, rtol=1e-4, atol=1e-5)
