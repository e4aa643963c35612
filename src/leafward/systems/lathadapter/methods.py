"""One training for each method and episode of a few-shot run, kept in a directory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leafward.adapters import LatentHierarchyConfig, attach
from leafward.adapters.prompts import (
    ClipAdapter,
    Coop,
    FeaturePrompts,
    Host,
    MaPLe,
    PromptKD,
    PromptSRC,
    TipAdapter,
    TokenPrompts,
    ZeroShot,
)
from leafward.adapters.prompts.features import Sides
from leafward.adapters.prompts.tokens import check_tokens
from leafward.adapters.surface import lasting
from leafward.engine import LoopConfig, Loss, OptimConfig, RunDirectory, fit, load_published, publish
from leafward.engine.data import mix
from leafward.errors import DataError
from leafward.hierarchy import Taxonomy, metrics
from leafward.recipes._devices import device_of
from leafward.recipes._lathadapter_images import CHUNK, Pixels, cached, image_set, open_clip_model
from leafward.tasks import fewshot
from leafward.tasks.decisions import decided
from leafward.tasks.fewshot import Episode, Exam, FeatureSet, Protocol, read_features

if TYPE_CHECKING:
    from leafward.recipes.lathadapter import Config

DEEPER = 2  # MaPLe's prompts are deep ones
MODEL = "model"


@dataclass(frozen=True)
class Method:
    """A host or baseline, and the geometry of the latent hierarchy on top of it, if there is one."""

    host: str
    geometry: str | None = None
    attributes: int | None = None

    @property
    def label(self) -> str:
        top = {None: "", "lorentz": " + LatHAdapter", "euclidean": " + Euclidean twin"}
        return self.host + top[self.geometry]


def methods(config: Config) -> list[Method]:
    """What a run trains, baselines first; the number of attributes is chosen in each training."""
    found = [Method(name) for name in config.baselines]
    for host in config.hosts:
        found.append(Method(host))
        found.append(Method(host, "lorentz"))
        if config.twin:
            found.append(Method(host, "euclidean"))
    return found


def lasting_paths(config: Config) -> Config:
    """The same configuration with whole paths, which hold in every directory."""
    taxonomy = config.taxonomy
    return replace(
        config,
        features=None if config.features is None else config.features.resolve(),
        images=None if config.images is None else config.images.resolve(),
        targets=tuple(path.resolve() for path in config.targets),
        model=None if config.model is None else lasting(config.model),
        taxonomy=taxonomy.resolve() if taxonomy is not None and taxonomy.exists() else taxonomy,
    )


def read_sets(config: Config) -> list[FeatureSet]:
    """The data set that is trained on and the targets, on features or on images, each with a name of its own."""
    if config.features is not None:
        return _told_apart([read_features(path) for path in (config.features, *config.targets)])
    assert config.images is not None
    assert config.model is not None
    encoder = open_clip_model(config.model)
    if config.hosts:  # refused before any image is read or encoded
        words = config.template.split("{}")[0]
        check_tokens(config.tokens, len(encoder.tokenizer(words, add_special_tokens=False)["input_ids"]))
    encoder = encoder.to(device_of(config.device))
    return _told_apart([image_set(path, encoder, config.template) for path in (config.images, *config.targets)])


def _told_apart(sets: Sequence[FeatureSet]) -> list[FeatureSet]:
    """Sets of files that are called alike get a number."""
    counts: dict[str, int] = {}
    found = []
    for each in sets:
        counts[each.name] = counts.get(each.name, 0) + 1
        number = counts[each.name]
        found.append(each if number == 1 else replace(each, name=f"{each.name} ({number})"))
    return found


def episodes(
    config: Config, sets: Sequence[FeatureSet], protocol: Protocol | None = None, *, elsewhere: bool = False
) -> list[Episode]:
    """The trainings of a run, each with the exams of its protocol or of another; `elsewhere`: on the targets alone."""
    data, *targets = sets
    seeds = range(config.seed, config.seed + config.seeds)
    trained: Protocol = "base-to-new" if config.protocol == "base-to-new" else "few-shot"  # half of the classes, or all
    found = fewshot.episodes(trained, data, [], config.shots, seeds)
    protocol = protocol or config.protocol
    if protocol == trained:
        return found
    exams = fewshot.episodes(protocol, data, targets, [1], [0])[0].exams
    return [replace(episode, exams=exams[1:] if elsewhere else exams) for episode in found]


def needs_frozen(config: Config) -> bool:
    """Whether there are methods without prompts beside others that are trained on images."""
    return config.images is not None and bool(config.baselines)


def frozen_sets(sets: Sequence[FeatureSet]) -> list[FeatureSet]:
    """Sets of images as features of their frozen model."""
    return [cached(each, each.images.encoder) for each in sets]  # pyright: ignore[reportAttributeAccessIssue]


def train_all(
    config: Config,
    episodes: Sequence[Episode],
    folder: Path,
    taxonomy: Taxonomy | None,
    frozen: Sequence[Episode] | None = None,
) -> list[dict[str, Any]]:
    """Train and score every method on every episode: one row for each exam.

    `frozen`: the same episodes on features, for the methods without prompts, where the others are on images.
    """
    return [
        {
            "method": method.label,
            "host": method.host,
            "geometry": method.geometry,
            "attributes": trained.method.attributes,
            "shots": episode.shots,
            "seed": episode.seed,
            "test": exam.name,
            **score(trained, exam, taxonomy),
        }
        for images, features in zip(episodes, frozen or episodes, strict=True)
        for method in methods(config)
        for episode in [features if method.host in config.baselines else images]
        for trained in [train(config, method, episode, folder)]
        for exam in episode.exams
    ]


@dataclass(frozen=True)
class Trained:
    """A host after its training; `teacher` gives the classes of PromptKD their features."""

    method: Method
    host: Host
    episode: Episode
    teacher: Host | None = None

    @torch.no_grad()
    def logits(self, exam: Exam) -> Tensor:
        """(rows, classes) of an exam."""
        self.host.eval()
        data, device = exam.data, self.host.classes.device
        same = data is self.episode.data and torch.equal(exam.classes, self.episode.classes)
        classes = None
        if not same:
            classes = class_inputs(self.method, data.texts, data.teacher_texts, exam.classes, self.teacher).to(device)
        chunks = exam.rows.split(chunk(data.images))
        logits = torch.cat([self.host(data.images[rows].to(device), classes=classes).logits for rows in chunks])
        if not same and isinstance(self.host, TipAdapter):
            self._recall(self.host, exam, logits)
        return logits.cpu()

    def _recall(self, host: TipAdapter, exam: Exam, logits: Tensor) -> None:
        """Add what the cache knows of the classes of an exam that have a name of the training's: domains share them."""
        own = self.episode.data.class_names
        place = {own[number]: column for column, number in enumerate(self.episode.classes.tolist())}
        names = [exam.data.class_names[number] for number in exam.classes.tolist()]
        known = [column for column, name in enumerate(names) if name in place]
        cached = [place[names[column]] for column in known]
        for part, rows in zip(logits.split(4096), exam.rows.split(4096), strict=True):
            said = host.remembered(exam.data.images[rows].to(logits.device))
            part[:, known] += said[:, cached]


def chunk(images: Tensor | Pixels) -> int:
    """Rows that are computed at once where no gradient is wanted."""
    return 4096 if isinstance(images, Tensor) else CHUNK


def class_inputs(
    method: Method, texts: Tensor, teacher_texts: Tensor | None, classes: Tensor, teacher: Host | None
) -> Tensor:
    """What a host takes as its classes: text features, for PromptKD those of its teacher with the teacher's prompts."""
    if method.host != "promptkd":
        return texts[classes]
    assert teacher is not None
    own = texts if teacher_texts is None else teacher_texts
    if own.is_floating_point() and own.shape[1] != teacher.classes.shape[1]:
        raise DataError(
            f"PromptKD's teacher has features of width {teacher.classes.shape[1]}, and the data set brings width "
            f"{own.shape[1]}: its file needs teacher_text_features"
        )
    with torch.no_grad():
        return teacher.text(own[classes].to(teacher.classes.device))


def train(config: Config, method: Method, episode: Episode, folder: Path) -> Trained:
    """Train a method on an episode, or take up what is there; of several numbers of attributes the best is kept."""
    teacher = _teacher(config, episode, folder) if method.host == "promptkd" else None
    if method.geometry is None:
        return _train_one(config, method, episode, folder, teacher)
    candidates = [
        _train_one(config, Method(method.host, method.geometry, count), episode, folder, teacher)
        for count in config.attributes
    ]
    if len(candidates) == 1:
        return candidates[0]
    if not len(episode.validation):
        raise DataError(f"{episode.data.name} has no validation images to choose the number of attributes with")
    exam = Exam("validation", episode.data, episode.classes, episode.validation)
    return max(candidates, key=lambda trained: score(trained, exam, None)["accuracy"])


def _teacher(config: Config, episode: Episode, folder: Path) -> Host:
    """PromptSRC on the teacher's features, or on the same ones where the file has no others."""
    data = episode.data
    if data.teacher_images is None or data.teacher_texts is None:
        return train(config, Method("promptsrc"), episode, folder).host
    larger = replace(data, images=data.teacher_images, texts=data.teacher_texts)
    return train(config, Method("promptsrc"), replace(episode, data=larger), folder / "teacher").host


def _train_one(config: Config, method: Method, episode: Episode, folder: Path, teacher: Host | None) -> Trained:
    device = device_of(config.device)
    torch.manual_seed(mix(episode.seed, 7))  # the same beginning with and without a latent hierarchy
    host = build(config, method, episode, teacher).to(device)
    trained = Trained(method, host, episode, teacher)
    images, labels = _shots(episode, device), episode.targets(episode.train).to(device)
    if isinstance(host, TipAdapter):
        assert isinstance(images, Tensor)
        host.remember(images, labels)
    if not any(parameter.requires_grad for parameter in host.parameters()):
        return trained
    place = folder / _name(method, episode)
    if (place / MODEL).is_dir():
        try:
            host.load_state_dict(load_published(place / MODEL)[1])
        except RuntimeError as error:
            raise DataError(
                f"{place / MODEL} was trained on features or a model of other sizes than {episode.data.name} has now: "
                f"{error}"
            ) from error
    else:
        lesson = _Lesson(images, labels, None if teacher is None else _teaching(teacher, episode))
        _fit(config, trained, lesson, place)
    return trained


def _shots(episode: Episode, device: torch.device) -> Tensor | Pixels:
    """The images of a training: features in memory, or pixels that are read batch by batch."""
    images: Tensor | Pixels = episode.data.images
    return images[episode.train].to(device) if isinstance(images, Tensor) else images.take(episode.train)


def _name(method: Method, episode: Episode) -> str:
    words = f"{method.label} {episode.shots} shots seed {episode.seed}".replace(" + ", "-").replace(" ", "-")
    return words if method.attributes is None else f"{words}-{method.attributes}-attributes"


@torch.no_grad()
def _teaching(teacher: Host, episode: Episode) -> Tensor:
    """A teacher's features of the training images, with its prompts."""
    data = episode.data
    images = data.images if data.teacher_images is None else data.teacher_images
    device, chunks = teacher.classes.device, episode.train.split(chunk(images))
    return torch.cat([teacher.eval().image(images[rows].to(device)) for rows in chunks])


def _fit(config: Config, trained: Trained, lesson: _Lesson, place: Path) -> None:
    count, episode, host = len(lesson.dataset), trained.episode, trained.host
    steps = min(config.max_steps, config.epochs * max(count // config.batch, 1))
    cell = asdict(trained.method) | {"shots": episode.shots, "seed": episode.seed, "steps": steps}
    loop = LoopConfig(
        steps=steps,
        batch_size=min(config.batch, count),
        seed=mix(episode.seed, 11) % 2**31,
        log_every=max(steps // 10, 1),
        checkpoint_every=steps,
        keep_last=1,
        device=config.device,
    )
    optim = OptimConfig(lr=config.lr, weight_decay=1e-4, warmup_steps=min(50, steps // 10))
    host.prepare(steps)
    run = RunDirectory.create(place, cell, resume=(place / "config.yaml").is_file())
    fit(host, lesson, loop, optim, run)
    host.finish()
    publish(host, place / MODEL, cell)


def build(config: Config, method: Method, episode: Episode, teacher: Host | None) -> Host:
    """An untrained host for the classes of an episode, with its latent hierarchy."""
    data = episode.data
    classes = class_inputs(method, data.texts, data.teacher_texts, episode.classes, teacher).detach().cpu()
    host = _host(config, method.host, classes, data)
    if method.geometry is not None:
        assert method.attributes is not None
        latent = LatentHierarchyConfig(
            attributes=method.attributes,
            geometry=method.geometry,  # pyright: ignore[reportArgumentType]
            c=config.c,
            refinement=config.refinement,
            margin=config.margin,
            neighbours=config.neighbours,
            queue=config.queue,
            normalise=config.normalise,
            hierarchy_weight=config.hierarchy_weight,
            seed=episode.seed,
        )
        attach(host, latent)
    return host


def _host(config: Config, name: str, classes: Tensor, data: FeatureSet) -> Host:
    depth, scale = config.depth, config.scale
    if name == "zero-shot":
        return ZeroShot(classes, scale)
    if name == "clip-adapter":
        return ClipAdapter(classes, scale)
    if name == "tip-adapter":
        return TipAdapter(classes, scale)
    if name == "coop":
        return Coop(_prompts(config, data, depth, "text"), classes, scale)
    if name == "maple":
        return MaPLe(_prompts(config, data, depth + DEEPER, "coupled"), classes, scale)
    if name == "promptsrc":
        return PromptSRC(_prompts(config, data, depth, "both"), classes, scale)
    images: Tensor | Pixels = data.images
    width = images.shape[1] if isinstance(images, Tensor) else images.encoder.model.config.projection_dim
    return PromptKD(_prompts(config, data, depth, "both"), classes, width, scale)


def _prompts(config: Config, data: FeatureSet, depth: int, sides: Sides) -> nn.Module:
    """Tokens inside the model where there are images, their stand-in for features otherwise."""
    images: Tensor | Pixels = data.images
    if isinstance(images, Tensor):
        return FeaturePrompts(images.shape[1], config.tokens, depth, sides)
    model = images.encoder.model
    layers = min(len(side.encoder.layers) for side in (model.text_model, model.vision_model))
    return TokenPrompts(model, data.texts, config.tokens, min(depth, layers), sides)


class _Lesson:
    """The shots; a batch is a tensor of row numbers."""

    # Some parameters of a host may rest: the text context of PromptKD's student.
    unused_parameters = True

    def __init__(self, images: Tensor | Pixels, labels: Tensor, teaching: Tensor | None) -> None:
        self.images, self.labels, self.teaching = images, labels, teaching

    @property
    def dataset(self) -> range:
        return range(len(self.images))

    def collate(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        teaching = None if self.teaching is None else self.teaching[batch]
        output = model(self.images[batch].to(self.labels.device), self.labels[batch], teacher=teaching)
        count = len(batch)
        parts = {name: count * value.detach() for name, value in output.losses.items()}
        return Loss(count * output.loss, count, parts)


def score(trained: Trained, exam: Exam, taxonomy: Taxonomy | None) -> dict[str, Any]:
    """Accuracy in percent and, with a taxonomy that has the classes, what the mistakes are like: of the most probable
    class, of the answer of least expected distance, and of the deepest node with a probability of at least ½, both
    of which may be inner nodes."""
    logits = trained.logits(exam)
    found = logits.argmax(dim=1)
    result: dict[str, Any] = {
        "accuracy": 100.0 * float((found == exam.targets).double().mean()),
        "images": len(exam.targets),
    }
    names = [exam.data.class_names[number] for number in exam.classes.tolist()]
    if taxonomy is not None and set(names) <= set(taxonomy.names):
        true = [names[place] for place in exam.targets.tolist()]
        probabilities = logits.double().softmax(dim=1)
        answers = decided(taxonomy, probabilities, names)
        report = metrics.evaluate(taxonomy, [names[place] for place in found.tolist()], true)
        nearest = metrics.evaluate(taxonomy, answers["least_expected_distance"], true)
        backed = answers["backed_off"]
        result["hierarchy"] = {
            "mistake_severity": report.mistake_severity,
            "lca_height": report.lca_height,
            "f1": report.f1,
            "decided_lca_height": nearest.lca_height,
            "decided_f1": nearest.f1,
            "backed_f1": metrics.evaluate(taxonomy, backed, true).f1,
            "backed_true": 100.0 * float(taxonomy.entails(backed, true).mean()),
        }
    return result
