"""The one table of adapters: where the settings of each lie, and under which names it is trained. Imports no torch."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Method(NamedTuple):
    """One kind of adapter."""

    settings: str
    """Module and class of its settings, an `AdapterConfig`."""
    trained: tuple[str, ...] = ()
    """What `--method` calls it, a name for each form of it; none: only a training of its own trains it."""


METHODS: dict[str, Method] = {
    "block_scale": Method("leafward.adapters.block_scale:BlockScaleConfig", ("block-scale", "orthogonal")),
    "low_rank": Method("leafward.adapters.low_rank:LowRankConfig", ("lora",)),
    "latent_hierarchy": Method("leafward.systems.lathadapter.attributes:LatentHierarchyConfig"),
}
"""Method as files name it -> the adapter. A new one is a file and a line here: with a name under which it is trained,
the trainings that compare methods offer it, and `--compare` trains it."""


def trained() -> tuple[str, ...]:
    """Every name under which an adapter is trained."""
    return tuple(name for method in METHODS.values() for name in method.trained)


def settings_of(name: str) -> Any:
    """The class of the settings of the adapter that is trained under a name."""
    return load(next(method.settings for method in METHODS.values() if name in method.trained))


def load(place: str) -> Any:
    """What "module:name" names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
