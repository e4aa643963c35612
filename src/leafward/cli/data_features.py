"""``leafward data features``: labelled images through a CLIP model, once, into a feature file.

The images are a folder of class folders, or one of the eleven usual data sets as CoOp's authors lay it out (see
`leafward.data.standard_sets`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import UsageError, need

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "Features of labelled images and class names, for few-shot training without the images."


@dataclass
class Args:
    images: Annotated[Path, tyro.conf.Positional]
    """A folder of class folders, with or without train, val and test above them; a folder with a split_zhou_*.json and
    the images it names; or the layout of ImageNet, one of its domains, or FGVC Aircraft."""
    model: str
    """A directory or hub name of CLIP or SigLIP, or open_clip:NAME@WEIGHTS."""
    out: Path
    """The feature file to write, .npz or .safetensors."""
    teacher: str | None = None
    """A larger model whose features of the same go into the file, for PromptKD."""
    templates: str | None = None
    """A file of templates, one in a line, or diverse for sixty of the package: the texts averaged over them go into
    the file as well, for PromptSRC."""
    template: str = "a photo of a {}."
    """The text of a class; {} is its name."""
    batch: int = 64
    """Images at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.data.fewshot import ENDINGS, write_feature_set
    from leafward.data.standard_sets import read_images
    from leafward.encoders import load_encoder
    from leafward.encoders.features import feature_set, taught_by
    from leafward.encoders.templates import DIVERSE
    from leafward.encoders.zeroshot import read_templates
    from leafward.engine.devices import device_of
    from leafward.files import check_ending

    need(args.batch >= 1, "batch", "an integer ≥ 1", args.batch)
    check_ending(args.out, ENDINGS)
    need(args.template.count("{}") == 1, "--template", "a text with {} once, for the class name", args.template)
    many = (
        None if args.templates is None else DIVERSE if args.templates == "diverse" else read_templates(args.templates)
    )
    files, labels, names, split = read_images(args.images)
    how = {"name": args.out.stem, "template": args.template, "batch": args.batch, "diverse": many}
    found = None
    for flag, model in (("teacher", args.teacher), ("model", args.model)):
        if model is not None:
            encoder = load_encoder(model)
            if not encoder.has_images:
                raise UsageError(f"--{flag} {model} has no image side; use a CLIP or SigLIP model")
            encoder.to(device_of(args.device))
            found = taught_by(found, feature_set(encoder, files, labels, names, split, **how))
    assert found is not None
    write_feature_set(args.out, found)
    console.print(f"wrote {len(files)} images of {len(names)} classes to {args.out}", markup=False)
    return {"out": str(args.out), "images": len(files), "classes": len(names)}
