"""The radial recipe's work: data, training, scores before and after, the trained model in its own layout."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from leafward.adapters.io import save_pretrained
from leafward.adapters.surface import adapters, trainable_parameters
from leafward.config import replace
from leafward.data.captions import Captions, image_key, read_captions, without_images_of
from leafward.encoders.encoder import Encoder, load_encoder, make_trainable, merge_adapters
from leafward.engine import Cluster, Experiment, Member, RunDirectory, train_loop
from leafward.engine.devices import type_of
from leafward.engine.experiment import curves
from leafward.engine.layout import EARLIER_TWIN
from leafward.errors import DataError
from leafward.hierarchy import metrics
from leafward.report import Result
from leafward.stats.intervals import Interval, mean_interval
from leafward.systems.radial import config as settings
from leafward.systems.radial import report
from leafward.systems.radial.config import Config
from leafward.systems.radial.loss import RadialModel, radius
from leafward.systems.radial.objective import Geometry
from leafward.systems.radial.roots import ROOTS, root_vectors, save_roots
from leafward.systems.radial.suite import Suite, load_suite, measure_suite
from leafward.systems.radial.task import CaptionData, RadialTask


class Training(Experiment[Config]):
    """The model, with `twin` the same one in the other geometry, and several seeds of each."""

    recipe, settings, leftovers = "radial", settings, (ROOTS, EARLIER_TWIN)

    def arms(self) -> dict[str, Config]:
        config = self.config
        other: Geometry = "lorentz" if config.objective.geometry == "euclidean" else "euclidean"
        arms = {config.objective.geometry: config}
        return arms | ({other: replace(config, objective={"geometry": other})} if config.arms.twin else {})

    def train(self, member: Member[Config], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        return train(member, run, cluster)

    def conclude(self, run: RunDirectory, members: list[Member[Config]], results: list[dict[str, Any]]) -> Result:
        return report.result(self.config, results, curves(members))


run = Training.launch


def train(member: Member[Config], directory: RunDirectory, cluster: Cluster) -> dict[str, Any]:
    """Train and score, on every rank; the trained model, adapters merged, goes to the home of the member."""
    config = member.config
    paths, loop = config.data, config.loop
    encoder = load_encoder(config.model).to(cluster.device, type_of(loop.precision))
    suite = load_suite(paths.test, encoder, second=paths.second, images=paths.images, words=paths.hyperlex)
    learned, watched = split(captions_of(config), config.held_out, loop.seed)
    before, _ = score(suite, watched, encoder, None, config)
    data = CaptionData(learned, encoder)
    if config.objective.root == "learned":
        check_roots(suite, data)
    model, task = prepare(config, encoder, data, watched, cluster)
    trained, total = trainable_parameters(model)
    done = train_loop(model, task, loop, config.optim, directory, cluster)
    if cluster.main:
        save_adapter(encoder, directory.path / "adapter")
    merge_adapters(encoder)

    def conclude() -> dict[str, Any]:
        encoder.save_pretrained(member.model)
        save_roots(model, member.home / ROOTS)
        after, intervals = score(suite, watched, encoder, learned_roots(model), config)
        return {
            "name": member.name,
            "geometry": config.objective.geometry,
            "seed": loop.seed,
            "before": before,
            "after": after,
            "intervals": intervals,
            "captions": {"learned": len(data), "validation": len(watched)},
            "parameters": {"trained": trained, "all": total},
            "validation": done.metrics,
            "steps": done.step,
        }

    return cluster.on_main(conclude)


def check_roots(suite: Suite, data: CaptionData) -> None:
    """Refuse, before training, scores about a root that will not be learned."""
    wanted = set(suite.candidates.roots if suite.candidates is not None else ()) | ({""} if suite.words else set())
    missing = wanted - set(data.root_texts)
    if missing:
        raise DataError(f"the test needs the root {min(missing)!r}, but the captions learn only {data.root_texts}")


def captions_of(config: Config) -> list[Captions]:
    """The captions to learn from, without those of test images."""
    data = config.data
    assert data.source is not None
    captions = read_captions(data.source)
    if data.test is not None:
        captions = without_images_of(captions, read_captions(data.test))
    if not captions:
        raise DataError(f"no caption of {data.source} is left after those of the test images")
    return captions


def split(captions: Sequence[Captions], share: float, seed: int) -> tuple[list[Captions], list[Captions]]:
    """(to learn from, to watch), such that no image is in both; captions without an image stand for themselves.

    Of five images or more a share above 0 watches at least one; none whose root no other caption has is watched.
    """
    keys = [image_key(each.image) if each.image else f"row {i}" for i, each in enumerate(captions)]
    distinct = sorted(set(keys))
    count = max(round(share * len(distinct)), int(share > 0 and len(distinct) >= 5))
    chosen = np.random.default_rng(seed).permutation(len(distinct))[:count]
    held = {distinct[i] for i in chosen}
    pairs = list(zip(captions, keys, strict=True))
    if len(held) == len(distinct):
        raise DataError(f"validation {share} leaves no caption to learn from")
    lost = {each.root for each in captions} - {each.root for each, key in pairs if key not in held}
    held -= {key for each, key in pairs if each.root in lost}
    watched = [each for each, key in pairs if key in held and len(each.texts) > 1]  # one text has no order
    return [each for each, key in pairs if key not in held], watched


def prepare(
    config: Config,
    encoder: Encoder,
    data: CaptionData,
    watched: Sequence[Captions] = (),
    cluster: Cluster | None = None,
) -> tuple[RadialModel, RadialTask]:
    """The model with what shall learn in it, and the task."""
    make_trainable(
        encoder,
        config.train,
        rank=config.rank,
        block_size=config.block_size,
        seed=config.loop.seed,
        base_model=config.model,
    )
    model = RadialModel(encoder, config.objective, data.root_texts)

    def watch(trained: RadialModel) -> dict[str, float]:
        return {"tau": float(np.mean(chain_taus(watched, trained.encoder, learned_roots(trained))))}

    keep_best = config.loop.patience is not None
    return model, RadialTask(data, config.objective, watch if watched else None, cluster, keep_best=keep_best)


@torch.no_grad()
def chain_taus(captions: Sequence[Captions], encoder: Encoder, learned: dict[str, Tensor] | None) -> list[float]:
    """τ_d of every caption chain, of any length; where a tree branches, its edges count as chains of two."""
    texts = list(dict.fromkeys(text for each in captions for text in each.texts))
    roots = list(dict.fromkeys(each.root for each in captions))
    place, which = {text: i for i, text in enumerate(texts)}, {text: i for i, text in enumerate(roots)}
    vectors = encoder.encode_text(texts)
    centres = root_vectors(encoder, roots, learned)
    rows, owners = [], []
    for each in captions:
        lines = [each.texts] if each.is_chain else [(each.texts[up], each.texts[down]) for up, down in each.edges()]
        rows += [torch.tensor([place[text] for text in line]) for line in lines if len(line) > 1]
        owners += [which[each.root]] * (len(rows) - len(owners))
    padded = pad_sequence(rows, batch_first=True, padding_value=-1)
    radii = radius(vectors[padded.to(vectors.device)], centres[torch.tensor(owners, device=centres.device)][:, None])
    return [metrics.radius_tau(chain) for chain in radii.double().cpu().masked_fill(padded < 0, torch.nan)]


def score(
    suite: Suite, watched: Sequence[Captions], encoder: Encoder, roots: dict[str, Tensor] | None, config: Config
) -> tuple[dict[str, float], dict[str, Interval]]:
    """Scores by name, and their intervals: of the suite, and of the captions kept from training where there are any."""
    found, intervals = measure_suite(suite, encoder, roots, config.objective.geometry, config.objective.c)
    if watched:
        found["validation_tau"], interval = mean_interval(chain_taus(watched, encoder, roots), -1.0, 1.0)
        intervals |= {} if interval is None else {"validation_tau": interval}
    return found, intervals


def learned_roots(model: RadialModel) -> dict[str, Tensor] | None:
    """Learned roots by their text; None where the roots are texts."""
    return None if model.free_roots is None else dict(zip(model.root_texts, model.roots(), strict=True))


def save_adapter(encoder: Encoder, folder: Path) -> None:
    """Write what learned beside the text side, if it was an adapter; that of a run that was replaced must not stay."""
    shutil.rmtree(folder, ignore_errors=True)
    if adapters(encoder.model):
        save_pretrained(encoder.model, folder)
