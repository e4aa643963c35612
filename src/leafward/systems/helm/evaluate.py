"""``leafward evaluate RUN``: held-out loss, perplexity and bits per byte of language models, and lm-eval tasks."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import UsageError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from leafward.data.text import Shard
    from leafward.report import Result
    from leafward.systems.helm import Scores

SUMMARY = "Held-out loss, perplexity and bits per byte of a language model, and lm-eval tasks."


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """A run directory, or a folder with a model."""
    data: Path | None = None
    """Text to score, in any form that training takes; None: the held-out documents of the run."""
    field: str = "text"
    """Field of JSONL, Parquet and data sets that holds the text."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval; those of the paper: mmlu, arc_challenge, openbookqa, commonsense_qa, hellaswag."""
    task_folder: Path | None = None
    """A folder with the YAML files of tasks; without --tasks, all of them are run."""
    shots: int | None = None
    """Examples in the prompts of tasks; None: as in the paper, or as the task says."""
    limit: int | None = None
    """Examples of each task, to try it out."""
    batch_size: int = 8
    """Windows or requests at a time."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast type of the forward pass; auto: bfloat16 on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """Folder for evaluation.json and report.html (default: RUN/evaluation, or runs/evaluate-NAME for a model)."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be an integer >= 1, not {value!r}")


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.engine import session
    from leafward.engine.evaluation import write_evaluation
    from leafward.systems.helm.harness import choose_tasks
    from leafward.systems.helm.open import is_run, members

    of_run = is_run(args.target)
    models = members(args.target)
    if args.data is None and not of_run and not args.tasks and args.task_folder is None:
        raise UsageError(f"{args.target} is a model, not a run: give --data to score it on, or --tasks")
    if args.tasks or args.task_folder is not None:
        choose_tasks(args.tasks, args.task_folder)  # a name that nobody knows is refused before the work begins
    out = args.out or (args.target / "evaluation" if of_run else Path("runs") / f"evaluate-{args.target.name}")
    scores: dict[str, Scores] = {}
    rows: list[dict[str, Any]] = []
    with session(args.device) as cluster, tempfile.TemporaryDirectory() as folder:
        for each in models:
            found, measured = _evaluate(args, each["folder"], cluster.device, Path(folder))
            rows += [{"model": each["name"], **row} for row in measured]
            if found is not None:
                scores[each["name"]] = found
    return write_evaluation(out, _result(args, models, scores, rows), console)


def _result(args: Args, models: list[dict[str, Any]], scores: dict[str, Scores], rows: list[dict[str, Any]]) -> Result:
    """Scores of the first model's geometry, over seeds where there are several, with those of the twin beside, and the
    tasks."""
    from leafward.report import Result
    from leafward.systems.helm.report import headline, show_models

    kept = {name: each.to_json() for name, each in scores.items()}
    data = None if args.data is None else str(args.data)
    values = {"target": str(args.target), "data": data, "models": kept, "tasks": rows}
    numbers = headline(models[0]["geometry"], models, list(scores.values())) if scores else []
    made = Result("Evaluation of a language model", str(args.target), numbers, values=values)
    if scores:
        show_models(made, kept, {"tokens": "tokens"}, data or "the held-out documents of the run")
    if rows:
        made.section("Tasks")
        made.table(TASK_COLUMNS, [[row[name] for name in TASK_COLUMNS] for row in rows], "lm-eval", terminal=True)
    return made


TASK_COLUMNS = ("model", "task", "metric", "value", "stderr", "shots", "examples")


def _evaluate(
    args: Args, model_folder: Path, device: torch.device, folder: Path
) -> tuple[Scores | None, list[dict[str, Any]]]:
    """Scores of one model on the text, and its rows of task results; `folder` keeps tokens for the next model."""
    from leafward.systems.helm import load_model, run_tasks, score
    from leafward.systems.helm.open import is_run

    model, tokenizer = load_model(model_folder, device)
    context = model.config.max_position_embeddings
    scores, rows = None, []
    if args.data is not None or is_run(args.target):
        shard = _shard(args, tokenizer, folder)
        usual = "bfloat16" if device.type == "cuda" else "float32"
        precision = usual if args.precision == "auto" else args.precision
        scores = score(model, shard, context, batch_size=args.batch_size, precision=precision)
    if args.tasks or args.task_folder is not None:
        rows = run_tasks(
            model,
            tokenizer,
            args.tasks,
            folder=args.task_folder,
            shots=args.shots,
            limit=args.limit,
            batch_size=args.batch_size,
        )
    return scores, rows


def _shard(args: Args, tokenizer: Any, folder: Path) -> Shard:
    """The held-out documents of the run, or all documents of --data, tokenised once for all models of a run."""
    from leafward.data.text import Corpus, Shard, find_files, read_documents
    from leafward.data.text.shards import token_type, write_shards
    from leafward.data.text.tokenizer import size
    from leafward.systems.helm.open import tokens_folder

    if args.data is None:
        return Corpus.open(tokens_folder(args.target)).held_out
    if not any(folder.iterdir()):
        files = find_files(args.data)
        write_shards(folder, (("data", text) for text in read_documents(files, args.field)), tokenizer)
    return Shard.open(folder, "data", token_type(size(tokenizer)))
