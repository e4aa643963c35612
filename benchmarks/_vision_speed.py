"""Models, calls and processes of the benchmark of vision: how each is built, compiled, warmed up and timed."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leafward.systems.hcformer.model  # noqa: F401  (registers the models)
from _timing import cuda_ms, first_line, graphed
from leafward.systems.himapper import HiMapper

MAPPED = {"himapper_resnet50": "resnet50", "himapper_deit_small": "deit_small"}
TIMM = {
    "swin_tiny": "swin_tiny_patch4_window7_224",
    "swin_small": "swin_small_patch4_window7_224",
    "deit_small": "deit_small_patch16_224",
}
"""Full names in timm of the models that are called by a shorter one here."""
BLOCKS = ("Block", "SwinTransformerBlock", "Bottleneck", "HierarchyMapper")
"""Classes of the modules that are compiled one by one: HCFormer's and DeiT's, Swin's, ResNet's, Hi-Mapper's."""
GROWTH_MODEL, GROWTH_SIZES = "hcformer_tiny", (224, 448, 672, 896)
Call = Callable[[], object]


def build(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    plain = MAPPED.get(name, name)
    # timm's Swin has stochastic depth unless told, with a rate of its own in every block.
    model: nn.Module = timm.create_model(TIMM.get(plain, plain), num_classes=1000, drop_path_rate=0.0)
    if name in MAPPED:
        model = HiMapper(model)
    model = model.to(device)
    return model.to(memory_format=torch.channels_last) if device == "cuda" else model  # pyright: ignore


def compile_model(model: nn.Module, how: str) -> None:
    torch._dynamo.config.recompile_limit = 32  # a block has one version for each stage and kind
    if how == "whole":
        model.compile(fullgraph=True)
    elif how == "blocks":
        for module in _blocks(model):
            # Its forward and not the module, so that each class has its own cache of compiled code.
            module.forward = torch.compile(module.forward, fullgraph=True, dynamic=False)
            if hasattr(module, "losses"):
                module.losses = torch.compile(module.losses, fullgraph=True, dynamic=False)  # pyright: ignore


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in BLOCKS]


def images(count: int, size: int, device: str) -> Tensor:
    x = torch.randn(count, 3, size, size, device=device)
    return x.contiguous(memory_format=torch.channels_last)


def inference_call(model: nn.Module, x: Tensor, graphs: bool = False) -> Call:
    def call() -> object:
        with _setting(x, training=False):
            return model(x)

    return call


def training_call(model: nn.Module, x: Tensor, graphs: bool = False) -> Call:
    """Forward with all losses, backward and an AdamW step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=x.is_cuda, capturable=graphs)
    target = torch.randint(1000, (len(x),), device=x.device)

    def call() -> object:
        with _setting(x, training=True):
            if isinstance(model, HiMapper):
                logits, losses = model(x, losses=True)
                loss = F.cross_entropy(logits, target) + losses.total()
            else:
                loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return call


CALLS: dict[str, Callable[..., Call]] = {"inference": inference_call, "training": training_call}


@contextlib.contextmanager
def _setting(x: Tensor, training: bool) -> Iterator[None]:
    """Gradients and precision of a call."""
    with torch.inference_mode(not training), torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        yield


def growth_calls(model: nn.Module, batch: int, device: str) -> tuple[dict[str, Call], dict[str, int]]:
    """Inference at every size with (nearly) as many pixels in each batch, and how many these are."""
    model.eval()
    largest = (GROWTH_SIZES[-1] // GROWTH_SIZES[0]) ** 2
    most = largest * max(1, batch // largest)
    calls, pixels = {}, {}
    for size in GROWTH_SIZES:
        count = max(1, round(most * (GROWTH_SIZES[0] / size) ** 2))
        calls[str(size)] = inference_call(model, images(count, size, device))
        pixels[str(size)] = count * size * size
    return calls, pixels


def relative_times(spent: dict[str, float], pixels: dict[str, int]) -> dict[str, float]:
    """Time per pixel at each size over that at the first."""
    per_pixel = {size: spent[size] / pixels[size] for size in spent}
    return {size: value / per_pixel[str(GROWTH_SIZES[0])] for size, value in per_pixel.items()}


@dataclass(frozen=True)
class Job:
    """What one process measures, and how its model is compiled."""

    model: str
    batch: int
    parts: tuple[str, ...]
    how: str


def run_jobs(jobs: Sequence[Job], args: argparse.Namespace, note: Callable[[dict[str, Any]], None]) -> None:
    """Every job in a process of its own on the GPU: they compile side by side and are timed one at a time.

    With `args.warm_only` they are not timed: what they compile stays in the compiler's cache on disk. Forked, and this
    process itself never touches the device. `note` gets every record as soon as it is there.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // len(jobs))))
    context = multiprocessing.get_context("fork")
    gate, turn, found = context.Barrier(len(jobs)), context.Lock(), context.Queue()
    rounds = max(len(job.parts) for job in jobs)
    workers = [context.Process(target=_work, args=(job, args, rounds, gate, turn, found)) for job in jobs]
    for worker in workers:
        worker.start()
    end = time.monotonic() + args.seconds
    while any(worker.is_alive() for worker in workers) or not found.empty():
        if time.monotonic() > end:
            for job, worker in zip(jobs, workers, strict=True):
                if worker.is_alive():
                    worker.terminate()
                    note({"model": job.model, "parts": job.parts, "error": "no time was left"})
            break
        with contextlib.suppress(queue.Empty):
            note(found.get(timeout=0.5))
    for worker in workers:
        worker.join()


def _work(job: Job, args: argparse.Namespace, rounds: int, gate: Any, turn: Any, found: Any) -> None:
    """Compile and time the parts of a job one after the other, each together with those of the other jobs."""

    def note(part: str, **record: Any) -> None:
        found.put({"part": part, "model": job.model, "batch": job.batch, **record})

    torch.backends.cudnn.benchmark = True
    made: list[Any] = []
    for place in range(rounds):
        part = job.parts[place] if place < len(job.parts) else None
        started, failed = time.monotonic(), part is None
        try:
            if not made:
                made += [build(job.model, "cuda"), images(job.batch, 224, "cuda")]
                compile_model(made[0], "no" if part == "growth" else job.how)
            if part in CALLS:
                _warm_up(part, made[0], made[1], job.how)
            torch.cuda.empty_cache()
        except Exception as error:
            note(part or "nothing", error=first_line(error))
            failed = True
        seconds = time.monotonic() - started
        if args.warm_only:
            if not failed:
                note(f"{part}, compiled", seconds_to_compile=seconds)
            continue
        alone = _together(gate, args.compile_seconds)
        with turn:
            try:
                if part is not None and not failed:
                    model, x = made
                    record = _grown(model, args) if part == "growth" else _timed(part, model, x, args)
                    about = {"compiled": job.how, "seconds_to_compile": seconds, "alone": alone}
                    note(part, **record, **about, device=torch.cuda.get_device_name())
            except Exception as error:
                note(part or "nothing", error=first_line(error))
            torch.cuda.empty_cache()
        _together(gate, args.compile_seconds)  # nobody compiles the next part while others are timed


def _warm_up(part: str, model: nn.Module, x: Tensor, how: str) -> None:
    """Compile what a part needs: blocks one by one; a whole model, which is one piece, by a call."""
    model.train(part == "training")
    if how == "blocks":
        compile_blocks(model, x, training=part == "training")
    elif how == "whole":
        CALLS[part](model, x)()
        torch.cuda.synchronize()


def _together(gate: Any, seconds: float) -> bool:
    """Whether all jobs came to this place in time."""
    try:
        gate.wait(seconds)
    except threading.BrokenBarrierError:
        return False
    return True


def compile_blocks(model: nn.Module, x: Tensor, training: bool) -> None:
    """Compile every kind of block on its own, on the input that it gets in the model: nothing of the others is held."""
    model.train(training)
    for module, inputs in _kinds(model, x, training):
        with _setting(x, training):
            given = [part.detach().requires_grad_(training) if _real(part) else part for part in inputs]
            out = module(*given)
        if training:
            parts = out if isinstance(out, tuple) else (out,)
            torch.stack([part.float().sum() for part in parts]).sum().backward()
            model.zero_grad()


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _kinds(model: nn.Module, x: Tensor, training: bool) -> list[tuple[nn.Module, tuple[Any, ...]]]:
    """One block for every class, kind of input and set of weights, with its input."""
    found: dict[Any, tuple[nn.Module, tuple[Any, ...]]] = {}

    def keep(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        shapes = tuple((part.shape, part.stride(), part.dtype) for part in inputs if isinstance(part, Tensor))
        weights = tuple((name, part.shape) for name, part in [*module.named_parameters(), *module.named_buffers()])
        found.setdefault((type(module), shapes, weights), (module, inputs))

    handles = [block.register_forward_pre_hook(keep) for block in _blocks(model)]
    with _setting(x, training), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model(x)
    for handle in handles:
        handle.remove()
    return list(found.values())


def _timed(part: str, model: nn.Module, x: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """Time of a call by the clock, launched and (`--graphs`) replayed, and of its kernels alone; memory at its peak."""
    model.train(part == "training")
    call = CALLS[part](model, x, args.graphs)
    started = time.monotonic()
    call()
    torch.cuda.synchronize()
    first = time.monotonic() - started
    torch.cuda.reset_peak_memory_stats()
    call()
    peak = torch.cuda.max_memory_allocated() / 2**30
    launched = cuda_ms(call, args.rounds)
    kernels_ms, launches, most = _kernels(call)
    replayed, graphs = launched, "no"
    if args.graphs:
        try:
            replayed, graphs = cuda_ms(graphed(call), args.rounds), "yes"
        except Exception as error:  # the figures of launched calls stand
            graphs = first_line(error)
    return {
        "images_per_second": 1e3 * len(x) / replayed,
        "milliseconds": replayed,
        "milliseconds_launched": launched,
        "kernels_ms": kernels_ms,
        "launches": launches,
        "most_ms": most,
        "graphs": graphs,
        "peak_gib": peak,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds_of_first_call": first,
    }


def _kernels(call: Call, calls: int = 3, most: int = 24) -> tuple[float, float, dict[str, list[float]]]:
    """Milliseconds that the kernels of a call take by themselves, how many there are, and both for those that take
    the most."""
    both = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=both) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found = [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    spent = sum(event.self_device_time_total for event in found) / 1e3
    found.sort(key=lambda event: event.self_device_time_total, reverse=True)
    top = {event.key[:80]: [event.self_device_time_total / 1e3 / calls, event.count / calls] for event in found[:most]}
    return spent / calls, sum(event.count for event in found) / calls, top


def _grown(model: nn.Module, args: argparse.Namespace) -> dict[str, Any]:
    """Inference at growing sizes, not compiled."""
    calls, pixels = growth_calls(model, args.batch, "cuda")
    if args.graphs:
        calls = {size: graphed(call) for size, call in calls.items()}
    spent = {size: cuda_ms(call, args.rounds) for size, call in calls.items()}
    return {"milliseconds_by_size": spent, "time_per_pixel_relative": relative_times(spent, pixels)}
