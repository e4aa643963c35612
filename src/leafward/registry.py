"""Our models under the names by which other libraries find theirs."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec

from leafward.errors import UsageError, nearest, require


def register(*libraries: str) -> None:
    """Make HELM known to the Auto classes of "transformers" and HCFormer to "timm".

    Without names, to all of them that are installed; a name asks for that library alone. Again is no harm.
    """
    for library in libraries or [name for name in _REGISTER if find_spec(name) is not None]:
        if library not in _REGISTER:
            raise UsageError(f"no models to register with {library!r}; {nearest(library, _REGISTER)}")
        _REGISTER[library]()


@cache
def _with_transformers() -> None:
    auto = require("transformers", "lm")
    config = importlib.import_module("leafward.systems.helm.model_config").HelmConfig
    models = importlib.import_module("leafward.systems.helm.model")
    auto.AutoConfig.register(config.model_type, config, exist_ok=True)
    auto.AutoModel.register(config, models.HelmModel, exist_ok=True)
    auto.AutoModelForCausalLM.register(config, models.HelmForCausalLM, exist_ok=True)


@cache
def _with_timm() -> None:
    require("timm", "vision")
    importlib.import_module("leafward.systems.hcformer.model")  # its decorators do it


_REGISTER = {"transformers": _with_transformers, "timm": _with_timm}
MODELS = {"HelmConfig": "transformers", "HelmForCausalLM": "transformers", "HCFormer": "timm"}
"""Name of the root -> the library that its model is registered with."""
