"""What each rank of test_norms.py does."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from leafward.systems.vision.norms import SyncNorm


def pass_through(world: int, folder: Path) -> None:
    """This rank's part of the images through the norm and back; with several ranks gradients are added, as by DDP."""
    rank = 0
    if world > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    saved = torch.load(folder / "images.pt", weights_only=True)
    torch.manual_seed(0)
    norm = SyncNorm(3).double().train()
    torch.nn.init.normal_(norm.weight)
    x = saved["x"].tensor_split([2])[rank] if world > 1 else saved["x"]  # two images and three
    weight = saved["weight"].tensor_split([2])[rank] if world > 1 else saved["weight"]
    x = x.clone().requires_grad_()
    out = norm(x)
    (out * weight).sum().backward()
    for parameter in norm.parameters():
        if world > 1:
            dist.all_reduce(parameter.grad)
    found = {"out": out.detach(), "grad": x.grad, "weight": norm.weight.grad, "bias": norm.bias.grad}
    torch.save(found | {f"own_{k}": v for k, v in norm.state_dict().items()}, folder / f"{world}-{rank}.pt")
    if world > 1:
        dist.destroy_process_group()
