"""HELM (arXiv 2505.24722): hyperbolic language models as Hugging Face models, and their Euclidean twins.

from leafward.systems.helm import HelmConfig, HelmForCausalLM
model = HelmForCausalLM(HelmConfig.preset("helm-mice-120m"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.systems.helm.harness import run_tasks
    from leafward.systems.helm.hub import load_model, save_model
    from leafward.systems.helm.model import HelmForCausalLM, HelmModel
    from leafward.systems.helm.model_config import PRESETS, HelmConfig
    from leafward.systems.helm.sampling import sample
    from leafward.systems.helm.scoring import Scores, score
    from leafward.systems.helm.task import LanguageTask

_HOME = {
    "model_config": (
        "PRESETS",
        "HelmConfig",
    ),
    "model": (
        "HelmForCausalLM",
        "HelmModel",
    ),
    "harness": ("run_tasks",),
    "hub": (
        "load_model",
        "save_model",
    ),
    "sampling": ("sample",),
    "scoring": (
        "Scores",
        "score",
    ),
    "task": ("LanguageTask",),
}

__all__ = [
    "PRESETS",
    "HelmConfig",
    "HelmForCausalLM",
    "HelmModel",
    "LanguageTask",
    "Scores",
    "load_model",
    "run_tasks",
    "sample",
    "save_model",
    "score",
]

__getattr__, __dir__ = lazy(__name__, _HOME)
