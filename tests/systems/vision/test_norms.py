"""Batch norm over ranks: what PyTorch's own gives on one rank with all images, backward and kept statistics too."""

import sys
from pathlib import Path

import torch

from ranks import together

sys.path.insert(0, str(Path(__file__).parent))  # child processes import it by name

from norm_ranks import pass_through


def test_two_ranks_norm_as_one_does(tmp_path):
    torch.manual_seed(1)
    x = 3.0 + torch.randn(5, 3, 4, 6, dtype=torch.float64)
    torch.save({"x": x, "weight": torch.randn_like(x)}, tmp_path / "images.pt")
    together(2, pass_through, 2, tmp_path)
    pass_through(1, tmp_path)  # `nn.BatchNorm2d` itself
    whole, first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("1-0", "2-0", "2-1"))
    for name in ("out", "grad"):
        torch.testing.assert_close(torch.cat([first[name], second[name]]), whole[name], rtol=1e-10, atol=1e-12)
    for name in whole.keys() - {"out", "grad"}:
        for part in (first, second):
            torch.testing.assert_close(part[name], whole[name], rtol=1e-10, atol=1e-12)
