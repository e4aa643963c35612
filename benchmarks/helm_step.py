"""Training steps of HELM beside its Euclidean twins and Hugging Face models of equal size, all in one run.

    python benchmarks/helm_step.py --out step.json                    # on a CUDA device
    python benchmarks/helm_step.py --only d,d-triton,d-twin --profile d,d-triton,d-twin
    python benchmarks/helm_step.py --device cpu                       # a tiny shape, to see that it runs

A step is forward, backward and fused AdamW under bfloat16 autocast. Sides, at each shape:

    d, mice                HELM-D and HELM-MiCE, plain torch, compiled; d-triton and mice-triton with our kernels
    d-twin, mice-twin      the same code with geometry="euclidean"
    d64, d64-twin, …       heads of 64 coordinates instead of 60 (see _helm.py)
    llama                  Llama of Hugging Face, compiled as ours is, with a loss that is compiled too
    llama-own              the same as its users have it: torch.compile of the whole model with its own loss
    deepseek               DeepSeek-V3 of Hugging Face with its eager loop over experts
    deepseek-grouped       DeepSeek-V3 with grouped products, compiled
    attention              the attention kernel alone, by head width and backend

`ms` is the time of a step that Python launches, `graph_ms` that of the same step replayed as a CUDA graph, which leaves
out what the host needs for its launches, and `kernels_ms` (of `--profile`) what the kernels take by themselves.
`--compile block` compiles one layer and uses it for all, which is quick to compile; `whole` compiles the model as one
graph. The JSON is written after every side.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from _helm import Report, deepseek, facts, helm, llama, parameters, profile
from _timing import cuda_ms, first_line, graphed
from leafward.nn import head, kernels
from leafward.systems.helm import HelmForCausalLM

SIDES = (
    *("d", "d-triton", "d-twin", "d64-twin", "llama", "llama-own", "mice", "mice-triton"),
    *("mice-twin", "deepseek", "attention", "d64", "d64-triton", "deepseek-grouped"),
)
DEFAULT = SIDES[:11]
TIME_RATIOS = tuple(
    (one, other)
    for ones, others in (
        (("d", "d-triton"), ("d-twin", "d64-twin", "llama", "llama-own")),
        (("d64", "d64-triton"), ("d64-twin",)),
        (("mice", "mice-triton"), ("mice-twin",)),
        (("deepseek", "deepseek-grouped"), ("mice", "mice-triton")),
    )
    for one in ones
    for other in others
)
BATCH = {"768": {"d": 16, "mice": 16}, "1b": {"d": 8, "mice": 8}, "tiny": {"d": 2, "mice": 2}}


def build(side: str, shape: str, length: int) -> PreTrainedModel:
    if side.startswith("llama"):
        return llama(shape, length)
    if side.startswith("deepseek"):
        return deepseek(shape, length, "grouped_mm" if "grouped" in side else "eager")
    kernels.use("triton" if side.endswith("triton") else "torch")
    geometry = "euclidean" if side.endswith("twin") else "lorentz"
    return helm(shape, geometry, side.startswith("mice"), "64" in side, length)


def compiled_loss(model: Any, how: str) -> Callable[[Tensor], Tensor]:
    """The loss of a batch of tokens, compiled as asked."""
    if how == "whole":
        return torch.compile(lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss)
    if how == "block":
        trunk = model.model
        for part in (*trunk.layers, trunk.norm):
            part.compile()
        if isinstance(model, HelmForCausalLM):
            trunk.project.compile()
            head.score_chunk = compiled_chunk
        else:
            return lambda ids: plain_loss(model.lm_head, trunk(input_ids=ids, use_cache=False).last_hidden_state, ids)
    return lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss


compiled_chunk = torch.compile(head.score_chunk, dynamic=False)


@torch.compile
def plain_loss(to_logits: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
    """The causal loss of transformers."""
    return F.cross_entropy(to_logits(hidden[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def train_step(model: nn.Module, loss_of: Callable[[Tensor], Tensor], ids: Tensor) -> Callable[[], Tensor]:
    cuda = ids.is_cuda
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.01, fused=cuda, capturable=cuda)

    def step() -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = loss_of(ids)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        if isinstance(model, HelmForCausalLM):
            model.rebalance()
        return loss.detach()

    return step


def timed(step: Callable[[], Tensor], iterations: int, device: str) -> dict[str, float]:
    """Median milliseconds of a step on the device, and of handing it over."""
    if device != "cuda":
        marks = []
        for _ in range(iterations):
            began = time.perf_counter()
            step()
            marks.append(1e3 * (time.perf_counter() - began))
        return {"ms": statistics.median(marks)}
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    began = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    host = 1e3 * (time.perf_counter() - began) / iterations
    torch.cuda.synchronize()
    passed = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return {"ms": statistics.median(passed), "fastest_ms": min(passed), "host_ms": host}


def measure(side: str, shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device, length = arguments.device, arguments.length
    with torch.device(device):
        model = build(side, shape, length)
    model.train()
    batch = arguments.batch or BATCH[shape]["mice" if side.startswith(("mice", "deepseek")) else "d"]
    ids = torch.randint(model.config.vocab_size, (batch, length), device=device)
    counters.clear()
    how = "none" if side == "deepseek" else "whole" if side == "llama-own" else arguments.compile
    step = train_step(model, compiled_loss(model, how), ids)
    began = time.perf_counter()
    losses = [step().item() for _ in range(arguments.warm)]
    result = {"batch": batch, "length": length, "compile": how, **parameters(model)}
    result["graph_breaks"] = sum(counters["graph_break"].values())
    result["warm_seconds"] = round(time.perf_counter() - began, 1)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result.update(timed(step, arguments.iterations, device))
    if device == "cuda":
        result["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    result["tokens_per_second"] = 1e3 * batch * length / result["ms"]
    result["losses"] = [*losses, step().item()]
    if side in arguments.profile.split(","):
        result["profile"] = profile(step, device)
        result["kernels_ms"] = sum(row["ms"] for row in result["profile"])
    if device == "cuda" and how != "none":  # what is not compiled waits for the device within a step
        result["graph_ms"] = replayed(step, arguments.iterations)
    return result


def replayed(step: Callable[[], Tensor], iterations: int) -> float | str:
    """Median milliseconds of a step as a CUDA graph, or why it is none."""
    try:
        return cuda_ms(graphed(step), iterations)
    except Exception as error:  # the figures of launched steps stand
        return first_line(error)


def attention(shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds, forward and backward, of causal attention by width of a head and backend."""
    batch, heads = (arguments.batch or BATCH[shape]["d"]), {"768": 12, "1b": 14, "tiny": 4}[shape]
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "default": None}
    result: dict[str, Any] = {}
    for width in (64, 72, 96, 128, 136):
        q, k, v = (
            torch.randn(
                (batch, arguments.length, heads, width), device=arguments.device, dtype=torch.bfloat16
            ).requires_grad_()
            for _ in range(3)
        )

        def call(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out.sum().backward()
            return out

        for name, backend in backends.items():
            try:
                if backend is None:
                    call()
                    result[f"{width} {name}"] = timed(call, 5, arguments.device)["ms"]
                    continue
                with sdpa_kernel(backend):
                    call()
                    result[f"{width} {name}"] = timed(call, 5, arguments.device)["ms"]
            except RuntimeError as error:
                result[f"{width} {name}"] = str(error)[:80]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", default=None, help="of 768, 1b, tiny; by default 768,1b, on the CPU tiny")
    parser.add_argument("--only", default=",".join(DEFAULT), help=f"of {', '.join(SIDES)}, by commas")
    parser.add_argument("--compile", choices=("block", "whole", "none"), default=None)
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--length", type=int, default=None)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=150.0, help="no side begins after this time")
    parser.add_argument("--profile", default="", help="sides to list the most expensive kernels of, by commas")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    arguments.compile = arguments.compile or ("block" if cuda else "none")
    arguments.length = arguments.length or (2048 if cuda else 64)
    shapes = (arguments.shapes or ("768,1b" if cuda else "tiny")).split(",")
    sides = arguments.only.split(",")
    for side in sides:
        if side not in SIDES:
            parser.error(f"unknown side {side!r}; allowed: {', '.join(SIDES)}")
    torch.set_float32_matmul_precision("high")
    report = Report(arguments.out, arguments.seconds, {"benchmark": "helm_step", **facts(arguments.device)})
    for shape in shapes:
        for side in sides:
            call = (
                attention
                if side == "attention"
                else lambda shape, arguments, side=side: measure(side, shape, arguments)
            )
            report.measure(f"{shape} {side}", lambda call=call, shape=shape: call(shape, arguments))
    pairs = [(f"{shape} {a}", f"{shape} {b}") for shape in shapes for a, b in TIME_RATIOS]
    report.write(graph_ratios=report.ratios("graph_ms", pairs))
    report.write(time_ratios=report.ratios("ms", pairs), memory_ratios=report.ratios("memory_gb", pairs))
    print(json.dumps(report.content))


if __name__ == "__main__":
    main()
