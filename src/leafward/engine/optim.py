"""AdamW with parameter groups, learning-rate schedules, clipping, and the moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from leafward.engine.config import OptimConfig
from leafward.errors import UsageError

POLY_POWER = 0.9
STEP_DROPS = (8, 11)  # twelfths of all steps: after epochs 8 and 11 of COCO's 1x schedule
NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (sharing its memory); any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: with weight decay, and without.

    No decay for norms, for anything with fewer than two dimensions (biases, scalars, curvature) and for what a
    module names in `no_weight_decay()` (relative names of parameters or submodules, as in timm). Parameters of a module
    with an attribute `lr_ratio` have groups of their own, with that part of the learning rate.
    """
    spared: set[str] = set()
    ratios: dict[str, float] = {}
    for prefix, module in model.named_modules():
        if hasattr(module, "lr_ratio"):
            ratios[prefix] = float(module.lr_ratio)  # pyright: ignore[reportArgumentType]
        names: set[str] = set(module.no_weight_decay()) if hasattr(module, "no_weight_decay") else set()  # type: ignore[operator]
        if isinstance(module, NORMS):
            names |= {name for name, _ in module.named_parameters(recurse=False)}
        spared |= {f"{prefix}.{name}" if prefix else name for name in names}
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        parts = name.split(".")
        within = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        plain = parameter.ndim < 2 or any(each in spared for each in within)
        ratio = math.prod(ratios.get(each, 1.0) for each in within)
        group = {"params": [], "weight_decay": 0.0 if plain else weight_decay}
        group |= {"lr_ratio": ratio} if ratio != 1.0 else {}
        groups.setdefault((ratio, plain), group)["params"].append(parameter)
    # The full learning rate first, which is the one that is logged.
    return [groups[key] for key in sorted(groups, key=lambda key: (-key[0], key[1]))]


def adamw(model: nn.Module, config: OptimConfig, found_bad: Tensor) -> torch.optim.AdamW:
    """Fused AdamW that leaves the weights alone while `found_bad` (a float scalar on the device) is not zero."""
    groups = parameter_groups(model, config.weight_decay)
    if not groups:
        raise UsageError("the model has no parameter to train: none requires a gradient")
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    # The fused kernel reads these two attributes, as torch.amp.GradScaler sets them.
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = torch.ones_like(found_bad)  # type: ignore[attr-defined]
    # A step that is skipped makes the optimiser's state (zeros, step 0) and changes nothing else, so that the state
    # is there to be loaded into, also for parameters whose first gradient comes later.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.found_inf = found_bad  # type: ignore[attr-defined]
    return optimizer


def schedule(config: OptimConfig, total: int) -> Callable[[int], float]:
    """The learning rate's factor at each step (from 0) of `total`.

    Warm-up: (step + 1) / warm-up steps. Then, with u = (step − warmup) / (total − warmup) in [0, 1] and r the final
    ratio: cosine r + (1 − r)(1 + cos πu)/2, linear 1 − (1 − r)u, poly r + (1 − r)(1 − u)^.9, constant 1; step is a
    tenth from 8/12 of all steps on and a hundredth from 11/12, whatever the warm-up (the 1x schedule), at least r.
    """

    warmup = config.warmup(total)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        u = min((step - warmup) / max(total - warmup, 1), 1.0)
        if config.schedule == "cosine":
            return config.final_ratio + (1.0 - config.final_ratio) * (1.0 + math.cos(math.pi * u)) / 2.0
        if config.schedule == "linear":
            return 1.0 - (1.0 - config.final_ratio) * u
        if config.schedule == "poly":
            return config.final_ratio + (1.0 - config.final_ratio) * (1.0 - u) ** POLY_POWER
        if config.schedule == "step":
            return max(config.final_ratio, 0.1 ** sum(12 * step >= drop * total for drop in STEP_DROPS))
        return 1.0

    return factor


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The (local parts of the) gradients that are there."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """Sum of squares over all `tensors`, as a scalar on their device, in float32 or, where one is, in float64."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    return torch.stack(torch._foreach_norm(tensors, dtype=dtype)).square().sum()


class EMA:
    """Exponential moving average of the trainable parameters: a ← decay·a + (1 − decay)·p after each update."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        averages = [local(average) for average in self.average.values()]
        parameters = [local(parameter.detach()) for parameter in self.parameters.values()]
        torch._foreach_lerp_(averages, parameters, 1.0 - self.decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model holds the average; afterwards its own weights again, bit for bit."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        for name, parameter in self.parameters.items():
            here, there = local(parameter.detach()), local(self.average[name])
            kept = here.clone()
            here.copy_(there)
            there.copy_(kept)
