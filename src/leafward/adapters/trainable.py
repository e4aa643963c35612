"""Leave trainable in a model what a method trains, by the method's name alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from leafward.adapters.layouts import ATTENTION, find_sites
from leafward.adapters.registry import FROZEN, METHODS, OWN_WEIGHTS, load, trainable
from leafward.adapters.surface import AdapterConfig, adapters, attach
from leafward.errors import UsageError, nearest


def make_trainable(model: nn.Module, name: str, wanted: Mapping[str, Any], base_model: str | None = None) -> None:
    """Freeze `model`, but for what the method `name` trains: an adapter, which is attached, or weights of its own.

    `wanted` has settings of methods by name, such as encoder, block_size, rank and seed; each takes those it knows.
    """
    if name not in trainable():
        raise UsageError(f"method {name!r} is not one that is trained; {nearest(name, trainable())}")
    if adapters(model):
        raise UsageError(
            f"model {base_model} holds an adapter already; train on the merged one: leafward export {base_model} "
            "--to DIR --merged"
        )
    model.requires_grad_(False)
    if name in OWN_WEIGHTS:
        load(OWN_WEIGHTS[name])(model, wanted)
    elif name != FROZEN:
        place = next(method.settings for method in METHODS.values() if name in method.trained)
        settings: type[AdapterConfig] = load(place)
        attach(model, settings.trained_as(name, model, wanted), base_model=base_model)


def attention(model: nn.Module, wanted: Mapping[str, Any]) -> None:
    """q, k and v themselves."""
    for site in find_sites(model, ATTENTION, wanted["encoder"]):
        model.get_submodule(site.holder).get_parameter(site.parameter).requires_grad_(True)


def full(model: nn.Module, wanted: Mapping[str, Any]) -> None:
    """All weights."""
    model.requires_grad_(True)
