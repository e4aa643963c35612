"""How fast HCFormer is beside timm's Swin: same precision, same batch, compiled alike, in one run.

    python benchmarks/vision.py                                   # one CPU thread, float32, eager, batch 8
    python benchmarks/vision.py --device cuda --only inference    # bfloat16, channels-last, compiled, batch 256
    python benchmarks/vision.py --device cuda --only training growth

`inference` and `training` give images per second and the ratio to swin_tiny (medium also to swin_small), on a GPU the
peak memory too. `growth` times one model from 224² to 896² pixels, as many pixels in each batch, and gives the time
per pixel relative to the smallest. Every result is printed as a line of JSON as soon as it is there, and the last line
is one JSON object of all. A model that fails is reported by its error and the others go on; what does not fit into
`--seconds` is left out and listed.
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

REFERENCES = ("swin_tiny", "swin_small")
OURS = ("hcformer_nano", "hcformer_tiny", "hcformer_small", "hcformer_medium")
PARTS = ("inference", "training", "growth")
GROWTH_MODEL, GROWTH_SIZES = "hcformer_tiny", (224, 448, 672, 896)


def build(name: str, device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    full = f"{name}_patch4_window7_224" if name.startswith("swin") else name
    model = timm.create_model(full, num_classes=1000).to(device)
    return model.to(memory_format=torch.channels_last) if device == "cuda" else model  # pyright: ignore


def images(count: int, size: int, device: str) -> torch.Tensor:
    x = torch.randn(count, 3, size, size, device=device)
    return x.contiguous(memory_format=torch.channels_last)


def inference_call(model: torch.nn.Module, x: torch.Tensor, compiled: bool) -> Callable[[], object]:
    model.eval()
    forward = torch.compile(model, fullgraph=True) if compiled else model

    def call() -> object:
        with torch.inference_mode(), torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            return forward(x)

    return call


def training_call(model: torch.nn.Module, x: torch.Tensor, compiled: bool) -> Callable[[], object]:
    """Forward, backward and an AdamW step."""
    model.train()
    forward = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=x.is_cuda)
    target = torch.randint(1000, (len(x),), device=x.device)

    def call() -> object:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            loss = F.cross_entropy(forward(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return call


CALLS = {"inference": inference_call, "training": training_call}


def emit(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def ratios(speed: dict[str, float]) -> dict[str, float]:
    """Throughput over that of the reference, for whichever pairs were measured."""
    pairs = [(ours, "swin_tiny") for ours in OURS] + [("hcformer_medium", "swin_small")]
    return {f"{a} / {b}": speed[a] / speed[b] for a, b in pairs if a in speed and b in speed}


class Runner:
    """Runs the parts within the time there is and keeps every record."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device, self.batch, self.rounds = args.device, args.batch, args.rounds
        self.models: Sequence[str] = args.models
        self.compiled: bool = args.compile
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

    def speeds(self, part: str) -> dict[str, float]:
        """Images per second of every model in `part`."""
        return self._on_cuda(part) if self.device == "cuda" else self._on_cpu(part)

    def _on_cpu(self, part: str) -> dict[str, float]:
        """All models take turns, by process time, because other work on the machine must not count."""
        x = images(self.batch, 224, "cpu")
        calls = {name: CALLS[part](build(name, "cpu"), x, self.compiled) for name in self.models}
        speed = {}
        for name, times in interleaved(calls, self.rounds).items():
            speed[name] = 1e3 * self.batch / times["cpu_ms"]
            self.note(part=part, model=name, images_per_second=speed[name], **times)
        return speed

    def _on_cuda(self, part: str) -> dict[str, float]:
        speed = {}
        for name in self.models:
            if not self.fits(f"{part} {name}"):
                continue
            try:
                speed[name] = self._one_on_cuda(part, name)
            except Exception as error:
                self.note(part=part, model=name, error=first_line(error))
            torch.compiler.reset()
            torch.cuda.empty_cache()
        return speed

    def _one_on_cuda(self, part: str, name: str) -> float:
        started = time.monotonic()
        model, x = build(name, "cuda"), images(self.batch, 224, "cuda")
        call = CALLS[part](model, x, self.compiled)
        call()
        torch.cuda.synchronize()
        first = time.monotonic() - started
        torch.cuda.reset_peak_memory_stats()
        milliseconds = cuda_ms(call, self.rounds)
        speed = 1e3 * self.batch / milliseconds
        self.note(
            part=part,
            model=name,
            images_per_second=speed,
            milliseconds=milliseconds,
            peak_gib=torch.cuda.max_memory_allocated() / 2**30,
            parameters=sum(p.numel() for p in model.parameters()),
            seconds_to_first_call=first,
        )
        return speed

    def growth(self) -> dict[str, float]:
        """Time per pixel at each size over that at the first, eager inference."""
        model = build(GROWTH_MODEL, self.device)
        largest = (GROWTH_SIZES[-1] // GROWTH_SIZES[0]) ** 2
        most = largest * max(1, self.batch // largest)
        calls, pixels = {}, {}
        for size in GROWTH_SIZES:
            count = max(1, round(most * (GROWTH_SIZES[0] / size) ** 2))
            calls[str(size)] = inference_call(model, images(count, size, self.device), False)
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
    parser.add_argument("--models", nargs="+", choices=REFERENCES + OURS, default=None)
    parser.add_argument("--batch", type=int, default=None, help="images (default: 8 on a CPU, 256 on a GPU)")
    parser.add_argument("--rounds", type=int, default=None, help="timed calls of each (default: 5 on a CPU, 20)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="default: on a GPU only")
    parser.add_argument("--seconds", type=float, default=None, help="begin nothing new after this long (GPU: 110)")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.models = args.models or (["swin_tiny", *OURS[1:], "swin_small"] if cuda else ["swin_tiny", *OURS])
    args.batch = args.batch or (256 if cuda else 8)
    args.rounds = args.rounds or (20 if cuda else 5)
    args.compile = cuda if args.compile is None else args.compile
    args.seconds = args.seconds or (110.0 if cuda else float("inf"))
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
            continue
        result[part] = ratios(runner.speeds(part))
        emit({"part": part, "ratios": result[part]})
    emit(result | {"records": runner.records, "left_out": runner.left_out})


if __name__ == "__main__":
    main()
