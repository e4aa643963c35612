"""Training the grid in packs: models that share their data, checkpointed, resumable, in processes or in this one.

A pack is a plain mapping (so that it can be hashed, stored and sent to a process) with its own directory:
`state.safetensors` while it trains, `result.json` once it is done, `done` with its model-steps so far.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from leafward.config import config_hash
from leafward.errors import DataError, LeafwardError
from leafward.files import finite, read_bytes, read_record, replacing, write_json, write_text

if TYPE_CHECKING:
    from leafward.systems.superposition import Fleet
    from leafward.systems.superposition.config import Config

MODELS_ON_CPU = 15  # per process: enough to make its start worth while
FIRST_STRETCH, STRETCH_SECONDS = 16, 0.5  # steps between looks at the clock and for signals, and their aim
NORM_EDGES = [k / 32 for k in range(57)]  # bins of the histogram of row norms; the last one takes all above
STATE, DONE, RESULT, ERROR, TABLE = "state.safetensors", "done", "result.json", "error.txt", "table.json"
MEASURED = ("loss", "loss_floor", "overlap_mean", "phi_half", "phi_one", "random_overlap_variance", "weak_loss")
MEASURED += ("strong_overlap_mean", "strong_overlap_variance", "ambiguity", "weak_loss_leading")
"""Numbers of a row that the analysis reads; None where there was none to be had."""

Pack = dict[str, Any]


class Stopped(LeafwardError):
    """A pack was asked to stop; its state is saved."""


def law_name(law: str) -> str:
    """The law as the fleet knows it: a bare number is the exponent of a power law."""
    try:
        return f"power:{float(law):g}"
    except ValueError:
        return law


def effective_decays(config: Config) -> tuple[float, ...]:
    """The decays that are trained: only 0 where decay has no meaning."""
    return (0.0,) if config.optim.name == "adam" or config.constraint == "sphere" else config.decays


def plan(config: Config, device: str) -> list[Pack]:
    """The packs of the grid; what no fleet would train (an unknown law and the like) is refused here, by name."""
    packs = [
        {
            "models": models,
            "options": _options(config, device, rows),
            "snapshots": _snapshots(config),
            "eval_rows": config.eval_rows,
            "checkpoint_every": config.loop.checkpoint_every,
        }
        for rows in (None, *(config.data_rows if "data" in config.axis else ()))
        for law in dict.fromkeys(map(law_name, config.laws))
        for seed in range(config.loop.seed, config.loop.seed + config.arms.seeds)
        for models in _dealt(_models(config, law, seed), config.pack, device)
    ]
    _check(packs)
    return packs


def _check(packs: Sequence[Pack]) -> None:
    """Make the narrowest model of each law, which fails here where otherwise every process would."""
    from leafward.systems.superposition import Fleet, FleetOptions, ModelSpec

    for pack in {pack["models"][-1]["law"]: pack for pack in packs}.values():
        options = pack["options"] | {"dataset_rows": None}
        if options["device"] == "cuda":
            options |= {"device": "cpu", "precision": "float32"}
        Fleet([ModelSpec(**pack["models"][-1])], FleetOptions(**options))


def _options(config: Config, device: str, rows: int | None) -> dict[str, Any]:
    """The fields of `FleetOptions`."""
    return {
        "features": config.features,
        "batch": config.loop.batch_size,
        "steps": config.loop.steps,
        "warmup": config.optim.warmup_ratio,
        "optimiser": config.optim.name,
        "loss": config.loss,
        "loss_scale": config.loss_scale,
        "constraint": config.constraint,
        "correlation": config.corr,
        "dataset_rows": rows,
        "precision": config.loop.precision,
        "device": device,
    }


def _models(config: Config, law: str, seed: int) -> list[dict[str, Any]]:
    from leafward.systems.superposition import width_scaled_rates

    models, optim = [], config.optim
    for decay in effective_decays(config):
        for width in config.widths:
            rates = width_scaled_rates(width) if optim.width_rates else {"lr": optim.lr, "bias_lr": optim.bias_lr}
            common = {"width": width, "decay": decay, "law": law, "density": config.density, "seed": seed}
            models.append(common | rates)
    return models


def _dealt(models: list[dict[str, Any]], size: int | None, device: str) -> list[list[dict[str, Any]]]:
    """The models in packs of at most `size` and of like total width."""
    size = size or (MODELS_ON_CPU if device == "cpu" else len(models))
    count = -(-len(models) // size)
    ordered = sorted(models, key=lambda model: -model["width"])
    return [ordered[first::count] for first in range(count)]


def _snapshots(config: Config) -> list[int]:
    """Steps at which losses are measured, the last one included."""
    if "steps" not in config.axis:
        return [config.loop.steps]
    first = max(1, round(config.optim.warmup_ratio * config.loop.steps))
    ratio = config.loop.steps / first
    return sorted({round(first * ratio ** (k / (config.snapshots - 1))) for k in range(config.snapshots)})


def train(packs: Sequence[Pack], out: Path, workers: int, executor: str = "local") -> dict[str, Any]:
    """Train what is missing; rows (one for each model and snapshot), norm histograms and failures.

    `workers` processes of the `executor` at a time, or this process if 0. The tables of a finished grid are kept in
    the run directory.
    """
    home = out / "checkpoints"
    if (home / TABLE).exists():
        return _checked(read_record(home / TABLE), packs, home / TABLE) | {"failures": []}
    began = monotonic()
    with _watching(packs, home) as done:
        started = done()
        if workers == 0:
            results, failures = _train_here(packs, home)
        else:
            results, failures = _train_apart(packs, home, workers, executor)
        trained = done() - started
    if not any(results):
        raise LeafwardError(f"every pack failed; the first: {failures[0]['message']} (see {failures[0]['trace']})")
    for path in home.glob(f"*/{RESULT}"):
        path.with_name(STATE).unlink(missing_ok=True)
    finished = [result for result in results if result is not None]
    seconds = monotonic() - began
    table = {
        "rows": [row for result in finished for row in result["rows"]],
        "norms": [entry for result in finished for entry in result["norms"]],
        "failures": failures,
        "time": {
            "seconds": seconds,  # of this call; the packs' own seconds count earlier ones as well
            "pack_seconds": sum(result["seconds"] for result in finished),
            "model_steps_per_second": trained / seconds,
        },
    }
    if not failures:
        write_json(home / TABLE, table)
    return table


def _train_apart(
    packs: Sequence[Pack], home: Path, workers: int, executor: str
) -> tuple[list[Any], list[dict[str, Any]]]:
    from leafward.engine.executor import JobsStopped, run_jobs

    try:
        jobs = run_jobs(train_pack, packs, home, executor=executor, workers=workers, show=False)
    except JobsStopped as stopped:
        raise _interrupted(stopped.number, packs, home) from None
    failures = [_failure(failure.config, failure.message, failure.trace) for failure in jobs.failures]
    for pack, result in zip(packs, jobs.results, strict=True):
        if result is not None:
            _checked(result, [pack], home / config_hash(pack)[:16] / RESULT)
    return jobs.results, failures


def _train_here(packs: Sequence[Pack], home: Path) -> tuple[list[Any], list[dict[str, Any]]]:
    from leafward.engine.bookkeeping import Signals

    results, failures = [], []
    with Signals() as signals:
        for pack in packs:
            directory = home / config_hash(pack)[:16]
            if not (directory / RESULT).exists():
                try:
                    write_json(directory / RESULT, _train(pack, directory, lambda: signals.number > 0))
                except Stopped:
                    raise _interrupted(signals.number, packs, home) from None
                except Exception as error:
                    write_text(directory / ERROR, traceback.format_exc())
                    failures.append(_failure(pack, f"{type(error).__name__}: {error}", directory / ERROR))
                    results.append(None)
                    continue
            results.append(_checked(read_record(directory / RESULT), [pack], directory / RESULT))
    return results, failures


def _failure(pack: Mapping[str, Any], message: str, trace: Path) -> dict[str, Any]:
    first = pack["models"][0]
    return {"law": first["law"], "seed": first["seed"], "models": len(pack["models"])} | {
        "dataset_rows": pack["options"]["dataset_rows"],
        "message": message,
        "trace": str(trace),
    }


def _interrupted(number: int, packs: Sequence[Pack], home: Path) -> LeafwardError:
    from leafward.engine import Interrupted

    models = sum(len(pack["models"]) for pack in packs)
    return Interrupted(number, _model_steps(home) // models, home.parent)


def train_pack(pack: Pack, directory: Path) -> dict[str, Any]:
    """The job of a process of its own."""
    import torch

    from leafward.engine.bookkeeping import Signals

    torch.set_num_threads(1)
    with Signals() as signals:
        return _train(pack, directory, lambda: signals.number > 0)


def _train(pack: Pack, directory: Path, stop: Callable[[], bool]) -> dict[str, Any]:
    from leafward.systems.superposition import Fleet, FleetOptions, ModelSpec

    fleet = Fleet([ModelSpec(**model) for model in pack["models"]], FleetOptions(**pack["options"]))
    directory.mkdir(parents=True, exist_ok=True)
    rows, seconds = _load(fleet, directory / STATE)
    began = monotonic() - seconds
    every, steps = pack["checkpoint_every"], fleet.options.steps
    stretch, saved = FIRST_STRETCH, fleet.step
    while fleet.step < steps:
        if stop():
            _save(fleet, directory / STATE, rows, monotonic() - began)
            raise Stopped(f"stopped after step {fleet.step}")
        goals = (fleet.step + stretch, saved + every, *(step for step in pack["snapshots"] if step > fleet.step))
        before = monotonic()
        fleet.run(min(goals) - fleet.step)
        if monotonic() - before < STRETCH_SECONDS:
            stretch *= 2
        if fleet.step in pack["snapshots"]:
            rows += _measure(fleet, pack)
        if fleet.step >= saved + every and fleet.step < steps:
            _save(fleet, directory / STATE, rows, monotonic() - began)
            saved = fleet.step
        (directory / DONE).write_text(str(fleet.step * len(fleet.models)), encoding="ascii")
    return finite({"rows": rows, "norms": _norms(fleet, pack), "seconds": monotonic() - began})


def _measure(fleet: Fleet, pack: Pack) -> list[dict[str, Any]]:
    rows = fleet.measure(pack["eval_rows"])
    return [{**row, "dataset_rows": pack["options"]["dataset_rows"]} for row in rows]


def _norms(fleet: Fleet, pack: Pack) -> list[dict[str, Any]]:
    """Histograms of the row norms of each model on fresh data."""
    import numpy as np

    if pack["options"]["dataset_rows"] is not None:
        return []
    entries = []
    for index, model in enumerate(fleet.models):
        norms = fleet.weights(index)[0].norm(dim=1).cpu().numpy()
        counts = np.histogram(np.minimum(norms, NORM_EDGES[-1]), NORM_EDGES)[0]
        key = {"width": model.width, "decay": model.decay, "law": model.law, "seed": model.seed}
        entries.append({**key, "counts": counts.tolist()})
    return entries


def _save(fleet: Fleet, path: Path, rows: list[dict[str, Any]], seconds: float) -> None:
    """The fleet's state, the rows measured and the seconds spent so far, in one file and one step."""
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        state = {name: tensor.contiguous() for name, tensor in fleet.state_dict().items()}
        save_file(state, temporary, metadata={"rows": json.dumps(finite(rows)), "seconds": str(seconds)})


def _load(fleet: Fleet, path: Path) -> tuple[list[dict[str, Any]], float]:
    """Continue from a saved state, where there is one; the rows measured and the seconds spent before it."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return [], 0.0
    try:
        with safe_open(path, framework="pt") as file:
            rows, seconds = json.loads(file.metadata()["rows"]), float(file.metadata()["seconds"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise DataError(f"{path} is not the state of a pack: {error}") from error
    fleet.load_state_dict(state)
    return rows, seconds


@contextmanager
def _watching(packs: Sequence[Pack], home: Path) -> Iterator[Callable[[], int]]:
    """Progress over all packs, read from their files by a thread of its own; yields the count of model-steps."""
    from leafward.engine.progress import Progress

    total = sum(len(pack["models"]) * pack["options"]["steps"] for pack in packs)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            progress.update(_model_steps(home))

    with Progress(total, "training", unit="model-step", start=_model_steps(home)) as progress:
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield lambda: _model_steps(home)
        finally:
            over.set()
            thread.join()
        progress.update(_model_steps(home))


def _model_steps(home: Path) -> int:
    counts = (read_bytes(path) for path in home.glob(f"*/{DONE}"))
    return sum(int(count) for count in counts if count.isdigit())


def _checked(held: dict[str, Any], packs: Sequence[Pack], path: Path) -> dict[str, Any]:
    """What `path` holds of an earlier attempt, refused where it is not of these packs or lacks what is analysed."""
    try:
        times = held["time"] if "time" in held else {"seconds": held["seconds"]}
        found = {(row["width"], row["decay"], row["law"], row["seed"], row["dataset_rows"]) for row in held["rows"]}
        numbers = [row[name] for row in held["rows"] for name in MEASURED if row[name] is not None]
        numbers += [*times.values(), *(row["step"] for row in held["rows"])]
        bars = [entry["counts"] for entry in held["norms"]]
        numbers += [entry[name] for entry in held["norms"] for name in ("width", "decay", "seed")]
        whole = all(len(each) == len(NORM_EDGES) - 1 for each in bars)
        numbers += [count for each in bars for count in each]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {error!r}; remove it, and what it held is measured again") from error
    planned = {
        (model["width"], model["decay"], model["law"], model["seed"], pack["options"]["dataset_rows"])
        for pack in packs
        for model in pack["models"]
    }
    if found != planned or not whole or not all(isinstance(number, int | float) for number in numbers):
        raise DataError(f"{path} is damaged: its rows are not those of this run; remove it to measure them again")
    return held
