"""How fast HCFormer is beside timm's Swin, and what Hi-Mapper adds to a backbone: same precision, same batch, compiled
alike, in one run.

    python benchmarks/vision.py                                   # one CPU thread, float32, eager, batch 8
    python benchmarks/vision.py --device cuda --only inference    # bfloat16, channels-last, compiled, batch 256
    python benchmarks/vision.py --device cuda --only training growth
    python benchmarks/vision.py --device cuda --only himapper     # added time at batch 64, inference and training

`inference` and `training` give images per second and the ratio to swin_tiny (medium also to swin_small), on a GPU the
peak memory too. `himapper` gives the time and the parameters that the mapper adds, as parts of the backbone's own.
`growth` times one model from 224² to 896² pixels, as many pixels in each batch, and gives the time
per pixel relative to the smallest. Every result is printed as a line of JSON as soon as it is there, and the last line
is one JSON object of all. A model that fails is reported by its error and the others go on; what does not fit into
`--seconds` is left out and listed.

A GPU compiles block by block: blocks of one kind and shape share their code, so that a model of 24 blocks is ready
after those of its four stages. `--compile whole` compiles each model as one graph, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

# oneDNN's bf16 path crashes on some CPUs that advertise AMX; nothing here computes bf16 on a CPU.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import timm
import torch
import torch.nn.functional as F

import leafward.models.hcformer  # noqa: F401  (registers the models)
from _timing import cuda_ms, first_line, interleaved
from leafward.models.himapper import HiMapper

REFERENCES = {"swin_tiny": "swin_tiny_patch4_window7_224", "swin_small": "swin_small_patch4_window7_224"}
OURS = ("hcformer_nano", "hcformer_tiny", "hcformer_small", "hcformer_medium")
MAPPED = {"himapper_resnet50": "resnet50", "himapper_deit_small": "deit_small"}
TIMM = {**REFERENCES, "deit_small": "deit_small_patch16_224"}
"""Full names in timm of the models that are called by a shorter one here."""
MAPPED_BATCH = 64
BLOCKS = ("Block", "SwinTransformerBlock", "Bottleneck", "HierarchyMapper")
"""Classes of the modules that are compiled one by one: HCFormer's and DeiT's, Swin's, ResNet's, Hi-Mapper's."""
PARTS = ("inference", "training", "himapper", "growth")
GROWTH_MODEL, GROWTH_SIZES = "hcformer_tiny", (224, 448, 672, 896)


def build(name: str, device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    plain = MAPPED.get(name, name)
    # timm's Swin has stochastic depth unless told, with a rate of its own in every block.
    model: torch.nn.Module = timm.create_model(TIMM.get(plain, plain), num_classes=1000, drop_path_rate=0.0)
    if name in MAPPED:
        model = HiMapper(model)
    model = model.to(device)
    return model.to(memory_format=torch.channels_last) if device == "cuda" else model  # pyright: ignore


def compile_model(model: torch.nn.Module, how: str) -> None:
    if how == "whole":
        model.compile(fullgraph=True)
    elif how == "blocks":
        for module in model.modules():
            if type(module).__name__ in BLOCKS:
                # Its forward and not the module, so that each class has its own cache of compiled code.
                module.forward = torch.compile(module.forward, fullgraph=True, dynamic=False)


def images(count: int, size: int, device: str) -> torch.Tensor:
    x = torch.randn(count, 3, size, size, device=device)
    return x.contiguous(memory_format=torch.channels_last)


def inference_call(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    model.eval()

    def call() -> object:
        with torch.inference_mode(), torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            return model(x)

    return call


def training_call(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """Forward with all losses, backward and an AdamW step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=x.is_cuda)
    target = torch.randint(1000, (len(x),), device=x.device)

    def call() -> object:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
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


CALLS = {"inference": inference_call, "training": training_call}


def emit(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def ratios(times: dict[str, float]) -> dict[str, float]:
    """Throughput over that of the reference, for whichever pairs were measured."""
    pairs = [(ours, "swin_tiny") for ours in OURS] + [("hcformer_medium", "swin_small")]
    return {f"{a} / {b}": times[b] / times[a] for a, b in pairs if a in times and b in times}


class Runner:
    """Runs the parts within the time there is and keeps every record."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device, self.batch, self.rounds = args.device, args.batch, args.rounds
        self.compile: str = args.compile
        self.end = time.monotonic() + args.seconds
        self.records: list[dict[str, Any]] = []
        self.left_out: list[str] = []

    def note(self, **record: Any) -> None:
        self.records.append(record)
        emit(record)

    def fits(self, what: str) -> bool:
        """Whether there is time to begin `what`; noted where there is not."""
        if time.monotonic() < self.end:
            return True
        self.left_out.append(what)
        return False

    def times(self, part: str, models: Sequence[str], batch: int) -> dict[str, float]:
        """Milliseconds of each model for a batch: `part` is inference or training."""
        return (self._on_cuda if self.device == "cuda" else self._on_cpu)(part, models, batch)

    def _on_cpu(self, part: str, models: Sequence[str], batch: int) -> dict[str, float]:
        """All models take turns, by process time, because other work on the machine must not count."""
        x = images(batch, 224, "cpu")
        calls = {}
        for name in models:
            model = build(name, "cpu")
            compile_model(model, self.compile)
            calls[name] = CALLS[part](model, x)
        found = interleaved(calls, self.rounds)
        for name, times in found.items():
            self.note(part=part, model=name, batch=batch, images_per_second=1e3 * batch / times["cpu_ms"], **times)
        return {name: times["cpu_ms"] for name, times in found.items()}

    def _on_cuda(self, part: str, models: Sequence[str], batch: int) -> dict[str, float]:
        found = {}
        for name in models:
            if not self.fits(f"{part} {name}"):
                continue
            try:
                found[name] = self._one_on_cuda(part, name, batch)
            except Exception as error:
                self.note(part=part, model=name, error=first_line(error))
            torch.compiler.reset()
            torch.cuda.empty_cache()
        return found

    def _one_on_cuda(self, part: str, name: str, batch: int) -> float:
        started = time.monotonic()
        model, x = build(name, "cuda"), images(batch, 224, "cuda")
        compile_model(model, self.compile)
        call = CALLS[part](model, x)
        call()
        torch.cuda.synchronize()
        first = time.monotonic() - started
        torch.cuda.reset_peak_memory_stats()
        milliseconds = cuda_ms(call, self.rounds)
        self.note(
            part=part,
            model=name,
            batch=batch,
            images_per_second=1e3 * batch / milliseconds,
            milliseconds=milliseconds,
            peak_gib=torch.cuda.max_memory_allocated() / 2**30,
            parameters=sum(p.numel() for p in model.parameters()),
            seconds_to_first_call=first,
        )
        return milliseconds

    def himapper(self) -> dict[str, float]:
        """What the mapper adds to each backbone, as a part of the backbone's own."""
        both = [name for mapped, plain in MAPPED.items() for name in (plain, mapped)]
        added: dict[str, float] = {}
        for mapped, plain in MAPPED.items():
            ours, theirs = (sum(p.numel() for p in build(name, "meta").parameters()) for name in (mapped, plain))
            added[f"{mapped}: parameters"] = ours / theirs - 1
        for part in CALLS:
            times = self.times(part, both, min(self.batch, MAPPED_BATCH))
            for mapped, plain in MAPPED.items():
                if mapped in times and plain in times:
                    added[f"{mapped}: {part} time"] = times[mapped] / times[plain] - 1
            emit({"part": "himapper", "added": added})
        return added

    def growth(self) -> dict[str, float]:
        """Time per pixel at each size over that at the first, eager inference."""
        model = build(GROWTH_MODEL, self.device)
        largest = (GROWTH_SIZES[-1] // GROWTH_SIZES[0]) ** 2
        most = largest * max(1, self.batch // largest)
        calls, pixels = {}, {}
        for size in GROWTH_SIZES:
            count = max(1, round(most * (GROWTH_SIZES[0] / size) ** 2))
            calls[str(size)] = inference_call(model, images(count, size, self.device))
            pixels[str(size)] = count * size * size
        if self.device == "cuda":
            spent = {size: cuda_ms(call, self.rounds) for size, call in calls.items()}
        else:
            spent = {size: times["cpu_ms"] for size, times in interleaved(calls, max(1, self.rounds // 2)).items()}
        per_pixel = {size: spent[size] / pixels[size] for size in calls}
        relative = {size: value / per_pixel[str(GROWTH_SIZES[0])] for size, value in per_pixel.items()}
        self.note(part="growth", model=GROWTH_MODEL, milliseconds=spent, time_per_pixel_relative=relative)
        return relative


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=None, help="parts (default: all; cpu: inference)")
    parser.add_argument("--models", nargs="+", choices=(*REFERENCES, *OURS), default=None)
    parser.add_argument("--batch", type=int, default=None, help="images (default: 8 on a CPU, 256 on a GPU)")
    parser.add_argument("--rounds", type=int, default=None, help="timed calls of each (default: 5 on a CPU, 20)")
    parser.add_argument("--compile", choices=("no", "blocks", "whole"), default=None, help="default: blocks on a GPU")
    parser.add_argument("--seconds", type=float, default=None, help="begin nothing new after this long (GPU: 480)")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.models = args.models or (["swin_tiny", *OURS[1:], "swin_small"] if cuda else ["swin_tiny", *OURS])
    args.batch = args.batch or (256 if cuda else 8)
    args.rounds = args.rounds or (20 if cuda else 5)
    args.compile = args.compile or ("blocks" if cuda else "no")
    args.seconds = args.seconds or (480.0 if cuda else float("inf"))
    torch._dynamo.config.recompile_limit = 32  # a block has one version for each stage and kind
    if cuda:
        torch.backends.cudnn.benchmark = True
    else:
        torch.set_num_threads(1)
    runner = Runner(args)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu, one thread",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "precision": "bfloat16 autocast" if cuda else "float32",
        "batch": args.batch,
        "compiled": args.compile,
    }
    for part in args.only or (PARTS if cuda else ("inference",)):
        if part == "growth":
            if runner.fits(part):
                result[part] = runner.growth()
        elif part == "himapper":
            result[part] = runner.himapper()
        else:
            result[part] = ratios(runner.times(part, args.models, args.batch))
            emit({"part": part, "ratios": result[part]})
    emit(result | {"records": runner.records, "left_out": runner.left_out})


if __name__ == "__main__":
    main()
