"""LatHAdapter (arXiv 2508.11176) on cached CLIP features: prompt-learning hosts alone, with the latent hierarchy, and
with its Euclidean twin, under the usual few-shot protocols, beside zero-shot CLIP, CLIP-Adapter and Tip-Adapter.

    leafward train lathadapter --features pets.npz --protocol base-to-new
    leafward train lathadapter --images pets --model openai/clip-vit-base-patch16 --depth 9

The feature file is described in `leafward.data.fewshot`. With images, prompts are tokens inside the encoders of the
model, as the papers have them; that takes a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

from leafward.config import Count, Place, Positive, Seeds, Settings, Several, Some, Template, replace
from leafward.engine import config as engine
from leafward.engine.config import LoopConfig, OptimConfig
from leafward.errors import UsageError, need
from leafward.systems.lathadapter.hierarchy import TERMS, HierarchyConfig, Term

SUMMARY = "Few-shot prompt learning on CLIP features: hosts alone, with LatHAdapter, and with its Euclidean twin."

HostName = Literal["coop", "maple", "promptsrc", "promptkd"]
Baseline = Literal[
    "zero-shot", "clip-adapter", "tip-adapter", "tip-adapter-f", "linear-probe", "clap", "taskres", "gda", "clip-lora"
]


class Data(Settings, frozen=True):
    """The images or their features, and which of them are trained on and scored."""

    MAIN: ClassVar[str] = "features"
    RARE: ClassVar[frozenset[str]] = frozenset({"template", "templates", "crops"})

    features: Path | None = None
    """Feature file (.npz or .safetensors) of the data set that is trained on."""
    images: Path | None = None
    """In place of features: labelled images, a folder of class folders or one of the usual data sets."""
    model: Place | None = None
    """With images: a directory or hub name of a Hugging Face CLIP model."""
    teacher: Place | None = None
    """With images: the larger Hugging Face CLIP model that teaches PromptKD; left out: the same model. Of features:
    those that the file has of a teacher."""
    template: Template = "a photo of a {}."
    """With images: the text of a class; its first words are where the tokens begin."""
    templates: Path | None = None
    """With images: a file of templates, one in a line, over which PromptSRC averages the frozen texts; left out: sixty
    of the package. Of features: those averages that the file has."""
    crops: bool = True
    """With images: train on random crops, half of them turned over, as the hosts' authors; --no-crops for none."""
    targets: tuple[Path, ...] = ()
    """Feature files (with images: folders) of other data sets, for the protocols cross-dataset and domain."""
    protocol: Literal["base-to-new", "few-shot", "cross-dataset", "domain"] = "base-to-new"
    """Which classes and images are trained and scored."""
    shots: Some[Count] = (16,)
    """Training images for each class; several give one training each."""
    taxonomy: Path | None = None
    """Taxonomy over the class names (.csv, .json, .txt, wordnet or wordnet:NODE): adds hierarchical metrics."""

    def conditions(self) -> None:
        need(len(set(self.shots)) == len(self.shots), "shots", "a list without repeats", self.shots)


class Arms(engine.Arms, frozen=True):
    """The same, with three seeds and the twin as a matter of course."""

    seeds: Seeds = 3
    """Trainings with other shots and beginnings; three or more give intervals."""
    twin: bool = True
    """The Euclidean twin of LatHAdapter, with the same parameters, data order and seeds; --no-twin leaves it out."""


class Config(Settings, frozen=True):
    """Data, protocol, methods and training."""

    EARLIER: ClassVar[dict[str, str]] = {"batch": "loop.batch_size"}

    data: Data = Data()
    hosts: tuple[HostName, ...] = ("coop", "promptsrc")
    """Prompt-learning hosts, each alone and with LatHAdapter on top."""
    baselines: tuple[Baseline, ...] = ("zero-shot", "clip-adapter", "tip-adapter")
    """Methods without prompts, under the same shots, steps and optimiser; clip-lora needs images."""
    attributes: Some[Several] = (20,)
    """Number of attributes; of several, the one with the best validation accuracy is taken."""
    hierarchy: HierarchyConfig = HierarchyConfig()
    tokens: Count = 4
    """Context tokens of the prompts."""
    depth: Count = 1
    """Layers with prompts of their own, of every host. In a model at most its layers; the papers have 9."""
    scale: Positive = 100.0
    """1/τ of the logits."""
    max_steps: Count = 2000
    """Upper end of the steps of one training where epochs say how long it is."""
    arms: Arms = Arms()
    loop: LoopConfig = LoopConfig(epochs=30.0, batch_size=32, keep_last=1)
    optim: OptimConfig = OptimConfig(lr=1e-3, weight_decay=1e-4, warmup_steps=50, warmup_ratio=0.1)

    def conditions(self) -> None:
        for name in ("attributes", "hosts", "baselines"):
            values = getattr(self, name)
            need(len(set(values)) == len(values), name, "a list without repeats", values)
        need(bool(self.hosts or self.baselines), "hosts", "at least one, or a baseline", self.hosts)
        loop = self.loop
        whole = "None, because the losses compare the images of a whole batch"
        need(loop.micro_batch is None, "loop.micro_batch", whole, loop.micro_batch)
        apart = "auto or ddp, because each training is on one rank"
        need(loop.strategy != "fsdp", "loop.strategy", apart, loop.strategy)
        need(loop.workers == 0, "loop.workers", "0, because a step reads its images itself", loop.workers)
        averaged = {"promptsrc", "promptkd"} & set(self.hosts)
        own = "None with PromptSRC, also as PromptKD's teacher, which averages its weights itself"
        need(loop.ema is None or not averaged, "loop.ema", own, loop.ema)


def base_to_new() -> Config:
    """16 shots of the first half of the classes, scored on both halves."""
    return Config()


def few_shot() -> Config:
    """1, 2, 4, 8 and 16 shots of every class."""
    return replace(Config(), protocol="few-shot", shots=(1, 2, 4, 8, 16))


def all_hosts() -> Config:
    """Base to new with the four hosts."""
    return Config(hosts=("coop", "maple", "promptsrc", "promptkd"))


def all_baselines() -> Config:
    """1, 2, 4, 8 and 16 shots of every class: every baseline on features beside CoOp and PromptSRC."""
    names = ("zero-shot", "clip-adapter", "tip-adapter", "tip-adapter-f", "linear-probe", "clap", "taskres", "gda")
    return replace(few_shot(), baselines=names)


PRESETS: dict[str, Callable[[], Config]] = {
    "base-to-new": base_to_new,
    "few-shot": few_shot,
    "all-hosts": all_hosts,
    "all-baselines": all_baselines,
}


def without(term: Term) -> tuple[Term, ...]:
    """The losses but one."""
    return tuple(each for each in TERMS if each != term)


ABLATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "attributes": {f"{count}": {"attributes": (count,)} for count in (5, 10, 20, 40)},
    "refinement": {f"{beta:g}": {"hierarchy.refinement": beta} for beta in (0.0, 0.05, 0.1, 0.2, 0.5)},
    "parts": {
        "both": {},
        "refinement-alone": {"hierarchy.hierarchy_weight": 0.0},
        "losses-alone": {"hierarchy.refinement": 0.0},
    },
    "terms": {"all": {}} | {f"no-{term}": {"hierarchy.terms": without(term)} for term in TERMS},
    "printed": {
        "ours": {},
        "degree": {"hierarchy.degree": "classes"},
        "choice": {"hierarchy.choice": "printed"},
        "both": {"hierarchy.degree": "classes", "hierarchy.choice": "printed"},
    },
    "curvature": {"fixed": {}, "learned": {"hierarchy.learn_c": True}},
    "geometry": {f"c={c:g}": {"hierarchy.c": c, "arms.twin": True} for c in (0.01, 0.1, 1.0)},
    "normalise": {"unit": {"hierarchy.normalise": True}, "norms": {"hierarchy.normalise": False}},
}
"""Name -> its variants. Every variant of geometry has the Euclidean twin beside its curvature."""


def check(config: Config) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    data = config.data
    if (data.features is None) == (data.images is None):
        missing = "is missing" if data.features is None else "and images exclude each other"
        raise UsageError(
            f"features {missing}: give a .npz or .safetensors file with image and text features, or images and model"
        )
    if data.images is not None and data.model is None:
        raise UsageError("model is missing: images need a Hugging Face CLIP model")
    for name in ("teacher", "templates"):
        if data.images is None and getattr(data, name) is not None:
            raise UsageError(
                f"{name} is read with images; features bring theirs: leafward data features --{name} writes them"
            )
    if data.images is None and "clip-lora" in config.baselines:
        raise UsageError("baselines: clip-lora changes the encoders and needs images and model, not features")
    if data.teacher is not None and "promptkd" not in config.hosts:
        raise UsageError("teacher is for promptkd, which is not among the hosts")
