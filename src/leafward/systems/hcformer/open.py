"""An HCFormer by whatever names it."""

from __future__ import annotations

from pathlib import Path

import timm

from leafward import register
from leafward.errors import UsageError, nearest
from leafward.systems.hcformer.model import HCFormer
from leafward.systems.vision.build import Card, open_trained


def open_backbone(target: str | Path) -> tuple[HCFormer, Card]:
    """The HCFormer inside a run, a published model, a checkpoint of a training, or (untrained) by its timm name."""
    register("timm")
    if Path(target).is_dir():
        model, card = open_trained(Path(target))
    else:
        name = str(target).removeprefix("timm:")
        if not name.startswith("hcformer") or not timm.is_model(name):
            known = timm.list_models("hcformer*")
            raise UsageError(f"{target} is neither a folder nor a model that has clusters; {nearest(name, known)}")
        model, card = timm.create_model(name).eval(), Card(task="classify", model=name)
    for module in model.modules():
        if isinstance(module, HCFormer):
            return module, card
    raise UsageError(f"{target} is a {card.model}, which does not cluster; explain needs an HCFormer")
