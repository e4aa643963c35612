"""Open-vocabulary segmentation on real photos and masks: frozen, block-diagonal, LoRA, OFT and fine-tuned encoders.

    python benchmarks/hyperclip_evidence.py --part pretrain --data DIR --minilm DIR --encoder DIR       first of all
    python benchmarks/openvocab_evidence.py --data DIR --minilm DIR --encoder DIR --out openvocab.json
    python benchmarks/openvocab_evidence.py --table openvocab.json

The encoder is the small dual encoder of `pretrain`: an image tower trained here on a few thousand pictures and MiniLM
as the text tower; there are no CLIP weights in it. On top of it the cost aggregation of
`leafward.systems.hyperclip.segment.task` is trained on street scenes (CamVid) and photos (COCO) by turns. Some
names of either set are held out: their pixels are ignored in training and the names never given. Tested on other
scenes, in one view of the whole,
with all names of the set: mean IoU over the seen and over the held-out names, and the accuracy on the pixels
of held-out classes when only those names are offered.

Every member takes the same steps on the same crops. The learning rate of the encoder is chosen from --ratios of the
decoder's, by the validation scenes of CamVid with the first seed. Written after every member (--out); several
processes may share the members by --methods.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from _dual_data import TEST, TRAIN, VALIDATION, Pictures, crops, decoded, load, normalised
from _dual_encoder import adapt, descend, open_encoder
from _dual_members import METHODS, SCORES, Member, curvature, earlier, plan, read_members, tables, train_all
from leafward.data.scenes import IGNORED, confusion
from leafward.encoders.encoder import HuggingFaceEncoder
from leafward.systems.hyperclip.segment.task import Segmenter, mask_loss

TEMPLATE = "a photo of a {}."
CURVATURE = 0.1
SIZE, VIEW, BATCH, CHANNELS, WINDOW, RATE = 96, 128, 8, 32, 6, 1e-3
"""Side of crops and of the view that is scored (a crop shows three quarters on average), scenes of a batch; decoder."""
MOST_NAMES = 24
"""Names in one step, at most: those that the scenes have and others by chance."""
FEWEST = 400
"""Pixels that a name needs in the test photos to be scored."""
HELD_OUT = {
    "camvid": ("sidewalk", "fence", "bicyclist"),
    "coco": ("grass", "sea", "snow", "bus", "elephant", "couch", "fence"),
}
SIZES = {"camvid": (120, 160), "coco": (144, 144)}
NUMBERS = (
    "camvid_seen",
    "camvid_held_out",
    "camvid_among_held_out",
    "coco_seen",
    "coco_held_out",
    "coco_among_held_out",
)
KEY = "seen"
"""The number of the validation scenes that decides between learning rates."""


def main() -> None:
    args = arguments()
    if args.table:
        print(tables(read_members(args.table), "scenes", NUMBERS, KEY))
        return
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    few = 8 if args.quick else None
    encoder = open_encoder(args.encoder, args.minilm, device)
    scenes = {name: Scenes.of(load(args.data, name).few(few), name, encoder, device) for name in HELD_OUT}
    members, steps = earlier(args.out), 2 if args.quick else args.steps

    def ratios(method: str) -> list[float]:
        return args.ratios[:1] if method == "frozen" else args.ratios

    order = plan(args.methods, args.scores, args.seeds, ratios, members, KEY)
    train_all(args, order, functools.partial(train_member, encoder, scenes, steps, device), members, device)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the original or the packed data")
    parser.add_argument("--minilm", type=Path, help="directory of all-MiniLM-L6-v2")
    parser.add_argument("--encoder", type=Path, help="directory of the small dual encoder")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--scores", nargs="+", choices=SCORES, default=SCORES)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.075, 0.5], help="the encoder's rates, relative")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no member after this time")
    parser.add_argument("--eager", action="store_true", help="record no CUDA graphs")
    parser.add_argument("--quick", action="store_true", help="two steps on few scenes, to see that it runs")
    parser.add_argument("--out", type=Path, default=None, help="file for the result; a second run goes on from it")
    parser.add_argument("--table", type=Path, nargs="+", default=None, help="print the table of result files")
    args = parser.parse_args()
    if args.table is None and (args.data is None or args.encoder is None):
        parser.error("--data and --encoder are needed")
    return args


@dataclass(frozen=True)
class Scenes:
    """Scenes (N, 3, H, W) and masks (N, 1, H, W), both of bytes; a mask of 255 is nobody's."""

    images: Tensor
    masks: Tensor
    part: np.ndarray
    names: list[str]
    held_out: list[int]
    tokens: dict[str, Tensor]
    """Of all names."""

    @classmethod
    def of(cls, pictures: Pictures, name: str, encoder: HuggingFaceEncoder, device: str) -> Scenes:
        """Classes are numbered through; a number without a name, and what no training scene has, is ignored."""
        assert pictures.masks is not None
        images = decoded(pictures.images, SIZES[name], device)
        masks = decoded(pictures.masks, SIZES[name], device, mask=True)
        counts = torch.bincount(masks.flatten().long(), minlength=256)
        there = [k for k, word in enumerate(pictures.names) if word and counts[k]]
        number = torch.full((256,), 255, dtype=torch.uint8, device=device)
        number[there] = torch.arange(len(there), dtype=torch.uint8, device=device)
        names = [pictures.names[k] for k in there]
        held_out = [names.index(word) for word in HELD_OUT[name] if word in names]
        tokens = {key: x.to(device) for key, x in encoder.tokenize([TEMPLATE.format(word) for word in names]).items()}
        return cls(images, number[masks.long()], pictures.part, names, held_out, tokens)

    def rows(self, part: int) -> np.ndarray:
        return np.flatnonzero(self.part == part)

    @property
    def seen(self) -> list[int]:
        return [k for k in range(len(self.names)) if k not in self.held_out]

    def batch(self) -> tuple[Tensor, ...]:
        """Crops (B, 3, s, s), masks (B, s, s) of numbers among some seen names, and the tokens of those.

        There are always as many names, those in the crops first, so that steps can be recorded.
        """
        rows = self.rows(TRAIN)
        some = torch.from_numpy(rows[torch.randint(len(rows), (BATCH,)).numpy()])
        pixels, masks = crops(self.images[some], SIZE, 0.5, self.masks[some])
        assert masks is not None
        present = set(masks.unique().tolist())
        chance = torch.randperm(len(self.seen)).tolist()
        words = sorted(sorted((self.seen[k] for k in chance), key=lambda k: k not in present)[:MOST_NAMES])
        number = torch.full((256,), IGNORED, device=masks.device)
        number[words] = torch.arange(len(words), device=masks.device)
        return pixels, number[masks], *(tokens[words] for tokens in self.tokens.values())


def train_member(
    encoder: HuggingFaceEncoder,
    scenes: dict[str, Scenes],
    steps: int,
    device: str,
    method: str,
    score: str,
    seed: int,
    ratio: float,
    record: bool,
) -> Member:
    began = time.perf_counter()
    torch.manual_seed(seed)
    kind, c = curvature(score, CURVATURE)
    options: dict[str, Any] = {"score": kind, "c": c, "templates": (TEMPLATE,)}
    model = Segmenter(copy.deepcopy(encoder), channels=CHANNELS, window=WINDOW, **options).to(device)
    trained = adapt(model.encoder.model, method, seed)
    train(model, scenes, steps, ratio, device, record)
    tested = {name: measure(model, each, TEST) for name, each in scenes.items()}
    return {
        "part": "scenes",
        "method": method,
        "score": score,
        "seed": seed,
        "rate": ratio,
        "steps": steps,
        "trainable": trained,
        "validation": measure(model, scenes["camvid"], VALIDATION),
        "test": {f"{name}_{key}": value for name, found in tested.items() for key, value in found.items()},
        "seconds": round(time.perf_counter() - began, 1),
    }


def train(model: Segmenter, scenes: dict[str, Scenes], steps: int, ratio: float, device: str, record: bool) -> None:
    turns = list(scenes.values())
    keys = list(turns[0].tokens)

    def loss(pixels: Tensor, masks: Tensor, *tokens: Tensor) -> Tensor:
        text = model.encoder._text(dict(zip(keys, tokens, strict=True))).float()
        found = mask_loss(model(pixels, text), masks)
        return found.total / found.count

    groups = [{"params": list(model.decoder.parameters()), "lr": RATE}]
    inside = [parameter for parameter in model.encoder.parameters() if parameter.requires_grad]
    groups += [{"params": inside, "lr": RATE * ratio}] if inside else []
    model.train()
    descend(lambda step: turns[step % len(turns)].batch(), loss, groups, steps, device, record=record)


@torch.no_grad()
def measure(model: Segmenter, scenes: Scenes, part: int) -> dict[str, float]:
    """Mean IoU, in per cent, of the seen and the held-out names among all; accuracy among the held-out names alone."""
    model.eval()
    count, held = len(scenes.names), torch.tensor(scenes.held_out, device=scenes.images.device)
    text = model.text(scenes.names)
    table = torch.zeros(count, count, dtype=torch.int64)
    right = total = 0
    for some in torch.from_numpy(scenes.rows(part)).split(BATCH):
        views = F.interpolate(normalised(scenes.images[some]), (VIEW, VIEW), mode="bilinear", antialias=True)
        logits = F.interpolate(model(views, text), scenes.masks.shape[-2:], mode="bilinear")
        masks = scenes.masks[some, 0].long()
        masks = torch.where(masks == 255, IGNORED, masks)
        table += confusion(logits.argmax(dim=1).cpu(), masks.cpu(), count)
        own = torch.isin(masks, held)
        among = held[logits[:, held].argmax(dim=1)]
        right, total = right + int((among == masks)[own].sum()), total + int(own.sum())
    own = table.sum(dim=1)
    iou = table.diagonal() / (own + table.sum(dim=0) - table.diagonal()).clamp_min(1)
    enough = own >= FEWEST

    def mean(names: list[int]) -> float:
        return 100.0 * float(iou[[k for k in names if enough[k]]].double().mean())

    return {
        "seen": mean(scenes.seen),
        "held_out": mean(scenes.held_out),
        "among_held_out": 100.0 * right / max(total, 1),
    }


if __name__ == "__main__":
    main()
