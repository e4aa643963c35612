"""What adapters cost: the blocked product, a training step beside LoRA's, merged inference, few-shot training.

    python benchmarks/adapters.py                 # all parts, one thread, some minutes
    python benchmarks/adapters.py --part product  # one of product, step, merged, fewshot, inference

Times are medians of calls that take turns, in milliseconds of process time; compare the ratios. Models have random
weights: nothing measured here depends on them. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from _timing import interleaved
from leafward.adapters import BlockScaleConfig, attach, merge, trainable_parameters
from leafward.adapters.block_scale import Scale
from leafward.systems.lathadapter import LatentHierarchyConfig
from leafward.systems.lathadapter.attributes import Classifier
from leafward.systems.lathadapter.prompts import Coop, FeaturePrompts, ZeroShot

WIDTH, BLOCK = 768, 128  # a layer of ViT-B and the paper's blocks
RANK = 96  # LoRA on a fused qkv of that width has as many parameters: 96 · (768 + 3·768) = 3 · 6 · 128²


def published(weight: Tensor, blocks: Tensor, c: float = 0.01) -> Tensor:
    """The paper's way for one projection: rows to the ball, a dense Möbius product, back inside the ball, log₀."""
    root = c**0.5
    length = weight.norm(dim=1, keepdim=True)
    point = torch.tanh(root * length) * weight / (root * length)
    image = point @ torch.block_diag(*blocks).mT
    before, after = point.norm(dim=1, keepdim=True), image.norm(dim=1, keepdim=True)
    moved = torch.tanh(after / before * torch.atanh(root * before)) * image / (root * after)
    size = moved.norm(dim=1, keepdim=True)
    moved = moved * (0.999 / root / size).clamp(max=1.0)
    size = moved.norm(dim=1, keepdim=True)
    return torch.atanh(root * size) * moved / (root * size)


def product(rounds: int) -> dict[str, Any]:
    """The scaled q, k and v of one layer, forward and with the gradient of S."""
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(3)]
    scales = [Scale(WIDTH // BLOCK, BLOCK, "free") for _ in range(3)]
    dense = [scale.matrix().detach().requires_grad_() for scale in scales]

    def blocked(index: int) -> Tensor:
        return scales[index](weights[index])

    def dense_mobius(index: int) -> Tensor:
        return published(weights[index], dense[index])

    def forward_of(one: Callable[[int], Tensor]) -> Callable[[], None]:
        @torch.no_grad()
        def call() -> None:
            for index in range(3):  # each result is used and let go, as in a forward pass
                one(index)

        return call

    def backward_of(one: Callable[[int], Tensor]) -> Callable[[], None]:
        return lambda: torch.stack([one(index) for index in range(3)]).sum().backward()

    gap = max((blocked(index) - dense_mobius(index)).abs().max().item() for index in range(3))
    forward = interleaved({"blocked": forward_of(blocked), "published": forward_of(dense_mobius)}, rounds)
    both = interleaved({"blocked": backward_of(blocked), "published": backward_of(dense_mobius)}, rounds)
    return {
        "largest_difference": gap,
        "forward": forward,
        "forward_ratio": ratio(forward, "published", "blocked"),
        "forward_and_backward": both,
        "forward_and_backward_ratio": ratio(both, "published", "blocked"),
    }


def vit(depth: int) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_base_patch16_224", depth=depth, num_classes=0).eval()


class LoRA(nn.Module):
    """x -> y + B A x beside a frozen linear layer, as a forward hook."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(RANK, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, RANK))
        layer.register_forward_hook(lambda module, args, output: output + (args[0] @ self.a.mT) @ self.b.mT)


def lora(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    layers = [module for name, module in model.named_modules() if name.endswith("qkv")]
    model.lora = nn.ModuleList(LoRA(layer) for layer in layers if isinstance(layer, nn.Linear))
    return model


def step(rounds: int) -> dict[str, Any]:
    """One training step of two ViT-B layers: forward, backward, AdamW."""
    pixels = torch.randn(8, 3, 224, 224)

    def trainer(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)

        def call() -> None:
            model(pixels).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return call

    blocked, low_rank = attach(vit(2), BlockScaleConfig(block_size=BLOCK)), lora(vit(2))
    counts = {"block_scale": trainable_parameters(blocked)[0], "lora": trainable_parameters(low_rank)[0]}
    times = interleaved({"block_scale": trainer(blocked), "lora": trainer(low_rank)}, rounds)
    return {"trainable": counts, "times": times, "ratio": ratio(times, "block_scale", "lora")}


@torch.no_grad()
def merged(rounds: int) -> dict[str, Any]:
    """Inference of two ViT-B layers: the base model, the adapted one, the merged one."""
    pixels = torch.randn(8, 3, 224, 224)
    base = vit(2)
    adapted = attach(copy.deepcopy(base), BlockScaleConfig(block_size=BLOCK))
    plain = merge(copy.deepcopy(adapted))
    times = interleaved(
        {
            name: lambda model=model: model(pixels)
            for name, model in (("base", base), ("adapted", adapted), ("merged", plain))
        },
        rounds,
    )
    return {
        "times": times,
        "merged_over_base": ratio(times, "merged", "base"),
        "adapted_over_base": ratio(times, "adapted", "base"),
    }


def fewshot(rounds: int) -> dict[str, Any]:
    """16 shots of 100 classes on cached features of width 512: whole trainings of the recipe."""
    from leafward.data.fewshot import FeatureSet, episodes, seeded_split
    from leafward.engine import Cluster, Member, RunDirectory
    from leafward.systems.lathadapter import methods as training
    from leafward.systems.lathadapter.config import Config

    labels = torch.arange(100 * 40) % 100
    texts = torch.randn(100, 512)
    images = texts[labels] + 2.0 * torch.randn(len(labels), 512)
    names = tuple(map(str, range(100)))
    data = FeatureSet("synthetic", images, labels, texts, names, seeded_split(labels))
    (episode,) = episodes("few-shot", data, [], [16], [0])
    seconds = {}
    for method in (training.Method("coop"), training.Method("promptsrc", "lorentz")):  # the fastest and the slowest
        cell = training.Cell(method.host, method.geometry, method.attributes, shots=16, seed=0)
        with tempfile.TemporaryDirectory() as folder, RunDirectory.create(Path(folder) / "run", cell) as run:
            wall, own = time.perf_counter(), time.process_time()
            member = Member(cell.arm, 0, cell, run.path, run.path, alone=True)
            training.train(Config(), member, episode, run, Cluster())
            seconds[method.label] = {"cpu_s": time.process_time() - own, "wall_s": time.perf_counter() - wall}
    return {"training_images": len(episode.train), "seconds": seconds}


@torch.no_grad()
def inference(rounds: int) -> dict[str, Any]:
    """Four ViT-B layers and a classifier of 1000 classes, with and without a latent hierarchy."""
    pixels, classes, encoder = torch.randn(8, 3, 224, 224), torch.randn(1000, WIDTH), vit(4)
    hosts = {"zero-shot": ZeroShot(classes), "coop": Coop(FeaturePrompts(WIDTH), classes)}
    hosts["coop + LatHAdapter"] = attach(Coop(FeaturePrompts(WIDTH), classes), LatentHierarchyConfig())
    heads = {name: Classifier(host.eval()) for name, host in hosts.items()}
    times = interleaved({name: lambda head=head: head(encoder(pixels)) for name, head in heads.items()}, rounds)
    return {"times": times, "latent_over_host": ratio(times, "coop + LatHAdapter", "coop")}


def ratio(times: dict[str, dict[str, float]], first: str, second: str) -> float:
    return times[first]["cpu_ms"] / times[second]["cpu_ms"]


PARTS: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "product": (product, 15),
    "step": (step, 7),
    "merged": (merged, 15),
    "fewshot": (fewshot, 1),
    "inference": (inference, 7),
}
"""Name -> measurement and how many rounds it takes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {name: PARTS[name][0](PARTS[name][1]) for name in arguments.part}
    print(json.dumps({"threads": arguments.threads, "cpus": os.cpu_count(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
