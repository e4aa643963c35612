"""HyperCLIP's block-diagonal adapter on a folder of labelled images, beside LoRA, OFT, attention-only and full
fine-tuning under the same budget, with the radius of the features before and after.

    leafward train hyperclip --data photos --model openai/clip-vit-base-patch16 --compare --seeds 3
    leafward export runs/hyperclip-quick --to adapted --merged

The loss is the cross-entropy of the images over the class texts; the score may be the cosine of the paper, the Lorentz
distance, or the cosine with a radius term (see `leafward.encoders.scores`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from leafward.adapters.registry import trained
from leafward.config import Count, NonNegative, Place, Positive, Settings, Template
from leafward.engine.config import Arms, LoopConfig, OptimConfig
from leafward.errors import UsageError, need

SUMMARY = (
    "Block-diagonal adapters in a CLIP model, on labelled images; beside LoRA, OFT and fine-tuning with --compare."
)

FROZEN = "frozen"
OWN_WEIGHTS = ("attention", "full")
"""Methods without an adapter: weights of the model itself are trained."""


def trainable() -> tuple[str, ...]:
    """Every method, in the order in which they are compared; those between are what the registry of adapters names."""
    return (FROZEN, *trained(), *OWN_WEIGHTS)


if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[trainable()]


class Adapt(Settings, frozen=True):
    """What is trained in the model, and how its features are compared."""

    RARE: ClassVar[frozenset[str]] = frozenset({"c", "radius_weight"})

    method: MethodName = "block-scale"
    """What is trained; orthogonal is OFT, attention trains q, k and v themselves, frozen nothing."""
    block_size: Count = 128
    """Width of the blocks."""
    constraint: Literal["free", "diagonal", "orthogonal", "orthogonal_diagonal"] = "free"
    """Constraint on the blocks of block-scale."""
    encoder: Literal["both", "image", "text"] = "both"
    """Which encoder is adapted."""
    rank: Count | None = None
    """Rank of LoRA; None: the one with about as many parameters as the blocks."""
    score: Literal["cosine", "lorentz", "cosine+radius"] = "cosine"
    """How images and texts are compared: the paper's cosine, or an extension in which the radius counts."""
    c: Positive = 0.1
    """Curvature −c of the Lorentz score."""
    radius_weight: NonNegative = 0.1
    """Weight of the radius term."""

    @property
    def label(self) -> str:
        """What it is called in tables: its method and, where that is not the cosine, its score."""
        return self.method if self.score == "cosine" else f"{self.method}, {self.score}"

    @property
    def arm(self) -> str:
        """The label as part of a file's name."""
        return self.label.replace(", ", "-")


class Compared(Arms, frozen=True):
    """What is trained beside one model: every method, the twin with the cosine, more seeds, variants."""

    compare: bool = False
    """Train every method under the same budget; what the one named by method learned is kept."""


def fits(config: Any) -> None:
    """What trainings with `adapt`, `arms` and `loop` refuse."""
    plain = config.adapt.score == "cosine"
    need(not (plain and config.arms.twin), "arms.twin", "off with the cosine, which is the twin of other scores", True)
    whole = config.loop.strategy != "fsdp"
    need(whole, "loop.strategy", "auto or ddp: adapters act on whole weights, not on parts of them", "fsdp")


class Data(Settings, frozen=True):
    """The images, and the text of their classes."""

    MAIN: ClassVar[str] = "source"

    source: Path | None = None
    """A folder of class folders, or one of the usual data sets (see leafward data features)."""
    template: Template = "a photo of a {}."
    """The text of a class; {} is its name."""
    shots: Count | None = None
    """Training images for each class; None: all of the training part."""


class Config(Settings, frozen=True):
    """Data, model, adapter and training."""

    EARLIER: ClassVar[dict[str, str]] = {"images": "data.source", "batch": "loop.batch_size"}

    data: Data = Data()
    model: Place | None = None
    """A directory or hub name of CLIP or SigLIP, or open_clip:NAME@WEIGHTS."""
    scale: Positive = 100.0
    """1/τ of the logits."""
    adapt: Adapt = Adapt()
    arms: Compared = Compared()
    loop: LoopConfig = LoopConfig(steps=200, batch_size=32, keep_last=1)
    """Evaluations, where eval_every asks for them, are of the validation images."""
    optim: OptimConfig = OptimConfig(lr=1e-4, weight_decay=1e-4, warmup_steps=20, warmup_ratio=0.1)
    """The rate is that of adapters; attention and full have a tenth of it. Weight decay pulls an adapter to the
    identity."""

    def conditions(self) -> None:
        fits(self)
        looked = self.loop.eval_every is not None or self.loop.patience is None
        need(looked, "loop.patience", "None where loop.eval_every is", self.loop.patience)


def quick() -> Config:
    """16 shots, 200 steps."""
    return Config(data=Data(shots=16))


def full_data() -> Config:
    """All training images, 2,000 steps."""
    return Config(loop=LoopConfig(steps=2000, batch_size=32, keep_last=1))


PRESETS: dict[str, Callable[[], Config]] = {"quick": quick, "full-data": full_data}
ABLATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "block-size": {str(size): {"adapt.block_size": size} for size in (1, 4, 16, 32, 64, 128, 256)},
    "encoder": {name: {"adapt.encoder": name} for name in ("both", "text", "image")},
    "constraint": {
        name: {"adapt.constraint": name} for name in ("free", "diagonal", "orthogonal", "orthogonal_diagonal")
    },
    "score": {name: {"adapt.score": name} for name in ("cosine", "lorentz", "cosine+radius")},
}
"""Table 4 (block size), Table 6 (encoder), and what the paper leaves open: the constraint and the score."""


def check(config: Any) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    for name, value, words in (("data", config.data.source, "FOLDER"), ("model", config.model, "NAME")):
        if value is None:
            raise UsageError(f"{name} is missing: give --{name} {words}")
