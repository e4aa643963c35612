"""LoRA (Hu et al. 2021) on the same sites and files as the other adapters: W + (α/r) B A. The rival to compare with.

PEFT computes, learns and merges the same (tests/adapters/test_low_rank_oracle.py); it begins with other draws of A.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from leafward.adapters.layouts import ATTENTION, Encoder, Role, Site, find_sites
from leafward.adapters.surface import AdapterConfig, WeightAdapter
from leafward.config import Count, Natural, Positive


class LowRankConfig(AdapterConfig, frozen=True):
    """Low-rank changes of projections; B begins at zero."""

    method: ClassVar[str] = "low_rank"

    rank: Count = 16
    """Rank r of the change of each projection."""
    alpha: Positive | None = None
    """The change is scaled by α/r; None: α = r."""
    targets: tuple[Role, ...] = ATTENTION
    """Which projections: q, k, v, out, fc1, fc2; kv where one matrix gives keys and values from a latent point."""
    encoder: Encoder = "both"
    """Which encoder of a dual one."""
    seed: Natural = 0
    """Seed of A."""

    def build(self, model: nn.Module) -> LowRank:
        sites = find_sites(model, self.targets, self.encoder)
        return LowRank(self, sites, next(model.parameters()).device)


class LowRank(WeightAdapter):
    """The factors A (r, in) and B (out, r) of all sites."""

    config: LowRankConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: LowRankConfig, sites: list[Site], device: torch.device) -> None:
        super().__init__(config, sites)
        generator = torch.Generator().manual_seed(config.seed)
        self.scale = 1.0 if config.alpha is None else config.alpha / config.rank
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for site in sites:
            start = torch.randn(config.rank, site.width, generator=generator) / site.width**0.5
            self.a[_key(site)] = nn.Parameter(start.to(device))
            self.b[_key(site)] = nn.Parameter(torch.zeros(site.stop - site.start, config.rank, device=device))

    def effective(self, site: Site, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            b, a = self.b[_key(site)].to(weight.dtype), self.a[_key(site)].to(weight.dtype)
            return torch.addmm(weight, b, a, alpha=self.scale)


def _key(site: Site) -> str:
    return site.name.replace(".", "/")  # the name of a parameter holds no dot
