"""``leafward data features``: labelled images through a CLIP model, once, into a feature file.

The images are a folder of class folders, or one of the eleven usual data sets as CoOp's authors lay it out: with its
split file (`split_zhou_NAME.json`: {"train": [[file, label, class name], …], "val": …, "test": …}), or as
`leafward.tasks.standard_sets` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import DataError, UsageError, need
from leafward.files import inside, read_json

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "Features of labelled images and class names, for few-shot training without the images."
PARTS = ("train", "val", "test")


@dataclass
class Args:
    images: Annotated[Path, tyro.conf.Positional]
    """A folder of class folders, with or without train, val and test above them; a folder with a split_zhou_*.json and
    the images it names; or the layout of ImageNet, one of its domains, or FGVC Aircraft."""
    model: str
    """A directory or hub name of CLIP or SigLIP, or open_clip:NAME@WEIGHTS."""
    out: Path
    """The feature file to write, .npz or .safetensors."""
    template: str = "a photo of a {}."
    """The text of a class; {} is its name."""
    batch: int = 64
    """Images at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""


def run(args: Args, console: Console) -> dict[str, Any]:
    import torch

    from leafward.adapters import load_encoder
    from leafward.engine import Progress
    from leafward.recipes._devices import device_of
    from leafward.tasks.features import check_ending
    from leafward.tasks.fewshot import ENDINGS, FeatureSet, seeded_split, write_features

    need(args.batch >= 1, "batch", "an integer ≥ 1", args.batch)
    check_ending(args.out, ENDINGS)
    if "{}" not in args.template:
        raise UsageError(f"--template must hold {{}} in the place of the class name, got {args.template!r}")
    files, labels, names, split = read_images(args.images)
    encoder = load_encoder(args.model)
    if not encoder.has_images:
        raise UsageError(f"--model {args.model} has no image side; use a CLIP or SigLIP model")
    encoder.to(device_of(args.device))
    # With their norms: a latent hierarchy without normalisation reads them as radii.
    texts = encoder.encode_text([args.template.format(name.replace("_", " ")) for name in names], unit=False)
    rows = []
    with Progress(len(files), "images", unit="image") as progress:
        for first in range(0, len(files), args.batch):
            rows.append(encoder.encode_image(files[first : first + args.batch], unit=False).cpu())
            progress.update(min(first + args.batch, len(files)))
    target = torch.tensor(labels)
    parts = seeded_split(target) if split is None else torch.tensor(split)
    write_features(args.out, FeatureSet(args.out.stem, torch.cat(rows), target, texts.cpu(), names, parts))
    console.print(f"wrote {len(files)} images of {len(names)} classes to {args.out}", markup=False)
    return {"out": str(args.out), "images": len(files), "classes": len(names)}


def read_images(folder: Path) -> tuple[list[Path], list[int], tuple[str, ...], list[int] | None]:
    """Files, labels, class names, and the split where the folder brings one."""
    from leafward.tasks.standard_sets import read_standard

    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder of images")
    splits = sorted(folder.glob("split_zhou_*.json"))
    if len(splits) > 1:
        raise DataError(f"{folder} holds {len(splits)} split files; one is needed: {', '.join(p.name for p in splits)}")
    return _with_split(folder, splits[0]) if splits else read_standard(folder) or _class_folders(folder)


def _class_folders(folder: Path) -> tuple[list[Path], list[int], tuple[str, ...], None]:
    from leafward.tasks.images import image_files

    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files: list[Path] = []
    labels: list[int] = []
    for label, path in enumerate(classes):
        found = image_files(inside(folder, path.name))
        if not found:
            raise DataError(f"the class folder {path} holds no image")
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(f"{folder} holds no class folders")
    return files, labels, tuple(path.name for path in classes), None


def _with_split(folder: Path, split: Path) -> tuple[list[Path], list[int], tuple[str, ...], list[int]]:
    try:
        parts = read_json(split)
        rows = [
            (str(file), int(label), str(name), PARTS.index(part)) for part in PARTS for file, label, name in parts[part]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot read the split {split}: {error!r}") from error
    names = {label: name for _, label, name, _ in rows}
    if sorted(names) != list(range(len(names))):
        raise DataError(f"{split}: the labels must be 0…{len(names) - 1} without a gap")
    # The files are named from the folder of the images, which some of the data sets keep one level down.
    first = rows[0][0]
    base = next(
        (each for each in [folder, *sorted(p for p in folder.iterdir() if p.is_dir())] if (each / first).is_file()),
        None,
    )
    if base is None:
        raise DataError(f"{split} names {first!r}, which is neither in {folder} nor in a folder of it")
    files = [inside(base, file) for file, _, _, _ in rows]
    ordered = tuple(names[label] for label in range(len(names)))
    return files, [label for _, label, _, _ in rows], ordered, [part for _, _, _, part in rows]
