"""Adapters in files, in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from leafward import __version__
from leafward.adapters.fingerprint import checked_fingerprint, difference, fingerprint
from leafward.adapters.registry import METHODS, load
from leafward.adapters.surface import (
    Adapter,
    AdapterConfig,
    adapters,
    attach,
    chosen,
    detach,
    identity,
    store_of,
)
from leafward.config import checked, to_dict
from leafward.errors import DataError, UsageError, nearest
from leafward.files import LARGEST_UNPACKED, check_size, check_version, read_record, replacing, write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FORMAT, VERSION = "leafward-adapter", 1

Model = TypeVar("Model", bound=nn.Module)
PathLike = str | os.PathLike[str]


def save_pretrained(model: nn.Module, directory: PathLike, name: str | None = None) -> None:
    """Write one adapter of `model` (the only one, if it has one) to `directory`, each file in one step."""
    held = adapters(model)
    if name is None and len(held) > 1:
        raise UsageError(f"name must say which adapter to save: {', '.join(held)}")
    adapter = held[chosen(model, name)[0]]
    directory = Path(directory)
    base = store_of(model).base
    tensors = {key: value.detach().cpu().contiguous() for key, value in adapter.named_parameters()}
    with replacing(directory / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_json(
        directory / CONFIG,
        {
            "format": FORMAT,
            "version": VERSION,
            "method": adapter.config.method,
            "leafward_version": __version__,
            "base_model": {
                "name": base.name,
                "revision": base.revision,
                "class": base.kind,
                # A base that is trained along with its adapter is not the one that the adapter will be put on.
                **(fingerprint(model) if adapter.freezes_base else {}),
            },
            "config": to_dict(adapter.config),
        },
    )


def from_pretrained(
    model: Model, directory: PathLike, name: str = "default", *, trainable: bool = False, check_base: bool = True
) -> Model:
    """Attach the adapter in `directory` to `model`; another base model, a missing target or another width is refused.

    The base is known by a few of its weights, wherever its folder lies; `check_base=False` allows another one, where
    the shapes fit.
    """
    record = read_config(directory)
    saved = record["base_model"]
    foreign = foreign_base(saved, model) if check_base else None
    if foreign is not None:
        allow = "check_base=False, or leafward export --merged --base, takes it all the same"
        raise UsageError(f"the adapter in {directory} {foreign}; {allow}")
    tensors = read_weights(Path(directory))
    attach(model, record["config"], name, base_model=saved["name"] or None, revision=saved["revision"] or None)
    adapter = adapters(model)[name]
    try:
        _fill(adapter, tensors, Path(directory))
    except DataError:
        detach(model, name)
        raise
    adapter.requires_grad_(trainable)
    return model


def read_config(directory: PathLike) -> dict[str, Any]:
    """What `adapter_config.json` says, with "config" as the configuration that `attach` takes."""
    path = Path(directory) / CONFIG
    try:
        record = read_record(path)
    except DataError as error:
        raise DataError(f"{directory} does not hold an adapter: {error}") from error
    if record.get("format") != FORMAT:
        raise DataError(f"{path} was not written by leafward: its format is not {FORMAT!r}")
    check_version(record, VERSION, str(path))
    method = record.get("method")
    if not isinstance(method, str) or method not in METHODS:
        raise DataError(f"{path}: unknown method {method!r}; {nearest(str(method), METHODS)}")
    for key in ("config", "base_model"):
        if not isinstance(record.get(key), dict):
            raise DataError(f"{path}: {key!r} must be an object, not {record.get(key)!r}")
    base = {key: str(record["base_model"].get(key) or "") for key in ("name", "revision", "class")}
    known = checked_fingerprint(record["base_model"], str(path))
    cls: type[AdapterConfig] = load(METHODS[method].settings)
    return {**record, "base_model": base | known, "config": checked(cls, record["config"])}


def foreign_base(saved: dict[str, Any], model: nn.Module) -> str | None:
    """What tells `model` from the base that an adapter was `saved` with, in words; None if nothing does.

    The class and the weights must agree; where none were written down, the revision and the last part of the name in
    their place, as far as both sides know them.
    """
    here = store_of(model).base if adapters(model) else identity(model)
    pairs = {"class": (saved["class"], here.kind)}
    if "weights" not in saved:
        pairs |= {
            "name": (Path(saved["name"]).name, Path(here.name).name),
            "revision": (saved["revision"], here.revision),
        }
    for what, (wanted, got) in pairs.items():
        if wanted and got and wanted != got:
            return f"belongs to a base model of {what} {wanted!r}, not {got!r}"
    found = difference(saved, model) if "weights" in saved else None
    if found is None:
        return None
    name = f" {saved['name']}" if saved["name"] else ""
    return f"belongs to another base model{name}: {found}"


def read_weights(directory: Path) -> dict[str, Tensor]:
    """The tensors of an adapter by name, refused where the file is damaged."""
    try:
        check_size(directory / WEIGHTS, LARGEST_UNPACKED)
        return load_file(directory / WEIGHTS)
    except (DataError, OSError, SafetensorError) as error:
        raise DataError(f"{directory} does not hold an adapter: cannot read {WEIGHTS} ({error})") from error


@torch.no_grad()
def _fill(adapter: Adapter, tensors: dict[str, Tensor], directory: Path) -> None:
    wanted = dict(adapter.named_parameters())
    for key in sorted(tensors.keys() ^ wanted.keys()):
        if key in wanted:
            raise DataError(f"{directory / WEIGHTS} lacks {key}, which this model needs")
        raise DataError(f"{directory / WEIGHTS} holds {key}, for which this model has no target")
    for key, parameter in wanted.items():
        if tensors[key].shape != parameter.shape:
            raise DataError(
                f"{directory / WEIGHTS}: {key} has shape {tuple(tensors[key].shape)}, but this model needs "
                f"{tuple(parameter.shape)}"
            )
        if not torch.isfinite(tensors[key]).all():
            raise DataError(f"{directory / WEIGHTS}: {key} holds values that are not finite")
        parameter.copy_(tensors[key])
