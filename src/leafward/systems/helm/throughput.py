"""How fast training is: tokens per second, and the part of the device's peak that useful arithmetic takes (MFU)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from leafward.engine import RunDirectory
from leafward.nn import MiCE
from leafward.systems.helm import HelmForCausalLM
from leafward.systems.helm.task import embedding

PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Dense bfloat16 operations per second by the makers' data sheets (H100: the SXM card)."""


def peak_flops(device: torch.device) -> float | None:
    """The peak of a device; None where it is not known (also of every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((PEAKS[key] for key in sorted(PEAKS, key=len, reverse=True) if key in name), None)


def flops_per_token(model: HelmForCausalLM, context: int) -> float:
    """Floating-point operations of one token's forward and backward pass: 6 N + 12 L H d T (as in PaLM).

    N counts the weights that a token meets: without the embedding, which is looked up, and of routed experts only the
    active ones. H d is the width of queries and keys of all heads, averaged with that of the values.
    """
    weights = sum(parameter.numel() for parameter in model.parameters())
    if model.lm_head.linear.weight is not embedding(model):
        weights -= embedding(model).numel()
    for module in model.modules():
        if isinstance(module, MiCE):
            idle = 1.0 - module.gate.active / module.gate.experts
            weights -= idle * sum(parameter.numel() for parameter in module.routed.parameters())
    config = model.config
    width = config.head_dim or config.hidden_size // config.num_attention_heads
    if config.kv_latent:
        width = (config.nope_width + config.rope_width + config.value_width) / 2
    return 6.0 * weights + 12.0 * config.num_hidden_layers * config.num_attention_heads * width * context


class MeteredRun(RunDirectory):
    """A run directory that adds tokens per second and MFU to the times of each line of metrics."""

    tokens_per_sample = 0
    flops_per_token = 0.0
    peak: float | None = None

    def meter(self, model: HelmForCausalLM, context: int, device: torch.device, world: int) -> None:
        """Say what is trained on what; samples are windows of `context` tokens."""
        peak = peak_flops(device)
        self.tokens_per_sample, self.flops_per_token = context, flops_per_token(model, context)
        self.peak = None if peak is None else peak * world

    def log(self, step: int, values: Mapping[str, Any], time: Mapping[str, float] | None = None) -> None:
        super().log(step, values, time and {**time, **self._speed(time["samples_per_second"])})

    def _speed(self, samples: float) -> dict[str, float]:
        tokens = samples * self.tokens_per_sample
        return {"tokens_per_second": tokens} | (
            {"mfu": tokens * self.flops_per_token / self.peak} if self.peak is not None else {}
        )


def speed(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Median tokens per second and MFU over the lines of metrics, without the first, which warms up."""
    times = [record["time"] for record in metrics if "tokens_per_second" in record.get("time", {})]
    times = times[1:] or times
    found: dict[str, float | None] = {}
    for name in ("tokens_per_second", "mfu"):
        values = [time[name] for time in times if name in time]
        found[name] = statistics.median(values) if values else None
    return found
