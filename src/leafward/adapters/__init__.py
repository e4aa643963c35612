"""Change a pretrained model by a few parameters beside it: attach, train, save, load, merge.

    from leafward.adapters import BlockScaleConfig, attach, merge, save_pretrained
    clip = attach(clip, BlockScaleConfig(block_size=128))
    ...                                # train: only the adapter's parameters require gradients
    save_pretrained(clip, "adapter")   # adapter_config.json, adapter_model.safetensors
    clip = merge(clip)                 # the base model again, at no cost

Names are imported on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.adapters.block_scale import BlockScaleConfig
    from leafward.adapters.io import from_pretrained, save_pretrained
    from leafward.adapters.low_rank import LowRankConfig
    from leafward.adapters.surface import (
        Adapter,
        adapters,
        attach,
        detach,
        merge,
        print_trainable_parameters,
        set_adapter,
        trainable_parameters,
    )

_HOME = {
    "block_scale": ("BlockScaleConfig",),
    "io": (
        "from_pretrained",
        "save_pretrained",
    ),
    "low_rank": ("LowRankConfig",),
    "surface": (
        "Adapter",
        "adapters",
        "attach",
        "detach",
        "merge",
        "print_trainable_parameters",
        "set_adapter",
        "trainable_parameters",
    ),
}

__all__ = [
    "Adapter",
    "BlockScaleConfig",
    "LowRankConfig",
    "adapters",
    "attach",
    "detach",
    "from_pretrained",
    "merge",
    "print_trainable_parameters",
    "save_pretrained",
    "set_adapter",
    "trainable_parameters",
]

__getattr__, __dir__ = lazy(__name__, _HOME)
