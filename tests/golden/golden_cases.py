"""The trainings whose numbers are golden: settings by dotted name, and where a run leaves what is compared.

This is the one place that knows how settings are called and how run directories and results are laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

STEPS = 10
EXACT, SINGLE = 1e-9, 1e-5
"""Relative tolerances: of what is computed in float64, and of what is in float32 in parts."""

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One run: its settings over those of the first preset; arm -> folder of its metrics.jsonl in the run directory.

    A setting that begins with @ is a path in the folder that `golden_data.make_all` fills.
    """

    settings: Mapping[str, Any]
    arms: Mapping[str, str]
    tolerance: float = EXACT


@dataclass(frozen=True)
class System:
    """The cases of one training; `scores`: name -> number from what result.json holds; `losses`: their names in the
    records of metrics.jsonl."""

    cases: Mapping[str, Case]
    scores: Callable[[Result], Iterator[tuple[str, Any]]]
    losses: tuple[str, ...] = ("train/loss",)


LOOP = {
    "loop.steps": STEPS,
    "loop.log_every": 1,
    "loop.eval_every": 5,
    "loop.checkpoint_every": STEPS,
    "loop.batch_size": 4,
    "loop.precision": "float64",
    "loop.device": "cpu",
    "optim.warmup_steps": 3,
    # With a tiny one a gradient that is zero but for rounding moves a weight by the whole learning rate.
    "optim.eps": 1e-4,
}
ALONE = {"precision": "float64", "device": "cpu"}
"""The same where the recipe has no loop of its own."""


def members(*arms: str) -> dict[str, str]:
    return {arm: f"members/{arm}-0" for arm in arms}


def numbers(values: Mapping[str, Any], *names: str) -> Iterator[tuple[str, Any]]:
    """What `values` holds under some names, or under all that are numbers."""
    chosen = names or [name for name, value in values.items() if isinstance(value, float)]
    return ((name, values[name]) for name in chosen)


def prefixed(prefix: str, found: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return ((f"{prefix}/{name}", value) for name, value in found)


# HELM

HELM = LOOP | {"data": "@fables.jsonl", "vocab_size": 320, "context": 32, "validation": 0.2, "optim.lr": 1e-2}


def helm_scores(result: Result) -> Iterator[tuple[str, Any]]:
    for member in result["members"]:
        found = {name: member[name]["value"] for name in ("loss", "perplexity", "bits_per_byte")}
        yield from prefixed(member["geometry"], numbers(found))


helm = System(
    {
        "helm-d": Case(HELM | {"twin": True}, members("lorentz", "euclidean")),
        "helm-mice": Case(HELM | {"model": "helm-mice-tiny", "twin": True}, members("lorentz", "euclidean")),
        "helm-mice-learned": Case(
            HELM | {"model": "helm-mice-tiny", "learn_curvatures": True, "loop.micro_batch": 2}, {"lorentz": ""}
        ),
    },
    helm_scores,
)

# Vision

VISION = LOOP | {"loop.eval_every": None, "size": 32, "held_out": 0.25, "optim.lr": 2e-3}
CLASSIFY = VISION | {"data": "@photos"}
SEGMENT = VISION | {"task": "segment", "data": "@scenes", "loop.batch_size": 2, "optim.lr": 5e-4}
DETECT = VISION | {"task": "detect", "data": "@boxes", "loop.batch_size": 1, "optim.lr": 2e-4}
AUGMENTED = {"augment.jitter": 0.4, "augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.smoothing": 0.1}


def vision_scores(result: Result) -> Iterator[tuple[str, Any]]:
    for member in result["members"]:
        arm = member["name"].removesuffix("-0")
        yield from prefixed(arm, numbers({key: value for key, value in member["scores"].items() if value is not None}))


hcformer = System(
    {
        "classify": Case(CLASSIFY | {"twin": True}, members("lorentz", "euclidean")),
        "classify-curved": Case(
            CLASSIFY | AUGMENTED | {"patch_geometry": "lorentz", "learn_curvature": True, "drop_path": 0.1},
            {"lorentz": ""},
        ),
        "classify-timm": Case(CLASSIFY | {"model": "test_vit"}, {"test_vit": ""}),
        "segment": Case(SEGMENT | {"twin": True}, members("lorentz", "euclidean")),
        "segment-timm": Case(SEGMENT | {"model": "test_resnet"}, {"test_resnet": ""}),
        "detect": Case(DETECT | {"twin": True}, members("lorentz", "euclidean")),
        "detect-timm": Case(DETECT | {"model": "test_convnext", "data": "@outlines"}, {"test_convnext": ""}),
    },
    vision_scores,
)

vision = System(
    {"classify": Case(CLASSIFY | AUGMENTED | {"model": "test_convnext"}, {"test_convnext": ""})}, vision_scores
)

# Hi-Mapper

TREE = {"backbone": "timm:test_resnet", "pretrained": False, "leaves": 4, "levels": 2, "dim": 8, "optim.lr": 5e-4}

himapper = System(
    {
        "classify": Case(
            CLASSIFY | TREE | {"twin": True, "ablation": True},
            members("lorentz", "plain", "euclidean", "lorentz-deterministic"),
        ),
        "classify-moments": Case(
            CLASSIFY | TREE | {"mixture": "moments", "freeze_backbone": True, "sibling_weight": 0.5}, {"lorentz": ""}
        ),
        "segment": Case(SEGMENT | TREE | {"twin": True}, members("lorentz", "plain", "euclidean")),
        "detect": Case(DETECT | TREE | {"backbone": "timm:test_convnext"}, {"lorentz": ""}),
    },
    vision_scores,
)

# HyperCLIP and its segmenter

METHODS = ("block-scale", "orthogonal", "lora", "attention", "full")
CLIP = ALONE | {"model": "@clip", "block_size": 8, "steps": STEPS, "batch_size": 6, "lr": 1e-2, "log_every": 1}
SQUARES = CLIP | {"data": "@squares", "scale": 20.0}


def hyperclip_scores(result: Result) -> Iterator[tuple[str, Any]]:
    for row in result["methods"]:
        radii = {f"{side}-radius": row["radius"][side]["after"]["mean"] for side in ("image", "text")}
        yield from prefixed(row["method"], numbers(row | radii, "accuracy_before", "accuracy", *radii))


hyperclip = System(
    {
        "methods": Case(SQUARES | {"compare": True}, members(*METHODS)),
        "lorentz": Case(
            SQUARES | {"score": "lorentz", "twin": True, "constraint": "orthogonal_diagonal", "shots": 4},
            members("block-scale-lorentz", "block-scale"),
        ),
        "radius": Case(SQUARES | {"score": "cosine+radius", "method": "lora"}, {"lora-cosine+radius": ""}),
    },
    hyperclip_scores,
)

SCENES = CLIP | {"data": "@scenes", "size": 32, "channels": 16, "window": 2, "batch_size": 2}


def segmenter_scores(result: Result) -> Iterator[tuple[str, Any]]:
    for row in result["methods"]:
        yield from prefixed(row["name"], numbers(row["metrics"]))


segmenter = System(
    {
        "methods": Case(
            SCENES | {"compare": True},
            members("frozen", *METHODS),
        ),
        "lorentz": Case(SCENES | {"score": "lorentz", "templates": ["a photo of a {}", "the {}"]}, {"block-scale": ""}),
    },
    segmenter_scores,
)

# LatHAdapter

HOSTS = ("coop", "maple", "promptsrc", "promptkd")
FEW = ALONE | {"seeds": 1, "shots": [4], "max_steps": STEPS, "batch_size": 4, "queue": 12, "lr": 1e-2, "log_every": 1}


def lathadapter_scores(result: Result) -> Iterator[tuple[str, Any]]:
    return ((f"{row['method']}/{row['test']}", row["accuracy"]) for row in result["scores"])


def cells(*hosts: str, attributes: int = 5) -> dict[str, str]:
    latent = ("LatHAdapter", "Euclidean-twin")
    names = [host + end for host in hosts for end in ("", *(f"-{name}" for name in latent))]
    ends = {name: f"-{attributes}-attributes" if name.endswith(latent) else "" for name in names}
    return {name: f"members/{name}-4-shots{ends[name]}-0" for name in names}


CACHED = FEW | {"features": "@features.npz", "hosts": list(HOSTS), "attributes": [5], "scale": 20.0}

lathadapter = System(
    {
        "features": Case(CACHED, {"clip-adapter": "members/clip-adapter-4-shots-0"} | cells(*HOSTS)),
        "tokens": Case(
            FEW | {"images": "@squares", "model": "@clip", "hosts": list(HOSTS), "attributes": [3], "depth": 2},
            cells(*HOSTS, attributes=3),
        ),
    },
    lathadapter_scores,
)

# Radial Embedding

CAPTIONS = ALONE | {
    "model": "@sentence",
    "data": "@captions.jsonl",
    "test": "@test.jsonl",
    "second": "@second.jsonl",
    "hyperlex": "@hyperlex.txt",
    "batch_size": 3,
    "epochs": 5.0,
    "lr": 1e-3,
    "log_every": 1,
    "twin": True,
}
BOTH = members("euclidean", "lorentz")


def radial_scores(result: Result) -> Iterator[tuple[str, Any]]:
    for name in ("before", "after", "twin"):
        yield from prefixed(name, numbers(result.get(name, {})))


radial = System(
    {
        "angles": Case(CAPTIONS, BOTH),
        "cones": Case(CAPTIONS | {"objective.loss": "cone", "objective.root": "learned", "train": "blocks"}, BOTH),
        "lora": Case(CAPTIONS | {"model": "@clip", "train": "lora", "rank": 4, "schedule": "cosine"}, BOTH),
    },
    radial_scores,
)

# Superposition: every step is a snapshot, so that the records hold the mean losses after each step.

FLEET = {
    "features": 24,
    "widths": [3, 4, 6, 8],
    "decays": [-1.0, 0.5],
    "laws": ["power:1"],
    "batch_size": 32,
    "steps": STEPS,
    "eval_rows": 64,
    "axis": ["steps"],
    "snapshots": 200,
    "precision": "float64",
    "device": "cpu",
    "processes": 0,
}


def superposition_scores(result: Result) -> Iterator[tuple[str, Any]]:
    models = result["models"]
    for index, (width, decay) in enumerate(zip(models["width"], models["decay"], strict=True)):
        for name in ("loss", "train_loss", "overlap_mean", "phi_half"):
            yield f"width {width}, decay {decay:g}/{name}", models[name][index]
    for fit in result["fits"]:
        yield f"decay {fit['decay']:g}/exponent", fit["exponent"]


superposition = System(
    {
        "fleet": Case(FLEET, {"models": ""}),
        "cross-entropy": Case(FLEET | {"loss": "ce", "optim": "muon", "laws": ["exponential:4"]}, {"models": ""}),
        "correlated": Case(FLEET | {"corr": "block:4:0.5", "width_rates": True, "loss_scale": 10.0}, {"models": ""}),
        "sphere": Case(FLEET | {"constraint": "sphere", "optim": "sgd"}, {"models": ""}),
    },
    superposition_scores,
    losses=("strong loss", "weak loss"),
)

# Taxonomy

NODES = ALONE | {
    "data": "@tree.csv",
    "dim": 3,
    "epochs": STEPS,
    "batch_size": 64,
    "log_every": 1,
    "warmup_ratio": 1 / STEPS,
}


def taxonomy_scores(result: Result) -> Iterator[tuple[str, Any]]:
    for member in result["members"]:
        yield from prefixed(member["geometry"], numbers(member))


WITH_TWIN = members("lorentz", "euclidean")

taxonomy = System(
    {
        "distance": Case(NODES | {"twin": True}, WITH_TWIN),
        "distance-poincare": Case(NODES | {"geometry": "poincare", "c": 0.5}, {"poincare": ""}),
        "cones": Case(NODES | {"objective": "cones", "twin": True}, WITH_TWIN),
        "cones-poincare": Case(NODES | {"objective": "cones", "geometry": "poincare", "dim": 2}, {"poincare": ""}),
    },
    taxonomy_scores,
)

SYSTEMS: dict[str, System] = {
    "helm": helm,
    "hcformer": hcformer,
    "himapper": himapper,
    "hyperclip": hyperclip,
    "segmenter": segmenter,
    "vision": vision,
    "lathadapter": lathadapter,
    "radial": radial,
    "superposition": superposition,
    "taxonomy": taxonomy,
}
