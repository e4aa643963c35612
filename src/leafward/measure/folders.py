"""Folders of weights: Hugging Face models (sharded, fp8, pickled), PEFT adapters, sparse autoencoders, our own runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from leafward.data import arrays
from leafward.data.arrays import RowReader
from leafward.errors import DataError, LeafwardError, UsageError
from leafward.files import check_size, inside, read_record
from leafward.measure.matrix_files import Catalogue
from leafward.measure.matrix_hub import (
    EMBEDDINGS,
    HEADS,
    catalogue_of,
    find_output,
    tokenizer_names,
    vocabulary_rows,
)
from leafward.measure.targets import Entry, Found, as_matrix, entry_of, of_state

LARGEST = 1 << 40
FLOATS = {"F64", "F32", "F16", "BF16"}
EIGHT_BITS = {"F8_E4M3", "F8_E5M2"}
SCALES = ("_scale_inv", "_scale")
"""What follows the name of an fp8 weight in that of its scale; both kinds of files mean the factor that it is times."""
BLOCK = 128
"""Rows and columns of a block of fp8 weights, where that many cover the matrix."""
TIME = "time_weight"
"""Beside a weight of HELM: the column of its time coordinate."""


def open_folder(path: Path) -> Found:
    """What a folder holds: an adapter, a sparse autoencoder, a run of ours, or a model."""
    if (path / "adapter_config.json").is_file() and _peft(path):
        return _adapter(path)
    if (path / "cfg.json").is_file() and not (path / "config.json").is_file():
        return _autoencoder(path)
    if (path / "config.yaml").is_file():
        return _run(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1 and not (path / "config.json").is_file():
        from leafward.measure.gguf import open_gguf

        return open_gguf(ggufs[0])
    if (path / "config.json").is_file():
        return _model(path)
    catalogue = _any_catalogue(path)
    return of_catalogue(catalogue, str(path), "safetensors") if isinstance(catalogue, Catalogue) else catalogue


def of_catalogue(catalogue: Catalogue, label: str, kind: str, **more: Any) -> Found:
    """The floating tensors of safetensors files: fp8 ones times their scales, HELM's with their time column."""
    described = catalogue.described()
    entries, skipped, notes = {}, {}, [*catalogue.notes()]
    for name, (shape, dtype) in described.items():
        if name.endswith(TIME) or (dtype in EIGHT_BITS | FLOATS and name.endswith(SCALES)):
            continue
        if dtype in EIGHT_BITS:
            found = _eight_bits(catalogue, described, name, shape, dtype)
        elif dtype in FLOATS:
            found = _plain(catalogue, described, name, shape, dtype)
        else:
            skipped[dtype] = skipped.get(dtype, 0) + (len(shape) > 1)
            continue
        if found is not None:
            entries[name] = found
    notes += [f"{count} tensors of type {dtype} are not read" for dtype, count in skipped.items() if count]
    return Found(label, kind, entries, notes=tuple(notes), **more)


def _plain(
    catalogue: Catalogue, described: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: str
) -> Entry | None:
    """A tensor as it is stored; a linear map of HELM with its time columns in front."""
    time = name.removesuffix("weight") + TIME
    if name.endswith(".weight") and time in described and len(shape) == 2 and described[time][0][0] == shape[0]:
        columns = described[time][0][1]
        wide = (shape[0], shape[1] + columns)
        note = f"with {columns} time column{'s' * (columns > 1)} in front"
        return entry_of(name, wide, dtype.lower(), lambda: _beside(catalogue, time, name, wide), notes=(note,))
    return entry_of(name, shape, dtype.lower(), lambda: _rows(catalogue, name, shape, dtype))


def _rows(catalogue: Catalogue, name: str, shape: tuple[int, ...], dtype: str) -> RowReader:
    if len(shape) == 2:
        return arrays.rows_of_safetensors(catalogue.files[name], name)
    matrix = as_matrix(name, shape)
    assert matrix is not None
    return RowReader(matrix, dtype.lower(), lambda a, b: catalogue.load(name).reshape(matrix)[a:b])


def _beside(catalogue: Catalogue, time: str, name: str, shape: tuple[int, int]) -> RowReader:
    first, rest = (arrays.rows_of_safetensors(catalogue.files[each], each) for each in (time, name))
    return RowReader(shape, rest.dtype, lambda a, b: torch.cat([first.read(a, b).float(), rest.read(a, b).float()], 1))


def _eight_bits(
    catalogue: Catalogue, described: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: str
) -> Entry | None:
    """An fp8 tensor times its scale: one number, one for each row, or one for each block."""
    if len(shape) != 2:
        return None
    scale = next((name + ending for ending in SCALES if name + ending in described), None)
    note = "fp8 without a scale: the values as they are stored" if scale is None else f"fp8 times {scale}"
    rows = (shape[0], shape[1])

    def open_scaled() -> RowReader:
        stored = arrays.rows_of_safetensors(catalogue.files[name], name)
        factor = torch.ones(1, 1) if scale is None else catalogue.load(scale).float()
        return RowReader(rows, dtype.lower(), lambda a, b: stored.read(a, b).float() * _spread(factor, rows, a, b))

    return entry_of(name, rows, dtype.lower(), open_scaled, notes=(note,))


def _spread(factor: torch.Tensor, shape: tuple[int, int], start: int, stop: int) -> torch.Tensor:
    """The scale of rows start … stop − 1: factor (), (n,), (n, 1) or (blocks, blocks) of a matrix of this shape."""
    if factor.ndim < 2:
        factor = factor.reshape(-1, 1)
    blocks = [size if parts == 1 else _block(size, parts) for size, parts in zip(shape, factor.shape, strict=True)]
    rows = torch.arange(start, stop) // blocks[0]
    columns = torch.arange(shape[1]) // blocks[1]
    return factor[rows][:, columns]


def _block(size: int, parts: int) -> int:
    """The size of a block where `parts` of them cover `size`: 128 and the like, the last one cut."""
    return BLOCK if -(-size // BLOCK) == parts else -(-size // parts)


def _model(path: Path) -> Found:
    """A Hugging Face folder: its embedding and head without padding rows, its tokens, and which matrix is the head."""
    config = read_record(path / "config.json")
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    catalogue = _any_catalogue(path)
    if not isinstance(catalogue, Catalogue):
        return _with_tokens(catalogue, path, text)
    found = of_catalogue(catalogue, str(path), "Hugging Face model", folder=path)
    try:
        head = find_output(catalogue, text.get("tie_word_embeddings"))[0]
    except LeafwardError:
        head = None
    entries = dict(found.entries)
    if text.get("model_type") == "helm" and text.get("geometry") == "lorentz":
        for name in [each for each in entries if each.endswith("embed.weight")]:
            note = "points of the hyperboloid by their space parts; distances are Lorentzian"
            entries[name] = replace(entries[name], curvature=float(text.get("curvature", 1.0)), notes=(note,))
        head = head or next((name for name in entries if name.endswith("head.weight")), None)
        found = replace(found, kind="HELM model")
    found = replace(found, entries=entries, head=head if head in entries else None)
    return _with_tokens(found, path, text)


def _with_tokens(found: Found, path: Path, text: Mapping[str, Any]) -> Found:
    """Padding rows of the vocabulary are left out, and rows are called by their tokens."""
    entries = dict(found.entries)
    endings = tuple("." + each for each in (*HEADS, *EMBEDDINGS))
    for name, entry in found.entries.items():
        if ("." + name).endswith(endings) or name == found.head:
            rows, notes = vocabulary_rows(path, dict(text), entry.shape[0])
            entries[name] = replace(entry, rows=min(rows, entry.shape[0]), notes=(*entry.notes, *notes))
    return replace(found, entries=entries, folder=path, tokens=lambda: tokenizer_names(path))


def _any_catalogue(path: Path) -> Catalogue | Found:
    """The safetensors of a folder; where there are none its pickled weights, of which tensors alone are unpickled."""
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.safetensors.index.json")):
        files = sorted(file for ending in ("*.bin", "*.pt", "*.pth") for file in path.glob(ending))
        index = sorted(path.glob("*.bin.index.json"))
        if index:
            shards = read_record(index[0]).get("weight_map")
            if not isinstance(shards, dict):
                raise DataError(f"{index[0]} has no 'weight_map' from tensor names to shard files")
            files = [inside(path, name) for name in sorted(set(shards.values()))]
        files = [file for file in files if file.name not in ("training_args.bin", "optimizer.pt", "scheduler.pt")]
        if files:
            state = {name: tensor for file in files for name, tensor in pickled(file).items()}
            return of_state(state, str(path), "pickled weights", notes=("read with weights_only: no code was run",))
    return catalogue_of(path)


def pickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of torch.save by their dotted names; anything but tensors and plain values is refused."""
    if not path.exists():
        raise DataError(f"no such file or directory: {path}")
    check_size(path, LARGEST)
    try:
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file of before 2020, which cannot be mapped
            held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise nearly anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if type(error).__name__ == "UnpicklingError":
            raise DataError(
                f"{path} is a pickle that holds more than tensors, which could run code when opened; convert it to "
                f"safetensors where you trust it ({reason})"
            ) from error
        raise DataError(f"{path} cannot be read as weights of torch.save: {reason}") from error
    return dict(_flat(held, ""))


def _flat(value: Any, name: str) -> Sequence[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(name or "tensor", value)]
    if not isinstance(value, Mapping):
        return []
    return [pair for key, item in value.items() for pair in _flat(item, f"{name}.{key}" if name else str(key))]


def _peft(path: Path) -> bool:
    return "peft_type" in read_record(path / "adapter_config.json")


def _adapter(path: Path) -> Found:
    """A LoRA adapter of PEFT: for each layer the change ΔW = s·BA (out, in) that it makes."""
    config = read_record(path / "adapter_config.json")
    if config.get("peft_type") != "LORA":
        raise UsageError(f"{path} holds an adapter of type {config.get('peft_type')}; the audit takes LORA")
    file = path / "adapter_model.safetensors"
    state: Mapping[str, torch.Tensor]
    if file.is_file():
        with arrays.open_safetensors(file) as opened:
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    else:
        state = pickled(path / "adapter_model.bin")
    entries = {}
    for name, down in state.items():
        left, kind, _ = name.partition(".lora_A")
        embedded = not kind and "lora_embedding_A" in name
        if not kind and not embedded:
            continue
        layer = name.partition(".lora_embedding_A")[0] if embedded else left
        up = state.get(name.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B"))
        if up is None or up.ndim != 2 or down.ndim != 2 or up.shape[1] != down.shape[0]:
            raise DataError(f"{path}: {name} has no lora_B that fits it")
        one, two = (down.T, up.T) if embedded else (up, down)
        short = layer.removeprefix("base_model.model.")
        factor = _lora_scale(config, short, down.shape[0])
        found = entry_of(
            short, (one.shape[0], two.shape[1]), str(up.dtype).removeprefix("torch."), _product(one, two, factor),
            notes=(f"the change BA·{factor:g} of rank {down.shape[0]}",),
        )  # fmt: skip
        if found is not None:
            entries[short] = found
    return Found(str(path), "LoRA adapter", entries, folder=path)


def _product(one: torch.Tensor, two: torch.Tensor, factor: float) -> Callable[[], RowReader]:
    left, right = one.float(), two.float()
    shape = (left.shape[0], right.shape[1])
    return lambda: RowReader(shape, "float32", lambda a, b: (left[a:b] @ right) * factor)


def _lora_scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """alpha/r, or alpha/√r for rank-stabilised LoRA; a layer's own alpha where alpha_pattern has one."""
    alpha = config.get("lora_alpha") or rank
    for ending, own in (config.get("alpha_pattern") or {}).items():
        if layer == ending or layer.endswith("." + ending):
            alpha = own
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _autoencoder(path: Path) -> Found:
    """A sparse autoencoder as SAELens saves it; the decoder's rows are its features."""
    config = read_record(path / "cfg.json")
    found = of_catalogue(catalogue_of(path), str(path), "sparse autoencoder", folder=path)
    if "W_dec" not in found.entries:
        raise DataError(f"{path} has a cfg.json but no W_dec; it holds {', '.join(found.entries) or 'no matrix'}")
    kept = {"W_dec": replace(found.entries["W_dec"], role="decoder")}
    named = {key: config[key] for key in ("architecture", "hook_name", "model_name") if key in config}
    hidden = {name: entry for name, entry in found.entries.items() if name != "W_dec"}
    note = f"the decoder; --tensor takes {', '.join(hidden)} too" if hidden else "the decoder"
    return replace(found, entries=kept, head="W_dec", notes=(*found.notes, note), extra={"sae": named, "more": hidden})


def _run(path: Path) -> Found:
    """A run of ours by its name: the model it published, or the first of its members."""
    models = [path / "model", *sorted(each / "model" for each in path.glob("members/*"))]
    models += sorted(path.glob("model-*"))
    there = [each for each in models if each.is_dir()]
    if not there:
        raise DataError(f"{path} is a run that has published no model; finish it with --resume, or name a file in it")
    found = open_folder(there[0])
    others = ", ".join(str(each) for each in there[1:])
    note = (f"the first model of the run; the others: {others}",) if others else ()
    return replace(found, kind=f"run: {found.kind}", notes=(*found.notes, *note))
