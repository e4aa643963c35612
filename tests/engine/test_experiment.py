"""All trainings have one lifecycle: on two ranks, stopped and resumed, they leave what one rank leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import golden_cases as golden
import golden_data
import golden_runs
import pytest
from experiment_ranks import Stop, train

from leafward.engine import is_run, members_of

SIGTERM = 143
STEP, FLEET = Stop(), Stop("leafward.systems.superposition:Fleet.run", 1)
SHORT = {"loop.steps": 4, "loop.checkpoint_every": 2, "loop.eval_every": 2}


@dataclass(frozen=True)
class Case:
    """A tiny training: the members that it has, the folders that it publishes, and whether its loss splits over the
    ranks, so that the numbers are those of one rank."""

    system: str
    settings: Mapping[str, Any]
    members: tuple[str, ...] = ()
    published: tuple[str, ...] = ("model",)
    exact: bool = True
    stop: Stop = STEP


BOTH = ("euclidean-0", "lorentz-0")
FIRST = [
    Case(
        "taxonomy",
        golden.NODES | {"batch_size": 4, "twin": True, "epochs": 3},
        BOTH,
        ("embeddings.safetensors",),
        stop=Stop(calls=2),
    ),
    # The hardest pairs are those of a rank's own part of the batch.
    Case("radial", golden.CAPTIONS | {"batch_size": 4, "epochs": 3.0}, BOTH, exact=False),
    Case(
        "hyperclip",
        golden.SQUARES | {"score": "lorentz", "twin": True, "steps": 4, "micro_batch": 1},
        ("block-scale-0", "block-scale-lorentz-0"),
        ("adapter",),
    ),
    Case(
        "lathadapter",
        golden.CACHED | {"hosts": ["promptkd"], "max_steps": 4},
        (
            "clip-adapter-4-shots-0",
            "promptkd-4-shots-0",
            "promptkd-Euclidean-twin-4-shots-5-attributes-0",
            "promptkd-LatHAdapter-4-shots-5-attributes-0",
            "teacher-promptsrc-4-shots-0",
        ),
        (),
    ),
    Case("superposition", golden.FLEET, (), ("figures",), stop=FLEET),
]
MORE = [
    Case("helm", golden.HELM | SHORT | {"twin": True}, BOTH),
    Case("vision", golden.CLASSIFY | SHORT | {"model": "test_convnext"}),
    Case("hcformer", golden.CLASSIFY | SHORT | {"twin": True}, BOTH),
    Case(
        "himapper",
        golden.CLASSIFY | golden.TREE | SHORT | {"twin": True},
        ("euclidean-0", "lorentz-0", "plain-0"),
        exact=False,
    ),
    Case(
        "segmenter",
        golden.SCENES | {"compare": True, "steps": 2, "micro_batch": 1},
        ("attention-0", "block-scale-0", "frozen-0", "full-0", "lora-0", "orthogonal-0"),
        ("adapter", "decoder"),
    ),
]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_data.make_all(tmp_path_factory.mktemp("experiments"))


def _is_as_alone(case: Case, data: Path, folder: Path) -> None:
    given, out, reference = (case.system, case.settings, data), folder / "run", folder / "alone"
    assert train(2, *given, out, stop=case.stop) == [SIGTERM, SIGTERM]
    assert is_run(out)
    assert not (out / "result.json").exists()
    assert train(2, *given, out, resume=True) == [0, 0]
    golden_runs.train(*given, reference)
    for each in (out, reference):
        assert sorted(path.name for path in (each / "members").glob("*")) == list(case.members)
        assert (each / "report.html").is_file()
        assert all((each / name).exists() for name in case.published)
        assert all((member.path / "result.json").is_file() for member in members_of(each))
    if case.exact:
        found, expected = _scores(case, out), _scores(case, reference)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        assert _losses(out) == pytest.approx(_losses(reference), rel=1e-9)


def _scores(case: Case, out: Path) -> dict[str, float]:
    result = json.loads((out / "result.json").read_text())
    return dict(golden.SYSTEMS[case.system].scores(result))


def _losses(out: Path) -> dict[str, float]:
    """(member, step) -> training loss."""
    return {
        f"{member.path.name.replace(out.name, '')} {record['step']}": record["train/loss"]
        for member in members_of(out)
        for record in member.metrics()
        if "train/loss" in record
    }


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.system)
def test_two_ranks_stopped_and_resumed_leave_what_one_leaves(case: Case, data: Path, tmp_path: Path) -> None:
    _is_as_alone(case, data, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.system)
def test_so_do_the_longer_ones(case: Case, data: Path, tmp_path: Path) -> None:
    _is_as_alone(case, data, tmp_path)


def test_no_training_is_left_out() -> None:
    assert {case.system for case in (*FIRST, *MORE)} == set(golden.SYSTEMS)
