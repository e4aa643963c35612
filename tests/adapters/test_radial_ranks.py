"""Radial Embedding trains alike on any number of ranks: means and hardest pairs are those of the whole batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from radial_toys import make

from ranks import numbers, together, train_system

NAMES = ("dog", "cat", "puppy", "kitten", "car", "bus", "pizza")


def _captions(folder: Path) -> dict[str, Any]:
    """Chains of two to four texts, so that ranks have unequal numbers of texts and triples."""
    lines = []
    for number, name in enumerate(NAMES):
        texts = ["animal", name, f"a {name} on the table", f"a small {name} on the red table"][: 2 + number % 3]
        other = NAMES[(number + 1) % len(NAMES)]
        negatives = ["vehicle", other, f"a photo of a {other}", f"a photo of a red {other}"][: len(texts)]
        lines.append(json.dumps({"positive": texts, "negative": negatives}))
    (folder / "captions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    make("sentence", folder)
    settings = {"model": str(folder / "sentence"), "data": str(folder / "captions.jsonl"), "precision": "float64"}
    settings |= {"device": "cpu", "batch_size": 4, "epochs": 4.0, "lr": 1e-3, "log_every": 1}
    return settings


@pytest.mark.parametrize(
    "objective", [{}, pytest.param({"objective.loss": "cone"}, marks=pytest.mark.slow)], ids=["angles", "cones"]
)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_alike(tmp_path: Path, world: int, objective: dict[str, Any]) -> None:
    settings = _captions(tmp_path) | objective
    for ranks in (1, world):
        together(ranks, train_system, "radial", settings, tmp_path / f"{ranks}")
    found, expected = numbers(tmp_path / f"{world}"), numbers(tmp_path / "1")
    assert found.keys() == expected.keys()
    assert len({step for step, name in expected if name == "train/loss"}) == 6
    assert max(abs(found[key] - expected[key]) for key in expected) < 1e-10
