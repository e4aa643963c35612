"""HyperCLIP's adapter as what it is: a block-diagonal linear map on the input side of chosen projections.

The paper ("HyperCLIP", CVPR 2025) takes each row w of a frozen W_q, W_k, W_v as a tangent vector, maps it to the
Poincaré ball, multiplies it by a block-diagonal S in the Möbius sense and maps it back. Since
log₀(S ⊗_c exp₀(w)) = S w for every curvature c, that is W′ = W Sᵀ; curvature drops out and is no setting here.
W Sᵀ can be written into the weights, so that the adapted model costs nothing at inference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from leafward.adapters.layouts import ATTENTION, Encoder, Role, Site, find_sites, without_layer
from leafward.adapters.surface import AdapterConfig, WeightAdapter
from leafward.config import Count
from leafward.errors import UsageError

Constraint = Literal["free", "diagonal", "orthogonal", "orthogonal_diagonal"]
Shared = Literal["blocks", "projections", "layers"]


class BlockScaleConfig(AdapterConfig, frozen=True):
    """Block-diagonal scaling W Sᵀ of projections; S begins as the identity.

    All parameters are stored as a difference from the identity: plain weight decay pulls S to I, not to 0.
    """

    method: ClassVar[str] = "block_scale"

    block_size: Count = 128
    """Width of a block; must divide the input width of every target."""
    targets: tuple[Role, ...] = ("q", "k", "v")
    """Which projections: q, k, v, out, fc1, fc2; kv where one matrix gives keys and values from a latent point."""
    encoder: Encoder = "both"
    """Which encoder of a dual one."""
    constraint: Constraint = "free"
    """free; diagonal; orthogonal (Cayley); orthogonal_diagonal, S = Q D."""
    share: tuple[Shared, ...] = ()
    """What shares one S: the blocks of a matrix, the projections of a layer, the layers of an encoder."""

    @classmethod
    def trained_as(cls, name: str, model: nn.Module, wanted: Mapping[str, Any]) -> AdapterConfig:
        """block-scale, with the constraint that is wanted, or orthogonal, which is OFT."""
        return super().trained_as(name, model, {**wanted, "constraint": name} if name == "orthogonal" else wanted)

    def build(self, model: nn.Module) -> BlockScale:
        sites = find_sites(model, self.targets, self.encoder)
        for site in sites:
            if site.width % self.block_size:
                raise UsageError(f"block_size {self.block_size} does not divide the width {site.width} of {site.name}")
        return BlockScale(self, sites, next(model.parameters()).device)


class BlockScale(WeightAdapter):
    """The scales S of all sites; sites of the same key share one."""

    config: BlockScaleConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: BlockScaleConfig, sites: list[Site], device: torch.device) -> None:
        super().__init__(config, sites)
        self.scales = nn.ModuleDict()
        for site in sites:
            key = self._key(site)
            if key not in self.scales:
                blocks = 1 if "blocks" in config.share else site.width // config.block_size
                self.scales[key] = Scale(blocks, config.block_size, config.constraint, device)

    def effective(self, site: Site, weight: Tensor) -> Tensor:
        scale = self.scales[self._key(site)]
        assert isinstance(scale, Scale)
        return scale(weight)

    def _key(self, site: Site) -> str:
        """The name of the scale of a site; sites that share one have the same."""
        share = set(self.config.share)
        name = site.group if "projections" in share and site.role in ATTENTION else site.name
        if "layers" in share:
            name = without_layer(name)
        # Layers or projections of different widths cannot share.
        key = f"{name}.{site.width}" if share - {"blocks"} else name
        return key.replace(".", "/")  # the name of a module holds no dot


class Scale(nn.Module):
    """One block-diagonal S of r blocks of b × b, applied to rows: W (o, r·b) -> W Sᵀ.

    Blocked: r products of (o, b) and (b, b), o·d·b multiplications in place of the o·d² of a dense S.
    """

    def __init__(self, blocks: int, size: int, constraint: Constraint, device: torch.device | None = None) -> None:
        super().__init__()
        self.size = size

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=torch.float32, device=device))

        self.offset = zeros(blocks, size, size) if constraint == "free" else None
        """S − I."""
        self.skew = zeros(blocks, math.comb(size, 2)) if constraint.startswith("orthogonal") else None
        """The entries above the diagonal of the skew A of the Cayley transform."""
        self.gain = zeros(blocks, size) if constraint.endswith("diagonal") else None
        """D − I."""

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            rows = weight.view(len(weight), -1, self.size)  # (o, r, b)
            if self.gain is not None:
                rows = rows + rows * self.gain.to(weight.dtype)
            full = self._full()
            if full is None:
                return rows.reshape(weight.shape)
            columns = rows.permute(1, 2, 0)  # (r, b, o)
            full = full.to(weight.dtype).expand(len(columns), -1, -1)
            # S Wᵀ comes out of the product as it is to lie in memory; W Sᵀ would need another pass.
            return torch.bmm(full, columns).reshape(-1, len(weight)).mT

    def matrix(self) -> Tensor:
        """The blocks of S (r or 1, b, b)."""
        full = self._full()
        if full is None:
            full = torch.eye(self.size, device=next(self.parameters()).device)
        return full if self.gain is None else full * (1.0 + self.gain).unsqueeze(-2)

    def _full(self) -> Tensor | None:
        """S, or Q of S = Q D, where it is not the identity: (r or 1, b, b)."""
        if self.offset is not None:
            return torch.eye(self.size, device=self.offset.device) + self.offset
        if self.skew is None:
            return None
        upper = self.skew.new_zeros(len(self.skew), self.size, self.size)
        row, column = torch.triu_indices(self.size, self.size, 1, device=self.skew.device)
        upper[:, row, column] = self.skew
        a = upper - upper.mT
        one = torch.eye(self.size, device=a.device, dtype=a.dtype)
        return torch.linalg.solve(one - a, one + a)  # Cayley; I − A of a skew A is never singular
