"""Text, image and text-image models of Hugging Face and open_clip behind one surface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.encoders.encoder import Encoder, load_encoder

_HOME = {
    "encoder": (
        "Encoder",
        "load_encoder",
    ),
}

__all__ = ["Encoder", "load_encoder"]

__getattr__, __dir__ = lazy(__name__, _HOME)
