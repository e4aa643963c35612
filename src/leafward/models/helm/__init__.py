"""HELM (arXiv 2505.24722): hyperbolic language models as Hugging Face models, and their Euclidean twins.

from leafward.models import HelmConfig, HelmForCausalLM
model = HelmForCausalLM(HelmConfig.preset("helm-mice-120m"))
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from leafward.models.helm.config import PRESETS, HelmConfig
from leafward.models.helm.model import HelmForCausalLM, HelmModel

AutoConfig.register(HelmConfig.model_type, HelmConfig, exist_ok=True)
AutoModel.register(HelmConfig, HelmModel, exist_ok=True)
AutoModelForCausalLM.register(HelmConfig, HelmForCausalLM, exist_ok=True)

__all__ = ["PRESETS", "HelmConfig", "HelmForCausalLM", "HelmModel"]
