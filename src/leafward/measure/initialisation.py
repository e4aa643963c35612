"""The same matrix as its architecture initialises it: the null of `--against init`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from leafward.errors import LeafwardError, UsageError, require
from leafward.measure.matrix_zoo import ZOOS, zoo_state
from leafward.measure.targets import Found, of_state

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")
MOST_LAYERS = 1
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Initial = Callable[[str], str | None]


def initial_weights(found: Found) -> tuple[Found, Initial]:
    """Fresh weights of the architecture of a target, and for each of its matrices the name of that one there.

    A transformer is built with one layer, which stands for all of them. Code that a folder brings is never run.
    """
    zoo, _, name = found.label.partition(":")
    if zoo in ZOOS:
        state = zoo_state(zoo, f"{name.partition('@')[0]}@random")
        assert isinstance(state, dict)
        fresh = of_state(state, f"{found.label} before training", "initialisation")
        return fresh, lambda each: each if each in fresh.entries else None
    if found.folder is None or not (found.folder / "config.json").is_file():
        raise UsageError(
            f"--against init: {found.label} does not say what its architecture is; it needs a Hugging Face folder, a "
            "timm or open_clip model, or a run"
        )
    fresh = of_state(_state(found.folder), f"{found.label} before training", "initialisation")
    return fresh, lambda each: _counterpart(each, fresh)


def _state(folder: Path) -> dict[str, Any]:
    transformers = require("transformers", "lm")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = config.get_text_config()
        for each in LAYERS:
            if isinstance(getattr(text, each, None), int) and getattr(text, each) > MOST_LAYERS:
                setattr(text, each, MOST_LAYERS)
        for kinds in ("layer_types", "mlp_layer_types"):
            if getattr(text, kinds, None):
                setattr(text, kinds, getattr(text, kinds)[:MOST_LAYERS])
        torch.manual_seed(0)
        kind = (
            "AutoModelForCausalLM" if type(config) in transformers.AutoModelForCausalLM._model_mapping else "AutoModel"
        )
        return getattr(transformers, kind).from_config(config, trust_remote_code=False).state_dict()
    except (ValueError, KeyError, OSError, ImportError, AttributeError, TypeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LeafwardError(f"--against init: the model of {folder} cannot be built anew ({reason})") from error


def _counterpart(name: str, fresh: Found) -> str | None:
    """The matrix of the same role in the fresh model: the same name with layer 0, whatever prefix either has."""
    wanted = NUMBER.sub("0", name)
    if wanted in fresh.entries:
        return wanted
    endings = [each for each in fresh.entries if each.endswith("." + wanted) or wanted.endswith("." + each)]
    return endings[0] if len(endings) == 1 else None
