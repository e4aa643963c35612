"""HCFormer against its Euclidean twin and a timm model of its size, and Hi-Mapper against the same fine-tuning without
it, on real images: classification with WordNet's hierarchy, segmentation, detection; paired over seeds.

    python benchmarks/vision_evidence.py --data DATA --device cuda --jobs 6 --work WORK --out evidence.json
    python benchmarks/vision_evidence.py --data DATA --quick                      a trial of every part, on a CPU
    python benchmarks/vision_evidence.py --summarise evidence.json

DATA is described in `_vision_data.py`. Every model is a member of its own, several are trained at a time (`--jobs`),
and each result is written as soon as it is there; a second run with the same WORK goes on where the first ended.

1. Each model tries the learning rates on a seed of its own, on nine tenths of the training images, scored on the rest.
2. Each model is trained from scratch at its best rate with each seed, and scored on the held-out images.
3. From that backbone: Semantic FPN on street scenes and Faster R-CNN on blood cells, the same steps for all; and on the
   timm model Hi-Mapper, its Euclidean tree, its deterministic tree and the backbone alone, fine-tuned alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
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
from leafward.stats.intervals import mean_interval

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
DOWNSTREAM = ("map", "segment", "detect")
PAIRS = {
    "map": (("mapped", "plain"), ("mapped", "mapped-flat"), ("mapped", "mapped-points"), ("mapped-flat", "plain")),
    "classify": (("hcformer", "hcformer-flat"), ("hcformer", "convnext"), ("hcformer-flat", "convnext")),
}
"""What is compared; segmentation and detection as classification."""


class Evidence:
    """Runs the members within the time there is and keeps what they found."""

    def __init__(self, args: argparse.Namespace, data: Data, folder: Path) -> None:
        self.args, self.data, self.folder = args, data, folder
        (folder / "results").mkdir(exist_ok=True)
        self.began = time.perf_counter()
        self.settings = _settings(args)
        self.unrecorded: set[tuple[str, str]] = set()
        """Parts and names whose steps could not be recorded."""
        self.needed: set[Path] = set()
        """Backbones that something without a result begins from."""
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
        if len(self.args.rates) > 1:
            self._together(self._tuning())
        rates = {name: self._best_rate(name) for name in MODELS}
        steps = self.args.steps or round(self.args.epochs * len(self.data.labels_train) / self.settings.batch)
        self.record |= {"rates": rates, "steps": steps}
        backbones = [
            self._member("classify", name, seed, steps, rates[name]) for seed in self._seeds for name in MODELS
        ]
        further = [member for each in backbones for member in self._after(each.name, each.seed)]
        self.needed = {member.backbone for member in further if not member.result.is_file()}
        # The backbones of the next seed begin before what comes after those of this one: nobody waits for them.
        self._together(sorted(backbones + further, key=lambda m: m.seed + (1.5 if m.part != "classify" else 0.0)))
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

    def _after(self, name: str, seed: int) -> list[Member]:
        """What begins from a trained classifier."""
        steps = {
            "segment": self.args.segment_epochs * (len(self.data.scenes_train) // self.settings.scene_batch or 1),
            "detect": self.args.detect_epochs * (int((~self.data.cells_test).sum()) // self.settings.cell_batch or 1),
            "map": self.args.map_epochs * (len(self.data.labels_train) // self.settings.batch or 1),
        }
        arms = [("map", arm) for arm in ARMS] if name == BASE else []
        wanted = [("detect", name), *arms, ("segment", name)]
        return [
            self._member(part, who, seed, max(1, round(steps[part])), RATES[part])
            for part, who in wanted
            if part in self.args.parts
        ]

    def _together(self, members: Sequence[Member]) -> None:
        """Train members, as many at a time as there are jobs, each as soon as the backbone that it needs is there."""
        waiting = [member for member in members if not self._read(member)]
        running: dict[int, tuple[BaseProcess, Member, Settings]] = {}
        while waiting or running:
            while len(running) < self.args.jobs and self._time_left() and (ready := _ready(waiting)):
                waiting.remove(ready)
                process, settings = self._start(ready)
                running[process.sentinel] = process, ready, settings
            if not running:
                break
            for sentinel in multiprocessing.connection.wait(list(running)):
                process, member, settings = running.pop(sentinel)  # pyright: ignore[reportArgumentType]
                process.join()
                if not self._read(member):
                    self._failed(member, settings, process.exitcode, waiting)
        self.left_out += [f"{each.part} {each.name} {each.seed}" for each in waiting]

    def _time_left(self) -> bool:
        return time.perf_counter() - self.began < self.args.seconds

    def _start(self, member: Member) -> tuple[BaseProcess, Settings]:
        """A process of its own for a member; forked, so that images are decoded and libraries imported once."""
        member.failure.unlink(missing_ok=True)
        if member.part == "classify":  # of other settings, if there is one
            shutil.rmtree(member.backbone, ignore_errors=True)
        known = _kind(member) in self.unrecorded
        settings = dataclasses.replace(self.settings, record=self.settings.record and not known)
        process = multiprocessing.get_context("fork").Process(
            target=run_one, args=(member, self.data, settings), daemon=True
        )
        process.start()
        return process, settings

    def _read(self, member: Member) -> bool:
        """Note the result of a member, if it has one, and its model where others have yet to begin from it."""
        if not member.result.is_file():
            return False
        row = json.loads(member.result.read_text(encoding="utf-8"))
        if row["steps"] != member.steps:
            return False
        if member.part == "classify" and member.backbone in self.needed and not member.backbone.is_dir():
            return False
        self._note(row)
        return True

    def _failed(self, member: Member, settings: Settings, code: int | None, waiting: list[Member]) -> None:
        """A member whose steps were recorded gets a second chance without."""
        why = member.failure.read_text(encoding="utf-8") if member.failure.is_file() else f"ended with code {code}"
        self._note({"part": member.part, "name": member.name, "seed": member.seed, "error": why})
        if settings.record:
            self.unrecorded.add(_kind(member))
            waiting.insert(0, member)

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


def _kind(member: Member) -> tuple[str, str]:
    """Members that are trained alike."""
    return "classify" if member.part == "tune" else member.part, member.name


def _ready(waiting: Sequence[Member]) -> Member | None:
    """The first whose backbone is there."""
    for member in waiting:
        if member.part in ("tune", "classify") or member.backbone.is_dir():
            return member
    return None


def run_one(member: Member, data: Data, settings: Settings) -> None:
    """One member, in a process of its own; its result or its failure goes to a file."""
    torch.set_num_threads(1)
    try:
        row = run(member, data, settings)
    except Exception as error:
        traceback.print_exc()
        member.failure.write_text(first_line(error), encoding="utf-8")
    else:
        write_json(member.result, row)


def _settings(args: argparse.Namespace) -> Settings:
    record = args.device == "cuda" and not args.eager
    if args.quick:
        small = {"size": 64, "batch": 8, "mapped_size": 64, "scene_size": 96, "scene_batch": 2, "cell_batch": 2}
        return Settings(args.device, record=record, **small)
    return Settings(args.device, args.size, args.batch, args.mapped_size, record=record)


def by_seed(rows: Sequence[dict[str, Any]], part: str, name: str) -> dict[int, dict[str, Any]]:
    own = [row for row in rows if row["part"] == part and row["name"] == name]
    return {row["seed"]: row for row in own if all(row.get(metric) is not None for metric in METRICS[part])}


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
    parser.add_argument("--parts", nargs="*", choices=DOWNSTREAM, default=list(DOWNSTREAM), help="after classification")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="models that are trained at a time")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin nothing new after this long")
    parser.add_argument("--epochs", type=float, default=20.0, help="of training from scratch")
    parser.add_argument("--steps", type=int, help="of training from scratch, in place of --epochs")
    parser.add_argument("--tuning-steps", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3], help="one alone is not tried out")
    parser.add_argument("--segment-epochs", type=float, default=25)
    parser.add_argument("--detect-epochs", type=float, default=12)
    parser.add_argument("--map-epochs", type=float, default=5)
    parser.add_argument("--size", type=int, default=128, help="pixels of the images in training from scratch")
    parser.add_argument("--mapped-size", type=int, default=192, help="the same in fine-tuning with Hi-Mapper")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--eager", action="store_true", help="record no CUDA graphs")
    parser.add_argument("--quick", action="store_true", help="a few images and steps of everything")
    parser.add_argument("--work", type=Path, help="keep backbones and results here; a second run goes on from them")
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
        print(summary(finite(Evidence(args, data, work).measure())))


if __name__ == "__main__":
    main()
