"""Whole networks. Importing this registers HELM with the Auto classes of transformers and HCFormer with timm, where
those are installed."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from leafward.errors import require
from leafward.models.himapper import HiMapper

if TYPE_CHECKING or find_spec("transformers") is not None:
    from leafward.models.helm import HelmConfig, HelmForCausalLM, HelmModel
if TYPE_CHECKING or find_spec("timm") is not None:
    from leafward.models.hcformer import HCFormer

_NEEDS = {
    "HCFormer": ("timm", "vision"),
    "HelmConfig": ("transformers", "lm"),
    "HelmForCausalLM": ("transformers", "lm"),
    "HelmModel": ("transformers", "lm"),
}


def __getattr__(name: str):
    """Only reached for names that are not here: say which package would bring them."""
    if name in _NEEDS:
        require(*_NEEDS[name])
    raise AttributeError(f"module 'leafward.models' has no attribute {name!r}")


__all__ = ["HCFormer", "HelmConfig", "HelmForCausalLM", "HelmModel", "HiMapper"]
