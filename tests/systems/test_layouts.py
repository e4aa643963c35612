"""One, two and four ranks train alike, in float64 to 1e-10, also where a rank dies and another number goes on.

The optimiser's eps is not tiny, or a gradient that is zero but for rounding would move a weight by the learning rate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ranks import finish, numbers, started, together, train_system

CLOSE = 1e-10
COMMON = {
    "loop.steps": 8,
    "loop.batch_size": 8,
    "loop.log_every": 1,
    "loop.eval_every": 4,
    "loop.checkpoint_every": 3,
    "loop.ema": 0.9,
    "loop.precision": "float64",
    "loop.device": "cpu",
    "optim.warmup_steps": 2,
    "optim.eps": 1e-4,
}
MIXED = {"augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.smoothing": 0.1}


def _texts(folder: Path) -> dict[str, Any]:
    """Documents of many lengths, so that windows, and with them ranks, have unequal numbers of labels."""
    words = ("fox", "owl", "hare", "wren", "mole", "leaf")
    texts = [" ".join(words[(i * k) % 6] for k in range(3 + i % 11)) + "." for i in range(90)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"data": str(folder / "texts.jsonl"), "vocab_size": 320, "context": 16, "validation": 0.2}
    return settings | {"model": "helm-mice-tiny", "optim.lr": 1e-2}


def _photos(folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    for name, colour in {"dog": (220, 40, 40), "car": (40, 220, 40), "pizza": (40, 40, 220)}.items():
        (folder / name).mkdir()
        for number in range(6):
            pixels = np.clip(np.array(colour) + rng.integers(-200, 201, (40, 40, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return {"data": str(folder), "size": 32, "held_out": 0.25, "optim.lr": 5e-4}


def _mapper(folder: Path) -> dict[str, Any]:
    tree = {"backbone": "timm:test_vit", "pretrained": False, "leaves": 4, "levels": 2, "dim": 8}
    return _photos(folder) | tree | MIXED


def _vision(folder: Path) -> dict[str, Any]:
    return _photos(folder) | {"model": "test_vit", "drop_path": 0.3} | MIXED


MADE: Mapping[str, Callable[[Path], dict[str, Any]]] = {"helm": _texts, "himapper": _mapper, "vision": _vision}


@pytest.fixture(scope="module", params=["helm", "himapper", pytest.param("vision", marks=pytest.mark.slow)])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """A system, its settings, and its run on one rank with the batch in one piece."""
    system = request.param
    folder = tmp_path_factory.mktemp(system)
    (folder / "data").mkdir()
    settings = MADE[system](folder / "data") | COMMON
    together(1, train_system, system, settings, folder / "run")
    return system, settings, folder / "run"


def _assert_same(run: Path, reference: Path) -> None:
    """Losses, norms and scores of every step, and those of the model at the end."""
    found, expected = numbers(run), numbers(reference)
    assert found.keys() == expected.keys()
    assert {step for step, _ in expected} == set(range(1, 9))
    assert max(abs(found[key] - expected[key]) for key in expected) < CLOSE
    (member,), (twin,) = (json.loads((each / "result.json").read_text())["members"] for each in (run, reference))
    scores, others = (_leaves(each["scores"] if "scores" in each else each["loss"]) for each in (member, twin))
    assert scores == pytest.approx(others, abs=CLOSE)


def _leaves(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, float)}


LAYOUTS = [
    (2, {"loop.strategy": "fsdp", "loop.micro_batch": 2}),
    pytest.param(2, {"loop.strategy": "ddp"}, marks=pytest.mark.slow),
    pytest.param(1, {"loop.micro_batch": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"loop.strategy": "ddp"}, marks=pytest.mark.slow),
    pytest.param(4, {"loop.strategy": "fsdp"}, marks=pytest.mark.slow),
    pytest.param(2, {"loop.checkpoint_activations": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_layouts_train_alike(
    alone: tuple[str, dict[str, Any], Path], tmp_path: Path, world: int, layout: dict[str, Any]
) -> None:
    system, settings, reference = alone
    together(world, train_system, system, settings | layout, tmp_path / "run")
    _assert_same(tmp_path / "run", reference)


STAIRS = [(2, 1, 2), pytest.param((4, 1, 2), marks=pytest.mark.slow)]


@pytest.mark.parametrize("worlds", STAIRS, ids=str)
def test_a_rank_dies_and_another_number_of_ranks_goes_on(
    alone: tuple[str, dict[str, Any], Path], tmp_path: Path, worlds: tuple[int, ...]
) -> None:
    """Down to one rank and up again; each stage loses its last rank between two checkpoints."""
    system, settings, reference = alone
    run = tmp_path / "run"
    for world, updates, resume in ((worlds[0], 5, False), (worlds[1], 4, True)):
        codes = finish(*started(world, train_system, system, settings, run, resume, updates))
        assert codes[-1] == -9
        assert all(codes), "the ranks that are left must not end as if all were well"
        assert not (run / "result.json").exists()
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())[-1] == "step-00000006"
    together(worlds[2], train_system, system, settings, run, True)
    _assert_same(run, reference)
