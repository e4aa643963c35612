"""HyperCLIP's published transform in the types it is run in, beside the linear map that it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leafward.adapters.block_scale import Scale


def length(x: Tensor) -> Tensor:
    return x.norm(dim=-1, keepdim=True)


def published(rows: Tensor, matrix: Tensor) -> Tensor:
    """exp₀, Möbius product, pulling back inside 0.999 of the ball and log₀ at c = 1, all in the type of the rows."""

    def inside(p: Tensor) -> Tensor:
        return torch.where(length(p) > 0.999, 0.999 * p / length(p), p)

    p = inside(torch.tanh(length(rows)) * rows / length(rows))
    image = p @ matrix.mT
    p = inside(torch.tanh(length(image) / length(p) * torch.atanh(length(p))) * image / length(image))
    return torch.atanh(length(p)) * p / length(p)


@pytest.mark.parametrize(("dtype", "finite"), [(torch.float16, True), (torch.bfloat16, False)])
def test_half_types_do_not_bear_the_ball(dtype: torch.dtype, finite: bool) -> None:
    """Rows of length 3, well inside the clipping: tanh 3 = 0.995 is where half types have few numbers left below 1."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 12, generator=generator)
    rows = (3.0 * rows / length(rows)).to(dtype)
    scale = Scale(3, 4, "free")
    torch.nn.init.normal_(scale.offset, std=0.05, generator=generator)  # pyright: ignore
    dense = torch.block_diag(*scale.matrix()).detach()
    exact = rows.double() @ dense.double().mT

    def error(found: Tensor) -> float:
        return float((length(found.double() - exact) / length(exact)).max())

    theirs = published(rows, dense.to(dtype))
    assert theirs.isfinite().all() == finite
    assert not error(theirs) < 0.02
    assert error(scale(rows).detach()) < (1e-3 if dtype == torch.float16 else 5e-3)
