"""Does Radial Embedding teach a text encoder the hierarchy of captions, and what does it cost elsewhere?

    python benchmarks/radial_evidence.py --model DIR --data DIR --out radial.json                   one GPU, minutes
    python benchmarks/radial_evidence.py --model DIR --data DIR --captions 1500 --seeds 1            one core
    python benchmarks/radial_evidence.py --model DIR --data DIR --rates 1e-4 3e-5 --no-search        rates as given
    python benchmarks/radial_evidence.py --model DIR --data DIR --frozen                             zero-shot alone

DIR of the data holds hierarcaps_test_expanded.csv.gz, hierarcaps_test.jsonl (or .parquet), hyperlex-data.zip and
breeds_hierarchy/. The text encoder has no image side: a second human caption of the same image stands for the image in
path retrieval, and in BREEDS the names of the classes are assigned to the nodes above them. Of the expanded chains
those that share no image with the test set are learned from; a twentieth of them, by image, is kept aside to choose
each loss's learning rate by its own objective. The frozen model, Radial Embedding and the entailment-cone loss, each
in flat and in hyperbolic space, are then scored on the same test chains. What is found is written to the file of --out
after every trained model, so that a run that is cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leafward.config import replace
from leafward.encoders.encoder import Encoder, load_encoder, merge_adapters
from leafward.encoders.zeroshot import class_vectors
from leafward.engine import DataOrder, RunDirectory, train_loop
from leafward.engine.loop import to_device
from leafward.files import finite, write_json
from leafward.systems.radial import breeds
from leafward.systems.radial.config import Config
from leafward.systems.radial.loss import RadialModel
from leafward.systems.radial.objective import RadialConfig
from leafward.systems.radial.suite import Suite, load_suite, score_suite
from leafward.systems.radial.task import CaptionData, RadialTask
from leafward.systems.radial.train import captions_of, prepare, split

#: the two rivals choose their learning rate; the twin of each in the other geometry takes it over
RIVALS = (RadialConfig(loss="radial", geometry="euclidean"), RadialConfig(loss="cone", geometry="lorentz"))
TWIN = {"euclidean": "lorentz", "lorentz": "euclidean"}
VALIDATION = 0.05


def main() -> None:
    args = arguments()
    torch.set_float32_matmul_precision("high")
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = settings(args)
    encoder = load_encoder(args.model).to(device)
    assert config.data.test is not None
    suite = load_suite(config.data.test, encoder, second=config.data.source, words=config.data.hyperlex)
    tree = breeds.read_breeds(args.data / "breeds_hierarchy")
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "frozen": scores(suite, tree, encoder, RadialConfig()),
    }
    log(began, f"frozen: {found['frozen']}")

    def keep(**news: Any) -> None:
        found.update(news, seconds=round(time.perf_counter() - began, 1))
        if args.out is not None:
            write_json(args.out, found)

    keep()
    if not args.frozen:
        learned, watched = split(captions_of(config), VALIDATION, 0)
        learned = learned[: args.captions]
        data, held = CaptionData(learned, encoder), CaptionData(watched[: args.validation], encoder)
        keep(captions={"learned": len(data), "validation": len(held), "texts": len(data.texts)})
        log(began, f"captions: {found['captions']}")
        trained = Trained(config, copy.deepcopy(encoder).cpu(), suite, tree, data, held, device)
        compare(args, trained, began, lambda methods: keep(methods=methods))
    print(json.dumps(finite(found), indent=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="directory of a sentence encoder")
    parser.add_argument("--data", required=True, type=Path, help="directory of the data")
    parser.add_argument("--captions", type=int, default=None, help="learn from the first N chains only")
    parser.add_argument("--validation", type=int, default=1000, help="validation chains, at most")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4], help="learning rates to try")
    parser.add_argument(
        "--no-search", action="store_true", help="--rates are those of the radial and the cone loss; one is for both"
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--train", choices=("full", "lora", "blocks"), default="full")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further run after this time")
    parser.add_argument("--frozen", action="store_true", help="score the frozen model and stop")
    parser.add_argument("--out", type=Path, default=None, help="file for the result, rewritten after every training")
    args = parser.parse_args()
    if args.no_search and len(args.rates) not in (1, len(RIVALS)):
        parser.error(f"--no-search needs one rate, or one for each of the {len(RIVALS)} losses, got {len(args.rates)}")
    return args


def settings(args: argparse.Namespace) -> Config:
    tests = [args.data / f"hierarcaps_test{ending}" for ending in (".jsonl", ".parquet")]
    return replace(
        Config(),
        model=str(args.model),
        data=args.data / "hierarcaps_test_expanded.csv.gz",
        test=next(path for path in tests if path.is_file()),
        hyperlex=args.data / "hyperlex-data.zip",
        train=args.train,
        batch_size=args.batch,
        warmup_ratio=0.1,
        schedule="cosine",
        clip_norm=1.0,
        precision="bfloat16" if torch.cuda.is_available() else "float32",
        checkpoint_every=10**9,
    )


@dataclasses.dataclass
class Trained:
    """Trains the frozen encoder anew for each objective, rate and seed, and scores it."""

    config: Config
    frozen: Any
    suite: Suite
    tree: breeds.Breeds
    data: CaptionData
    held: CaptionData
    device: str

    def __call__(self, objective: RadialConfig, rate: float, seed: int) -> tuple[RadialModel, float]:
        """The trained model, adapters merged, and its objective on the validation chains."""
        config = replace(self.config, objective=objective, lr=rate, seed=seed)
        torch.manual_seed(seed)
        encoder = copy.deepcopy(self.frozen).to(self.device)
        model, task = prepare(config, encoder, self.data)
        with tempfile.TemporaryDirectory() as folder:
            directory = RunDirectory.create(Path(folder) / "run", config, recipe="radial")
            train_loop(model, task, config.loop, config.optim, directory)
        merge_adapters(encoder)
        return model, self.objective(model, objective)

    @torch.no_grad()
    def objective(self, model: RadialModel, objective: RadialConfig) -> float:
        task = RadialTask(self.held, objective)
        order = DataOrder(len(self.held), 64, 0)
        total = count = 0.0
        for step in range(len(self.held) // 64):
            batch = self.held.collate([self.held[i] for i in order.indices(step)])
            loss = task.loss(model, to_device(batch, torch.device(self.device)))
            total, count = total + float(loss.total), count + float(loss.count)
        return total / count

    def scores(self, model: RadialModel, objective: RadialConfig) -> dict[str, float]:
        return scores(self.suite, self.tree, model.encoder, objective)


def scores(suite: Suite, tree: breeds.Breeds, encoder: Encoder, objective: RadialConfig) -> dict[str, float]:
    nodes = class_vectors(encoder, tree.words).cpu()
    leaves = tree.tax.leaves
    levels = breeds.score(tree, nodes[torch.from_numpy(leaves)], leaves, nodes, with_leaf=False)
    found = score_suite(suite, encoder, None, objective.geometry, objective.c)
    return found | {"breeds_names": levels["mean_accuracy"]}


def compare(args: argparse.Namespace, trained: Trained, began: float, keep: Callable[[dict[str, Any]], None]) -> None:
    """Rates for each rival, then all seeds of both; then their twins, as far as the time goes.

    `keep` gets the summary anew after every training.
    """
    runs: dict[str, list[dict[str, float]]] = {}
    chosen: dict[str, Any] = {}
    plan, left_out = [], []

    def summary() -> dict[str, Any]:
        found = {name: chosen[name] | {"scores": summarise(several)} for name, several in runs.items()}
        return found | ({"left_out": left_out} if left_out else {})

    for place, rival in enumerate(RIVALS):
        name, tried = name_of(rival), {}
        for rate in [args.rates[place % len(args.rates)]] if args.no_search else args.rates:
            model, value = trained(rival, rate, 0)
            tried[rate] = (value, trained.scores(model, rival))
            log(began, f"{name} lr {rate:g}: objective {value:.4f}, {tried[rate][1]}")
            best = min(tried, key=lambda rate: tried[rate][0])
            chosen[name] = {"lr": best, "objectives": {f"{rate:g}": tried[rate][0] for rate in tried}}
            runs[name] = [tried[best][1]]
            keep(summary())
        lr = chosen[name]["lr"]
        twin = replace(rival, geometry=TWIN[rival.geometry])
        chosen[name_of(twin)] = {"lr": lr}
        plan += [(0, rival, lr, seed) for seed in range(1, args.seeds)]
        plan += [(1, twin, lr, seed) for seed in range(args.seeds)]
    for _, objective, rate, seed in sorted(plan, key=lambda entry: entry[0]):
        if time.perf_counter() - began > args.seconds:
            left_out.append(f"{name_of(objective)} seed {seed}")
        else:
            model, _ = trained(objective, rate, seed)
            runs.setdefault(name_of(objective), []).append(trained.scores(model, objective))
            log(began, f"{name_of(objective)} seed {seed}: {runs[name_of(objective)][-1]}")
        keep(summary())


def name_of(objective: RadialConfig) -> str:
    return f"{objective.loss}, {objective.geometry}"


def summarise(several: list[dict[str, float]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of every number."""
    found = {}
    for name in several[0]:
        values = [each[name] for each in several]
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        found[name] = {"mean": float(np.mean(values)), "sd": spread, "seeds": len(values)}
    return found


def log(began: float, text: str) -> None:
    print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
