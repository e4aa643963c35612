"""Checkpoints to resume from and models to publish. Nothing here is ever unpickled.

A checkpoint is a directory `step-00000100` with the tensors of model, optimiser and average as safetensors, written
and read by torch.distributed.checkpoint (so that one rank or many, DDP or FSDP2, can read what the other wrote), and
`manifest.json` with everything that is not a tensor. DCP's own file format keeps its metadata as a pickle; its
safetensors back end, used here, does not.

The manifest has the size and a hash of every file, and a hash of itself. Each rank hashes what it writes while it is
written; on load the ranks share the files between them. A damaged checkpoint is not used, and the one before it is.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from leafward.config import to_dict
from leafward.engine.distributed import Cluster
from leafward.engine.hashes import (
    FASTEST,
    SUMS,
    HashedFile,
    check_sums,
    file_hash,
    first_damage,
    record_hash,
    write_sums,
)
from leafward.errors import DataError, LeafwardError, UsageError
from leafward.files import read_record, replacing, write_json

FORMAT, VERSION = "leafward-checkpoint", 2
WITHOUT_HASHES = 1
"""The version of older checkpoints, of which only the sizes are known."""
MANIFEST, SEAL = "manifest.json", "seal"
"""The manifest, and its entry with the hash of all others."""
PARTIAL = ".partial-"
WEIGHTS, CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    identity: str
    best: int | None = None
    state: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION


class Checkpointer:
    """The checkpoints of one run: written beside and renamed; the last `keep_last` and the best of each are kept."""

    def __init__(self, directory: str | Path, identity: str, cluster: Cluster | None = None, keep_last: int = 2):
        self.directory = Path(directory)
        self.identity = identity
        self.cluster = cluster or Cluster()
        self.keep_last = keep_last
        self.damaged: list[str] = []
        """What `latest` found wrong, and `is_good`, one sentence for each checkpoint that is not used."""

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], best: int | None = None) -> None:
        """Write the checkpoint of `step`; `state` is JSON, `best` the step of a checkpoint never to prune.

        If anything fails, what was written is removed and the checkpoints that were there stay.
        """
        partial = self.directory / f"{PARTIAL}step-{step:08d}"
        try:
            self.cluster.on_main(lambda: _fresh(partial))
            hashes = _write(tensors, partial, self.cluster)
            self.cluster.on_main(lambda: self._complete(step, partial, hashes, dict(state), best))
        except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
            if self.cluster.main:
                shutil.rmtree(partial, ignore_errors=True)
                last = max(self._steps(), default=None)
            else:
                last = None
            kept = f"; the last good checkpoint is {self.path(last)}" if last is not None else ""
            raise LeafwardError(f"cannot write the checkpoint {self.path(step)}: {_reason(error)}{kept}") from error

    def latest(self) -> Manifest | None:
        """The newest good checkpoint, or None if there is none at all; remains of killed writes are removed.

        Every rank has it, and in `damaged` what is wrong with newer ones; an error if that are all there are.
        """
        self.damaged = []
        for step in self.cluster.on_main(self._candidates):
            manifest = self._checked(step, "; trying the checkpoint before it")
            if manifest is None:
                continue
            if manifest.identity != self.identity:
                raise DataError(f"{self.path(step)} belongs to a run with another configuration; it is not used")
            # A kill may have come before the last save had done so.
            self.cluster.on_main(partial(self._prune, step, manifest.best))
            return manifest
        if self.damaged:
            raise DataError(f"{self.damaged[0]}; no checkpoint in {self.directory} is good; start again (--overwrite)")
        return None

    def is_good(self, step: int) -> bool:
        """Whether the checkpoint of `step` can be loaded; else `damaged` says why. Call it on every rank."""
        return self._checked(step, "; it is not used") is not None

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill `tensors` (plain or sharded) in place from the checkpoint of `step`."""
        _read(dict(tensors), self.path(step), self.cluster)

    def _checked(self, step: int, consequence: str) -> Manifest | None:
        try:
            return verify(self.path(step), self.cluster)
        except DataError as error:
            self.damaged.append(str(error))
            if self.cluster.main:
                warnings.warn(f"{error}{consequence}", stacklevel=3)
            return None

    def _complete(
        self, step: int, partial: Path, hashes: Mapping[str, str], state: dict[str, Any], best: int | None
    ) -> None:
        files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        known = {name: hashes.get(name) or file_hash(partial / name) for name in files}
        record = asdict(Manifest(step, self.identity, best, state, files, known))
        write_json(partial / MANIFEST, record | {SEAL: record_hash(record)})
        _move(partial, self.path(step))
        self._prune(step, best)

    def _prune(self, step: int, best: int | None) -> None:
        """Remove the checkpoints up to `step` but for the last ones and the best of each of them.

        The best of an older one is needed if the run has to go on from there.
        """
        steps = [other for other in self._steps() if other <= step]
        needed = {best, *(self._best_of(other) for other in steps[-self.keep_last :] if other != step)}
        for other in steps[: -self.keep_last]:
            if other not in needed:
                shutil.rmtree(_set_aside(self.path(other)))

    def _best_of(self, step: int) -> int | None:
        try:
            return _read_manifest(self.path(step)).best
        except DataError:
            return None

    def _steps(self) -> list[int]:
        names = [path.name for path in self.directory.glob("step-*") if path.is_dir()]
        return sorted(int(name[5:]) for name in names if name[5:].isdigit())

    def _candidates(self) -> list[int]:
        """The steps of all checkpoints, newest first, once the remains of killed writes are gone."""
        for leftover in self.directory.glob(f"{PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        return self._steps()[::-1]


def verify(path: str | Path, cluster: Cluster | None = None) -> Manifest:
    """The manifest of the checkpoint at `path`, after checking that each file is there, whole and unchanged.

    With a `cluster` of several ranks each checks some of the files; call it on every rank.
    """
    path, cluster = Path(path), cluster or Cluster()
    found: Manifest | None = None
    try:
        found = _read_manifest(path)
        names = sorted(found.hashes)[cluster.rank :: cluster.world]
        wrong = first_damage(path, {name: found.hashes[name] for name in names})
    except DataError as error:
        wrong = str(error)
    wrong = next((each for each in cluster.gather(wrong) if each is not None), None)
    if found is None or wrong is not None:
        raise DataError(wrong)
    return found


def _read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, after checking that each file is there at its full size."""
    try:
        read = read_record(path / MANIFEST)
    except DataError as error:
        raise DataError(f"{path} is not a complete checkpoint: {error}") from error
    if read.get("format") != FORMAT:
        raise DataError(f"{path} is not a leafward checkpoint: its {MANIFEST} does not say format {FORMAT!r}")
    version = read.get("version")
    if version not in (WITHOUT_HASHES, VERSION):
        raise DataError(f"{path} has checkpoint version {version!r}; this leafward reads {VERSION} and older")
    if version == VERSION and read.pop(SEAL, None) != record_hash(read):
        raise DataError(f"{path / MANIFEST} is damaged: it is not what was written")
    try:
        manifest = Manifest(**read)
        names = {str(name): int(size) for name, size in manifest.files.items()}
        unhashed = sorted(names.keys() - manifest.hashes.keys()) if version == VERSION else []
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path / MANIFEST} is damaged: {error}") from error
    if unhashed:
        raise DataError(f"{path / MANIFEST} is damaged: it has no hash of {unhashed[0]}")
    for name, size in names.items():
        file = path / name
        if Path(name).name != name or not file.is_file():
            raise DataError(f"{path} is not a complete checkpoint: {name} is missing")
        if file.stat().st_size != size:
            raise DataError(f"{file} is damaged: it has {file.stat().st_size} bytes and should have {size}")
    extra = {file.name for file in path.glob("*.safetensors")} - set(names)
    if extra:
        raise DataError(f"{path} holds a file that its {MANIFEST} does not know: {min(extra)}")
    return manifest


def second_names(model: nn.Module) -> dict[str, str]:
    """The other names of tied parameters and buffers that are kept, each with the name that comes first."""
    firsts: dict[int, str] = {}
    kept = model.state_dict().keys()
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    owners = {name: firsts.setdefault(id(tensor), name) for name, tensor in named if name in kept}
    return {name: owner for name, owner in owners.items() if name != owner}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of `model` with each tied tensor once."""
    seconds = second_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in seconds}


def load_weights(path: str | Path, model: nn.Module, cluster: Cluster | None = None) -> Manifest:
    """Fill `model` with the weights of the checkpoint at `path`: their moving average where there is one."""
    path, cluster = Path(path), cluster or Cluster()
    manifest = verify(path, cluster)
    saved = _saved_names(path)
    targets = {
        f"ema.{name}" if f"ema.{name}" in saved else f"model.{name}": tensor for name, tensor in weights(model).items()
    }
    _read(targets, path, cluster)
    return manifest


def publish(model: nn.Module, directory: str | Path, config: Any, cluster: Cluster | None = None) -> None:
    """Write `model.safetensors`, `config.json` and the sums of both to `directory` in one step; call it on every rank.

    Tensors that share memory (tied weights) are stored once; `load_published` gives them all their names back. A
    model published there before is replaced; a directory that holds anything else is refused.
    """
    directory, cluster = Path(directory), cluster or Cluster()
    tensors = {name: _whole(tensor.detach()) for name, tensor in weights(model).items()}

    def write() -> None:
        foreign = (
            {entry.name for entry in directory.iterdir()} - {WEIGHTS, CONFIG, SUMS} if directory.exists() else set()
        )
        if foreign:
            raise UsageError(
                f"{directory} is not empty and not only a published model: {min(foreign)}; give another path"
            )
        kept = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        aliases = second_names(model)
        partial = directory.parent / f"{PARTIAL}{directory.name}"
        try:
            _fresh(partial)
            metadata = {"format": "pt"} | ({"aliases": json.dumps(aliases)} if aliases else {})
            with replacing(partial / WEIGHTS) as temporary:
                save_file(kept, temporary, metadata=metadata)
            write_json(partial / CONFIG, to_dict(config))
            write_sums(partial)
            _move(partial, directory)
        except (OSError, SafetensorError) as error:
            raise LeafwardError(f"cannot write the model to {directory}: {_reason(error)}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    cluster.on_main(write)


def load_published(directory: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the state dict that `publish` wrote.

    A file that has changed since is refused by its name; a folder without `SHA256SUMS` (an older one) is read as it is.
    """
    directory = Path(directory)
    try:
        check_sums(directory)
        config = read_record(directory / CONFIG)
        with safe_open(directory / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
            aliases = dict(json.loads((file.metadata() or {}).get("aliases", "{}")))
        return config, tensors | {name: tensors[owner] for name, owner in aliases.items()}
    except (DataError, OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise DataError(f"{directory} does not hold a published model: {error}") from error


class HashingFiles(FileSystem):
    """DCP's files, hashed while they are written."""

    def __init__(self, kind: str = FASTEST) -> None:
        super().__init__()
        self.kind = kind
        self.written: dict[str, HashedFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with HashedFile(path, self.kind) as file:
            yield file
        self.written[Path(path).name] = file


def _write(tensors: Mapping[str, Tensor], path: Path, cluster: Cluster) -> dict[str, str]:
    """Write the shards of all ranks; the hash of each file that went through this process or another rank's."""
    # safetensors wants its bytes in order, which those of a channels-last weight, for one, are not.
    ordered = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with _single_process_is_meant():
        writer, files = HuggingFaceStorageWriter(str(path), save_distributed=True), HashingFiles()
        writer.fs = files
        dcp.save(ordered, storage_writer=writer, no_dist=cluster.world == 1)
    own = {name: file.digest for name, file in files.written.items()}
    return {name: found for rank in cluster.gather(own) for name, found in rank.items()}


def _read(targets: dict[str, Tensor], path: Path, cluster: Cluster) -> None:
    saved = _saved_names(path)
    missing = targets.keys() - saved
    if missing:
        raise DataError(f"{path} was written by another model: it has no tensor {min(missing)!r}")
    known = {name.partition(".")[2] for name in targets}
    unknown = {name for name in saved if name.startswith("model.")} - {f"model.{name}" for name in known}
    if unknown:
        raise DataError(f"{path} was written by another model: this one has no tensor {min(unknown)!r}")
    try:
        with _single_process_is_meant():
            dcp.load(targets, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=cluster.world == 1)
    except (OSError, ValueError, SafetensorError, dcp.CheckpointException) as error:
        raise DataError(f"cannot load the checkpoint {path}: {_reason(error)}") from error


def _saved_names(path: Path) -> set[str]:
    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as opened:
                names |= set(opened.keys())
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file} is not a valid safetensors file: {error}") from error
    return names


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _reason(error: BaseException) -> str:
    """The root of a failure: DCP wraps the error of each rank in one of its own."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_reason(cause)}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _fresh(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _move(source: Path, target: Path) -> None:
    """Rename directory `source` to `target`, replacing what is there, so that it survives a loss of power."""
    _sync(source)
    old = _set_aside(target) if target.exists() else None
    os.rename(source, target)
    _sync(target.parent)
    if old is not None:
        shutil.rmtree(old)


def _set_aside(path: Path) -> Path:
    """Rename a directory that is to go, so that a kill while it is removed leaves nothing under its name."""
    doomed = path.parent / f"{PARTIAL}old-{path.name}"
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    return doomed


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
