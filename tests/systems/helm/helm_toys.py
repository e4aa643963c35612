"""Small HELM models for the tests with other tools: two layers, float64, every parameter off its start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leafward.systems.helm import HelmConfig, HelmForCausalLM

MODELS = {
    "HELM-D": ("helm-d-tiny", "lorentz"),
    "HELM-D twin": ("helm-d-tiny", "euclidean"),
    "HELM-MiCE": ("helm-mice-tiny", "lorentz"),
    "HELM-MiCE twin": ("helm-mice-tiny", "euclidean"),
}
VOCABULARY = 96


def toy(name: str, **changes: Any) -> HelmForCausalLM:
    preset, geometry = MODELS[name]
    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    latent = {"query_latent": 24, "expert_size": 24, "num_experts": 3} if "mice" in preset else {}
    config = HelmConfig.preset(preset, **{**small, **latent, "geometry": geometry, **changes})
    model = HelmForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
