"""One training for each method and episode of a few-shot run, kept in a directory of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leafward.adapters import attach
from leafward.config import checked, replace, to_dict
from leafward.data import fewshot
from leafward.data.fewshot import Episode, Exam, FeatureSet, Protocol, read_feature_set
from leafward.encoders.encoder import HuggingFaceEncoder
from leafward.encoders.templates import DIVERSE
from leafward.encoders.zeroshot import read_templates
from leafward.engine import (
    Cluster,
    FitResult,
    LoopConfig,
    Member,
    RunDirectory,
    load_published,
    publish,
    train_loop,
)
from leafward.engine.data import mix
from leafward.engine.devices import device_of, type_of
from leafward.engine.layout import EARLIER_CELLS
from leafward.engine.run import MEMBERS, MODEL
from leafward.errors import DataError
from leafward.hierarchy import Taxonomy, metrics
from leafward.hierarchy.answers import decided
from leafward.systems.lathadapter import LatentHierarchyConfig
from leafward.systems.lathadapter.attributes import Classifier
from leafward.systems.lathadapter.images import CHUNK, Pixels, cached, image_set, open_clip_model, with_diverse
from leafward.systems.lathadapter.lesson import Labelled, Lesson, Teaching
from leafward.systems.lathadapter.prompts import (
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
from leafward.systems.lathadapter.prompts.baselines import (
    Clap,
    ClassWeights,
    ClipLora,
    Gda,
    LinearProbe,
    TaskRes,
    TipAdapterF,
)
from leafward.systems.lathadapter.prompts.features import Sides
from leafward.systems.lathadapter.prompts.tokens import check_tokens

if TYPE_CHECKING:
    from leafward.systems.lathadapter.config import Config

TEACHER = "promptsrc"
"""The host that teaches PromptKD."""
UNTRAINED = ("zero-shot", "tip-adapter", "gda")
"""Baselines without parameters that learn."""
BASELINES: dict[str, Callable[[Tensor, float], Host]] = {
    "zero-shot": ZeroShot,
    "clip-adapter": ClipAdapter,
    "tip-adapter": TipAdapter,
    "tip-adapter-f": TipAdapterF,
    "linear-probe": LinearProbe,
    "clap": Clap,
    "taskres": TaskRes,
    "gda": Gda,
}
"""Those on features, whatever the others read."""


MOST = 1 << 23
"""Logits that are held at once in an evaluation."""


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


@dataclass(frozen=True)
class Cell:
    """The settings of one training: a method on the shots of a seed; `teacher`: on the teacher's features."""

    host: str
    geometry: str | None
    attributes: int | None
    shots: int
    seed: int
    teacher: bool = False

    @property
    def method(self) -> Method:
        return Method(self.host, self.geometry, self.attributes)

    @property
    def arm(self) -> str:
        """All but the seed, as a part of a file's name."""
        words = f"{'teacher ' * self.teacher}{self.method.label} {self.shots} shots"
        words += "" if self.attributes is None else f" {self.attributes} attributes"
        return words.replace(" + ", "-").replace(" ", "-")

    @property
    def earlier_place(self) -> str:
        """Where versions before this one kept it, in the run directory."""
        words = f"{self.method.label} {self.shots} shots seed {self.seed}".replace(" + ", "-").replace(" ", "-")
        words += "" if self.attributes is None else f"-{self.attributes}-attributes"
        return f"{EARLIER_CELLS}/{'teacher/' * self.teacher}{words}"

    def seeded(self, seed: int) -> Cell:
        return dataclasses.replace(self, seed=seed)


def methods(config: Config) -> list[Method]:
    """What a run trains, baselines first; the number of attributes is chosen in each training."""
    found = [Method(name) for name in config.baselines]
    for host in config.hosts:
        found.append(Method(host))
        found.append(Method(host, "lorentz"))
        if config.arms.twin:
            found.append(Method(host, "euclidean"))
    return found


def cells(config: Config, teacher: bool) -> list[Cell]:
    """Every training of a run with its first seed, PromptKD's teacher first; `teacher`: it has features of its own."""
    found: dict[Cell, None] = {}
    seed = config.loop.seed
    for shots in config.data.shots:
        if "promptkd" in config.hosts:
            found[Cell(TEACHER, None, None, shots, seed, teacher)] = None
        for method in methods(config):
            if method.host not in UNTRAINED:
                counts = config.attributes if method.geometry is not None else (None,)
                found |= {Cell(method.host, method.geometry, n, shots, seed): None for n in counts}
    return list(found)


def read_sets(config: Config) -> list[FeatureSet]:
    """The data set that is trained on and the targets, on features or on images, each with a name of its own."""
    data = config.data
    if data.features is not None:
        return _told_apart([_as_computed(read_feature_set(path), config) for path in (data.features, *data.targets)])
    assert data.images is not None
    assert data.model is not None
    encoder = _prompted(config, data.model)
    teacher = None if data.teacher is None else _prompted(config, data.teacher)
    sets = [image_set(path, encoder, data.template, teacher) for path in (data.images, *data.targets)]
    if {"promptsrc", "promptkd"} & set(config.hosts):
        templates = DIVERSE if data.templates is None else read_templates(data.templates)
        sets[0] = with_diverse(sets[0], templates)
    return _told_apart(sets)


def _prompted(config: Config, name: str) -> HuggingFaceEncoder:
    """A model for prompts, on its device; tokens that have no place are refused before any image is encoded."""
    encoder = open_clip_model(name)
    if config.hosts:
        words = config.data.template.split("{}")[0]
        check_tokens(config.tokens, len(encoder.tokenizer(words, add_special_tokens=False)["input_ids"]))
    return encoder.to(device_of(config.loop.device), type_of(config.loop.precision))


def _as_computed(data: FeatureSet, config: Config) -> FeatureSet:
    """Features in the type that the run computes in."""
    dtype = type_of(config.loop.precision)
    names = ("images", "texts", "teacher_images", "teacher_texts", "diverse_texts", "teacher_diverse_texts")
    held = {name: values for name in names if (values := getattr(data, name)) is not None}
    return dataclasses.replace(data, **{name: values.to(dtype or values.dtype) for name, values in held.items()})


def _told_apart(sets: Sequence[FeatureSet]) -> list[FeatureSet]:
    """Sets of files that are called alike get a number."""
    counts: dict[str, int] = {}
    found = []
    for each in sets:
        counts[each.name] = counts.get(each.name, 0) + 1
        number = counts[each.name]
        found.append(each if number == 1 else dataclasses.replace(each, name=f"{each.name} ({number})"))
    return found


def episodes(
    config: Config, sets: Sequence[FeatureSet], protocol: Protocol | None = None, *, elsewhere: bool = False
) -> list[Episode]:
    """The trainings of a run, each with the exams of its protocol or of another; `elsewhere`: on the targets alone."""
    data, *targets = sets
    seeds = range(config.loop.seed, config.loop.seed + config.arms.seeds)
    own = config.data.protocol
    trained: Protocol = "base-to-new" if own == "base-to-new" else "few-shot"  # half of the classes, or all
    found = fewshot.episodes(trained, data, [], config.data.shots, seeds)
    protocol = protocol or own
    if protocol == trained:
        return found
    exams = fewshot.episodes(protocol, data, targets, [1], [0])[0].exams
    return [dataclasses.replace(episode, exams=exams[1:] if elsewhere else exams) for episode in found]


def needs_frozen(config: Config) -> bool:
    """Whether there are methods without prompts beside others that are trained on images."""
    return config.data.images is not None and bool(set(config.baselines) & set(BASELINES))


def frozen_sets(sets: Sequence[FeatureSet]) -> list[FeatureSet]:
    """Sets of images as features of their frozen model."""
    return [cached(each, each.images.encoder) for each in sets]  # pyright: ignore[reportAttributeAccessIssue]


def score_all(
    config: Config,
    episodes: Sequence[Episode],
    run: Path,
    taxonomy: Taxonomy | None,
    frozen: Sequence[Episode] | None = None,
) -> list[dict[str, Any]]:
    """Score every method of the run directory `run` on every episode: one row for each exam.

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
        for episode in [features if method.host in BASELINES else images]
        for trained in [open_trained(config, method, episode, run)]
        for exam in episode.exams
    ]


@dataclass(frozen=True)
class Trained:
    """A host after its training; `teacher` gives the classes of PromptKD their features."""

    method: Method
    host: Host
    episode: Episode
    teacher: Host | None = None

    def logits(self, exam: Exam) -> Tensor:
        """(rows, classes) of an exam."""
        return torch.cat([part.cpu() for _, part in self.parts(exam)])

    @torch.no_grad()
    def parts(self, exam: Exam) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of an exam a few at a time, with their logits (n, classes); the classes are computed once."""
        self.host.eval()
        data, device = exam.data, self.host.classes.device
        same = data is self.episode.data and torch.equal(exam.classes, self.episode.classes)
        classes = None
        if not same:
            classes = class_inputs(self.method, data.texts, data.teacher_texts, exam.classes, self.teacher).to(device)
            if isinstance(self.host, ClassWeights):
                classes = self.host.known(classes, *self._shared(exam))
        cache = self.host if isinstance(self.host, TipAdapter) else None
        fixed = Classifier(self.host, classes)
        shared = self._shared(exam) if cache is not None and not same else None
        for rows in exam.rows.split(chunk(data.images, len(exam.classes))):
            images = data.images[rows].to(device)
            logits = fixed(images)
            if cache is not None and shared is None:
                logits = logits + cache.remembered(images)
            elif cache is not None and shared is not None:
                # What the cache knows of classes that have a name of the training's: domains share them.
                logits[:, shared[0]] += cache.remembered(images)[:, shared[1]]
            yield rows, logits

    def _shared(self, exam: Exam) -> tuple[list[int], list[int]]:
        """The classes of an exam that have a name of the training's: their places in the exam and in the training."""
        own = self.episode.data.class_names
        place = {own[number]: column for column, number in enumerate(self.episode.classes.tolist())}
        names = [exam.data.class_names[number] for number in exam.classes.tolist()]
        known = [column for column, name in enumerate(names) if name in place]
        return known, [place[names[column]] for column in known]


def chunk(images: Tensor | Pixels, classes: int) -> int:
    """Rows that are computed at once where no gradient is wanted: at most `MOST` logits."""
    return max(1, min(4096 if isinstance(images, Tensor) else CHUNK, MOST // classes))


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


def open_trained(config: Config, method: Method, episode: Episode, run: Path) -> Trained:
    """What the run directory `run` holds of a method; of several numbers of attributes the best is taken."""
    teacher = _teacher(config, episode, run) if method.host == "promptkd" else None
    counts = (None,) if method.geometry is None else config.attributes
    chosen = [Cell(method.host, method.geometry, count, episode.shots, episode.seed) for count in counts]
    candidates = [_open_one(config, cell, episode, run, teacher) for cell in chosen]
    if len(candidates) == 1:
        return candidates[0]
    if not len(episode.validation):
        raise DataError(f"{episode.data.name} has no validation images to choose the number of attributes with")
    exam = Exam("validation", episode.data, episode.classes, episode.validation)
    return max(candidates, key=lambda trained: score(trained, exam, None)["accuracy"])


def has_teacher(data: FeatureSet) -> bool:
    """Whether PromptKD's teacher has features of its own."""
    return data.teacher_images is not None and data.teacher_texts is not None


def of_teacher(episode: Episode) -> Episode:
    """The same episode on the teacher's features."""
    data = episode.data
    assert data.teacher_images is not None
    assert data.teacher_texts is not None
    above = {"images": data.teacher_images, "texts": data.teacher_texts, "diverse_texts": data.teacher_diverse_texts}
    return dataclasses.replace(episode, data=dataclasses.replace(data, **above))


def distilled(episode: Episode) -> Episode:
    """What PromptKD's student trains on: all classes of the data set, which need no labels."""
    return dataclasses.replace(episode, classes=torch.arange(len(episode.data.texts)))


def _teacher(config: Config, episode: Episode, run: Path) -> Host:
    """PromptSRC on the teacher's features, or on the same ones where the file has no others."""
    own = has_teacher(episode.data)
    cell = Cell(TEACHER, None, None, episode.shots, episode.seed, own)
    return _open_one(config, cell, of_teacher(episode) if own else episode, run, None).host


def _begin(config: Config, cell: Cell, episode: Episode, teacher: Host | None) -> Trained:
    """A host before its training; what remembers its images does so."""
    device = device_of(config.loop.device)
    episode = distilled(episode) if cell.host == "promptkd" else episode
    torch.manual_seed(mix(episode.seed, 7))  # the same beginning with and without a latent hierarchy
    host = build(config, cell.method, episode, teacher).to(device, type_of(config.loop.precision))
    if isinstance(host, TipAdapter | Clap):
        host.remember(*_held(episode, episode.train, device))
    if isinstance(host, Gda) and len(episode.validation):
        host.choose(*_held(episode, episode.validation, device))
    return Trained(cell.method, host, episode, teacher)


def _held(episode: Episode, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features and labels of some rows of an episode, where a host computes."""
    return episode.data.images[rows].to(device), episode.targets(rows).to(device)


def _open_one(config: Config, cell: Cell, episode: Episode, run: Path, teacher: Host | None) -> Trained:
    trained = _begin(config, cell, episode, teacher)
    if cell.host in UNTRAINED:
        return trained
    place = _model_of(run, cell)
    try:
        trained.host.load_state_dict(load_published(place)[1])
    except RuntimeError as error:
        raise DataError(
            f"{place} was trained on features or a model of other sizes than {episode.data.name} has now: {error}"
        ) from error
    return trained


def _model_of(run: Path, cell: Cell) -> Path:
    """The folder of a trained host: that of its member, of the run where it is the only one, or an earlier place."""
    member = run / MEMBERS / f"{cell.arm}-{cell.seed}" / MODEL
    places = (member, run / cell.earlier_place / MODEL, run / MODEL)
    return next((place for place in places if place.is_dir()), member)


def train(config: Config, member: Member[Cell], episode: Episode, run: RunDirectory, cluster: Cluster) -> FitResult:
    """Train a method on an episode in `run` and publish it; its teacher lies in the run directory of the whole."""
    cell = member.config
    whole = member.path if member.alone else member.path.parent.parent
    teacher = _teacher(config, episode, whole) if cell.host == "promptkd" else None
    begun = _begin(config, cell, of_teacher(episode) if cell.teacher else episode, teacher)
    host = begun.host
    watch = watched(config, begun, episode) if loop_watched(config) else None
    lesson = lesson_of(config, begun, cluster.device, watch)
    loop = loop_of(config, episode.seed, len(lesson.dataset))
    if loop.compile:
        torch._dynamo.reset()  # every training compiles the same code anew, and only a few versions are allowed
    host.prepare(loop.steps)
    found = train_loop(host, lesson, loop, config.optim, run, cluster)
    host.finish()
    publish(host, member.model, asdict(cell), cluster)
    return found


def loop_watched(config: Config) -> bool:
    """Whether a training looks at the validation images."""
    return config.loop.patience is not None or config.loop.eval_every is not None


def lesson_of(
    config: Config, begun: Trained, device: torch.device, watch: Callable[[], dict[str, float]] | None
) -> Lesson:
    """What a host learns from: the shots with their labels; PromptKD all training images of all classes without, and
    the shots beside them where a latent hierarchy reads labels."""
    episode, data = begun.episode, begun.episode.data
    shots = Labelled(episode.train, episode.targets(episode.train))
    how = {"device": device, "crops": config.data.crops, "watch": watch, "keep_best": config.loop.patience is not None}
    if begun.teacher is None:
        return Lesson(data.images, shots, **how)
    unlabelled = Labelled(data.part(fewshot.TRAIN), None)
    above = data.images if data.teacher_images is None else data.teacher_images
    beside = shots if begun.method.geometry is not None else None
    return Lesson(data.images, unlabelled, teaching=Teaching(begun.teacher, above), beside=beside, **how)


def loop_of(config: Config, seed: int, count: int) -> LoopConfig:
    """The loop of a training on `count` images; an epoch is as many whole batches as they give."""
    loop = config.loop
    steps = loop.steps
    if loop.epochs is not None:
        steps = min(config.max_steps, max(1, round(loop.epochs * max(count // loop.batch_size, 1))))
    return replace(loop, steps=steps, batch_size=min(loop.batch_size, count), seed=mix(seed, 11) % 2**31)


def watched(config: Config, trained: Trained, episode: Episode) -> Callable[[], dict[str, float]]:
    """The accuracy in percent on the validation images of its episode, which training may look at."""
    if not len(episode.validation):
        raise DataError(f"{episode.data.name} has no validation images for loop.eval_every and loop.patience")
    exam = Exam("validation", trained.episode.data, episode.classes, episode.validation)
    return lambda: {"accuracy": score(trained, exam, None)["accuracy"]}


def build(config: Config, method: Method, episode: Episode, teacher: Host | None) -> Host:
    """An untrained host for the classes of an episode, with its latent hierarchy."""
    data = episode.data
    classes = class_inputs(method, data.texts, data.teacher_texts, episode.classes, teacher).detach().cpu()
    diverse = None if data.diverse_texts is None else data.diverse_texts[episode.classes]
    host = _host(config, method.host, classes, data, diverse)
    if method.geometry is not None:
        assert method.attributes is not None
        chosen = {"attributes": method.attributes, "geometry": method.geometry, "seed": episode.seed}
        latent = checked(LatentHierarchyConfig, to_dict(config.hierarchy) | chosen)
        attach(host, latent)
    return host


def _host(config: Config, name: str, classes: Tensor, data: FeatureSet, diverse: Tensor | None) -> Host:
    depth, scale = config.depth, config.scale
    if name in BASELINES:
        return BASELINES[name](classes, scale)
    if name == "clip-lora":
        return ClipLora(data.images.encoder.model, classes, scale)  # pyright: ignore[reportAttributeAccessIssue]
    if name == "coop":
        return Coop(_prompts(config, data, depth, "text"), classes, scale)
    if name == "maple":
        return MaPLe(_prompts(config, data, depth, "coupled"), classes, scale)
    if name == "promptsrc":
        return PromptSRC(_prompts(config, data, depth, "both"), classes, scale, diverse=diverse)
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


def score(trained: Trained, exam: Exam, taxonomy: Taxonomy | None) -> dict[str, Any]:
    """Accuracy in percent and, with a taxonomy that has the classes, what the mistakes are like: of the most probable
    class, of the answer of least expected distance, and of the deepest node with a probability of at least ½, both
    of which may be inner nodes."""
    names = [exam.data.class_names[number] for number in exam.classes.tolist()]
    measured = taxonomy is not None and set(names) <= set(taxonomy.names)
    found, answers = [], {"least_expected_distance": [], "backed_off": []}
    for _, logits in trained.parts(exam):
        logits = logits.cpu()
        found.append(logits.argmax(dim=1))
        if measured:
            assert taxonomy is not None
            for name, nodes in decided(taxonomy, logits.double().softmax(dim=1), names).items():
                answers[name].append(nodes)
    chosen, targets = torch.cat(found), exam.targets
    result: dict[str, Any] = {
        "accuracy": 100.0 * float((chosen == targets).double().mean()),
        "images": len(targets),
    }
    if measured:
        assert taxonomy is not None
        true = [names[place] for place in targets.tolist()]
        report = metrics.evaluate(taxonomy, [names[place] for place in chosen.tolist()], true)
        nearest = metrics.evaluate(taxonomy, torch.cat(answers["least_expected_distance"]), true)
        backed = torch.cat(answers["backed_off"])
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
