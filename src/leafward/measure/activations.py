"""Hidden states of every layer of a model on text or images, a sample of them held while the rest goes by.

Positions are drawn as they come, each with the same chance (reservoir sampling), so a corpus of any length takes the
memory of the sample. Every layer of a text keeps the same positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leafward.data import arrays
from leafward.data.text import find_files, read_documents
from leafward.errors import DataError, UsageError, require
from leafward.measure.survey_matrices import Plan, measure_matrix
from leafward.measure.survey_report import Survey
from leafward.measure.targets import Entry, open_target

IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
MOST_CONTEXT = 1024
BATCH = 8


@dataclass(frozen=True, eq=False)
class States:
    """Hidden states of a sample of positions: layer -> (r, m); ids (r,) of their tokens and counts (r,) in the text.

    `mean_norm`: layer -> mean length over all positions that went by. Of images ids and counts are None.
    """

    layers: dict[str, np.ndarray]
    mean_norm: dict[str, float]
    positions: int
    ids: np.ndarray | None
    counts: np.ndarray | None


class Reservoir:
    """A uniform sample of `size` of all rows that are offered, the same rows for every layer."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seen = size, 0
        self.rng = np.random.default_rng(seed)
        self.held: dict[str, np.ndarray] = {}
        self.ids = np.full(size, -1, dtype=np.int64)
        self.totals: dict[str, float] = {}

    def offer(self, layers: dict[str, torch.Tensor], ids: np.ndarray | None) -> None:
        """Rows (k, m) of each layer, and the ids (k,) of their tokens."""
        count = len(next(iter(layers.values())))
        places = np.arange(self.seen, self.seen + count)
        late = places >= self.size
        places[late] = self.rng.integers(0, places[late] + 1)
        kept = np.flatnonzero(places < self.size)
        for name, rows in layers.items():
            self.totals[name] = self.totals.get(name, 0.0) + float(torch.linalg.vector_norm(rows.float(), dim=1).sum())
            store = self.held.setdefault(name, np.zeros((self.size, rows.shape[1]), dtype=np.float32))
            store[places[kept]] = rows[torch.from_numpy(kept)].float().cpu().numpy()
        if ids is not None:
            self.ids[places[kept]] = ids[kept]
        self.seen += count

    def states(self, counts: dict[int, int] | None) -> States:
        used = min(self.size, self.seen)
        ids = None if counts is None else self.ids[:used]
        often = None if counts is None or ids is None else np.array([counts[int(each)] for each in ids])
        layers = {name: rows[:used] for name, rows in self.held.items()}
        means = {name: total / max(self.seen, 1) for name, total in self.totals.items()}
        return States(layers, means, self.seen, ids, often)


def hidden_states(target: str, source: Path, sample: int, seed: int, advance: Callable[[int], None]) -> States:
    """States of every layer of a Hugging Face or timm model on a text (file or folder) or a folder of images."""
    if not source.exists():
        raise DataError(f"activations: no such file or directory: {source}")
    reservoir = Reservoir(sample, seed)
    with torch.no_grad():
        if _images(source):
            return _image_states(target, source, sample, seed, advance)
        counts: dict[int, int] = {}
        for ids, layers in _of_text(target, source):
            for each, times in zip(*np.unique(ids, return_counts=True), strict=True):
                counts[int(each)] = counts.get(int(each), 0) + int(times)
            reservoir.offer(layers, ids)
            advance(len(ids))
    if not reservoir.seen:
        raise DataError(f"activations: {source} holds no token for {target}")
    return reservoir.states(counts)


def _image_states(target: str, source: Path, sample: int, seed: int, advance: Callable[[int], None]) -> States:
    """Every layer draws its own places: the maps of an image shrink from layer to layer."""
    held: dict[str, Reservoir] = {}
    for layers in _of_images(target, source):
        for name, rows in layers.items():
            held.setdefault(name, Reservoir(sample, seed)).offer({name: rows}, None)
        advance(len(next(iter(layers.values()))))
    found = [each.states(None) for each in held.values()]
    return States(
        layers={name: rows for each in found for name, rows in each.layers.items()},
        mean_norm={name: value for each in found for name, value in each.mean_norm.items()},
        positions=max(each.positions for each in found),
        ids=None,
        counts=None,
    )


def survey_states(target: str, states: States, sample: int, seed: int) -> Survey:
    """A row for each layer. Of text the correlation of length and ln(frequency) is in `extra`."""
    plan = Plan(sample, seed, level=1 - 0.05 / (7 * max(len(states.layers), 1)))
    rows = []
    for name, held in states.layers.items():
        tensor = torch.from_numpy(held)
        entry = Entry(name, (held.shape[0], held.shape[1]), "float32", lambda t=tensor: arrays.rows_of_tensor(t))
        rows.append(measure_matrix(entry, plan))
    extra: dict[str, Any] = {"positions": states.positions, "mean_norm": states.mean_norm}
    if states.counts is not None:
        extra["frequency"] = {name: frequency_correlation(held, states.counts) for name, held in states.layers.items()}
    notes = (f"{states.positions:,} positions went by; at most {sample:,} were kept",)
    return Survey(target, "hidden states", tuple(rows), notes, sample, seed, False, plan.level, None, extra)


def frequency_correlation(rows: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """Spearman's ρ of a state's length (r, m) and how often its token is in the text (r,), with its interval."""
    from scipy.stats import spearmanr

    from leafward.stats.intervals import rank_correlation_interval

    norms = np.linalg.norm(rows, axis=1)
    if np.ptp(norms) == 0 or np.ptp(counts) == 0:
        return {"rho": None, "interval": None}
    rho = float(spearmanr(norms, counts).statistic)  # pyright: ignore[reportAttributeAccessIssue]
    # Positions with the same token are not independent: the interval counts different tokens.
    return {"rho": rho, "interval": rank_correlation_interval(rho, len(np.unique(counts)))}


def _images(source: Path) -> bool:
    files = [source] if source.is_file() else [each for each in source.rglob("*") if each.is_file()]
    return any(each.suffix.lower() in IMAGES for each in files)


def _model(folder: Path) -> Any:
    """The model of a folder without its heads; from safetensors alone, never unpickled."""
    transformers = require("transformers", "lm")
    return transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    ).eval()


def _of_text(target: str, source: Path) -> Iterator[tuple[np.ndarray, dict[str, torch.Tensor]]]:
    """Token ids (k,) and states of each window of a text; special tokens are not among them."""
    transformers = require("transformers", "lm")
    folder = _folder(target)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model = _model(folder)
    except (ValueError, KeyError, OSError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"activations: {target} is no model of text with a tokenizer ({reason})") from error
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 512
    context = min(int(positions) - 2, MOST_CONTEXT)
    if hasattr(model, "text_model"):  # of a text-image model the text side
        model = model.text_model
    for text in read_documents(find_files(source)):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(0, len(ids), context):
            window = torch.tensor(ids[start : start + context])
            found = model(input_ids=window[None], output_hidden_states=True).hidden_states
            yield window.numpy(), {f"layer {at}": each[0] for at, each in enumerate(found)}


def _of_images(target: str, source: Path) -> Iterator[dict[str, torch.Tensor]]:
    """States of all places of a batch of images, layer by layer."""
    from leafward.data.image_files import read_image

    files = sorted(
        each for each in ([source] if source.is_file() else source.rglob("*")) if each.suffix.lower() in IMAGES
    )
    run = _timm_run(target) if target.startswith("timm:") else _vision_run(_folder(target), target)
    for start in range(0, len(files), BATCH):
        yield run([read_image(each) for each in files[start : start + BATCH]])


def _timm_run(target: str) -> Callable[[list[Any]], dict[str, torch.Tensor]]:
    timm = require("timm", "vision")
    name, _, weights = target.partition(":")[2].partition("@")
    try:
        model = timm.create_model(name, pretrained=weights != "random").eval()
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"activations: {target} cannot be opened ({str(error).splitlines()[0]})") from error
    if not hasattr(model, "forward_intermediates"):
        raise UsageError(f"activations: {name} of timm does not give its intermediate features")
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)

    def run(images: list[Any]) -> dict[str, torch.Tensor]:
        batch = torch.stack([transform(each) for each in images])
        found = model.forward_intermediates(batch, intermediates_only=True, output_fmt="NCHW")
        return {f"layer {at}": each.movedim(1, -1).flatten(0, -2) for at, each in enumerate(found)}

    return run


def _vision_run(folder: Path, target: str) -> Callable[[list[Any]], dict[str, torch.Tensor]]:
    transformers = require("transformers", "vision")
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        model = _model(folder)
    except (ValueError, KeyError, OSError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"activations: {target} is no model of images ({reason})") from error
    model = getattr(model, "vision_model", model)

    def run(images: list[Any]) -> dict[str, torch.Tensor]:
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        found = model(pixel_values=pixels, output_hidden_states=True).hidden_states
        flat = [each.flatten(2).movedim(1, 2) if each.ndim == 4 else each for each in found]
        return {f"layer {at}": each.flatten(0, 1) for at, each in enumerate(flat)}

    return run


def _folder(target: str) -> Path:
    folder = open_target(target).folder
    if folder is None or not (folder / "config.json").is_file():
        raise UsageError(f"activations: {target} is no folder, hub name or run of a model that can be run")
    return folder
