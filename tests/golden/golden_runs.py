"""One golden run: trained through its own `run`, its numbers read from the files that it leaves, and compared."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import golden_presets
import torch
from golden_cases import EXACT, STEPS, SYSTEMS, System

from leafward.config import replace
from leafward.files import write_text

THREADS = 1
ABOUT = (
    "Golden numbers, rewritten by python tests/golden/write.py; a commit that changes them says why. losses: of ten "
    "steps, each before its update, so that the first is the initial loss (superposition: after each step, geometric "
    "means over the fleet). tolerance: relative; 1e-9 where all is computed in float64."
)
Numbers = dict[str, Any]


def path_of(system: str) -> Path:
    return golden_presets.FOLDER / f"{system}.json"


def run(system: str, name: str, data: Path) -> Numbers:
    """Train a case on the data that `golden_data.make_all` left in `data`; the run directory is gone afterwards."""
    chosen = SYSTEMS[system]
    case = chosen.cases[name]
    with TemporaryDirectory() as folder, _one_thread():
        out = Path(folder) / "run"
        train(system, case.settings, data, out)
        result = json.loads((out / "result.json").read_text(encoding="utf-8"))
        losses = {arm: _losses(chosen, out / place / "metrics.jsonl") for arm, place in case.arms.items()}
    return {"tolerance": case.tolerance, "losses": losses, "scores": dict(chosen.scores(result))}


def train(
    system: str, settings: Mapping[str, Any], data: Path, out: Path, *, resume: bool | Literal["data-changed"] = False
) -> None:
    """Train the first preset with other settings, by dotted name; `data`: the folder of those that begin with @."""
    training = importlib.import_module(f"{golden_presets.PACKAGES[system]}.train")
    training.run(settings_of(system, settings, data), out, resume=resume)


def settings_of(system: str, settings: Mapping[str, Any], data: Path) -> Any:
    known = importlib.import_module(f"{golden_presets.PACKAGES[system]}.config")
    first = next(iter(known.PRESETS.values()))()
    return replace(first, **{name: _found(value, data) for name, value in settings.items()})


def _found(value: Any, data: Path) -> Any:
    """A setting; where it begins with @, a path in `data`."""
    return str(data / value[1:]) if isinstance(value, str) and value.startswith("@") else value


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread and one state of torch's generator, whatever ran before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _losses(system: System, metrics: Path) -> dict[str, list[float]]:
    """Name -> the losses of all steps."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    found = {
        name.removeprefix("train/"): {record["step"]: record[name] for record in records if name in record}
        for name in system.losses
    }
    found = {name: by_step for name, by_step in found.items() if by_step}
    assert found, f"{metrics} holds no loss"
    assert all(sorted(by_step) == list(range(1, STEPS + 1)) for by_step in found.values()), f"{metrics} lacks steps"
    return {name: [by_step[step] for step in sorted(by_step)] for name, by_step in found.items()}


def elsewhere(system: str) -> str | None:
    """Why the numbers of a system need not hold here, if so: another release of torch, or a processor without AVX2,
    for which torch draws other random numbers in the last digit."""
    made = json.loads(path_of(system).read_text(encoding="utf-8"))["torch"]
    if _release(made) != _release(torch.__version__):
        return f"the golden numbers are those of torch {made}, this is {torch.__version__}"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "the golden numbers are those of a processor with AVX2"
    return None


def _release(version: str) -> list[str]:
    return version.split(".")[:2]


def recorded(system: str) -> dict[str, Numbers]:
    """Case -> its golden numbers; nothing where there is no file."""
    path = path_of(system)
    return json.loads(path.read_text(encoding="utf-8"))["cases"] if path.is_file() else {}


def write(system: str, cases: Mapping[str, Numbers]) -> None:
    made = {"about": ABOUT, "threads": THREADS, "torch": torch.__version__, "cases": dict(cases)}
    write_text(path_of(system), json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def changes(old: Numbers, new: Numbers) -> list[str]:
    """Every number that differs by more than the tolerance, is gone, or is new."""
    before, after = _leaves(old), _leaves(new)
    tolerance = min(old.get("tolerance", EXACT), new["tolerance"])
    gone = [f"{key} is gone, it was {before[key]!r}" for key in before.keys() - after.keys()]
    come = [f"{key} is new, {after[key]!r}" for key in after.keys() - before.keys()]
    moved = [
        f"{key}: {before[key]!r} -> {after[key]!r}"
        for key in before.keys() & after.keys()
        if not _same(before[key], after[key], tolerance)
    ]
    return sorted([*gone, *come, *moved])


def _same(a: Any, b: Any, tolerance: float) -> bool:
    """Equal to the relative tolerance; what cancels to nearly zero need only do so again."""
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-3 * tolerance)


def _leaves(values: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(values, dict | list):
        return {path: values}
    items = values.items() if isinstance(values, dict) else enumerate(values, start=1)
    return {
        name: leaf
        for key, value in items
        for name, leaf in _leaves(value, f"{path} > {key}" if path else str(key)).items()
    }
