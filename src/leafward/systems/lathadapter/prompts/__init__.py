"""Prompt-learning hosts: CoOp, MaPLe, PromptSRC and PromptKD, and the baselines beside them.

A host turns images and classes into features and logits and brings its own losses; a latent hierarchy may sit on top
of any of them. Prompts act on tokens inside a CLIP model, or on cached features.
"""

from leafward.systems.lathadapter.prompts.features import FeaturePrompts
from leafward.systems.lathadapter.prompts.host import Host, Output
from leafward.systems.lathadapter.prompts.hosts import (
    ClipAdapter,
    Coop,
    MaPLe,
    PromptKD,
    PromptSRC,
    TipAdapter,
    ZeroShot,
)
from leafward.systems.lathadapter.prompts.tokens import TokenPrompts

__all__ = [
    "ClipAdapter",
    "Coop",
    "FeaturePrompts",
    "Host",
    "MaPLe",
    "Output",
    "PromptKD",
    "PromptSRC",
    "TipAdapter",
    "TokenPrompts",
    "ZeroShot",
]
