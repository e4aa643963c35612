"""leafward: the geometry of representations. Measure, adapt, build.

    import leafward
    leafward.survey("gpt2").to_frame()                    # every matrix: how superposed, hierarchical and curved?
    model = leafward.attach(clip, config)                 # adapters of a pretrained model
    model = leafward.HelmForCausalLM.from_pretrained(folder)

The names below are imported on first use; the root imports nothing heavy. `register()` makes our models known to
transformers and timm; a model's name asks for that by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward import _moved
from leafward._lazy import lazy
from leafward.registry import MODELS, register

if TYPE_CHECKING:
    from leafward.adapters import attach, merge
    from leafward.encoders import load_encoder
    from leafward.hierarchy import LorentzIndex, Taxonomy
    from leafward.measure import audit, survey
    from leafward.stats.power_laws import fit_power_law
    from leafward.systems.hcformer import HCFormer
    from leafward.systems.helm import HelmConfig, HelmForCausalLM
    from leafward.systems.himapper import HiMapper
    from leafward.systems.superposition import Fleet

_HOME = {
    "adapters": ("attach", "merge"),
    "encoders": ("load_encoder",),
    "hierarchy": ("LorentzIndex", "Taxonomy"),
    "measure": ("audit", "survey"),
    "stats.power_laws": ("fit_power_law",),
    "systems.hcformer": ("HCFormer",),
    "systems.helm": ("HelmConfig", "HelmForCausalLM"),
    "systems.himapper": ("HiMapper",),
    "systems.superposition": ("Fleet",),
}

__all__ = [
    "Fleet",
    "HCFormer",
    "HelmConfig",
    "HelmForCausalLM",
    "HiMapper",
    "LorentzIndex",
    "Taxonomy",
    "attach",
    "audit",
    "fit_power_law",
    "load_encoder",
    "merge",
    "register",
    "survey",
]

__version__ = "0.1.0"

_find, _ = lazy(__name__, _HOME)
_moved.install()


def __getattr__(name: str) -> object:
    found = _find(name)
    if name in MODELS:
        register(MODELS[name])
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
