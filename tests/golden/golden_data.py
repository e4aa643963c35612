"""The data of the golden numbers: small, drawn by seeded generators, pictures as PNG so that decoding is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from radial_toys import CHAINS, make

COLOURS = {"dog": (220, 40, 40), "car": (40, 220, 40), "pizza": (40, 40, 220)}
ANIMALS = ("fox", "owl", "hare", "wren", "mole")
NODES = 31
CLASSES, WIDTH = 6, 16


def make_all(folder: Path) -> Path:
    """Everything that a case of `golden_cases` names with an @, in one folder."""
    for kind in ("clip", "sentence"):
        make(kind, folder)
    _fables(folder / "fables.jsonl")
    _photos(folder / "photos", per_class=8, side=(36, 44))
    _photos(folder / "squares", per_class=12, side=(16, 16))
    _scenes(folder / "scenes")
    _coco(folder / "boxes", outlines=False)
    _coco(folder / "outlines", outlines=True)
    _features(folder / "features.npz")
    _captions(folder)
    edges = "".join(f"n{i},{f'n{(i - 1) // 2}' if i else ''}\n" for i in range(NODES))
    (folder / "tree.csv").write_text(f"child,parent\n{edges}", encoding="utf-8")
    return folder


def _fables(path: Path) -> None:
    pairs = [(a, b) for a in ANIMALS for b in ANIMALS if a != b]
    texts = [f"The {a} met the {b}. The {b} asked the {a} for {n} leaves.\n" * 3 for n, (a, b) in enumerate(pairs)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def _photos(folder: Path, per_class: int, side: tuple[int, int]) -> None:
    """Noisy pictures of one colour for each class."""
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            _save(np.array(colour) + rng.integers(-200, 201, (*side, 3)), folder / name / f"{number}.png")


def _scenes(folder: Path) -> None:
    """Scenes of two halves, red dog and blue car, with a strip that does not count."""
    rng = np.random.default_rng(1)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(8):
        mask = np.zeros((48, 48), np.uint8)
        mask[:, int(rng.integers(12, 36)) :] = 1
        mask = mask.T.copy() if number % 2 else mask
        colours = np.array([[220, 30, 30], [30, 30, 220]])[mask]
        mask[:2] = 255
        _save(colours + rng.integers(-150, 151, (48, 48, 3)), folder / "images" / f"{number}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
    (folder / "classes.txt").write_text("dog\ncar\n", encoding="utf-8")


def _coco(folder: Path, outlines: bool) -> None:
    """Photos with a red and a green rectangle each, boxes and perhaps outlines in COCO's JSON."""
    rng = np.random.default_rng(2)
    folder.mkdir()
    images: list[dict[str, Any]] = []
    things: list[dict[str, Any]] = []
    for number in range(4):
        pixels = rng.integers(0, 120, (32, 32, 3))
        for label in (0, 1):
            x, y, width, height = (int(v) for v in (*rng.integers(0, 16, 2), *rng.integers(10, 16, 2)))
            pixels[y : y + height, x : x + width, label] = 230
            corners = [x, y, x + width, y, x + width, y + height, x, y + height]
            box = {"bbox": [x, y, width, height], "area": width * height}
            box |= {"segmentation": [corners]} if outlines else {}
            things.append({"id": len(things) + 1, "image_id": number, "category_id": label + 1, "iscrowd": 0, **box})
        _save(pixels, folder / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 32, "height": 32})
    categories = [{"id": 1, "name": "red"}, {"id": 2, "name": "green"}]
    record = {"images": images, "annotations": things, "categories": categories}
    (folder / "annotations.json").write_text(json.dumps(record), encoding="utf-8")


def _features(path: Path) -> None:
    """Images about class features that their texts know but roughly, and a larger teacher's."""
    rng = np.random.default_rng(3)
    labels = np.arange(CLASSES * 20) % CLASSES
    centres = 3.0 * rng.standard_normal((CLASSES, WIDTH))
    images = centres[labels] + 6.0 * rng.standard_normal((len(labels), WIDTH))
    texts = centres + 3.0 * rng.standard_normal((CLASSES, WIDTH))
    arrays = {"image_features": images, "text_features": texts}
    arrays |= {f"teacher_{name}": np.concatenate([values, values[:, :4]], axis=1) for name, values in arrays.items()}
    arrays = {name: values.astype(np.float32) for name, values in arrays.items()}
    names = np.array([f"class {number}" for number in range(CLASSES)])
    np.savez(path, **arrays, labels=labels, class_names=names, split=rng.integers(0, 3, len(labels)))


def _captions(folder: Path) -> None:
    """Chains to learn from, chains to be scored on with second captions of their images, and pairs of words."""
    _chains(folder / "captions.jsonl", [(image, texts, negatives) for texts, negatives, image in CHAINS])
    asked = [
        ("10.jpg", ["animal", "dog", "a small dog"], ["a dog on the grass"]),
        ("11.jpg", ["food", "pizza", "a small pizza on the table"], ["pizza on the table"]),
        ("12.jpg", ["vehicle", "car", "a red car on the grass"], ["a small red car"]),
    ]
    _chains(folder / "test.jsonl", [(image, texts, []) for image, texts, _ in asked])
    _chains(folder / "second.jsonl", [(f"x/{image}", [*texts[:2], *other], []) for image, texts, other in asked])
    pairs = ["dog animal N hyp 5.9", "animal dog N r-hyp 1.0", "car vehicle N hyp 5.5", "dog car N no-rel 0.1"]
    (folder / "hyperlex.txt").write_text("\n".join(["WORD1 WORD2 POS TYPE AVG_SCORE", *pairs, ""]), encoding="utf-8")


def _chains(path: Path, rows: list[tuple[str, list[str], list[str]]]) -> None:
    lines = [{"positive": texts, "negative": negatives, "image": image} for image, texts, negatives in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _save(pixels: np.ndarray, path: Path) -> None:
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path)
