"""LoRA (Hu et al. 2021) on the same sites and files as the other adapters: W + (α/r) B A. The rival to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from leafward.adapters._checks import check_choice, check_choices, check_integers, check_numbers
from leafward.adapters.layouts import ATTENTION, Encoder, Role, Site, find_sites
from leafward.adapters.surface import WeightAdapter


@dataclass(frozen=True)
class LowRankConfig:
    """Low-rank changes of projections; B begins at zero."""

    method: ClassVar[str] = "low_rank"

    rank: int = 16
    """Rank r of the change of each projection."""
    alpha: float | None = None
    """The change is scaled by α/r; None: α = r."""
    targets: tuple[Role, ...] = ATTENTION
    """Which projections: q, k, v, out, fc1, fc2."""
    encoder: Encoder = "both"
    """Which encoder of a dual one."""
    seed: int = 0
    """Seed of A."""

    def __post_init__(self) -> None:
        check_integers(self, {"rank": 1, "seed": 0})
        check_choice(self, "encoder", Encoder)
        check_choices(self, "targets", Role)
        if self.alpha is not None:
            check_numbers(self, "alpha", positive=True)

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
