"""Training the members of a HELM run: one model, or both geometries and several seeds."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leafward.engine import Cluster, RunDirectory, fit, session
from leafward.errors import DataError, UsageError
from leafward.files import finite, read_record, replacing, write_json
from leafward.models import HelmConfig, HelmForCausalLM
from leafward.models.helm import PRESETS
from leafward.recipes import _helm_report as report
from leafward.recipes._helm_open import DATA, SCORES, TOKENS
from leafward.recipes._members import Member, by_geometry, create_run, finish, plan, train_members
from leafward.recipes.helm import MAY_CHANGE, Config
from leafward.tasks.language import Corpus, LanguageTask, Scores, load_model, prepare, sample, save_model, score
from leafward.tasks.language.throughput import MeteredRun, speed
from leafward.tasks.language.tokenizer import encode, load_tokenizer, size

SAMPLE = 200
"""Tokens of a sample in the report."""
ALIGNED = 64
"""The vocabulary is rounded up to a multiple, which fills the hardware's tiles."""


def train(config: Config, out: Path, *, resume: bool, overwrite: bool) -> dict[str, Any]:
    """The whole recipe, on every rank."""
    with session(config.loop.device) as cluster:
        fresh = not (out.is_dir() and any(out.iterdir()))
        run = _create(cluster, out, config, resume=resume, overwrite=overwrite)
        corpus = _corpus(config, run, cluster, fresh)
        members = plan(config, by_geometry(config), out)
        results = train_members(
            members,
            run,
            partial(_create, cluster),
            lambda member, own: _train_member(member, corpus, cluster, own, out),
        )
        return cluster.on_main(lambda: _conclude(config, run, corpus, members, results))


def _create(cluster: Cluster, path: Path, config: Config, *, resume: bool, overwrite: bool) -> MeteredRun:
    settings = {"recipe": "helm", "may_change": MAY_CHANGE, "leftovers": (DATA, SCORES)}
    return create_run(MeteredRun, cluster, path, config, resume=resume, overwrite=overwrite, **settings)


def _corpus(config: Config, run: RunDirectory, cluster: Cluster, fresh: bool) -> Corpus:
    """The tokens, made by the first rank. If the data cannot be used, a `fresh` run directory goes again."""

    def make() -> str:
        try:
            return str(_tokenised(config, run).folder)
        except BaseException:
            if fresh:
                shutil.rmtree(run.path)
            raise

    return Corpus.open(cluster.on_main(make))


def _tokenised(config: Config, run: RunDirectory) -> Corpus:
    """The tokens of the run, and a check that model and prompt go with them."""
    assert config.data is not None
    if config.tokenizer is not None:  # before the long work
        model_config(config, load_tokenizer(config.tokenizer))
    corpus = prepare(
        config.data,
        config.cache or run.path / TOKENS,
        field=config.field,
        tokenizer=config.tokenizer,
        vocab_size=config.vocab_size or PRESETS[config.model]["vocab_size"],
        validation=config.validation,
    )
    _sample_length(config, corpus.tokenizer)
    record = run.path / DATA
    if record.is_file() and read_record(record).get("key") != corpus.key:
        raise DataError(f"{config.data} or its tokenizer has changed since {run.path} was started; start a new run")
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
    rows = -(-tokens // ALIGNED) * ALIGNED if config.vocab_size is None else config.vocab_size
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
        eval_tokens=config.eval_tokens,
        keep_best=config.loop.patience is not None,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    run.meter(model, config.context, cluster.device, cluster.world)
    with task.balancing(model, config.balance_rate):
        fitted = fit(model, task, config.loop, config.optim, run, cluster)
    save_model(model, corpus.tokenizer, member.model, cluster)

    def conclude() -> dict[str, Any]:
        result = finite(
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
        if not member.alone:
            run.finish(result)
        return result

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
        **{name: {"value": value, "interval": interval} for name, (value, interval) in scores.headline().items()},
        "sample": sample(model, tokenizer, config.prompt, tokens=tokens, seed=config.loop.seed),
    }


def _conclude(
    config: Config, run: RunDirectory, corpus: Corpus, members: list[Member[Config]], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Put the members together, write result.json and report.html."""
    scores = [_read_scores(member.path, result["unit"]) for member, result in zip(members, results, strict=True)]
    curves = {member.name: RunDirectory.open(member.path).metrics() for member in members}
    result = finite(report.result(config, corpus.counts, results, scores))
    if len(members) > 1:
        run.rewind(0)  # an earlier attempt may have come this far
        for step, values in report.merged(curves).items():
            run.log(step, values)
    return finish(run, result, lambda: report.write(config, result, curves, run.path))


def _read_scores(path: Path, unit: str) -> Scores:
    try:
        nats, tokens, sizes = np.load(path / SCORES, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the scores {path / SCORES}: {error}") from error
    return Scores(nats, tokens.astype(np.int64), sizes, unit)
