"""The tokens of a trained language model as points of its space."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from leafward.geometry import Euclidean, Lorentz

SHOWN_AS = str.maketrans({"Ġ": "␣", "Ċ": "⏎"})
"""Byte-level tokenizers write a space and the end of a line as letters."""


def read_tokens(model: Path) -> tuple[list[str], Lorentz | Euclidean, Tensor]:
    """Names (N), space and points (N, m) of the tokens of the model in the folder `model`."""
    from leafward.systems.helm import load_model

    trained, tokenizer = load_model(model, "cpu")
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    rows = trained.state_dict()["model.embed.weight"][: len(tokens)].float()
    names = [token.translate(SHOWN_AS) for token in tokens]
    if trained.config.geometry == "euclidean":
        return names, Euclidean(), rows
    space = Lorentz(trained.config.curvature)
    return names, space, space.lift(rows)
