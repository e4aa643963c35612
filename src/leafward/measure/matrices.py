"""From what a user names to a matrix that streams: files, checkpoints, model zoos, arrays."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from leafward.errors import UsageError, nearest
from leafward.files import read_record
from leafward.measure.matrix_files import (
    Catalogue,
    Matrix,
    feature_notes,
    from_array,
    from_npy,
    from_npz,
    only_one,
    refuse_pickle,
)
from leafward.measure.matrix_hub import catalogue_of, from_checkpoint
from leafward.measure.matrix_zoo import ZOOS, from_zoo

if TYPE_CHECKING:
    from leafward.measure.targets import Found

Target = str | os.PathLike[str] | torch.Tensor | np.ndarray


def open_matrix(target: Target, *, tensor: str | None = None, fold_norm: bool = False) -> Matrix:
    """Find the matrix (n, m) that `target` names, without reading its rows.

    `target` is anything that `leafward.measure.targets.open_target` takes. `tensor` chooses by name; without it a
    checkpoint's output head, a zoo model's classifier, the texts of a feature file, or the only matrix is taken.
    """
    if isinstance(target, torch.Tensor | np.ndarray):
        _refuse_options("an array", tensor, fold_norm)
        return from_array(target)
    if not isinstance(target, str | os.PathLike):
        raise UsageError(f"target must be a path, a zoo name, a tensor or an array, not {type(target).__name__}")
    text = os.fspath(target)
    zoo, colon, name = text.partition(":")
    if colon and zoo in ZOOS:
        _refuse_options(f"{zoo}: weights", None, fold_norm)
        return from_zoo(zoo, name, tensor)
    path = Path(text).expanduser()
    if path.suffix == ".npy" and path.exists():
        _refuse_options("a .npy file", tensor, fold_norm)
        return from_npy(path)
    if path.suffix == ".npz" and path.exists():
        _refuse_options("a target without config.json", None, fold_norm)
        return from_npz(path, tensor)
    if _plain_files(path):
        return _from_catalogue(catalogue_at(path), text, tensor, fold_norm)
    if path.is_dir() and (path / "config.json").is_file() and any(path.glob("*.safetensors*")) and not _ours(path):
        return from_checkpoint(path, tensor, fold_norm)
    from leafward.measure.targets import open_target

    found = open_target(target)
    if fold_norm or _foldable(found):
        if found.folder is None or not any(found.folder.glob("*.safetensors*")):
            raise UsageError(f"--fold-norm: {text} has no final norm that is read; it needs a Hugging Face directory")
        return replace(from_checkpoint(found.folder, tensor, fold_norm), target=text)
    return _of_found(found, text, tensor)


SPECIAL = ("config.json", "config.yaml", "cfg.json", "adapter_config.json")


def _plain_files(path: Path) -> bool:
    """Safetensors without a word about what model they are."""
    if path.is_dir():
        return any(path.glob("*.safetensors*")) and not any((path / name).is_file() for name in SPECIAL)
    return path.exists() and (path.suffix == ".safetensors" or path.name.endswith(".index.json"))


def _ours(path: Path) -> bool:
    """Whether the folder is of HELM, whose weights have columns for the time."""
    return read_record(path / "config.json").get("model_type") == "helm"


def _from_catalogue(catalogue: Catalogue, text: str, tensor: str | None, fold_norm: bool) -> Matrix:
    """One tensor of safetensors files; fp8 ones are read with their scales."""
    _refuse_options("a target without config.json", None, fold_norm)
    name = tensor or catalogue.only_matrix()
    if catalogue.described().get(name, ((), ""))[1].startswith("F8"):
        from leafward.measure.folders import of_catalogue

        return _of_found(of_catalogue(catalogue, text, "safetensors"), text, name)
    source = catalogue.rows(name)
    notes = (*catalogue.notes(), *feature_notes(name))
    return Matrix(target=text, tensor=name, source=source, rows=source.shape[0], notes=notes)


def _foldable(found: Found) -> bool:
    """A Hugging Face folder of safetensors whose output is found by the names that models give it."""
    return found.kind == "Hugging Face model" and found.folder is not None


def _of_found(found: Found, text: str, tensor: str | None) -> Matrix:
    """One matrix of a target: the one asked for, its head, the texts of a feature file, or the only one."""
    entries = {**found.entries, **found.extra.get("more", {})}
    name = tensor or found.head or only_one(text, list(found.entries))
    if name not in entries:
        raise UsageError(f"--tensor: {text} holds no {name!r}; {nearest(name, entries)}")
    entry = entries[name]
    notes = (*found.notes, *entry.notes, *feature_notes(name))
    return Matrix(text, name, entry.open(), entry.used, entry.role or "matrix", notes=notes)


def catalogue_at(path: Path) -> Catalogue:
    """The tensors of a safetensors file, an index, or a folder of them."""
    if path.is_dir():
        return catalogue_of(path)
    refuse_pickle(path)
    if path.name.endswith(".index.json"):
        return Catalogue.of_index(path)
    if path.suffix == ".safetensors":
        return Catalogue.of_file(path)
    raise UsageError(
        f"cannot audit {path}: give a Hugging Face directory, a .safetensors file, a .index.json, a .npy "
        "or .npz file, timm:NAME or open_clip:NAME"
    )


def _refuse_options(what: str, tensor: str | None, fold_norm: bool) -> None:
    if tensor is not None:
        raise UsageError(f"--tensor {tensor}: {what} holds one unnamed matrix, so there is nothing to choose")
    if fold_norm:
        raise UsageError(f"--fold-norm: {what} has no final norm; it needs a Hugging Face directory")
