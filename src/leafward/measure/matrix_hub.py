"""The output matrix of a Hugging Face directory: head or tied embedding, without padding rows.

Names are matched by their endings, so prefixes such as `model.`, `transformer.` or `language_model.` do not
matter; tensors inside numbered layers never match.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from leafward.data.arrays import open_safetensors
from leafward.errors import DataError, UsageError
from leafward.files import read_bytes, read_record
from leafward.measure.matrix_files import Catalogue, Matrix

HEADS = (
    "lm_head.weight",
    "embed_out.weight",
    "output.weight",
    "proj_out.weight",
    "cls.predictions.decoder.weight",
)
EMBEDDINGS = (
    "shared.weight",
    "decoder.embed_tokens.weight",
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "embeddings.weight",
)
FINAL_NORMS = (
    "decoder.final_layer_norm.weight",
    "decoder.layer_norm.weight",
    "final_layer_norm.weight",
    "final_layernorm.weight",
    "ln_f.weight",
    "norm_f.weight",
    "norm.weight",
    "cls.predictions.transform.LayerNorm.weight",
)
OTHER_TOWERS = {"encoder", "vision_tower", "vision_model", "visual", "audio_tower", "multi_modal_projector"}
# Model types whose RMSNorm multiplies by (1 + w), so that the stored gain is w = g − 1.
UNIT_OFFSET_NORMS = {
    "gemma", "gemma2", "gemma3", "recurrent_gemma", "vaultgemma", "t5gemma", "t5gemma2",
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "minimax_m3_vl", "step3p7",
}  # fmt: skip


def from_checkpoint(path: Path, tensor: str | None, fold_norm: bool) -> Matrix:
    """The output matrix of the checkpoint in `path`, or the tensor asked for."""
    config = read_record(path / "config.json")
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    catalogue = catalogue_of(path)
    if tensor is None:
        name, role = find_output(catalogue, text.get("tie_word_embeddings"))
    else:
        name, role = tensor, "chosen tensor"
    source = catalogue.rows(name)
    notes = [*catalogue.notes()]
    rows = source.shape[0]
    hidden = _hidden_size(text)
    if _ends(name, HEADS + EMBEDDINGS):
        rows, note = vocabulary_rows(path, text, rows)
        notes += note
        if hidden is not None and hidden != source.shape[1]:
            notes.append(
                f"the rows are {source.shape[1]} wide while hidden_size is {hidden} (a projected embedding): "
                f"every figure here, and any fit against width, uses m = {source.shape[1]}"
            )
    if role == "input embedding":
        notes.append("no output head is stored and the embeddings are not tied: this is the input embedding")
    gain = None
    if fold_norm:
        gain, note = _final_gain(catalogue, text.get("model_type") or "", source.shape[1])
        notes.append(note)
    return Matrix(
        target=str(path),
        tensor=name,
        source=source,
        rows=rows,
        role=role,
        gain=gain,
        hidden_size=hidden,
        notes=tuple(notes),
    )


def catalogue_of(path: Path) -> Catalogue:
    """The safetensors of a directory: one index, else every .safetensors file in it."""
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return Catalogue.of_index(indices[0])
    files = sorted(path.glob("*.safetensors"))
    if len(indices) > 1:
        raise UsageError(f"{path} holds several indices: name one of {', '.join(file.name for file in indices)}")
    if not files:
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
        if pickles:
            raise DataError(
                f"{path} holds only pickled weights ({', '.join(pickles[:3])}), which can run code when "
                "opened: convert them to safetensors first, for example with model.save_pretrained"
            )
        raise DataError(f"{path} holds no weights: no .safetensors file and no .safetensors.index.json")
    catalogue: dict[str, Path] = {}
    for file in files:
        with open_safetensors(file) as opened:
            catalogue.update(dict.fromkeys(opened.keys(), file))
    return Catalogue(str(path), catalogue)


def find_output(catalogue: Catalogue, tied: bool | None) -> tuple[str, str]:
    """(tensor name, role). A stored head counts unless the configuration ties it to the embedding."""
    head = _match(catalogue, HEADS)
    if head is not None and tied is not True:
        return head, "output head"
    embedding = _match(catalogue, EMBEDDINGS)
    if embedding is not None:
        return embedding, "input embedding" if tied is False else "tied embedding"
    if head is not None:
        return head, "output head"
    raise DataError(
        f"{catalogue.label}: found neither an output head nor a token embedding; choose one with --tensor, for "
        f"example {', '.join(catalogue.matrices()[:8])}"
    )


def _match(catalogue: Catalogue, endings: tuple[str, ...]) -> str | None:
    """The one tensor outside numbered layers and other towers with the first ending that occurs."""
    names = [
        name
        for name in catalogue.files
        if not any(part.isdecimal() or part in OTHER_TOWERS for part in name.split("."))
    ]
    for ending in endings:
        hits = [name for name in names if _ends(name, (ending,))]
        if len(hits) > 1:
            raise UsageError(f"{catalogue.label}: choose one with --tensor: {', '.join(sorted(hits))}")
        if hits:
            return hits[0]
    return None


def _ends(name: str, endings: tuple[str, ...]) -> bool:
    """Whether the last dotted parts of a name are one of the endings."""
    return ("." + name).endswith(tuple("." + ending for ending in endings))


def _hidden_size(config: dict[str, Any]) -> int | None:
    return next(
        (config[key] for key in ("hidden_size", "n_embd", "d_model") if isinstance(config.get(key), int)),
        None,
    )


def vocabulary_rows(path: Path, config: dict[str, Any], stored: int) -> tuple[int, list[str]]:
    """How many rows belong to real tokens, and a note where padding was left out or could not be told."""
    length, origin = tokenizer_length(path), "the tokenizer"
    if length is None:
        length, origin = config.get("vocab_size"), "config.json (no tokenizer file here)"
    if not isinstance(length, int) or length < 2:
        return stored, ["neither a tokenizer nor vocab_size: padding rows, if any, are counted"]
    if length > stored:
        return stored, [f"{origin} has {length:,} tokens but the matrix has {stored:,} rows"]
    if length == stored:
        return stored, []
    return length, [f"left out {stored - length:,} padding rows: {stored:,} stored, {length:,} by {origin}"]


def tokenizer_length(path: Path) -> int | None:
    """1 + the largest token id that the tokenizer files of a directory name; None without such files."""
    try:
        ids = _token_ids(path)
    except (AttributeError, TypeError, OSError) as error:
        raise DataError(f"the tokenizer files in {path} are not as tokenizers write them: {error}") from error
    return max(ids) + 1 if ids else None


def _token_ids(path: Path) -> set[int]:
    """The token ids that the files name, or of a plain list of tokens the last one."""
    ids: set[int] = set()
    if (path / "tokenizer.json").is_file():
        tokenizer = read_record(path / "tokenizer.json")
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        ids |= _ids(vocabulary) if isinstance(vocabulary, dict) else {len(vocabulary) - 1}
        ids |= {token["id"] for token in tokenizer.get("added_tokens", []) if isinstance(token.get("id"), int)}
    elif (path / "vocab.json").is_file():
        ids |= _ids(read_record(path / "vocab.json"))
    elif (path / "vocab.txt").is_file():
        # As bytes: a str would also be split at characters such as U+2028, which are tokens.
        ids.add(len(read_bytes(path / "vocab.txt").splitlines()) - 1)
    if not ids:
        return ids
    if (path / "added_tokens.json").is_file():
        ids |= _ids(read_record(path / "added_tokens.json"))
    if (path / "tokenizer_config.json").is_file():
        added = read_record(path / "tokenizer_config.json").get("added_tokens_decoder", {})
        ids |= {int(key) for key in added if key.isdecimal()}
    return ids


def tokenizer_names(path: Path) -> list[str] | None:
    """The tokens of the tokenizer in a directory by their ids; None where its files do not list them."""
    if (path / "tokenizer.json").is_file():
        tokenizer = read_record(path / "tokenizer.json")
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        if not isinstance(vocabulary, dict):
            vocabulary = {each[0]: at for at, each in enumerate(vocabulary) if isinstance(each, list) and each}
        added = tokenizer.get("added_tokens", [])
        vocabulary = {**vocabulary, **{token["content"]: token["id"] for token in added if "content" in token}}
    elif (path / "vocab.json").is_file():
        vocabulary = read_record(path / "vocab.json")
    elif (path / "vocab.txt").is_file():
        return [line.decode("utf-8", "replace") for line in read_bytes(path / "vocab.txt").splitlines()]
    else:
        return None
    by_id = {at: name for name, at in vocabulary.items() if isinstance(at, int)}
    return [by_id.get(at, f"row {at}") for at in range(max(by_id, default=-1) + 1)] or None


def _ids(vocabulary: dict[str, Any]) -> set[int]:
    return {token for token in vocabulary.values() if isinstance(token, int)}


def _final_gain(catalogue: Catalogue, model_type: str, width: int) -> tuple[torch.Tensor, str]:
    """(gain (m,) of the final norm in float32, a note on how it was read)."""
    name = _match(catalogue, FINAL_NORMS)
    if name is None:
        raise DataError(f"--fold-norm: {catalogue.label} has no final norm that we know by name")
    gain = catalogue.load(name).float()
    if gain.shape != (width,):
        raise DataError(
            f"--fold-norm: {name} has shape {list(gain.shape)} but the rows are {width} wide; a projection "
            "lies between the norm and the head, so its gain cannot be folded into the rows"
        )
    if not bool(gain.isfinite().all()):
        raise DataError(f"--fold-norm: {name} holds NaN or infinite values")
    if model_type.removesuffix("_text") in UNIT_OFFSET_NORMS:
        return gain + 1, f"folded {name} as 1 + w (the convention of {model_type})"
    biased = name.removesuffix("weight") + "bias" in catalogue.files
    kind = "LayerNorm gain (its bias only shifts logits)" if biased else "RMSNorm gain"
    return gain, f"folded {name}: {kind}"
