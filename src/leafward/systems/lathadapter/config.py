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
from typing import Literal

from leafward.config import Count, Natural, NonNegative, Place, Positive, Seeds, Settings, Several, Some, Template
from leafward.errors import UsageError, need

SUMMARY = "Few-shot prompt learning on CLIP features: hosts alone, with LatHAdapter, and with its Euclidean twin."
MAY_CHANGE = ("device",)
"""Fields that a resumed run may change."""

HostName = Literal["coop", "maple", "promptsrc", "promptkd"]
Baseline = Literal["zero-shot", "clip-adapter", "tip-adapter"]


class Config(Settings, frozen=True):
    """Data, protocol, methods and training."""

    features: Path | None = None
    """Feature file (.npz or .safetensors) of the data set that is trained on."""
    images: Path | None = None
    """In place of features: labelled images, a folder of class folders or one of the usual data sets."""
    model: Place | None = None
    """With images: a directory or hub name of a Hugging Face CLIP model."""
    template: Template = "a photo of a {}."
    """With images: the text of a class; its first words are where the tokens begin."""
    targets: tuple[Path, ...] = ()
    """Feature files (with images: folders) of other data sets, for the protocols cross-dataset and domain."""
    protocol: Literal["base-to-new", "few-shot", "cross-dataset", "domain"] = "base-to-new"
    """Which classes and images are trained and scored."""
    shots: Some[Count] = (16,)
    """Training images for each class; several give one training each."""
    seeds: Seeds = 3
    """Trainings with other shots and beginnings; three or more give intervals."""
    seed: Natural = 0
    """The first of the seeds."""
    hosts: tuple[HostName, ...] = ("coop", "promptsrc")
    """Prompt-learning hosts, each alone and with LatHAdapter on top."""
    baselines: tuple[Baseline, ...] = ("zero-shot", "clip-adapter", "tip-adapter")
    """Methods without prompts."""
    twin: bool = True
    """The Euclidean twin of LatHAdapter, with the same parameters, data order and seeds; --no-twin leaves it out."""
    attributes: Some[Several] = (20,)
    """Number of attributes; of several, the one with the best validation accuracy is taken."""
    c: Positive = 0.1
    """Curvature −c."""
    refinement: NonNegative = 0.1
    """Strength β of the refinement of classes by attributes."""
    margin: NonNegative = 0.1
    """Margin of the hierarchy loss."""
    neighbours: Count = 3
    """k of the reciprocal nearest neighbours."""
    queue: Natural = 256
    """Features of earlier batches that serve as negatives."""
    normalise: bool = True
    """Features of unit length before the exponential map; --no-normalise keeps their norms, which are the radii."""
    hierarchy_weight: NonNegative = 1.0
    """Weight of the hierarchy losses."""
    tokens: Count = 4
    """Context tokens of the prompts."""
    depth: Count = 1
    """Depth of the prompts; MaPLe has two more. In a model at most its layers; the papers have 9."""
    epochs: Count = 30
    """Passes over the shots, at most `max_steps` steps."""
    max_steps: Count = 2000
    """Upper end of the steps of one training."""
    batch: Count = 32
    """Images of a batch."""
    lr: Positive = 1e-3
    """Peak learning rate of AdamW."""
    scale: Positive = 100.0
    """1/τ of the logits."""
    taxonomy: Path | None = None
    """Taxonomy over the class names (.csv, .json, .txt, wordnet or wordnet:NODE): adds hierarchical metrics."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16 is autocast of the forward pass over float32 parameters; float64 computes all in float64, for proofs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""

    def conditions(self) -> None:
        for name in ("shots", "attributes", "hosts", "baselines"):
            values = getattr(self, name)
            need(len(set(values)) == len(values), name, "a list without repeats", values)
        need(bool(self.hosts or self.baselines), "hosts", "at least one, or a baseline", self.hosts)


def base_to_new() -> Config:
    """16 shots of the first half of the classes, scored on both halves."""
    return Config()


def few_shot() -> Config:
    """1, 2, 4, 8 and 16 shots of every class."""
    return Config(protocol="few-shot", shots=(1, 2, 4, 8, 16))


def all_hosts() -> Config:
    """Base to new with the four hosts."""
    return Config(hosts=("coop", "maple", "promptsrc", "promptkd"))


PRESETS: dict[str, Callable[[], Config]] = {
    "base-to-new": base_to_new,
    "few-shot": few_shot,
    "all-hosts": all_hosts,
}


def check(config: Config) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    if (config.features is None) == (config.images is None):
        missing = "is missing" if config.features is None else "and images exclude each other"
        raise UsageError(
            f"features {missing}: give a .npz or .safetensors file with image and text features, or images and model"
        )
    if config.images is not None and config.model is None:
        raise UsageError("model is missing: images need a Hugging Face CLIP model")
