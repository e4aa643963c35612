"""One method after the other on the same images: adapt a fresh copy of the model, train, score, measure the radii."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leafward.adapters import adapters, attach, save_pretrained, trainable_parameters
from leafward.adapters.layouts import ATTENTION, find_sites
from leafward.adapters.registry import settings_of, trained
from leafward.config import Settings, replace, to_dict
from leafward.data.captions import readable
from leafward.data.fewshot import TEST, TRAIN, VALIDATION, few_shot, seeded_split
from leafward.data.image_files import read_image
from leafward.data.standard_sets import read_images
from leafward.encoders import load_encoder
from leafward.encoders.encoder import Encoder
from leafward.encoders.scores import radii, similarity
from leafward.engine import Cluster, Loss, RunDirectory, train_loop
from leafward.engine.devices import type_of
from leafward.engine.experiment import batch_of
from leafward.engine.run import MODEL
from leafward.errors import UsageError
from leafward.geometry.scalars import wide
from leafward.systems.hyperclip.config import OWN_WEIGHTS, trainable
from leafward.systems.hyperclip.figures import sweeps

if TYPE_CHECKING:
    from leafward.systems.hyperclip.config import Adapt, Config

ADAPTER = "adapter"
TENTH = 0.1
"""Of the learning rate of adapters, for weights of the model itself."""
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Data:
    """Files with labels, and which of them train and test."""

    files: list[Path]
    labels: Tensor
    names: tuple[str, ...]
    train: Tensor
    validation: Tensor
    test: Tensor


def arms_of(config: S) -> dict[str, S]:
    """What is trained of settings with `adapt` and `arms`: the method or, to compare, every one that there is, each
    with its score and, with `twin`, the cosine."""
    adapt, arms = config.adapt, config.arms  # pyright: ignore[reportAttributeAccessIssue]
    names = trainable() if arms.compare else (adapt.method,)
    scores = (adapt.score, "cosine") if arms.twin else (adapt.score,)
    chosen = [replace(adapt, method=name, score=score) for name in names for score in scores]
    return {each.arm: replace(config, adapt=to_dict(each), arms={"twin": False}) for each in chosen}


def adapt(model: nn.Module, settings: Adapt, seed: int, base_model: str | None = None) -> None:
    """Leave trainable in `model` what a method trains: an adapter, which is attached, or weights of its own."""
    if adapters(model):
        raise UsageError(
            f"model {base_model} holds an adapter already; train on the merged one: leafward export {base_model} "
            "--to DIR --merged"
        )
    model.requires_grad_(settings.method == "full")
    if settings.method == "attention":
        for site in find_sites(model, ATTENTION, settings.encoder):
            model.get_submodule(site.holder).get_parameter(site.parameter).requires_grad_(True)
    elif settings.method in trained():
        wanted = to_dict(settings) | {"seed": seed}
        attach(model, settings_of(settings.method).trained_as(settings.method, model, wanted), base_model=base_model)


def read(config: Config) -> Data:
    """The images of a run, with the split that they bring or a seeded one."""
    source, shots = config.data.source, config.data.shots
    assert source is not None
    files, labels, names, split = read_images(source)
    target = torch.tensor(labels)
    parts = seeded_split(target) if split is None else torch.tensor(split)
    train, validation, test = ((parts == part).nonzero().squeeze(1) for part in (TRAIN, VALIDATION, TEST))
    if not len(train) or not len(test):
        raise UsageError(f"{source} has {len(train)} training and {len(test)} test images; both are needed")
    if config.loop.eval_every is not None and not len(validation):
        raise UsageError(f"loop.eval_every needs validation images, and {source} has none")
    if shots is not None:
        train = few_shot(target, train, shots, config.loop.seed)
    return Data(files, target, names, train, validation, test)


def train(config: Config, data: Data, run: RunDirectory, cluster: Cluster, home: Path | None = None) -> dict[str, Any]:
    """Train and score one method with one seed, on every rank; what it learns goes to the folder `home`, if any."""
    assert config.model is not None
    loop = replace(config.loop, batch_size=batch_of(config.loop.batch_size, len(data.train), cluster))
    encoder = load_encoder(config.model)
    if not encoder.has_images:
        raise UsageError(f"model {config.model} has no image side; use a CLIP or SigLIP model")
    dual = Dual(encoder, config, data.names)
    adapt(encoder.model, config.adapt, loop.seed, config.model)
    dual.to(cluster.device, type_of(loop.precision))
    task = (_Images if loop.eval_every is None else _Watched)(encoder, data, loop.micro_batch or loop.batch_size)
    before = cluster.on_main(lambda: task.features(dual, data.test))
    if trainable_parameters(dual)[0]:
        share = TENTH if config.adapt.method in OWN_WEIGHTS else 1.0
        train_loop(dual, task, loop, replace(config.optim, lr=config.optim.lr * share), run, cluster)

    def conclude() -> dict[str, Any]:
        dual.eval()
        if home is not None and adapters(encoder.model):
            save_pretrained(encoder.model, home / ADAPTER)
        elif home is not None and trainable_parameters(dual)[0]:
            encoder.save_pretrained(home / MODEL)
        return measure(config, dual, before, task.features(dual, data.test), data.labels[data.test])

    return cluster.on_main(conclude)


class Dual(nn.Module):
    """A dual encoder with the texts of its classes: pixels (B, 3, H, W) -> features (B, d), (C, d), logits (B, C)."""

    def __init__(self, encoder: Encoder, config: Config, names: tuple[str, ...]) -> None:
        super().__init__()
        self.encoder, self.config = encoder, config
        tokens = encoder.tokenize([config.data.template.replace("{}", readable(name)) for name in names])
        self.token_names = list(tokens)
        for name, tensor in tokens.items():
            self.register_buffer(f"token_{name}", tensor, persistent=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image, text = wide(self.encoder._image(pixels)), self.text()
        return image, text, self.logits(image, text)

    def text(self) -> Tensor:
        return wide(self.encoder._text({name: self.get_buffer(f"token_{name}") for name in self.token_names}))

    def logits(self, image: Tensor, text: Tensor) -> Tensor:
        adapt = self.config.adapt
        return self.config.scale * similarity(image, text, adapt.score, c=adapt.c, weight=adapt.radius_weight)


class _Images:
    """The training images as a task; a sample is its pixels and label."""

    # Full fine-tuning leaves what the scores do not use without a gradient.
    unused_parameters = True

    def __init__(self, encoder: Encoder, data: Data, batch: int) -> None:
        self.encoder, self.data, self.batch = encoder, data, batch

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
    def features(self, dual: Dual, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Features of images (N, d) and of the classes (C, d), before any normalisation."""
        place: Any = {"device": dual.encoder.device, "dtype": dual.encoder.dtype}
        parts = [wide(dual.encoder._image(self._pixels(part.tolist()).to(**place))) for part in rows.split(self.batch)]
        return torch.cat(parts).cpu(), dual.text().cpu()


class _Watched(_Images):
    """The same, with evaluations on the validation images; the best of them is kept."""

    monitor, mode = "accuracy", "max"

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Dual)
        with torch.autocast(model.encoder.device.type, enabled=False):  # as the test images are scored
            features = self.features(model, self.data.validation)
        return {"accuracy": accuracy(model, features, self.data.labels[self.data.validation])}


def accuracy(dual: Dual, features: tuple[Tensor, Tensor], labels: Tensor) -> float:
    """In percent: features of images (N, d) and of classes (C, d), labels (N)."""
    return 100.0 * float((dual.logits(*features).argmax(dim=1) == labels).double().mean())


def measure(
    config: Config, dual: Dual, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], labels: Tensor
) -> dict[str, Any]:
    """Accuracy before and after, radii before and after, and the radius sweep with every score."""
    (image, text), adapt = after, config.adapt
    return {
        **named(adapt, config.loop.seed),
        "trainable": trainable_parameters(dual)[0],
        "accuracy_before": accuracy(dual, before, labels),
        "accuracy": accuracy(dual, after, labels),
        "images": len(labels),
        "radius": {
            "image": {"before": radii(before[0]).to_dict(), "after": radii(image).to_dict()},
            "text": {"before": radii(before[1]).to_dict(), "after": radii(text).to_dict()},
        },
        "sweep": sweeps(image, text, labels, c=adapt.c, weight=adapt.radius_weight),
    }


def named(adapt: Adapt, seed: int) -> dict[str, Any]:
    """What tells the row of a method from others in result.json."""
    return {"method": adapt.label, "name": adapt.method, "score": adapt.score, "seed": seed}
