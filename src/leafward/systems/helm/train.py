"""Training the members of a HELM run: one model, or both geometries and several seeds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leafward.data.text import Corpus, prepare
from leafward.data.text.tokenizer import encode, load_tokenizer, size
from leafward.engine import Cluster, Experiment, Member, RunDirectory, train_loop
from leafward.engine.experiment import by_geometry, curves
from leafward.errors import DataError, UsageError
from leafward.files import finite, read_record, replacing, write_json
from leafward.report import Result
from leafward.systems.helm import (
    PRESETS,
    HelmConfig,
    HelmForCausalLM,
    LanguageTask,
    Scores,
    load_model,
    report,
    sample,
    save_model,
    score,
)
from leafward.systems.helm import config as settings
from leafward.systems.helm.config import Config
from leafward.systems.helm.open import DATA, SCORES, TOKENS
from leafward.systems.helm.throughput import MeteredRun, speed

SAMPLE = 200
"""Tokens of a sample in the report."""
ALIGNED = 64
"""The vocabulary is rounded up to a multiple, which fills the hardware's tiles."""


class Training(Experiment[Config]):
    """Both geometries and several seeds on the same tokens."""

    recipe, settings, leftovers, kind = "helm", settings, (DATA, SCORES), MeteredRun
    corpus: Corpus

    def arms(self) -> dict[str, Config]:
        return by_geometry(self.config)

    def inputs(self) -> dict[str, Path]:
        return {name: path for name, path in super().inputs().items() if not name.endswith("cache")}

    def prepare(self, run: RunDirectory) -> None:
        """The tokens, made by the first rank. If the data cannot be used, a fresh run directory is removed."""

        def make() -> str:
            try:
                return str(_tokenised(self.config, run, self.data_changed).folder)
            except BaseException:
                if self.fresh:
                    shutil.rmtree(run.path)
                raise

        self.corpus = Corpus.open(self.on_main(make))

    def train(self, member: Member[Config], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        assert isinstance(run, MeteredRun)
        return _train_member(member, self.corpus, cluster, run, self.out)

    def conclude(self, run: RunDirectory, members: list[Member[Config]], results: list[dict[str, Any]]) -> Result:
        scores = [_read_scores(member.path, result["unit"]) for member, result in zip(members, results, strict=True)]
        return report.result(self.config, self.corpus.counts, results, scores, curves(members))


run = Training.launch


def _tokenised(config: Config, run: RunDirectory, changed: bool) -> Corpus:
    """The tokens of the run, and a check that model and prompt go with them; `changed`: other data are meant."""
    data = config.data
    assert data.source is not None
    if data.tokenizer is not None:  # before the long work
        model_config(config, load_tokenizer(data.tokenizer))
    corpus = prepare(
        data.source,
        data.cache or run.path / TOKENS,
        field=data.field,
        tokenizer=data.tokenizer,
        vocab_size=data.vocab_size or PRESETS[config.model]["vocab_size"],
        validation=data.validation,
    )
    _sample_length(config, corpus.tokenizer)
    record = run.path / DATA
    if record.is_file() and not changed and read_record(record).get("key") != corpus.key:
        raise DataError(f"{data.source} or its tokenizer has changed since {run.path} was started; start a new run")
    write_json(record, {"key": corpus.key, "folder": str(corpus.folder.resolve())})
    return corpus


def _sample_length(config: Config, tokenizer: Any) -> int:
    """Tokens of the samples in the report, as many as fit after the prompt."""
    prompt = len(encode(tokenizer, [config.prompt])[0])
    left = config.context - 1 - prompt
    if left < 1:
        raise UsageError(f"the prompt has {prompt} tokens, which leaves no room in the context of {config.context}")
    return min(SAMPLE, left)


def model_config(config: Config, tokenizer: Any) -> HelmConfig:
    """The model's configuration for this tokenizer."""
    tokens = size(tokenizer)
    rows = -(-tokens // ALIGNED) * ALIGNED if config.data.vocab_size is None else config.data.vocab_size
    if tokens > rows:
        raise UsageError(
            f"the tokenizer has {tokens} tokens, more than the model's vocab_size of {rows}; "
            "give a larger --vocab-size or leave it out"
        )
    return HelmConfig.preset(
        config.model,
        geometry=config.geometry,
        vocab_size=rows,
        max_position_embeddings=config.context,
        learn_curvatures=config.learn_curvatures,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )


def _train_member(
    member: Member[Config], corpus: Corpus, cluster: Cluster, run: MeteredRun, out: Path
) -> dict[str, Any]:
    """Train one model, publish it and score it."""
    config = member.config
    model = HelmForCausalLM(model_config(config, corpus.tokenizer))
    rows = config.loop.micro_batch or max(1, config.loop.batch_size // cluster.world)
    task = LanguageTask(
        corpus,
        config.context,
        cluster=cluster,
        eval_batch=rows,
        eval_tokens=config.data.eval_tokens,
        keep_best=config.loop.patience is not None,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    run.meter(model, config.context, cluster.device, cluster.world)
    with task.balancing(model, config.balance_rate):
        fitted = train_loop(model, task, config.loop, config.optim, run, cluster)
    save_model(model, corpus.tokenizer, member.model, cluster)

    def conclude() -> dict[str, Any]:
        return finite(
            {
                "name": member.name,
                "geometry": config.geometry,
                "seed": config.loop.seed,
                "parameters": parameters,
                "step": fitted.best_step or fitted.step,
                "tokens": fitted.step * config.loop.batch_size * config.context,
                "model": str(member.model.relative_to(out)),
                **speed(run.metrics()),
                **_scored(member, corpus, cluster.device, rows),
            }
        )

    return cluster.on_main(conclude)


def _scored(member: Member[Config], corpus: Corpus, device: torch.device, rows: int) -> dict[str, Any]:
    """Scores on all held-out documents, and a sample, of the model as it was published."""
    config = member.config
    model, tokenizer = load_model(member.model, device)
    scores = score(model, corpus.held_out, config.context, batch_size=rows, precision=config.loop.precision)
    with replacing(member.path / SCORES) as temporary, open(temporary, "wb") as file:
        np.save(file, np.stack([scores.nats, scores.tokens, scores.bytes]))
    tokens = _sample_length(config, tokenizer)
    return {
        "unit": scores.unit,
        **{name: found for name, found in scores.to_json().items() if name in report.SCORED},
        "sample": sample(model, tokenizer, config.prompt, tokens=tokens, seed=config.loop.seed),
    }


def _read_scores(path: Path, unit: str) -> Scores:
    try:
        nats, tokens, sizes = np.load(path / SCORES, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the scores {path / SCORES}: {error}") from error
    return Scores(nats, tokens.astype(np.int64), sizes, unit)
