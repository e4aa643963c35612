"""HyperLex: graded lexical entailment, "to what degree is X a type of Y?", by the angle about a root.

Vulić et al. (Computational Linguistics 2017): 2,616 pairs of nouns and verbs with ratings. The score of a pair is
−Ξ_r(Y, X), the exterior angle at the general word; the cosine of the two words, which knows no direction, stands
beside it. What counts is Spearman's ρ between score and rating.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leafward.errors import DataError
from leafward.files import check_archive, read_text
from leafward.systems.radial.loss import Geometry, exterior_angle

#: name of a part -> its file in the archive
PARTS = {
    "all": "hyperlex-all.txt",
    "nouns": "nouns-verbs/hyperlex-nouns.txt",
    "verbs": "nouns-verbs/hyperlex-verbs.txt",
    "lexical_test": "splits/lexical/hyperlex_test_all_lexical.txt",
    "random_test": "splits/random/hyperlex_test_all_random.txt",
}


@dataclass(frozen=True)
class Pairs:
    """P pairs: is `specific` a type of `general`? `rating` (P) says how much so."""

    specific: tuple[str, ...]
    general: tuple[str, ...]
    rating: np.ndarray


def read_hyperlex(path: str | Path) -> dict[str, Pairs]:
    """The parts of HyperLex's archive, as a .zip or unpacked; of a single .txt file the part "all"."""
    path = Path(path)
    try:
        if path.is_dir():
            texts = {part: read_text(path / name) for part, name in PARTS.items()}
        elif path.suffix == ".zip":
            check_archive(path)
            with zipfile.ZipFile(path) as archive:
                texts = {part: archive.read(name).decode("utf-8") for part, name in PARTS.items()}
        else:
            texts = {"all": read_text(path)}
    except (OSError, KeyError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read HyperLex from {path}: {error}") from error
    return {part: _parse(text, f"{path}, {part}") for part, text in texts.items()}


def _parse(text: str, source: str) -> Pairs:
    """Lines ``WORD1 WORD2 POS TYPE AVG_SCORE …`` after a header: WORD1 is the specific word."""
    rows = []
    for number, line in enumerate(text.splitlines()[1:], start=2):
        fields = line.split()
        if not fields:
            continue
        try:
            rows.append((fields[0], fields[1], float(fields[4])))
        except (IndexError, ValueError) as error:
            raise DataError(
                f"{source}, line {number}: expected WORD1 WORD2 POS TYPE AVG_SCORE, got {line!r}"
            ) from error
    if len(rows) < 3:
        raise DataError(f"{source}: at least three pairs are needed, got {len(rows)}")
    specific, general, rating = zip(*rows, strict=True)
    return Pairs(specific, general, np.array(rating))


def words(parts: dict[str, Pairs]) -> list[str]:
    """The distinct words of all parts, in order of appearance, the specific word of a pair first."""
    pairs = ((a, b) for part in parts.values() for a, b in zip(part.specific, part.general, strict=True))
    return list(dict.fromkeys(word for pair in pairs for word in pair))


def score(
    parts: dict[str, Pairs], features: Tensor, root: Tensor, geometry: Geometry = "euclidean", c: float = 1.0
) -> dict[str, dict[str, float]]:
    """Spearman's ρ of each part by angle and by cosine: unit embeddings of `words` (W, d), root (d)."""
    from scipy.stats import spearmanr

    row = {word: i for i, word in enumerate(words(parts))}
    if len(features) != len(row):
        raise DataError(f"text must be one vector for each of the {len(row)} words, got {len(features)}")
    found = {}
    for name, part in parts.items():
        specific = features[torch.tensor([row[word] for word in part.specific], device=features.device)]
        general = features[torch.tensor([row[word] for word in part.general], device=features.device)]
        scores = {
            "angle": -exterior_angle(general, specific, root.expand_as(general), geometry, c),
            "cosine": (general * specific).sum(dim=-1),
        }
        found[name] = {
            kind: float(spearmanr(value.cpu().numpy(), part.rating)[0])  # pyright: ignore[reportArgumentType]
            for kind, value in scores.items()
        } | {"pairs": len(part.rating)}
    return found
