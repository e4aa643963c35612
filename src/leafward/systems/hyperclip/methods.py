"""One method after the other on the same images: adapt a fresh copy of the model, train, score, measure the radii."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leafward.adapters import BlockScaleConfig, adapters, attach, save_pretrained, trainable_parameters
from leafward.adapters.layouts import ATTENTION, find_sites
from leafward.adapters.low_rank import LowRankConfig
from leafward.data.captions import readable
from leafward.data.fewshot import TEST, TRAIN, few_shot, seeded_split
from leafward.data.image_files import read_image
from leafward.data.standard_sets import read_images
from leafward.encoders import load_encoder
from leafward.encoders.encoder import Encoder
from leafward.encoders.scores import radii, similarity
from leafward.engine import Cluster, LoopConfig, Loss, OptimConfig, RunDirectory, train_loop
from leafward.engine.devices import type_of
from leafward.engine.experiment import batch_of
from leafward.engine.run import MODEL
from leafward.errors import UsageError
from leafward.geometry.scalars import wide
from leafward.systems.hyperclip.figures import sweeps

if TYPE_CHECKING:
    from leafward.systems.hyperclip.config import Config

COMPARED = ("frozen", "block-scale", "orthogonal", "lora", "attention", "full")
ADAPTER = "adapter"
FINE_TUNED = ("attention", "full")  # trained without an adapter, at a tenth of the learning rate


@dataclass(frozen=True)
class Method:
    name: str
    score: str

    @property
    def label(self) -> str:
        return self.name if self.score == "cosine" else f"{self.name}, {self.score}"

    @property
    def arm(self) -> str:
        """The label as part of a file's name."""
        return self.label.replace(", ", "-")


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


def train(config: Config, data: Data, run: RunDirectory, cluster: Cluster, home: Path | None = None) -> dict[str, Any]:
    """Train and score one method with one seed, on every rank; what it learns goes to the folder `home`, if any."""
    assert config.model is not None
    method = Method(config.method, config.score)
    encoder = load_encoder(config.model)
    if not encoder.has_images:
        raise UsageError(f"model {config.model} has no image side; use a CLIP or SigLIP model")
    dual = Dual(encoder, config, method, data.names)
    adapt(encoder.model, config, method.name)
    dual.to(cluster.device, type_of(config.precision))
    task = _Images(encoder, data)
    before = cluster.on_main(lambda: task.features(dual, data.test, config.batch))
    if trainable_parameters(dual)[0]:
        train_loop(dual, task, *loop_and_optim(config, len(data.train), cluster), run, cluster)

    def conclude() -> dict[str, Any]:
        if home is not None and adapters(encoder.model):
            save_pretrained(encoder.model, home / ADAPTER)
        elif home is not None and trainable_parameters(dual)[0]:
            encoder.save_pretrained(home / MODEL)
        after = task.features(dual, data.test, config.batch)
        return measure(config, method, dual, before, after, data.labels[data.test])

    return cluster.on_main(conclude)


def loop_and_optim(config: Config, samples: int, cluster: Cluster) -> tuple[LoopConfig, OptimConfig]:
    loop = LoopConfig(
        steps=config.steps,
        batch_size=batch_of(config.batch, samples, cluster),
        seed=config.seed,
        precision=config.precision,
        log_every=config.log_every,
        checkpoint_every=config.steps,
        keep_last=1,
        workers=config.workers,
        device=config.device,
    )
    rate = config.lr * (0.1 if config.method in FINE_TUNED else 1.0)
    return loop, OptimConfig(lr=rate, weight_decay=config.weight_decay, warmup_steps=min(20, config.steps // 10))


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
        image, text = wide(self.encoder._image(pixels)), self.text()
        return image, text, self.logits(image, text)

    def text(self) -> Tensor:
        return wide(self.encoder._text({name: self.get_buffer(f"token_{name}") for name in self.token_names}))

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
        return self.encoder.prepare_images([read_image(self.data.files[row]) for row in rows])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        pixels, labels = batch
        _, _, logits = model(pixels)
        total = F.cross_entropy(logits, labels, reduction="sum")
        return Loss(total, len(labels), {"accuracy": (logits.argmax(dim=1) == labels).float().sum()})

    @torch.no_grad()
    def features(self, dual: Dual, rows: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Features of images (N, d) and of the classes (C, d), before any normalisation."""
        place: Any = {"device": dual.encoder.device, "dtype": dual.encoder.dtype}
        parts = [wide(dual.encoder._image(self._pixels(part.tolist()).to(**place))) for part in rows.split(batch)]
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
