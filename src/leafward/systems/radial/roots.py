"""The roots about which radii and angles are measured: those of texts, or learned ones, which a run keeps in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leafward.encoders.encoder import Encoder
from leafward.encoders.evaluation import open_target
from leafward.engine import RunDirectory
from leafward.errors import DataError
from leafward.files import replacing
from leafward.systems.radial.objective import Geometry

if TYPE_CHECKING:
    from leafward.systems.radial.loss import RadialModel

ROOTS = "roots.safetensors"


@dataclass(frozen=True)
class Rooted:
    """An encoder on its device and, where it comes from a radial run, that run's learned roots and geometry."""

    encoder: Encoder
    roots: dict[str, Tensor] | None = None
    geometry: Geometry = "euclidean"
    c: float = 1.0

    def root(self, texts: Sequence[str]) -> Tensor:
        """Vectors of the roots of given texts: (R, d)."""
        return root_vectors(self.encoder, texts, self.roots)


def open_rooted(target: str | None, device: str) -> Rooted:
    """A model by name or directory, or a run directory, with its roots if it learned any."""
    encoder = open_target(target, device)
    assert target is not None  # it is refused there
    if not (Path(target) / "config.yaml").is_file():
        return Rooted(encoder)
    objective = RunDirectory.open(target).config.get("objective", {})
    return Rooted(encoder, load_roots(Path(target)), objective.get("geometry", "euclidean"), objective.get("c", 1.0))


def root_vectors(encoder: Encoder, texts: Sequence[str], learned: dict[str, Tensor] | None = None) -> Tensor:
    """The roots of given texts: the learned ones where there are, else the embeddings of the texts: (R, d)."""
    if not learned:
        return encoder.encode_text(texts)
    missing = [text for text in texts if text not in learned]
    if missing:
        raise DataError(f"the run has no learned root for {missing[0]!r}; it has {', '.join(map(repr, learned))}")
    return torch.stack([learned[text] for text in texts]).to(encoder.device)


def save_roots(model: RadialModel, path: Path) -> None:
    """Write learned roots; where there are none, those of a run that was replaced must not stay."""
    from safetensors.torch import save_file

    if model.free_roots is None:
        path.unlink(missing_ok=True)
    else:
        with replacing(path) as temporary:
            texts = json.dumps(model.root_texts, ensure_ascii=False)
            save_file({"roots": model.roots().cpu().contiguous()}, temporary, metadata={"texts": texts})


def load_roots(run: Path) -> dict[str, Tensor] | None:
    """The learned roots of a run directory by their text; None where it has none."""
    from safetensors import SafetensorError, safe_open

    if not (run / ROOTS).is_file():
        return None
    try:
        with safe_open(run / ROOTS, framework="pt") as file:
            return dict(zip(json.loads(file.metadata()["texts"]), file.get_tensor("roots"), strict=True))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"cannot read {run / ROOTS}: {error}") from error
