"""Block-diagonal adapters against LoRA, OFT, attention-only and full fine-tuning, and with the Lorentz score.

    python benchmarks/hyperclip_evidence.py --part pretrain --data DIR --minilm DIR --encoder DIR       first of all
    python benchmarks/hyperclip_evidence.py --part captions --data DIR --minilm DIR --out captions.json
    python benchmarks/hyperclip_evidence.py --part clothing --data DIR --minilm DIR --encoder DIR --out clothing.json
    python benchmarks/hyperclip_evidence.py --table captions.json clothing.json
    python benchmarks/hyperclip_evidence.py --pack SMALL --data DIR                                     smaller data

captions: MiniLM, a real sentence encoder, is brought to the real CLIP ViT-B/32 features of 1,000 Flickr8k photos by
their captions; every method trains the same linear projection, the adapters beside it. Recall among 250 held-out
pairs; each seed has its own split. clothing: the small dual encoder of `pretrain` (an image tower trained here on a few
thousand pictures, MiniLM as the text tower; no CLIP weights) is adapted to ten classes of clothes.

All members take the same steps on the same data in the same order. Each method chooses its learning rate by the
validation part with the first seed. With the cosine and the Lorentz distance the scale of the logits is learned from
the same spread. Results are written after every member (--out); several processes may share the members by --methods.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _dual_data import TEST, TRAIN, VALIDATION, crops, decoded, load, normalised, pack
from _dual_encoder import NORM, SIDE, adapt, descend, open_encoder, open_text, pretrain
from _dual_members import METHODS, SCORES, curvature, earlier, plan, read_members, tables, train_all
from leafward.encoders.scores import similarity

CURVATURE = 0.1
SCALE = 20.0
"""Scale of the cosine's logits at the start."""
HEADS = 1e-3
"""Learning rate of the projection and the scale, whatever that of the adapter."""
EVAL_BATCH = 256
NUMBERS = {"captions": ("r1", "r5"), "clothing": ("accuracy",)}
"""The numbers of the table; the last decides between learning rates."""


def main() -> None:
    args = arguments()
    if args.table:
        members = read_members(args.table)
        parts = [part for part in NUMBERS if any(member["part"] == part for member in members)]
        print("\n\n".join(tables(members, part, NUMBERS[part], NUMBERS[part][-1]) for part in parts))
        return
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.pack is not None:
        pack(args.data, args.pack)
    elif args.part == "pretrain":
        steps, most = (2, 64) if args.quick else (args.steps or 3000, None)
        record = device == "cuda" and not args.eager
        found = pretrain(args.data, args.minilm, args.encoder, device, steps, args.seconds, most, record)
        print(json.dumps(found, indent=2))
    else:
        steps = 2 if args.quick else args.steps or 300
        part = Captions(args, device) if args.part == "captions" else Clothing(args, device)
        Comparison(args, part, device, steps).run()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("pretrain", "captions", "clothing"), default="captions")
    parser.add_argument("--data", type=Path, help="folder of the original or the packed data")
    parser.add_argument("--minilm", type=Path, help="directory of all-MiniLM-L6-v2")
    parser.add_argument("--encoder", type=Path, help="directory of the small dual encoder")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--scores", nargs="+", choices=SCORES, default=SCORES)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3], help="rates to choose from")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None, help="default 300; 3,000 of pretrain")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no member after this time")
    parser.add_argument("--eager", action="store_true", help="record no CUDA graphs")
    parser.add_argument("--quick", action="store_true", help="two steps of everything, to see that it runs")
    parser.add_argument("--out", type=Path, default=None, help="file for the result; a second run goes on from it")
    parser.add_argument("--table", type=Path, nargs="+", default=None, help="print the tables of result files")
    parser.add_argument("--pack", type=Path, default=None, help="write the data small to this folder")
    args = parser.parse_args()
    if args.table is None and args.data is None:
        parser.error("--data is missing")
    return args


@dataclass
class Trial:
    """One member in the making: what it trains and how it is scored."""

    model: nn.Module
    heads: list[nn.Parameter]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    scores: Callable[[int], dict[str, float]]
    """By part, validation or test."""


class Logits(nn.Module):
    """Scaled scores of images for texts; the learned scale begins so that the logits spread as those of the cosine."""

    def __init__(self, score: str, image: Tensor, text: Tensor) -> None:
        super().__init__()
        kind, c = curvature(score, CURVATURE)
        self.options: dict[str, Any] = {"score": kind, "c": c}
        spread = [float(similarity(image, text, **each).std()) for each in ({}, self.options)]
        self.log_scale = nn.Parameter(torch.tensor(math.log(SCALE * spread[0] / spread[1]), device=image.device))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return self.log_scale.exp() * similarity(image.float(), text.float(), **self.options)


class Captions:
    """MiniLM texts to CLIP's image features of 1,000 photos, 600 to train on, 150 to validate, 250 to test."""

    name = "captions"
    trains_heads = True

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.device = device
        folder = args.data / "clip_vitb32_features"
        folder = folder if folder.is_dir() else args.data
        features = np.load(folder / "flickr8k_image_1000x512_f16.npy").astype(np.float32)
        images = torch.from_numpy(features).to(device)
        self.images = NORM * images / images.norm(dim=1).mean()  # one factor for all: radii still differ
        self.encoder = open_text(args.minilm, device)
        captions = json.loads((folder / "flickr8k_captions_1000.json").read_text(encoding="utf-8"))
        self.tokens = {name: x.to(device) for name, x in self.encoder.tokenize(captions).items()}
        self.ends = (20, 30) if args.quick else (600, 750)
        self.last = 50 if args.quick else len(captions)

    def trial(self, method: str, score: str, seed: int) -> tuple[Trial, int]:
        torch.manual_seed(seed)
        order = torch.randperm(len(self.images))[: self.last]
        rows: dict[int, Tensor] = dict(zip((TRAIN, VALIDATION, TEST), order.tensor_split(self.ends), strict=True))
        encoder = copy.deepcopy(self.encoder)
        trained = adapt(encoder.model, method, seed)
        projection = nn.Linear(384, self.images.shape[1], bias=False).to(self.device)

        def text(part: Tensor) -> Tensor:
            return projection(encoder._text({name: x[part] for name, x in self.tokens.items()}))

        def batch(_: int) -> tuple[Tensor, ...]:
            part = rows[TRAIN][torch.randperm(len(rows[TRAIN]))[:128]].to(self.device)
            return self.images[part], *(tokens[part] for tokens in self.tokens.values())

        with torch.no_grad():  # texts begin as long as the images are
            projection.weight *= NORM / text(rows[TRAIN]).norm(dim=1).mean()
            logits = Logits(score, self.images[rows[TRAIN]], text(rows[TRAIN]))

        def loss(images: Tensor, *tokens: Tensor) -> Tensor:
            found = logits(images, projection(encoder._text(dict(zip(self.tokens, tokens, strict=True)))))
            own = torch.arange(len(images), device=self.device)
            return 0.5 * (F.cross_entropy(found, own) + F.cross_entropy(found.mT, own))

        @torch.no_grad()
        def scores(part: int) -> dict[str, float]:
            found = logits(self.images[rows[part]], text(rows[part]))
            own = found.diagonal()
            ranks = torch.cat([(found > own[:, None]).sum(dim=1), (found.mT > own[:, None]).sum(dim=1)])
            return {f"r{k}": 100.0 * float((ranks < k).float().mean()) for k in (1, 5)}

        heads = [projection.weight, logits.log_scale]
        return Trial(encoder.model, heads, batch, loss, scores), trained


class Clothing:
    """The small dual encoder on ten classes of clothes, with the parts that the data bring."""

    name = "clothing"
    trains_heads = False
    """Of the frozen encoder nothing is trained: it is the zero-shot model."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.device = device
        self.encoder = open_encoder(args.encoder, args.minilm, device)
        data = load(args.data, "clothing").few(64 if args.quick else None)
        self.images = decoded(data.images, (SIDE, SIDE), device)
        self.labels = torch.from_numpy(data.labels).to(device)
        self.rows = {part: torch.from_numpy(data.rows(part)).to(device) for part in (TRAIN, VALIDATION, TEST)}
        tokens = self.encoder.tokenize([f"a photo of a {name}." for name in data.names])
        self.tokens = {name: x.to(device) for name, x in tokens.items()}

    def trial(self, method: str, score: str, seed: int) -> tuple[Trial, int]:
        torch.manual_seed(seed)
        encoder = copy.deepcopy(self.encoder)
        trained = adapt(encoder.model, method, seed)
        few = self.rows[TRAIN][:EVAL_BATCH]
        with torch.no_grad():
            logits = Logits(score, encoder._image(normalised(self.images[few])), encoder._text(self.tokens))

        def batch(_: int) -> tuple[Tensor, ...]:
            part = self.rows[TRAIN][torch.randint(len(self.rows[TRAIN]), (64,), device=self.device)]
            return crops(self.images[part], SIDE, 0.6)[0], self.labels[part]

        def loss(pixels: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits(encoder._image(pixels), encoder._text(self.tokens)), labels)

        @torch.no_grad()
        def scores(part: int) -> dict[str, float]:
            text = encoder._text(self.tokens)
            right = [
                logits(encoder._image(normalised(self.images[some])), text).argmax(dim=1) == self.labels[some]
                for some in self.rows[part].split(EVAL_BATCH)
            ]
            return {"accuracy": 100.0 * float(torch.cat(right).float().mean())}

        return Trial(encoder.model, [logits.log_scale], batch, loss, scores), trained


@dataclass
class Comparison:
    """All members of one part, in an order in which every method has a result early."""

    args: argparse.Namespace
    part: Captions | Clothing
    device: str
    steps: int

    def run(self) -> None:
        members = earlier(self.args.out)
        key = NUMBERS[self.part.name][-1]
        order = plan(self.args.methods, self.args.scores, self.args.seeds, self.rates, members, key)
        train_all(self.args, order, self.train, members, self.device)

    def rates(self, method: str) -> Sequence[float | None]:
        if method == "frozen":
            return [None] if self.part.trains_heads else []
        # Weights themselves are trained more slowly than adapters that begin at nothing.
        share = 0.1 if method in ("attention", "full") else 1.0
        return [rate * share for rate in self.args.rates]

    def train(self, method: str, score: str, seed: int, rate: float | None, record: bool) -> dict[str, Any]:
        began = time.perf_counter()
        trial, trained = self.part.trial(method, score, seed)
        inside = [parameter for parameter in trial.model.parameters() if parameter.requires_grad]
        groups = [{"params": trial.heads, "lr": HEADS, "weight_decay": 0.0}]
        groups += [{"params": inside, "lr": rate}] if inside else []
        if self.rates(method):
            descend(trial.batch, trial.loss, groups, self.steps, self.device, record=record)
        return {
            "part": self.part.name,
            "method": method,
            "score": score,
            "seed": seed,
            "rate": rate,
            "steps": self.steps,
            "trainable": trained,
            "validation": trial.scores(VALIDATION),
            "test": trial.scores(TEST),
            "seconds": round(time.perf_counter() - began, 1),
        }


if __name__ == "__main__":
    main()
