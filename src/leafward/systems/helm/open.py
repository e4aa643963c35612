"""What the commands after training find in a run directory, or in a folder with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leafward.config import checked
from leafward.engine.layout import is_run
from leafward.engine.run import MODEL, RunDirectory
from leafward.errors import DataError, UsageError
from leafward.files import read_record
from leafward.systems.helm.config import Config

TOKENS, DATA, SCORES = "tokens", "data.json", "held_out.npy"


def model_folder(target: Path) -> Path:
    """The folder of the (first) model of a run, or the folder itself."""
    if is_run(target):
        _need_finished(RunDirectory.open(target))
        return target / MODEL
    if (target / "config.json").is_file():
        return target
    raise UsageError(f"{target} is neither the directory of a finished run nor a folder with a model")


def members(target: Path) -> list[dict[str, Any]]:
    """Name, geometry and folder of every model."""
    if not is_run(target):
        return [{"name": target.name, "geometry": None, "folder": model_folder(target)}]
    run = RunDirectory.open(target)
    _need_finished(run)
    return [{**each, "folder": target / each["model"]} for each in run.result()["members"]]


def configuration(target: Path) -> Config:
    """The configuration that a run was trained with."""
    return checked(Config, RunDirectory.open(target).config)


def tokens_folder(target: Path) -> Path:
    """Where the tokens are that a run was trained on."""
    try:
        folder = Path(read_record(target / DATA)["folder"])
    except (DataError, KeyError, TypeError) as error:
        raise DataError(f"{target} does not say where its tokens are ({error}); give --data") from error
    # A run directory that was moved takes its own tokens along.
    inside = target / TOKENS / folder.name
    found = next((each for each in (inside, folder) if each.is_dir()), None)
    if found is None:
        raise DataError(f"the tokens of {target} are no longer at {folder}; give --data")
    return found


def _need_finished(run: RunDirectory) -> None:
    if run.recipe != "helm":
        raise UsageError(f"{run.path} is a run of recipe {run.recipe!r}, not of a language model")
    if not run.finished:
        raise UsageError(f"{run.path} holds an unfinished run; finish it with leafward train helm … --resume")
