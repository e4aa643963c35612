"""Training that loses nothing: configuration, run directory, loop, checkpoints, distribution, progress.

The engine knows no system. A recipe brings a model and a `Task`; `fit` trains it, `RunDirectory` keeps the record,
and a run that was killed continues where its last checkpoint stands. Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.engine.bookkeeping import Loss
    from leafward.engine.checkpoint import Checkpointer, load_published, load_weights, publish
    from leafward.engine.config import (
        LoopConfig,
        OptimConfig,
        config_hash,
        from_dict,
        load_yaml,
        save_yaml,
        to_dict,
    )
    from leafward.engine.data import DataOrder, batches
    from leafward.engine.distributed import Cluster, create_run, session
    from leafward.engine.executor import JobFailure, Jobs, run_jobs
    from leafward.engine.loop import FitResult, Interrupted, Task, fit
    from leafward.engine.nonfinite import NonFiniteError
    from leafward.engine.optim import EMA, parameter_groups, schedule
    from leafward.engine.progress import Progress
    from leafward.engine.run import RunDirectory

_HOME = {
    "bookkeeping": ("Loss",),
    "checkpoint": ("Checkpointer", "load_published", "load_weights", "publish"),
    "config": ("LoopConfig", "OptimConfig", "config_hash", "from_dict", "load_yaml", "save_yaml", "to_dict"),
    "data": ("DataOrder", "batches"),
    "distributed": ("Cluster", "create_run", "session"),
    "executor": ("JobFailure", "Jobs", "run_jobs"),
    "loop": ("FitResult", "Interrupted", "Task", "fit"),
    "nonfinite": ("NonFiniteError",),
    "optim": ("EMA", "parameter_groups", "schedule"),
    "progress": ("Progress",),
    "run": ("RunDirectory",),
}

__all__ = [
    "EMA",
    "Checkpointer",
    "Cluster",
    "DataOrder",
    "FitResult",
    "Interrupted",
    "JobFailure",
    "Jobs",
    "LoopConfig",
    "Loss",
    "NonFiniteError",
    "OptimConfig",
    "Progress",
    "RunDirectory",
    "Task",
    "batches",
    "config_hash",
    "create_run",
    "fit",
    "from_dict",
    "load_published",
    "load_weights",
    "load_yaml",
    "parameter_groups",
    "publish",
    "run_jobs",
    "save_yaml",
    "schedule",
    "session",
    "to_dict",
]


__getattr__, __dir__ = lazy(__name__, _HOME)
