"""Training that loses nothing: settings, run directory, loop, checkpoints, distribution, progress.

The engine knows no system. A system brings a model and a `Task`; `train_loop` trains it, `RunDirectory` keeps the
record, and a run that was killed continues where its last checkpoint stands. Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.engine.bookkeeping import Loss
    from leafward.engine.checkpoint import Checkpointer, load_published, load_weights, publish
    from leafward.engine.config import Arms, LoopConfig, OptimConfig
    from leafward.engine.data import DataOrder, batches
    from leafward.engine.distributed import Cluster, RankLostError, create_run, session
    from leafward.engine.executor import JobFailure, Jobs, run_jobs
    from leafward.engine.experiment import Experiment, Member
    from leafward.engine.layout import is_run, members_of
    from leafward.engine.loop import FitResult, Interrupted, Task, train_loop
    from leafward.engine.nonfinite import NonFiniteError
    from leafward.engine.optim import EMA, parameter_groups, schedule
    from leafward.engine.progress import Progress
    from leafward.engine.run import RunDirectory

_HOME = {
    "bookkeeping": ("Loss",),
    "checkpoint": ("Checkpointer", "load_published", "load_weights", "publish"),
    "config": ("Arms", "LoopConfig", "OptimConfig"),
    "data": ("DataOrder", "batches"),
    "distributed": ("Cluster", "RankLostError", "create_run", "session"),
    "executor": ("JobFailure", "Jobs", "run_jobs"),
    "experiment": ("Experiment", "Member"),
    "layout": ("is_run", "members_of"),
    "loop": ("FitResult", "Interrupted", "Task", "train_loop"),
    "nonfinite": ("NonFiniteError",),
    "optim": ("EMA", "parameter_groups", "schedule"),
    "progress": ("Progress",),
    "run": ("RunDirectory",),
}

__all__ = [
    "EMA",
    "Arms",
    "Checkpointer",
    "Cluster",
    "DataOrder",
    "Experiment",
    "FitResult",
    "Interrupted",
    "JobFailure",
    "Jobs",
    "LoopConfig",
    "Loss",
    "Member",
    "NonFiniteError",
    "OptimConfig",
    "Progress",
    "RankLostError",
    "RunDirectory",
    "Task",
    "batches",
    "create_run",
    "is_run",
    "load_published",
    "load_weights",
    "members_of",
    "parameter_groups",
    "publish",
    "run_jobs",
    "schedule",
    "session",
    "train_loop",
]


__getattr__, __dir__ = lazy(__name__, _HOME)
