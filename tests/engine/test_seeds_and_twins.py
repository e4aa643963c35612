"""Every training with two seeds and its twin or rival: one layout, one result, one page, and no lock that is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden_cases as golden
import golden_data
import golden_runs
import pytest

from leafward.engine import members_of
from leafward.engine.lock import LOCK, acquire, release

BRIEF = {"loop.steps": 2, "loop.eval_every": 2, "loop.checkpoint_every": 2}
CLIP = {"steps": 2, "score": "lorentz", "twin": True}
PAIRS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # system: settings, the arms that its run has with them
    "helm": (golden.HELM | BRIEF | {"twin": True}, ("euclidean", "lorentz")),
    "vision": (golden.CLASSIFY | BRIEF | {"model": "test_convnext"}, ("lorentz",)),  # no geometry, no twin
    "hcformer": (golden.CLASSIFY | BRIEF | {"twin": True}, ("euclidean", "lorentz")),
    "himapper": (golden.CLASSIFY | golden.TREE | BRIEF | {"twin": True}, ("euclidean", "lorentz", "plain")),
    "hyperclip": (golden.SQUARES | CLIP, ("block-scale", "block-scale-lorentz")),
    "segmenter": (golden.SCENES | CLIP, ("block-scale", "block-scale-lorentz")),
    "lathadapter": (
        golden.CACHED | {"hosts": ["coop"], "baselines": [], "max_steps": 2, "twin": True},
        ("coop-4-shots", "coop-Euclidean-twin-4-shots-5-attributes", "coop-LatHAdapter-4-shots-5-attributes"),
    ),
    "radial": (golden.CAPTIONS | {"epochs": 1.0, "twin": True}, ("euclidean", "lorentz")),
    "superposition": (golden.FLEET | {"steps": 20}, ()),  # its seeds are replicates of the fleet
    "taxonomy": (golden.NODES | {"epochs": 2, "twin": True}, ("euclidean", "lorentz")),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_data.make_all(tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize("system", golden.SYSTEMS)
def test_two_seeds_and_a_twin(system: str, data: Path, tmp_path: Path) -> None:
    settings, arms = PAIRS[system]
    out = tmp_path / "run"
    golden_runs.train(system, settings | {"seeds": 2}, data, out)
    assert [path.name for path in sorted((out / "members").glob("*"))] == [f"{arm}-{n}" for arm in arms for n in (0, 1)]
    result = json.loads((out / "result.json").read_text())
    assert result["headline"] or result["claims"]
    assert (out / "report.html").is_file()
    for member in members_of(out):
        assert json.loads((member.path / "result.json").read_text())
        assert member.path == out or not (member.path / LOCK).exists()
    assert acquire(out)  # nobody holds it any more
    release(out)
