"""The run directory: one folder that tells everything about a run, with one writer. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from leafward.config import config_hash, flatten, parse_yaml, save_yaml, to_dict
from leafward.engine import inputs, lock
from leafward.errors import DataError, LeafwardError, UsageError
from leafward.files import (
    LARGEST_RECORD,
    check_version,
    finite,
    read_bytes,
    read_record,
    read_text,
    replacing,
    write_json,
)

CONFIG, ENV, METRICS, RESULT, REPORT = "config.yaml", "env.json", "metrics.jsonl", "result.json", "report.html"
FORMAT, VERSION = "leafward-run", 1
CHECKPOINTS, BOARD, BAD_BATCH = "checkpoints", "tensorboard", "nonfinite-"
MODEL, MEMBERS, CELLS, FIGURES = "model", "members", "cells", "figures"
EVALUATION = ("evaluation.json", "evaluation.html", "evaluation")
"""What evaluations of a run leave in its directory."""


class RunDirectory:
    """`config.yaml`, `env.json`, `metrics.jsonl`, `checkpoints/`, `result.json` and `report.html` of one run.

    `writes` is False on ranks other than the first: they see the same directory and leave it alone. Who makes or takes
    up a run (`create`) holds its lock, so that no other process writes there: to the end of a `with` block over the
    run, or of a training decorated with `lock.one_writer`; outside of both until `finish`, or the process ends.
    """

    def __init__(
        self, path: str | Path, config: Mapping[str, Any], may_change: Iterable[str] = (), writes: bool = True
    ):
        self.path = Path(path)
        self.config = dict(config)
        self.may_change = frozenset(may_change)
        self.writes = writes
        self._board: Any = None

    @classmethod
    def create(
        cls,
        path: str | Path,
        config: Any,
        *,
        resume: bool = False,
        overwrite: bool = False,
        may_change: Iterable[str] = (),
        recipe: str = "",
    ) -> RunDirectory:
        """Make the run directory `path` for `config` (a dataclass or a mapping), or take up an unfinished one.

        `recipe` is the name that later commands know the run by.

        A finished run is refused unless `overwrite`, or `resume` where its page is missing. An unfinished one is
        refused unless `resume` (or `overwrite`), and a resumed one must have the configuration that it was started
        with, but for the dotted paths in `may_change`. What another process is writing is refused always.
        """
        if resume and overwrite:
            raise UsageError("resume and overwrite exclude each other; give one of them")
        run = cls(path, to_dict(config), may_change)
        run._refuse_foreign()
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LeafwardError(f"cannot make the run directory {run.path}: {error.strerror or error}") from error
        locked = lock.acquire(run.path)
        try:
            run._begin(resume, overwrite, recipe)
        except BaseException:
            if locked:
                lock.release(run.path)
            raise
        return run

    def _begin(self, resume: bool, overwrite: bool, recipe: str) -> None:
        """Clear or take up what the directory holds, and write what describes the run."""
        held = self._refuse_foreign()
        clear_leftovers(self.path)
        earlier: list[Any] = []
        if held and overwrite:
            self._clear()
        elif held == "finished" and not (resume and self._only_lacks_its_page()):
            raise UsageError(f"{self.path} holds a finished run; use --overwrite to replace it, or another path")
        elif held == "unfinished" and not resume:
            raise UsageError(
                f"{self.path} holds an unfinished run; use --resume to continue it, or --overwrite to start again"
            )
        elif held:
            self._check_same(self.open(self.path).config)
            before = read_record(self.path / ENV)
            earlier = [*before.pop("earlier", []), before]
        try:
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise LeafwardError(f"cannot make the run directory {self.path}: {error.strerror or error}") from error
        # A resumed run may have moved to other hardware or versions; the record of each part is kept.
        record = environment(self.config) | {"recipe": recipe} | ({"earlier": earlier} if earlier else {})
        write_json(self.path / ENV, record)
        # The configuration comes last: a directory with one is complete enough to be resumed.
        save_yaml(self.config, self.path / CONFIG)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run directory, to read; for small inputs that are gone from their place it names its copies."""
        path = Path(path)
        try:
            text = read_text(path / CONFIG, LARGEST_RECORD)
        except DataError as error:
            raise DataError(f"{path} is not a run directory: {error}") from error
        if (path / ENV).is_file():
            check_version(read_record(path / ENV), VERSION, f"the run directory {path}")
        config = parse_yaml(text, str(path / CONFIG))
        for name, copy in inputs.kept(path).items():
            _set(config, name, str(copy))
        return cls(path, config)

    @property
    def recipe(self) -> str:
        """The name of the recipe that made the run; empty where nobody said."""
        return self._env().get("recipe", "")

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def report(self) -> Path:
        return self.path / REPORT

    @property
    def finished(self) -> bool:
        return (self.path / RESULT).is_file()

    @property
    def identity(self) -> str:
        """Hash of what makes this run this run: its configuration without what may change on resume."""
        return config_hash(self.config, without=self.may_change)

    def log(self, step: int, values: Mapping[str, Any], time: Mapping[str, float] | None = None) -> None:
        """Append one line to metrics.jsonl. `time` holds what differs from run to run (seconds, throughput)."""
        if not self.writes:
            return
        record = {"step": step, **values} | ({"time": dict(time)} if time else {})
        line = json.dumps(finite(record), ensure_ascii=False, allow_nan=False)
        try:
            with open(self.path / METRICS, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise LeafwardError(f"cannot write {self.path / METRICS}: {error.strerror or error}") from error
        self._show_on_board(step, values)

    def metrics(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl."""
        return [record for _, record in self._complete_lines()]

    def rewind(self, step: int) -> None:
        """Drop the metrics of later steps than `step`, which a resumed run will write again, and a torn last line."""
        if self.writes and (self.path / METRICS).exists():
            kept = [line for line, record in self._complete_lines() if record["step"] <= step]
            with replacing(self.path / METRICS) as temporary:
                temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write result.json; from now on the run is finished. Lets the lock go, but for one that a block holds."""
        if self.writes:
            write_json(self.path / RESULT, dict(result))
            if self._board:
                self._board.close()
            lock.release(self.path, unless_in_block=True)

    def release(self) -> None:
        """Let the lock go; nothing may be written any more."""
        if self.writes:
            lock.release(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def result(self) -> dict[str, Any]:
        return read_record(self.path / RESULT)

    def _refuse_foreign(self) -> str | None:
        """What the path holds, if that is nothing or a run."""
        held = self._held()
        if held == "other":
            raise UsageError(f"{self.path} is not empty and not a run directory; give a new path")
        return held

    def _held(self) -> str | None:
        """What the path holds: None (nothing), "other", "unfinished" or "finished"."""
        try:
            names = {entry.name for entry in os.scandir(self.path)}
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"{self.path} cannot be a run directory: {error.strerror or error}") from error
        if CONFIG in names and self._has_mark():
            return "finished" if RESULT in names else "unfinished"
        # A run killed while its directory was being made leaves these and nothing else.
        young = {name for name in names if name.startswith((f".{CONFIG}.", f".{ENV}."))}
        young |= {ENV} if self._has_mark() else set()
        young |= {CHECKPOINTS} if not any(self.checkpoints.glob("*")) else set()
        young |= {lock.LOCK}
        return "other" if names - young else None

    def _only_lacks_its_page(self) -> bool:
        """Whether a finished run has no report.html, and what it trained is there to make it from."""
        trained = any(any((self.path / name).glob("*")) for name in (CHECKPOINTS, MEMBERS, CELLS))
        return trained and not self.report.is_file()

    def _has_mark(self) -> bool:
        """Whether the directory's env.json says that it is a run's, and not somebody's project."""
        return self._env().get("format") == FORMAT

    def _env(self) -> dict[str, Any]:
        """What env.json says; nothing where there is none that can be read."""
        try:
            return read_record(self.path / ENV)
        except DataError:
            return {}

    def _clear(self) -> None:
        """Remove what a run wrote and nothing else: the mark of a finished run first, that of a run last."""
        batches = [path.name for path in self.path.glob(f"{BAD_BATCH}*")]
        try:
            shown = REPORT, BOARD, FIGURES, *EVALUATION
            for name in (
                RESULT,
                CHECKPOINTS,
                METRICS,
                *shown,
                MODEL,
                MEMBERS,
                CELLS,
                *batches,
                *inputs.WRITTEN,
                CONFIG,
                ENV,
            ):
                path = self.path / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise LeafwardError(f"cannot clear {self.path}: {error.strerror or error}") from error

    def _check_same(self, saved: Mapping[str, Any]) -> None:
        gone = [name for name in saved if name not in self.config]
        if gone:  # and a checkpoint is that of its settings, name by name
            raise UsageError(
                f"{self.path} was begun by an earlier version of leafward, whose settings had other names "
                f"({', '.join(gone)}), so it cannot be resumed; start again with --overwrite, and with the same "
                f"settings by --config {self.path / CONFIG}"
            )
        old, new = flatten(saved), flatten(self.config)
        changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key, ...) != new.get(key, ...)]
        refused = [key for key in changed if key not in self.may_change]
        if refused:
            shown = ", ".join(f"{key} (was {old.get(key)!r}, now {new.get(key)!r})" for key in refused)
            raise UsageError(f"{self.path} was started with another configuration: {shown}; resume needs the same one")

    def _complete_lines(self) -> list[tuple[str, dict[str, Any]]]:
        """Each line as it stands and what it says; a line without its newline was torn by a kill and is left out."""
        path = self.path / METRICS
        if not path.exists():
            return []
        try:
            lines = read_bytes(path).decode("utf-8", "replace").split("\n")[:-1]
            records = [(line, json.loads(line)) for line in lines]
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}") from error
        for number, (_, record) in enumerate(records, 1):
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise DataError(f"cannot read {path}: line {number} is not the record of a step")
        return records

    def _show_on_board(self, step: int, values: Mapping[str, Any]) -> None:
        """The same numbers for TensorBoard, where it is installed."""
        if self._board is None:
            self._board = _board_writer(self.path / BOARD, step)
        for name, value in values.items():
            if self._board and isinstance(value, int | float):
                self._board.add_scalar(name, value, step)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_board": None}


LEFT_OVER = re.compile(r"\.partial-.+|\..+\.[a-z0-9_]{8}\.tmp(\.old)?")
"""Names of what is being written and not yet renamed: checkpoints and models; files and folders (leafward.files)."""


def clear_leftovers(folder: Path) -> None:
    """Remove what writers that were killed left in `folder` and below it; nobody else may be writing there.

    Of locks below `folder` those that nobody holds go: a member that was done before the kill is not taken up again.
    """
    for place, folders, files in os.walk(folder):
        for name in filter(LEFT_OVER.fullmatch, [*folders]):
            folders.remove(name)
            if not os.path.islink(os.path.join(place, name)):
                shutil.rmtree(os.path.join(place, name), ignore_errors=True)
        for name in filter(LEFT_OVER.fullmatch, files):
            with suppress(OSError):
                os.unlink(os.path.join(place, name))
        if lock.LOCK in files and Path(place) != folder:
            with suppress(lock.RunLocked):
                if lock.acquire(place):
                    lock.release(place)


def _set(config: dict[str, Any], dotted: str, value: str) -> None:
    *groups, name = dotted.split(".")
    place: Any = config
    for group in groups:
        place = place.get(group, {})
    name, _, number = name.rstrip("]").partition("[")
    if number:
        place, name = place[name], int(number)
    place[name] = value


def discard_unbegun(path: str | Path) -> None:
    """Remove the directory of a run that failed before it trained anything: no checkpoint, no metrics, no result.

    One that another process is writing in is left alone.
    """
    if not Path(path).is_dir():
        return
    try:
        locked = lock.acquire(path)
    except lock.RunLocked:
        return
    try:
        _discard(path)
    finally:
        if locked:
            lock.release(path)
    with suppress(OSError):
        Path(path).rmdir()


def _discard(path: str | Path) -> None:
    run = RunDirectory(path, {})
    begun = any(run.checkpoints.rglob("*")) or any(
        (run.path / name).exists() for name in (METRICS, RESULT, MEMBERS, CELLS)
    )
    if run._has_mark() and not begun:
        run._clear()


def _board_writer(path: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return False
    return SummaryWriter(str(path), purge_step=step)


def environment(config: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, commit, seeds, hardware and command of this process."""
    packages = ("leafward", "torch", "numpy", "safetensors", "transformers", "timm")
    return {
        "format": FORMAT,
        "version": VERSION,
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := _version(name))},
        "commit": _commit(),
        "seed": {path: value for path, value in flatten(config).items() if path.split(".")[-1] == "seed"},
        "hardware": _hardware(),
        "argv": sys.argv,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the working directory, with a + when files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _hardware() -> dict[str, Any]:
    hardware: dict[str, Any] = {"platform": platform.platform(), "cpus": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        hardware["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return hardware
