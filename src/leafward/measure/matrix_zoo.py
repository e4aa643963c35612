"""Matrices of model zoos: `timm:NAME` (classifier rows) and `open_clip:NAME` (visual or text projection).

With `@FILE` the weights are streamed from a safetensors file and no model is built; without it the zoo loads
its own pretrained weights, from its cache or the network.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch

from leafward.errors import LeafwardError, UsageError, nearest, require
from leafward.measure.matrix_files import PICKLES, Catalogue, Matrix, from_array, refuse_pickle

ZOOS = ("timm", "open_clip")
RANDOM = "random"
CLIP_PROJECTIONS = ("visual.proj", "visual.head.proj.weight", "text_projection", "text.text_projection")


def from_zoo(zoo: str, name: str, tensor: str | None) -> Matrix:
    """The matrix of a zoo model; `name` is NAME, NAME@FILE or, for open_clip, NAME@TAG."""
    library = require(zoo, "vision")
    name, _, weights = name.partition("@")
    _check_name(zoo, name, library)
    usual = _classifiers(library, name) if zoo == "timm" else CLIP_PROJECTIONS
    target = f"{zoo}:{name}" + (f"@{weights}" if weights else "")
    if weights and (Path(weights).suffix in {".safetensors", *PICKLES} or Path(weights).exists()):
        refuse_pickle(Path(weights))
        catalogue = Catalogue.of_file(Path(weights))
        chosen = tensor or _first(target, usual, catalogue.matrices())
        source = catalogue.rows(chosen)
        return Matrix(target=target, tensor=chosen, source=source, rows=source.shape[0], role=f"{zoo} weights")
    state = zoo_state(zoo, f"{name}@{weights}" if weights else name)
    assert isinstance(state, dict)
    chosen = tensor or _first(target, usual, [key for key, value in state.items() if value.ndim == 2])
    if chosen not in state:
        raise UsageError(f"--tensor: {target} holds no {chosen!r}; {nearest(chosen, state)}")
    rows = from_array(state[chosen], f"{target}: {chosen}").source
    return Matrix(target=target, tensor=chosen, source=rows, rows=rows.shape[0], role=f"{zoo} weights")


def zoo_state(zoo: str, name: str) -> dict[str, torch.Tensor] | Path:
    """All weights of a zoo model, or the file of them that was named: NAME, NAME@FILE, NAME@TAG (open_clip),
    NAME@random.

    `@random` is the model as it is before training; nothing else ever gives random weights.
    """
    library = require(zoo, "vision")
    name, _, weights = name.partition("@")
    _check_name(zoo, name, library)
    if weights == RANDOM:
        torch.manual_seed(0)
        if zoo == "timm":
            return timm_random(library, name)
        return library.create_model(name, pretrained=None).state_dict()
    if weights and (Path(weights).suffix in {".safetensors", *PICKLES} or Path(weights).exists()):
        return Path(weights)
    return _timm_state(library, name, weights) if zoo == "timm" else _clip_state(library, name, weights)


def timm_random(timm: ModuleType, name: str) -> dict[str, torch.Tensor]:
    """The weights of a timm model as it initialises them."""
    return timm.create_model(name, pretrained=False).state_dict()


def _check_name(zoo: str, name: str, library: ModuleType) -> None:
    known = library.list_models()
    if name.partition(".")[0] not in known:
        alike = [other for other in known if other[:3].lower() == name[:3].lower()]
        raise UsageError(f"{zoo} has no model {name!r}; {nearest(name, alike or known)}")


def _classifiers(timm: ModuleType, name: str) -> tuple[str, ...]:
    """Weight names of the classifier; distilled models have several, of which the first is the main one."""
    layers = getattr(timm.get_pretrained_cfg(name), "classifier", None) or ()
    return tuple(f"{layer}.weight" for layer in ((layers,) if isinstance(layers, str) else layers))


def _first(target: str, usual: tuple[str, ...], matrices: list[str]) -> str:
    for name in usual:
        if name in matrices:
            return name
    names = ", ".join(usual) or "the usual classifiers"
    raise UsageError(f"{target} has none of {names}: choose one with --tensor; here: {', '.join(matrices[:12])}")


def _timm_state(timm: ModuleType, name: str, weights: str) -> dict[str, torch.Tensor]:
    if weights:
        raise UsageError(f"timm:{name}@{weights}: no such file (a tag is part of the name: timm:resnet18.a1_in1k)")
    try:
        return timm.create_model(name, pretrained=True).state_dict()
    except (OSError, RuntimeError, ValueError) as error:
        raise _not_loaded(f"timm:{name}", error) from error


def _clip_state(open_clip: ModuleType, name: str, tag: str) -> dict[str, torch.Tensor]:
    tags = open_clip.list_pretrained_tags_by_model(name)
    if not tags:
        raise UsageError(f"open_clip has no pretrained weights for {name!r}: give open_clip:{name}@FILE")
    if tag and tag not in tags:
        raise UsageError(f"open_clip:{name}@{tag}: neither a file nor a tag of this model; {nearest(tag, tags)}")
    try:
        return open_clip.create_model(name, pretrained=tag or tags[0], require_pretrained=True).state_dict()
    except (OSError, RuntimeError, ValueError) as error:
        raise _not_loaded(f"open_clip:{name}@{tag or tags[0]}", error) from error


def _not_loaded(target: str, error: Exception) -> LeafwardError:
    return LeafwardError(
        f"the pretrained weights of {target} could not be loaded ({error}); where the network is closed, give "
        f"a local file: {target.partition('@')[0]}@/path/to/weights.safetensors"
    )
