"""One method after the other on the same images: adapt a fresh copy of the model, train, score, measure the radii."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leafward.adapters import BlockScaleConfig, adapters, attach, load_encoder, save_pretrained, trainable_parameters
from leafward.adapters.encoders import Encoder, open_image
from leafward.adapters.layouts import ATTENTION, find_sites
from leafward.adapters.low_rank import LowRankConfig
from leafward.adapters.scores import radii, similarity
from leafward.engine import LoopConfig, Loss, OptimConfig, RunDirectory, fit
from leafward.errors import UsageError
from leafward.files import read_record, write_json
from leafward.recipes._devices import device_of
from leafward.recipes._hyperclip_radius import sweeps
from leafward.tasks.captions import readable
from leafward.tasks.fewshot import TEST, TRAIN, few_shot, seeded_split
from leafward.tasks.standard_sets import read_images

if TYPE_CHECKING:
    from leafward.recipes.hyperclip import Config

COMPARED = ("frozen", "block-scale", "orthogonal", "lora", "attention", "full")
FINE_TUNED = ("attention", "full")  # trained without an adapter, at a tenth of the learning rate


@dataclass(frozen=True)
class Method:
    name: str
    score: str

    @property
    def label(self) -> str:
        return self.name if self.score == "cosine" else f"{self.name}, {self.score}"


@dataclass(frozen=True)
class Data:
    """Files with labels, and which of them train and test."""

    files: list[Path]
    labels: Tensor
    names: tuple[str, ...]
    train: Tensor
    test: Tensor


def methods(config: Config) -> list[Method]:
    names = COMPARED if config.compare else (config.method,)
    scores = [config.score] + (["cosine"] if config.twin and config.score != "cosine" else [])
    return [Method(name, score) for name in names for score in scores]


def read(config: Config) -> Data:
    """The images of a run, with the split that they bring or a seeded one."""
    assert config.images is not None
    files, labels, names, split = read_images(config.images)
    target = torch.tensor(labels)
    parts = seeded_split(target) if split is None else torch.tensor(split)
    train, test = ((parts == part).nonzero().squeeze(1) for part in (TRAIN, TEST))
    if not len(train) or not len(test):
        raise UsageError(f"{config.images} has {len(train)} training and {len(test)} test images; both are needed")
    if config.shots is not None:
        train = few_shot(target, train, config.shots, config.seed)
    return Data(files, target, names, train, test)


def train(config: Config, method: Method, data: Data, run: RunDirectory, *, keep: bool) -> dict[str, Any]:
    """Train and score one method with one seed, or read what an earlier attempt found.

    `keep`: what the method of the configuration learns goes to the run directory.
    """
    folder = run.checkpoints / f"{method.label.replace(', ', '-')}-seed-{config.seed}"
    done = folder / "scores.json"
    if done.is_file():
        return read_record(done)
    assert config.model is not None
    encoder = load_encoder(config.model)
    if not encoder.has_images:
        raise UsageError(f"model {config.model} has no image side; use a CLIP or SigLIP model")
    dual = Dual(encoder, config, method, data.names)
    adapt(encoder.model, config, method.name)
    dual.to(device_of(config.device))
    task = _Images(encoder, data)
    before = task.features(dual, data.test, config.batch)
    if trainable_parameters(dual)[0]:
        loop = LoopConfig(
            steps=config.steps,
            batch_size=min(config.batch, len(data.train)),
            seed=config.seed,
            checkpoint_every=config.steps,
            keep_last=1,
            workers=config.workers,
            device=config.device,
        )
        rate = config.lr * (0.1 if method.name in FINE_TUNED else 1.0)
        optim = OptimConfig(lr=rate, weight_decay=config.weight_decay, warmup_steps=min(20, config.steps // 10))
        cell = RunDirectory.create(
            folder / "training", {"method": method.label}, resume=(folder / "training" / "config.yaml").is_file()
        )
        fit(dual, task, loop, optim, cell)
    row = measure(config, method, dual, before, task.features(dual, data.test, config.batch), data.labels[data.test])
    if keep and (method.name, method.score) == (config.method, config.score):
        if adapters(encoder.model):
            save_pretrained(encoder.model, run.path / "adapter")
        elif row["trainable"]:
            encoder.save_pretrained(run.path / "model")
    write_json(done, row)
    return row


def adapt(model: nn.Module, config: Config, name: str) -> None:
    """Leave trainable in `model` what a method trains."""
    if adapters(model):
        raise UsageError(
            f"model {config.model} holds an adapter already; train on the merged one: leafward export {config.model} "
            "--to DIR --merged"
        )
    model.requires_grad_(False)
    if name in ("block-scale", "orthogonal"):
        constraint = "orthogonal" if name == "orthogonal" else config.constraint
        scale = BlockScaleConfig(config.block_size, encoder=config.encoder, constraint=constraint)
        attach(model, scale, base_model=config.model)
    elif name == "lora":
        rank = config.rank or equal_rank(model, config)
        attach(model, LowRankConfig(rank, encoder=config.encoder, seed=config.seed), base_model=config.model)
    elif name == "attention":
        for site in find_sites(model, ATTENTION, config.encoder):
            model.get_submodule(site.holder).get_parameter(site.parameter).requires_grad_(True)
    elif name == "full":
        model.requires_grad_(True)


def equal_rank(model: nn.Module, config: Config) -> int:
    """The rank at which LoRA has about as many parameters as free blocks: Σ r (in + out) = Σ in · block."""
    sites = find_sites(model, ATTENTION, config.encoder)
    blocks = sum(site.width * config.block_size for site in sites)
    return max(1, round(blocks / sum(site.width + site.stop - site.start for site in sites)))


class Dual(nn.Module):
    """A dual encoder with the texts of its classes: pixels (B, 3, H, W) -> features (B, d), (C, d), logits (B, C)."""

    def __init__(self, encoder: Encoder, config: Config, method: Method, names: tuple[str, ...]) -> None:
        super().__init__()
        self.encoder, self.config, self.method = encoder, config, method
        tokens = encoder.tokenize([config.template.replace("{}", readable(name)) for name in names])
        self.token_names = list(tokens)
        for name, tensor in tokens.items():
            self.register_buffer(f"token_{name}", tensor, persistent=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image, text = self.encoder._image(pixels).float(), self.text()
        return image, text, self.logits(image, text)

    def text(self) -> Tensor:
        return self.encoder._text({name: self.get_buffer(f"token_{name}") for name in self.token_names}).float()

    def logits(self, image: Tensor, text: Tensor) -> Tensor:
        score: Any = self.method.score
        return self.config.scale * similarity(image, text, score, c=self.config.c, weight=self.config.radius_weight)


class _Images:
    """The training images as a task; a sample is its pixels and label."""

    # Full fine-tuning leaves what the scores do not use without a gradient.
    unused_parameters = True

    def __init__(self, encoder: Encoder, data: Data) -> None:
        self.encoder, self.data = encoder, data

    @property
    def dataset(self) -> _Images:
        return self

    def __len__(self) -> int:
        return len(self.data.train)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = int(self.data.train[index])
        return self._pixels([row])[0], self.data.labels[row]

    def _pixels(self, rows: list[int]) -> Tensor:
        return self.encoder.prepare_images([open_image(self.data.files[row]) for row in rows])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        pixels, labels = batch
        _, _, logits = model(pixels)
        total = F.cross_entropy(logits, labels, reduction="sum")
        return Loss(total, len(labels), {"accuracy": (logits.argmax(dim=1) == labels).float().sum()})

    @torch.no_grad()
    def features(self, dual: Dual, rows: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Features of images (N, d) and of the classes (C, d), before any normalisation."""
        device = next(dual.parameters()).device
        parts = [dual.encoder._image(self._pixels(part.tolist()).to(device)).float() for part in rows.split(batch)]
        return torch.cat(parts).cpu(), dual.text().cpu()


def measure(
    config: Config,
    method: Method,
    dual: Dual,
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
    labels: Tensor,
) -> dict[str, Any]:
    """Accuracy before and after, radii before and after, and the radius sweep with every score."""

    def accuracy(features: tuple[Tensor, Tensor]) -> float:
        return 100.0 * float((dual.logits(*features).argmax(dim=1) == labels).double().mean())

    image, text = after
    return {
        "method": method.label,
        "name": method.name,
        "score": method.score,
        "seed": config.seed,
        "trainable": trainable_parameters(dual)[0],
        "accuracy_before": accuracy(before),
        "accuracy": accuracy(after),
        "images": len(labels),
        "radius": {
            "image": {"before": radii(before[0]).to_dict(), "after": radii(image).to_dict()},
            "text": {"before": radii(before[1]).to_dict(), "after": radii(text).to_dict()},
        },
        "sweep": sweeps(image, text, labels, c=config.c, weight=config.radius_weight),
    }
