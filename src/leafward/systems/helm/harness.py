"""Downstream tasks through lm-evaluation-harness."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from leafward.errors import LeafwardError, UsageError, nearest, require
from leafward.systems.helm import HelmForCausalLM

PAPER_SHOTS = {"mmlu": 5, "arc_challenge": 5, "commonsense_qa": 0, "hellaswag": 0, "openbookqa": 0}
"""Examples in the prompt, as in the paper; other tasks have what they say themselves."""

RESAMPLES = 1000
"""Bootstrap draws for standard errors that have no closed form (perplexity, F1 …). With 0 lm-eval gives no standard
error at all, not even that of a mean such as accuracy, which is √(Σ(x − x̄)²/(n(n − 1))) without any draw."""


def run_tasks(
    model: HelmForCausalLM,
    tokenizer: Any,
    tasks: Sequence[str] = (),
    *,
    folder: str | Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> list[dict[str, Any]]:
    """Accuracies (and whatever else they measure) of `tasks`, one row for each task and metric, with standard errors.

    `stderr` is None where lm-eval has none: of a single example, and of ratios of sums such as bits per byte.
    `folder` holds tasks as YAML files; with no names, all of them are run. `limit` is for trying out.
    """
    evaluator, models = require("lm_eval.evaluator", "lm"), require("lm_eval.models.huggingface", "lm")
    manager, names = choose_tasks(tasks, folder)
    wrapped = models.HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
    rows: list[dict[str, Any]] = []
    for name in names:
        count = PAPER_SHOTS.get(name) if shots is None else shots
        try:
            with _bootstrapping_here():
                found = evaluator.simple_evaluate(
                    model=wrapped,
                    tasks=[name],
                    num_fewshot=count,
                    limit=limit,
                    task_manager=manager,
                    log_samples=False,
                    bootstrap_iters=RESAMPLES,
                )
        except Exception as error:  # whatever a task's own code raises, for instance where its data cannot be had
            raise LeafwardError(
                f"lm-eval cannot run the task {name!r}: {type(error).__name__}: {error}; "
                "without a network, --task-folder takes tasks whose data are files"
            ) from error
        rows += _rows(found)
    return rows


@contextmanager
def _bootstrapping_here() -> Iterator[None]:
    """Inside, lm-eval draws its bootstrap in this process, and what it prints about that goes to stderr.

    It would fork one process per core, each a copy of one that holds a model and perhaps a CUDA context.
    """
    name = "DISABLE_MULTIPROC"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def choose_tasks(tasks: Sequence[str], folder: str | Path | None = None) -> tuple[Any, list[str]]:
    """The task manager that knows all that is asked for, and the names; what nobody knows is refused."""
    make_manager = require("lm_eval.tasks", "lm").TaskManager
    if folder is not None:
        if not Path(folder).is_dir():
            raise UsageError(f"--task-folder must be a folder with the YAML files of tasks, not {folder}")
        manager = make_manager(include_path=str(folder), include_defaults=False)
        own = list(manager.all_tasks)
        if not own:
            raise UsageError(f"{folder} holds no YAML file of a task")
        if set(tasks) <= set(own):
            return manager, list(tasks) or own
    manager = make_manager(include_path=None if folder is None else str(folder))
    for name in tasks:
        if name not in manager.all_tasks:
            raise UsageError(f"lm-eval knows no task {name!r}; {nearest(name, manager.all_tasks)}")
    return manager, list(tasks)


def _rows(found: Any) -> list[dict[str, Any]]:
    rows = []
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if kind and isinstance(value, int | float) and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{kind}")
                rows.append(
                    {
                        "task": task,
                        "metric": metric,
                        "value": float(value),
                        "stderr": float(error) if isinstance(error, int | float) and math.isfinite(error) else None,
                        "shots": found.get("n-shot", {}).get(task),
                        "examples": found.get("n-samples", {}).get(task, {}).get("effective"),
                    }
                )
    return rows
