"""The tokens of a trained language model as points of hyperbolic space, for the explorer."""

from __future__ import annotations

import shlex
from pathlib import Path

SHOWN_AS = str.maketrans({"Ġ": "␣", "Ċ": "⏎"})
"""Byte-level tokenizers write a space and the end of a line as letters."""


def file(model: Path, out: Path) -> str:
    """Write the token embeddings of the model in the folder `model` to `out`; returns the command that opens them."""
    import numpy as np

    from leafward.files import replacing, write_text
    from leafward.tasks.language import load_model

    trained, tokenizer = load_model(model, "cpu")
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    write_text(out / "names.txt", "".join(f"{token.translate(SHOWN_AS)}\n" for token in tokens))
    with replacing(out / "embeddings.npy") as temporary, open(temporary, "wb") as stream:
        np.save(stream, trained.state_dict()["model.embed.weight"][: len(tokens)].numpy())
    c = trained.config.curvature
    return shlex.join(["leafward", "explore", str(out), "--vectors", "space", "--c", f"{c:g}"])
