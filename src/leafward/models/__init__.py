"""Whole networks. Importing this registers HELM with the Auto classes of transformers, where that is installed."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from leafward.errors import require

if TYPE_CHECKING or find_spec("transformers") is not None:
    from leafward.models.helm import HelmConfig, HelmForCausalLM, HelmModel
else:

    def __getattr__(name: str):
        if name in __all__:
            require("transformers", "lm")
        raise AttributeError(f"module 'leafward.models' has no attribute {name!r}")


__all__ = ["HelmConfig", "HelmForCausalLM", "HelmModel"]
