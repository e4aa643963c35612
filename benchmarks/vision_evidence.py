"""HCFormer against its Euclidean twin and a timm model of its size, and Hi-Mapper against the same fine-tuning without
it, on real images: classification with WordNet's hierarchy, segmentation, detection; paired over seeds.

    python benchmarks/vision_evidence.py --data DATA --device cuda --seconds 480 --out evidence.json
    python benchmarks/vision_evidence.py --data DATA --quick                      a trial of every part, on a CPU
    python benchmarks/vision_evidence.py --summarise evidence.json

DATA is described in `_vision_data.py`. Every model is a member of its own, several are trained at a time (`--jobs`),
and each result is written as soon as it is there.

1. Each model tries the learning rates on a seed of its own, on nine tenths of the training images, scored on the rest.
   How long a step takes there says how many steps all models get.
2. Each model is trained from scratch at its best rate with each seed, and scored on the held-out images.
3. From that backbone: Semantic FPN on street scenes and Faster R-CNN on blood cells, the same steps for all; and on the
   timm model Hi-Mapper, its Euclidean tree, its deterministic tree and the backbone alone, fine-tuned alike.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU: asked without touching it

import numpy as np
import timm
import torch

from _timing import first_line, markdown
from _vision_data import Data, load
from _vision_members import ARMS, BASE, MODELS, Member, Settings, run, write_cells
from leafward.files import finite, write_json
from leafward.intervals import mean_interval

TUNING = 0
"""The seed that tries the learning rates."""
RATES = {"segment": 5e-4, "detect": 5e-4, "map": 2e-4}
TITLES = {
    "hcformer": "HCFormer-Nano, Lorentz windows",
    "hcformer-flat": "HCFormer-Nano, Euclidean twin",
    "convnext": "ConvNeXt-Femto (timm)",
    "mapped": "Hi-Mapper, Lorentz",
    "mapped-flat": "Hi-Mapper, Euclidean tree",
    "mapped-points": "Hi-Mapper, deterministic tree",
    "plain": "plain fine-tuning",
}
METRICS = {
    "classify": ("top1", "top5", "hierarchical_f1", "mistake_severity"),
    "map": ("top1", "top5", "hierarchical_f1", "mistake_severity"),
    "segment": ("miou", "pixel_accuracy"),
    "detect": ("box_ap", "box_ap50"),
}
PAIRS = {
    "map": (("mapped", "plain"), ("mapped", "mapped-flat"), ("mapped", "mapped-points"), ("mapped-flat", "plain")),
    "classify": (("hcformer", "hcformer-flat"), ("hcformer", "convnext"), ("hcformer-flat", "convnext")),
}
"""What is compared; segmentation and detection as classification."""


class Evidence:
    """Runs the members within the time there is and keeps what they found."""

    def __init__(self, args: argparse.Namespace, data: Data, folder: Path) -> None:
        self.args, self.data, self.folder = args, data, folder
        self.began = time.perf_counter()
        self.settings = _settings(args)
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.record: dict[str, Any] = {
            "device": args.device,
            "torch": torch.__version__,
            "timm": timm.__version__,
            "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
            "images": {name: len(getattr(data, name)) for name in ("objects_train", "objects_test", "scenes_train")}
            | {
                "scenes_test": len(data.scenes_test),
                "cells": len(data.cells),
                "cells_test": int(data.cells_test.sum()),
            },
        }

    def measure(self) -> dict[str, Any]:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
        # Forked, so that the images are decoded once; this process itself never touches the device.
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(self.args.jobs, mp_context=context) as pool:
            self.pool = pool
            if "classify" in self.args.parts:
                self._together(self._tuning())
                rates = {name: self._best_rate(name) for name in MODELS}
                steps = self.args.steps or self._steps()
                self.record |= {"rates": rates, "steps": steps}
                self._together(
                    [
                        self._member("classify", name, seed, steps, rates[name])
                        for seed in self._seeds
                        for name in MODELS
                    ]
                )
            else:
                self._rest([(name, seed) for seed in self._seeds for name in MODELS])
        return self.result()

    @property
    def _seeds(self) -> range:
        return range(TUNING + 1, TUNING + 1 + self.args.seeds)

    def _member(self, part: str, name: str, seed: int, steps: int, rate: float) -> Member:
        return Member(part, name, seed, steps, rate, self.folder)

    def _tuning(self) -> list[Member]:
        rates = self.args.rates
        return [self._member("tune", name, TUNING, self.args.tuning_steps, rate) for rate in rates for name in MODELS]

    def _best_rate(self, name: str) -> float:
        tried = [row for row in self.rows if row["part"] == "tune" and row["name"] == name and "loss" in row]
        return min(tried, key=lambda row: row["loss"])["rate"] if tried else self.args.rates[0]

    def _steps(self) -> int:
        """As many as fit the share of the time, at the pace of the slowest, and at most so many epochs."""
        most = round(self.args.epochs * len(self.data.labels_train) / self.settings.batch)
        paces = [row["step_ms"] / 1e3 for row in self.rows if "step_ms" in row]
        if not paces:
            return most
        # As many models were trained at a time when the pace was taken.
        waves = -(-len(MODELS) * self.args.seeds // min(self.args.jobs, len(paces)))
        left = self.args.seconds - (time.perf_counter() - self.began)
        return max(1, min(most, int(self.args.share * left / (waves * max(paces)))))

    def _after(self, name: str, seed: int) -> list[Member]:
        """What begins from a trained classifier."""
        steps = {
            "segment": self.args.segment_epochs * (len(self.data.scenes_train) // self.settings.scene_batch or 1),
            "detect": self.args.detect_epochs * (int((~self.data.cells_test).sum()) // self.settings.cell_batch or 1),
            "map": self.args.map_epochs * (len(self.data.labels_train) // self.settings.batch or 1),
        }
        arms = [("map", arm) for arm in ARMS] if name == BASE else []
        wanted = [*arms, ("detect", name), ("segment", name)]
        return [
            self._member(part, who, seed, max(1, round(steps[part])), RATES[part])
            for part, who in wanted
            if part in self.args.parts
        ]

    def _rest(self, trained: Sequence[tuple[str, int]]) -> None:
        self._together([member for name, seed in trained for member in self._after(name, seed)])

    def _together(self, members: Sequence[Member]) -> None:
        """Train members and whatever begins from them, as many at a time as there are jobs."""
        running = {self.pool.submit(run_one, member): member for member in members}
        while running:
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                member, row = running.pop(future), future.result()
                self._note(row)
                if member.part == "classify" and "error" not in row:
                    for further in self._after(member.name, member.seed):
                        if time.perf_counter() - self.began < self.args.seconds:
                            running[self.pool.submit(run_one, further)] = further
                        else:
                            self.left_out.append(f"{further.part} {further.name} {further.seed}")

    def _note(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        shown = {
            key: value for key, value in row.items() if key in ("top1", "miou", "box_ap", "loss", "error", "step_ms")
        }
        after = time.perf_counter() - self.began
        print(f"[{after:6.1f} s] {row['part']} {row['name']} {row['seed']}: {shown}", file=sys.stderr, flush=True)
        if self.args.out is not None:
            write_json(self.args.out, finite(self.result()))

    def result(self) -> dict[str, Any]:
        return self.record | {"rows": self.rows, "left_out": self.left_out}


_SHARED: dict[str, Any] = {}
"""The images and settings, in the memory that the trained members are forked from."""


def run_one(member: Member) -> dict[str, Any]:
    """One member in a process of its own; a failure is a result too."""
    torch.set_num_threads(1)
    try:
        return run(member, _SHARED["data"], _SHARED["settings"])
    except Exception as error:
        return {"part": member.part, "name": member.name, "seed": member.seed, "error": first_line(error)}


def _settings(args: argparse.Namespace) -> Settings:
    if args.quick:
        small = {"size": 64, "batch": 8, "mapped_size": 64, "scene_size": 96, "scene_batch": 2, "cell_batch": 2}
        return Settings(args.device, compile=args.compile, **small)
    return Settings(args.device, args.size, args.batch, args.mapped_size, compile=args.compile)


def by_seed(rows: Sequence[dict[str, Any]], part: str, name: str) -> dict[int, dict[str, Any]]:
    return {row["seed"]: row for row in rows if row["part"] == part and row["name"] == name and "error" not in row}


def differences(rows: Sequence[dict[str, Any]], part: str, one: str, other: str) -> dict[str, Any]:
    """Paired over the seeds that both have, for every metric of the part: mean and 95 % interval (Student's t)."""
    left, right = by_seed(rows, part, one), by_seed(rows, part, other)
    seeds = sorted(set(left) & set(right))
    found = {}
    for metric in METRICS[part] if seeds else ():
        values = [left[seed][metric] - right[seed][metric] for seed in seeds]
        centre, interval = mean_interval(values)
        found[metric] = {"mean": centre, "interval": interval, "seeds": len(values)}
    return found


def summary(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = result["rows"]
    lines = [
        f"{result['device']}, torch {result['torch']}, timm {result['timm']}; images {result['images']}; "
        f"classification: {result.get('steps')} steps, rates {result.get('rates')}"
    ]
    for part, metrics in METRICS.items():
        names = ARMS if part == "map" else MODELS
        found = {name: list(by_seed(rows, part, name).values()) for name in names}
        if not any(found.values()):
            continue
        table = [
            [
                TITLES[name],
                f"{own[0]['parameters'] / 1e6:.2f}",
                *(_spread([row[metric] for row in own], metric) for metric in metrics),
                f"{np.median([row['step_ms'] for row in own]):.0f}",
                str(len(own)),
            ]
            for name, own in found.items()
            if own
        ]
        steps = next(own[0]["steps"] for own in found.values() if own)
        lines += ["", f"{part}, {steps} steps, mean ± standard deviation over seeds:", ""]
        lines.append(markdown(["model", "M weights", *metrics, "ms per step", "seeds"], table))
        paired = [
            [
                f"{TITLES[one]} − {TITLES[other]}",
                *(_difference(differences(rows, part, one, other).get(metric), metric) for metric in metrics),
            ]
            for one, other in PAIRS.get(part, PAIRS["classify"])
        ]
        lines += ["", markdown(["paired difference, 95 % interval", *metrics], paired)]
    errors = [f"{row['part']} {row['name']} {row['seed']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join([*lines, "", *errors, *(f"left out: {each}" for each in result["left_out"])])


def _unit(metric: str) -> float:
    return 1.0 if metric == "mistake_severity" else 100.0


def _spread(values: Sequence[float], metric: str) -> str:
    scaled = _unit(metric) * np.array(values)
    return f"{scaled.mean():.2f} ± {scaled.std(ddof=1):.2f}" if len(scaled) > 1 else f"{scaled.mean():.2f}"


def _difference(found: dict[str, Any] | None, metric: str) -> str:
    if found is None:
        return "–"
    unit = _unit(metric)
    if found["interval"] is None:
        return f"{unit * found['mean']:+.2f}"
    low, high = (unit * end for end in found["interval"])
    return f"{unit * found['mean']:+.2f} [{low:+.2f}, {high:+.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the images")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", nargs="+", choices=tuple(METRICS), default=list(METRICS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="models that are trained at a time")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin nothing new after this long")
    parser.add_argument(
        "--share", type=float, default=0.45, help="part of the time left after tuning that training gets"
    )
    parser.add_argument("--steps", type=int, help="of training from scratch, whatever the time")
    parser.add_argument("--epochs", type=float, default=100.0, help="of training from scratch, at most")
    parser.add_argument("--tuning-steps", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--segment-epochs", type=float, default=35)
    parser.add_argument("--detect-epochs", type=float, default=15)
    parser.add_argument("--map-epochs", type=float, default=8)
    parser.add_argument("--size", type=int, default=128, help="pixels of the images in training from scratch")
    parser.add_argument("--mapped-size", type=int, default=192, help="the same in fine-tuning with Hi-Mapper")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--compile", action="store_true", help="compile the blocks of HCFormer for its training")
    parser.add_argument("--quick", action="store_true", help="a few images and steps of everything")
    parser.add_argument("--work", type=Path, help="keep the trained backbones here; used again without `classify`")
    parser.add_argument("--out", type=Path, help="keep the result in this file")
    parser.add_argument("--summarise", type=Path, help="print the tables of an earlier result, nothing else")
    args = parser.parse_args()
    if args.summarise is not None:
        print(summary(json.loads(args.summarise.read_text(encoding="utf-8"))))
        return
    if args.data is None:
        parser.error("--data is missing")
    data = load(args.data)
    if args.quick:
        data = data.first(8)
        quick = {"seeds": 2, "steps": 3, "tuning_steps": 3, "rates": [1e-3], "segment_epochs": 0, "detect_epochs": 0}
        vars(args).update(quick | {"map_epochs": 0.4})
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        write_cells(data, work)
        evidence = Evidence(args, data, work)
        _SHARED.update(data=data, settings=evidence.settings)
        print(summary(finite(evidence.measure())))


if __name__ == "__main__":
    main()
