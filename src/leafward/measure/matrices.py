"""From what a user names to a matrix that streams: files, checkpoints, model zoos, arrays."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from leafward.errors import DataError, UsageError
from leafward.measure.matrix_files import (
    Catalogue,
    Matrix,
    feature_notes,
    from_array,
    from_npy,
    from_npz,
    refuse_pickle,
)
from leafward.measure.matrix_hub import catalogue_of, from_checkpoint
from leafward.measure.matrix_zoo import ZOOS, from_zoo

Target = str | os.PathLike[str] | torch.Tensor | np.ndarray


def open_matrix(target: Target, *, tensor: str | None = None, fold_norm: bool = False) -> Matrix:
    """Find the matrix (n, m) that `target` names, without reading its rows.

    `target` is a Hugging Face directory, a safetensors file, a `*.index.json`, a directory of safetensors, a
    `.npy` or `.npz` file, `timm:NAME[@FILE]`, `open_clip:NAME[@TAG or FILE]`, or a tensor or array. `tensor` chooses
    by name; without it a checkpoint's output head, a zoo model's classifier, the texts of a feature file, or the only
    matrix is taken.
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
    if not path.exists():
        raise DataError(f"no such file or directory: {path} (a zoo is named as timm:NAME or open_clip:NAME)")
    if path.is_dir() and (path / "config.json").is_file():
        return from_checkpoint(path, tensor, fold_norm)
    _refuse_options("a target without config.json", None, fold_norm)
    if path.suffix == ".npy":
        _refuse_options("a .npy file", tensor, False)
        return from_npy(path)
    if path.suffix == ".npz":
        return from_npz(path, tensor)
    catalogue = catalogue_at(path)
    name = tensor or catalogue.only_matrix()
    source = catalogue.rows(name)
    notes = (*catalogue.notes(), *feature_notes(name))
    return Matrix(target=text, tensor=name, source=source, rows=source.shape[0], notes=notes)


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
