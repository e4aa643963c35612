"""LoRA (Hu et al. 2021) on the same sites and files as the other adapters: W + (α/r) B A. The rival to compare with.

PEFT computes, learns and merges the same (tests/adapters/test_low_rank_oracle.py); it begins with other draws of A.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

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

    @classmethod
    def trained_as(cls, name: str, model: nn.Module, wanted: Mapping[str, Any]) -> AdapterConfig:
        """Of the rank that is wanted, or of about as many parameters as free blocks of the block_size that is."""
        rank = wanted["rank"] or equal_rank(model, wanted["encoder"], wanted["block_size"])
        return super().trained_as(name, model, {**wanted, "rank": rank})

    def build(self, model: nn.Module) -> LowRank:
        sites = find_sites(model, self.targets, self.encoder)
        return LowRank(self, sites, next(model.parameters()).device)


def equal_rank(model: nn.Module, encoder: Encoder, block_size: int) -> int:
    """The rank at which LoRA has about as many parameters as free blocks: Σ r (in + out) = Σ in · block."""
    sites = find_sites(model, ATTENTION, encoder)
    blocks = sum(site.width * block_size for site in sites)
    return max(1, round(blocks / sum(site.width + site.stop - site.start for site in sites)))


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
