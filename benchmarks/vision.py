"""How fast HCFormer is beside timm's Swin, and what Hi-Mapper adds to a backbone: same precision, same batch, compiled
alike, in one run.

    python benchmarks/vision.py                                   # one CPU thread, float32, eager, batch 8
    python benchmarks/vision.py --device cuda --out vision.json   # bfloat16, channels-last, compiled, batch 256
    python benchmarks/vision.py --device cuda --only inference training --models swin_tiny hcformer_tiny
    python benchmarks/vision.py --device cuda --only himapper     # added time at batch 64, inference and training
    python benchmarks/vision.py --device cuda --warm-only         # compile all that the same without it would time

`inference` and `training` give images per second and the ratio to swin_tiny (medium also to swin_small), on a GPU the
peak memory too. `himapper` gives the time and the parameters that the mapper adds, as parts of the backbone's own.
`growth` times one model from 224² to 896² pixels, as many pixels in each batch, and gives the time
per pixel relative to the smallest. Every result is printed as a line of JSON as soon as it is there, and the last line
is one JSON object of all (`--out` keeps it in a file, rewritten after every result). A model that fails is reported by
its error and the others go on.

On a GPU every model has a process of its own: all compile a part side by side, then they are timed one after the other
with nothing else running, then comes the next part; `alone` says whether the others had indeed finished compiling.
`--warm-only` compiles and times nothing; with TORCHINDUCTOR_CACHE_DIR set, a later run finds all in that folder.
HCFormer and Swin are compiled block by block: blocks of one kind and shape share their code, so that a model of 24
blocks is ready after those of its four stages; each kind is compiled by itself on an input of its shape, which needs
little memory. What Hi-Mapper adds is small, so there both sides are compiled whole. `milliseconds` are those of calls
replayed as CUDA graphs (`--no-graphs`: launched), `milliseconds_launched` those of launched calls, and `kernels_ms`
what the kernels took by themselves, by torch.profiler. With LEAFWARD_KERNELS=torch HCFormer runs in plain torch.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread on a CPU
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU: asked without touching it

import timm
import torch

from _timing import interleaved
from _vision_speed import (
    CALLS,
    GROWTH_MODEL,
    MAPPED,
    Job,
    build,
    compile_model,
    growth_calls,
    images,
    relative_times,
    run_jobs,
)
from leafward.files import finite, write_json
from leafward.nn import kernels

OURS = ("hcformer_nano", "hcformer_tiny", "hcformer_small", "hcformer_medium")
REFERENCES = ("swin_tiny", "swin_small")
MAPPED_BATCH = 64
PARTS = ("inference", "training", "himapper", "growth")


def ratios(times: dict[str, float]) -> dict[str, float]:
    """Throughput over that of the reference, for whichever pairs were measured."""
    pairs = [(ours, "swin_tiny") for ours in OURS] + [("hcformer_medium", "swin_small")]
    return {f"{a} / {b}": times[b] / times[a] for a, b in pairs if a in times and b in times}


def added(times: dict[str, float], part: str) -> dict[str, float]:
    """What the mapper adds to each backbone, as a part of the backbone's own."""
    return {
        f"{mapped}: {part} time": times[mapped] / times[plain] - 1
        for mapped, plain in MAPPED.items()
        if mapped in times and plain in times
    }


@functools.cache
def added_parameters() -> dict[str, float]:
    """What the mapper adds to each backbone; once, because models are timed meanwhile."""
    sizes = {name: sum(p.numel() for p in build(name, "meta").parameters()) for both in MAPPED.items() for name in both}
    return {f"{mapped}: parameters": sizes[mapped] / sizes[plain] - 1 for mapped, plain in MAPPED.items()}


class Results:
    """Every record, and what follows from them; printed and kept as soon as it is there."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path | None = args.out
        self.batch: int = args.batch
        self.records: list[dict[str, Any]] = []
        self.about = {
            "torch": torch.__version__,
            "timm": timm.__version__,
            "precision": "bfloat16 autocast" if args.device == "cuda" else "float32",
            "batch": args.batch,
            "compiled": args.compile or "blocks; for himapper whole",
            "graphs": args.graphs,
            "kernels": kernels.chosen(),
        }

    def note(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        print(json.dumps(finite(record)), flush=True)
        if self.out is not None:
            write_json(self.out, finite(self.all()))

    def all(self) -> dict[str, Any]:
        """Ratios by the clock, and on a GPU by the time of the kernels alone, then every record."""
        found: dict[str, Any] = {}
        for part in CALLS:
            for key, name in (("milliseconds", part), ("kernels_ms", f"{part}, kernels")):
                own, mapped = self._times(part, key, self.batch), self._times(part, key, MAPPED_BATCH)
                if ratio := ratios(own):
                    found[name] = ratio
                if extra := added(mapped, name):
                    found["himapper"] = found.get("himapper", added_parameters()) | extra
        return self.about | found | {"records": self.records}

    def _times(self, part: str, key: str, batch: int) -> dict[str, float]:
        wanted = [r for r in self.records if r.get("part") == part and r.get("batch") == batch and key in r]
        return {record["model"]: record[key] for record in wanted}


def on_cpu(args: argparse.Namespace, results: Results) -> None:
    """All models take turns, by process time, because other work on the machine must not count."""
    torch.set_num_threads(1)
    both = [name for mapped, plain in MAPPED.items() for name in (plain, mapped)]
    for part in args.only:
        if part == "growth":
            model = build(GROWTH_MODEL, "cpu")
            calls, pixels = growth_calls(model, args.batch, "cpu")
            spent = {size: each["cpu_ms"] for size, each in interleaved(calls, max(1, args.rounds // 2)).items()}
            relative = relative_times(spent, pixels)
            results.note({"part": part, "model": GROWTH_MODEL, "time_per_pixel_relative": relative})
        elif part == "himapper":
            for kind in CALLS:
                _take_turns(results, kind, both, min(args.batch, MAPPED_BATCH), args)
        else:
            _take_turns(results, part, args.models, args.batch, args)


def _take_turns(results: Results, part: str, models: Sequence[str], batch: int, args: argparse.Namespace) -> None:
    x = images(batch, 224, "cpu")
    calls: dict[str, Callable[[], object]] = {}
    for name in models:
        model = build(name, "cpu")
        compile_model(model, args.compile)
        calls[name] = CALLS[part](model, x)
    for name, times in interleaved(calls, args.rounds).items():
        rate = 1e3 * batch / times["cpu_ms"]
        results.note(
            {"part": part, "model": name, "batch": batch, "images_per_second": rate, "milliseconds": times["cpu_ms"]}
        )


def jobs(args: argparse.Namespace) -> list[Job]:
    """One process for every model, and one for the growth with the size."""
    parts = [part for part in args.only if part in CALLS]
    found = [Job(name, args.batch, tuple(parts), args.compile or "blocks") for name in args.models if parts]
    if "himapper" in args.only:
        both = [name for pair in MAPPED.items() for name in pair]
        found += [Job(name, MAPPED_BATCH, tuple(CALLS), args.compile or "whole") for name in both]
    grows = "growth" in args.only and not args.warm_only  # it is not compiled
    return found + [Job(GROWTH_MODEL, args.batch, ("growth",), "no")] * grows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=None, help="parts (default: all; cpu: inference)")
    parser.add_argument("--models", nargs="+", choices=(*REFERENCES, *OURS), default=None)
    parser.add_argument("--batch", type=int, default=None, help="images (default: 8 on a CPU, 256 on a GPU)")
    parser.add_argument("--rounds", type=int, default=None, help="timed calls of each (default: 5 on a CPU, 20)")
    parser.add_argument(
        "--compile", choices=("no", "blocks", "whole"), default=None, help="default: no on a CPU, else as said above"
    )
    parser.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, default=None, help="replay CUDA graphs (default: on a GPU)"
    )
    parser.add_argument("--warm-only", action="store_true", help="compile everything and time nothing (GPU)")
    parser.add_argument("--compile-seconds", type=float, default=240.0, help="time the models anyway after this (GPU)")
    parser.add_argument("--seconds", type=float, default=480.0, help="stop what still runs after this long (GPU)")
    parser.add_argument("--out", type=Path, help="keep the result in this file")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.models = args.models or (["swin_tiny", *OURS[1:], "swin_small"] if cuda else ["swin_tiny", *OURS])
    args.only = args.only or (list(PARTS) if cuda else ["inference"])
    args.batch = args.batch or (256 if cuda else 8)
    args.rounds = args.rounds or (20 if cuda else 5)
    if args.warm_only and not cuda:
        parser.error("--warm-only needs --device cuda")
    args.compile = args.compile or (None if cuda else "no")
    args.graphs = cuda if args.graphs is None else args.graphs
    results = Results(args)
    if cuda:
        planned = jobs(args)
        if not planned:
            parser.error("--warm-only: growth is not compiled")
        run_jobs(planned, args, results.note)
    else:
        on_cpu(args, results)
    print(json.dumps(finite(results.all())))


if __name__ == "__main__":
    main()
