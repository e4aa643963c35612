"""How fast a fleet of toy models trains, and how exactly.

    python benchmarks/superposition.py --device cpu     # a fleet against the sequential dense reference, one thread
    python benchmarks/superposition.py --device cuda    # the whole small grid of the paper, float32 and TF32

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from leafward.systems.superposition import Fleet, ModelSpec, frequencies

FEATURES, BATCH, STEPS = 1000, 2048, 20_000
WIDTHS = (10, 15, 25, 39, 63, 100)
DECAYS = tuple(np.linspace(-1, 1, 10).tolist())
EXPONENTS = tuple(np.linspace(0, 2, 17).tolist())


class DenseModel:
    """One toy model, plainly from its definition: dense data, autograd, AdamW with signed decay by hand."""

    def __init__(self, width: int, decay: float, p: torch.Tensor, lr: float = 0.01):
        self.p, self.decay, self.lr, self.step = p, decay, lr, 0
        self.weights = (torch.randn(len(p), width) / math.sqrt(width)).requires_grad_()
        self.bias = torch.randn(len(p)).requires_grad_()
        self.moments = [(torch.zeros_like(t), torch.zeros_like(t)) for t in (self.weights, self.bias)]

    def train_step(self) -> float:
        x = (torch.rand(BATCH, len(self.p)) < self.p) * (2 * torch.rand(BATCH, len(self.p)))
        y = torch.relu(x @ self.weights @ self.weights.t() + self.bias)
        loss = torch.nn.functional.mse_loss(y, x)
        gradients = torch.autograd.grad(loss, (self.weights, self.bias))
        self.step += 1
        with torch.no_grad():
            norms = self.weights.norm(dim=1, keepdim=True)
            pull = 1 - 1 / (norms + 1e-8) if self.decay < 0 else -1.0
            self.weights.mul_(1 + self.lr * self.decay * pull)
            for tensor, gradient, (first, second) in zip(
                (self.weights, self.bias), gradients, self.moments, strict=True
            ):
                first.lerp_(gradient, 0.1)
                second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                denominator = (second / (1 - 0.999**self.step)).sqrt_().add_(1e-8)
                tensor.addcdiv_(first, denominator, value=-self.lr / (1 - 0.9**self.step))
        return float(loss.detach())


def compare_on_cpu(steps: int, decay: float = -0.556) -> dict[str, Any]:
    """CPU milliseconds per step for the six widths, both ways in alternation (so that load falls on both)."""
    torch.set_num_threads(1)
    p = torch.from_numpy(frequencies("power:1", FEATURES)).float()
    reference = [DenseModel(width, decay, p) for width in WIDTHS]
    fleet = Fleet([ModelSpec(width, decay) for width in WIDTHS], features=FEATURES, batch=BATCH, steps=STEPS)
    sides: dict[str, Callable[[], object]] = {
        "reference": lambda: [model.train_step() for model in reference],
        "fleet": lambda: fleet.run(16),  # the batches of 16 steps are drawn together
    }
    per_call = {"reference": 1, "fleet": 16}
    times: dict[str, list[float]] = {"reference": [], "fleet": []}
    for side in sides.values():
        side()
    for _ in range(max(1, steps // 16)):
        for name, side in sides.items():
            for _ in range(3 if name == "reference" else 1):
                start = time.process_time()
                side()
                times[name].append((time.process_time() - start) * 1e3 / per_call[name])
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "device": "cpu",
        "threads": 1,
        "features": FEATURES,
        "batch": BATCH,
        "widths": WIDTHS,
        "cpu_ms_per_step": medians,
        "best_cpu_ms_per_step": {name: min(values) for name, values in times.items()},
        "speed_up": medians["reference"] / medians["fleet"],
    }


def small_grid() -> list[ModelSpec]:
    """The small experiment: 6 widths × 10 decays × 17 exponents = 1020 models."""
    return [
        ModelSpec(width, decay, law=f"power:{alpha}") for alpha in EXPONENTS for decay in DECAYS for width in WIDTHS
    ]


def measure_on_cuda(steps: int) -> dict[str, Any]:
    """Milliseconds per step of the whole grid, and what TF32 does to losses and weights."""
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "models": len(small_grid()),
        "features": FEATURES,
        "batch": BATCH,
    }
    for precision in ("float32", "tf32"):
        fleet = Fleet(small_grid(), features=FEATURES, batch=BATCH, steps=STEPS, precision=precision, device="cuda")
        fleet.run(16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        fleet.run(steps)
        issued = time.perf_counter() - start
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        result[precision] = {
            "ms_per_step": seconds / steps * 1e3,
            "host_ms_per_step": issued / steps * 1e3,
            "projected_minutes_for_20000_steps": seconds / steps * STEPS / 60,
            "peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9,
        }
    result["difference_from_float64"] = _precision_on_cuda()
    return result


def _precision_on_cuda(steps: int = 48) -> dict[str, Any]:
    """Largest relative difference of first gradient, weights and losses from float64 on the CPU, after some steps."""
    models = [ModelSpec(width, decay) for width in WIDTHS for decay in (-0.556, 0.333)]
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, precision, device in (
        ("exact", "float64", "cpu"),
        ("float64", "float64", "cuda"),
        ("float32", "float32", "cuda"),
        ("tf32", "tf32", "cuda"),
    ):
        fleet = Fleet(models, features=FEATURES, batch=BATCH, steps=STEPS, precision=precision, device=device)
        fleet.run(1)
        gradient = fleet.state_dict()["first"]  # a tenth of the first gradient
        fleet.run(steps - 1)
        losses = torch.tensor([row["loss"] for row in fleet.measure(rows=10 * BATCH)], dtype=torch.float64)
        found[name] = {"gradient": gradient, "weights": fleet.state_dict()["parameters"], "loss": losses}
    exact = found.pop("exact")
    return {"steps": steps} | {
        name: {
            key: float((value.double() - exact[key]).abs().max() / exact[key].abs().max()) for key, value in row.items()
        }
        for name, row in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=160, help="steps to time")
    arguments = parser.parse_args()
    measure = compare_on_cpu if arguments.device == "cpu" else measure_on_cuda
    print(json.dumps(measure(arguments.steps), indent=2))


if __name__ == "__main__":
    main()
