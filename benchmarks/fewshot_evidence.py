"""LatHAdapter on real CLIP features: two hosts, base to new, few shots and another data set, with Euclidean twin.

    python benchmarks/fewshot_evidence.py --data DIR --out runs/fewshot-evidence

Images: CLIP ViT-B/32 features of 1,000 Flickr8k photos. Classes: LVIS categories with CLIP text features. A photo is
labelled with the one category (of those with at least eight such photos, people aside) that its caption names: labels
are noisy and classes few; the numbers compare methods and say little about any of them alone. The other data set are
500 COCO photos, each with a caption of its own: which of the 500 texts belongs to a photo? Prints one JSON object, with
the means and 95 % intervals of every --protocols; `refinement` is base to new without the hierarchy loss.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leafward.config import replace
from leafward.data.fewshot import TEST, FeatureSet, seeded_split, write_feature_set
from leafward.systems.lathadapter import config as lathadapter
from leafward.systems.lathadapter import train as train_lathadapter

PEOPLE = ("person", "baby")
FEWEST = 8
PROTOCOLS: dict[str, dict[str, Any]] = {
    "base-to-new": {"shots": (4,)},
    "few-shot": {"protocol": "few-shot", "shots": (1, 2, 4)},
    "cross-dataset": {"protocol": "cross-dataset", "shots": (4,)},
    "refinement": {"shots": (4,), "hierarchy_weight": 0.0},
}


def mentioned(captions: list[str], categories: list[dict[str, Any]]) -> list[set[int]]:
    """The categories that each caption names, by a synonym in singular or plural."""
    number: dict[str, int] = {}
    for index, category in enumerate(categories):
        if category["name"] not in PEOPLE:
            for synonym in category["synonyms"]:
                number.setdefault(re.sub(r"_?\(.*\)", "", synonym).replace("_", " ").lower().strip(), index)
    found = []
    for caption in captions:
        text = f" {re.sub(r'[^a-z ]', ' ', caption.lower())} "
        found.append({index for word, index in number.items() if f" {word} " in text or f" {word}s " in text})
    return found


def labelled(folder: Path) -> FeatureSet:
    """Photos whose caption names exactly one of the frequent categories."""
    captions = json.loads((folder / "flickr8k_captions_1000.json").read_text())
    categories = json.loads((folder / "lvis_v1_train_cat_info.json").read_text())
    names = mentioned(captions, categories)
    frequent = {index for index, count in Counter(i for each in names for i in each).items() if count >= FEWEST}
    single = {row: next(iter(each & frequent)) for row, each in enumerate(names) if len(each & frequent) == 1}
    kept = sorted(index for index, count in Counter(single.values()).items() if count >= FEWEST)
    rows = [row for row, index in single.items() if index in kept]
    labels = torch.tensor([kept.index(single[row]) for row in rows])
    images = np.load(folder / "flickr8k_image_1000x512_f16.npy")[rows].astype(np.float32)
    texts = np.load(folder / "detic_text_lvis_v1.npy")[kept].astype(np.float32)
    return FeatureSet(
        "flickr8k-lvis",
        torch.from_numpy(images),
        labels,
        torch.from_numpy(texts),
        tuple(categories[index]["name"] for index in kept),
        seeded_split(labels),
    )


def captioned(folder: Path) -> FeatureSet:
    """COCO's pairs: every caption is a class with one photo, and all are for testing."""
    images, texts = torch.from_numpy(np.load(folder / "coco_pairs_image_text_2x500x512_f32.npy"))
    count = len(images)
    names = tuple(f"caption {k}" for k in range(count))
    return FeatureSet("coco-captions", images, torch.arange(count), texts, names, torch.full((count,), TEST))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/fewshot-evidence"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    arguments = parser.parse_args()
    data = labelled(arguments.data)
    file, other = (arguments.out / f"{name}.npz" for name in ("flickr8k-lvis", "coco-captions"))
    write_feature_set(file, data)
    write_feature_set(other, captioned(arguments.data))
    summary = {}
    for name in arguments.protocols:
        targets = (other,) if name == "cross-dataset" else ()
        common = {"features": file, "targets": targets, "seeds": arguments.seeds, "attributes": (8,), "epochs": 60}
        config = replace(lathadapter.Config(), **common | PROTOCOLS[name])
        result = train_lathadapter.run(config, arguments.out / name, overwrite=True)
        summary[name] = {key: result[key] for key in ("table", "differences")}
    print(json.dumps({"images": len(data.images), "classes": data.class_names, **summary}, indent=2))


if __name__ == "__main__":
    main()
