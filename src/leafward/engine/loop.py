"""The training loop: `train_loop` trains a model on a `Task` and can be stopped and taken up again at any moment."""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from leafward.config import checked
from leafward.engine.blocks import activation_checkpoints, compiled
from leafward.engine.bookkeeping import Best, Clock, Guard, Loss, Signals, Window
from leafward.engine.checkpoint import Checkpointer, Manifest, load_weights, weights
from leafward.engine.config import LoopConfig, OptimConfig
from leafward.engine.data import DataOrder, batches, mix, seed_cpu
from leafward.engine.distributed import Cluster, accumulating, session, share
from leafward.engine.draws import BatchDraws
from leafward.engine.nonfinite import NonFiniteError, bad_gradient, find_cause, save_batches
from leafward.engine.optim import EMA, adamw, gradients, schedule, squared_norm
from leafward.engine.progress import Progress
from leafward.engine.run import BAD_BATCH, RunDirectory
from leafward.errors import DataError, LeafwardError, UsageError


class Task(Protocol):
    """What is learned. Beside these two members a task may have

    - `collate(samples) -> batch` (default: torch's),
    - `evaluate(model) -> dict[str, float]`, called on every rank; the numbers of rank 0 count,
    - `monitor: str` and `mode: "min" | "max"`: the evaluated number that early stopping and the best checkpoint follow,
    - `scalars(model) -> dict[str, Tensor | float]`: values to log with the training metrics, such as a curvature,
    - `unused_parameters: bool`: True if some parameters get no gradient in some steps (needed under DDP).
    """

    @property
    def dataset(self) -> Any:
        """Map-style training data: `__len__` and `__getitem__` or `__getitems__`."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Summed loss of one micro-batch, its number of terms, and summed metrics."""
        ...


@dataclass
class FitResult:
    """Where training ended and what the evaluation there (`metrics`) and the best one gave.

    The model then holds the best weights if the task has a monitor, else the last; in either case their moving
    average if there is one.
    """

    step: int
    metrics: dict[str, float]
    best: float | None
    best_step: int | None
    stopped_early: bool


class Interrupted(LeafwardError):
    """A signal asked the run to stop; everything is saved. `exit_code` is the shell's 128 + signal number."""

    def __init__(self, number: int, after: int | str, where: Path):
        """`after`: the last step, or how far it came in words."""
        name, far = signal.Signals(number).name, after if isinstance(after, str) else f"step {after}"
        super().__init__(f"stopped by {name} after {far}; all is saved in {where}: continue with --resume")
        self.number, self.exit_code = number, 128 + number


def train_loop(
    model: nn.Module,
    task: Task,
    loop: LoopConfig,
    optim: OptimConfig,
    run: RunDirectory,
    cluster: Cluster | None = None,
) -> FitResult:
    """Train `model` on `task` in `run`, from the newest checkpoint there (if any) to step `loop.steps`.

    Call it on every rank of `cluster`; without one it takes what `session(loop.device, loop.timeout)` gives. Raises
    `NonFiniteError` when a loss or gradient is not finite, and `Interrupted` after SIGTERM or SIGINT, once the state
    is saved.
    """
    loop, optim = checked(LoopConfig, loop).over(len(task.dataset)), checked(OptimConfig, optim)
    with ExitStack() as stack:
        if cluster is None:
            cluster = stack.enter_context(session(loop.device, loop.timeout))
        if loop.checkpoint_activations:
            stack.enter_context(activation_checkpoints(model))
        if loop.compile:
            stack.enter_context(compiled(model, cluster.world))
        trainer = _Trainer(model, task, loop, optim, run, cluster)
        trainer.resume()
        trainer.train()
        return trainer.finish()


class _Trainer:
    def __init__(
        self, model: nn.Module, task: Task, loop: LoopConfig, optim: OptimConfig, run: RunDirectory, cluster: Cluster
    ):
        self.task, self.loop, self.optim, self.run, self.cluster = task, loop, optim, run, cluster
        self.device = cluster.device
        run.writes = cluster.main
        self.order = DataOrder(len(task.dataset), loop.batch_size, loop.seed)
        self.micro_batch = self.order.micro_batch(loop.micro_batch, cluster.world)
        self.places = self.order.places(cluster.rank, cluster.world, self.micro_batch)
        self.best = Best(getattr(task, "monitor", None), getattr(task, "mode", "min"), loop.patience)
        if self.best.monitor is not None and not hasattr(task, "evaluate"):
            raise UsageError(f"the task monitors {self.best.monitor!r} but has no evaluate() that would give it")
        self.dtype = torch.float64 if loop.precision == "float64" else None
        self.model = model.to(self.device, self.dtype).train()
        if self.dtype is not None:
            _takes_all_as(self.model, self.dtype)
        self.local_step = _LossModule(self.model, task)
        unused = bool(getattr(task, "unused_parameters", False))
        self.shared_step = share(self.model, self.local_step, loop.strategy, cluster, unused)
        self.sharded = cluster.world > 1 and loop.strategy == "fsdp"
        # Not zero from the first non-finite loss or gradient on; the optimiser then changes nothing any more.
        self.bad = torch.zeros((), device=self.device)
        self.optimizer = adamw(self.model, optim, self.bad)
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.factor = schedule(optim, loop.steps)
        self.ema = EMA(self.model, loop.ema) if loop.ema is not None else None
        self.checkpointer = Checkpointer(run.checkpoints, run.identity, cluster, loop.keep_last)
        self.window = Window(self.device)
        self.evaluated: dict[str, float] = {}
        self.step = 0

    def resume(self) -> None:
        """Take up the newest checkpoint, if there is one."""
        found = self.checkpointer.latest()
        if found is not None:
            self._restore(found)
        if self.best.step not in (None, self.step) and not self.checkpointer.is_good(self.best.step):
            self.best.forget()
        self.run.rewind(self.step)
        for damage in self.checkpointer.damaged:
            self.run.log(self.step, {"event": f"{damage}; the run goes on from step {self.step}"})

    def train(self) -> None:
        if self._done():
            return
        stream = batches(
            self.task.dataset,
            self.order,
            start=self.step,
            rank=self.cluster.rank,
            world=self.cluster.world,
            micro_batch=self.micro_batch,
            workers=self.loop.workers,
            collate=getattr(self.task, "collate", None),
            pin_memory=self.device.type == "cuda",
        )
        guard, clock = Guard(lag=int(self.device.type == "cuda")), Clock(self.step)
        progress = Progress(self.loop.steps, "training", start=self.step, show=self.cluster.main)
        with closing(stream), Signals() as signals, progress:
            while not self._done():
                micro_batches = next(stream)
                status = self._update(micro_batches, signals)
                self.step += 1
                guard.watch(self.step, micro_batches, status)
                self._look(guard, clock, progress)
                if guard.stop:
                    raise Interrupted(signals.number or signal.SIGTERM, self.step, self.run.path)
            # A signal during the last evaluation or checkpoint counts too, or what comes after this would start.
            late = max(self.cluster.gather(signals.number))
            if late:
                raise Interrupted(late, self.step, self.run.path)

    def finish(self) -> FitResult:
        """Put the weights to be used into the model and say how it went."""
        if self.best.step is not None and self.best.step != self.step:
            load_weights(self.checkpointer.path(self.best.step), self.model, self.cluster)
        elif self.ema is not None:
            self.ema.swap()
        return FitResult(self.step, self.evaluated, self.best.value, self.best.step, self.best.exhausted)

    def _done(self) -> bool:
        return self.step >= self.loop.steps or self.best.exhausted

    def _update(self, micro_batches: list[Any], signals: Signals) -> Tensor:
        """One optimiser update; returns its flags (bad, stop), still on the device."""
        sums: Tensor | None = None
        for index, batch in enumerate(micro_batches):
            more = index + 1 < len(micro_batches)
            with accumulating(self.shared_step, self.model, more), self._draws(self.step, index):
                loss = self._loss(self.shared_step, batch)
                loss.total.backward()
            part = self.window.vector(loss)
            sums = part if sums is None else sums + part
        assert sums is not None
        # One small reduction carries loss, count, metrics and the wish to stop.
        stop = torch.full((1,), float(signals.number), dtype=sums.dtype, device=self.device)
        sums, stop = self.cluster.sum(torch.cat([sums, stop])).split([len(sums), 1])
        # The ranks' gradients were averaged; the loss is a sum over all of them divided by the count of all.
        norm = self._scale_gradients((self.cluster.world / sums[1].clamp(min=1.0)).to(self.dtype or torch.float32))
        self.bad.copy_(torch.maximum(self.bad, (~(norm.isfinite() & sums[0].isfinite())).float()))
        factor = self.factor(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.optim.lr * factor * group.get("lr_ratio", 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update()
        self.window.add(sums, norm)
        return torch.cat([self.bad.double().view(1), stop])

    def _loss(self, step: nn.Module, batch: Any) -> Loss:
        with self._autocast():
            return step(to_device(batch, self.device, self.dtype))

    @torch.no_grad()
    def _scale_gradients(self, scale: Tensor) -> Tensor:
        """Multiply the gradients by `scale` and clip their norm in one pass; returns the norm before clipping."""
        grads = gradients(self.parameters)
        if not grads:
            raise UsageError("no parameter of the model got a gradient from the loss")
        norm = scale * self._squared_norm(grads).sqrt()
        if self.optim.clip_norm is not None:
            scale = scale * (self.optim.clip_norm / norm).clamp(max=1.0)
        torch._foreach_mul_(grads, scale)
        return norm

    def _squared_norm(self, grads: list[Tensor]) -> Tensor:
        """Of the gradients (their local parts) of all ranks; those of parameters that are not sharded are averaged."""
        if not self.sharded:
            return squared_norm(grads)
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        whole = [grad for grad in found if not isinstance(grad, DTensor)]
        parts = [grad.to_local() for grad in found if isinstance(grad, DTensor)]
        for grad in whole:
            self.cluster.sum(grad).div_(self.cluster.world)
        sharded = self.cluster.sum(squared_norm(parts)) if parts else 0.0
        return sharded + squared_norm(whole) if whole else torch.as_tensor(sharded)

    def _look(self, guard: Guard, clock: Clock, progress: Progress) -> None:
        """After a step: log, evaluate and save where it is time to."""
        last = self.step == self.loop.steps
        log_due = last or self.step % self.loop.log_every == 0
        eval_due = last or (self.loop.eval_every is not None and self.step % self.loop.eval_every == 0)
        save_due = last or self.step % self.loop.checkpoint_every == 0
        if log_due or eval_due or save_due or guard.stop:
            guard.settle()
        if guard.bad is not None:
            self._fail(*guard.bad)
        if log_due:
            self._log(clock, progress)
        with clock.paused():
            improved = eval_due and self._evaluate()
            if save_due or improved or self.best.exhausted or guard.stop:
                self._save()

    def _log(self, clock: Clock, progress: Progress) -> None:
        values = self.window.take()
        values["lr"] = self.optimizer.param_groups[0]["lr"]
        if hasattr(self.task, "scalars"):
            values |= {name: float(value) for name, value in self.task.scalars(self.model).items()}  # type: ignore[attr-defined]
        seconds, steps = clock.lap(self.step)
        speed = {"seconds": seconds, "samples_per_second": steps * self.loop.batch_size / seconds}
        self.run.log(self.step, {f"train/{name}": value for name, value in values.items()}, speed)
        shown = {f"eval {name}": value for name, value in self.evaluated.items() if name == self.best.monitor}
        progress.update(self.step, {"loss": values["loss"], **shown})

    def _evaluate(self) -> bool:
        """Evaluate (the average of) the weights; True if the monitored number is the best so far."""
        if not hasattr(self.task, "evaluate"):
            return False
        self.cluster.broadcast(self.model.buffers())
        self._seed(self.step)
        self.model.eval()
        with torch.no_grad(), self._autocast(), self.ema.swapped_in() if self.ema is not None else nullcontext():
            values = self.task.evaluate(self.model)  # type: ignore[attr-defined]
            if self.sharded:
                self.model.reshard()  # type: ignore[operator]  (no copy of the average may stay)
        self.model.train()
        self.evaluated = self.cluster.gather({name: float(value) for name, value in values.items()})[0]
        self.run.log(self.step, {f"eval/{name}": value for name, value in self.evaluated.items()})
        return self.best.update(self.step, self.evaluated)

    def _save(self) -> None:
        # Statistics such as those of batch norm differ between ranks; rank 0's are kept, as DDP does.
        self.cluster.broadcast(self.model.buffers())
        state = {"window": self.window.state(), "best": self.best.state(), "evaluated": self.evaluated}
        self.checkpointer.save(self.step, self._tensors(), state, self.best.step)

    def _restore(self, found: Manifest) -> None:
        self.checkpointer.load(found.step, self._tensors())
        self.step = found.step
        try:
            self.window.restore(found.state["window"])
            self.best.restore(found.state["best"])
            # JSON has no NaN; it was written as null.
            evaluated = dict(found.state["evaluated"])
        except (KeyError, TypeError, ValueError) as error:
            where = self.checkpointer.path(found.step)
            raise DataError(f"{where} is not a checkpoint of this loop: its state is damaged at {error}") from error
        self.evaluated = {name: math.nan if value is None else value for name, value in evaluated.items()}

    def _tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by name; loading fills these tensors in place."""
        tensors = {f"model.{name}": tensor for name, tensor in weights(self.model).items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optim.{name}.{key}"] = value
        if self.ema is not None:
            tensors |= {f"ema.{name}": average for name, average in self.ema.average.items()}
        return tensors

    def _draws(self, step: int, index: int) -> AbstractContextManager[Any]:
        """Inside, random numbers are those of micro-batch `index` of this rank in `step`.

        They are the rows of what one rank would draw for the whole batch at once, so that any layout draws the same;
        compiled code does not pass through Python, and gets a seed for each micro-batch instead.
        """
        if self.loop.compile:
            self._seed(step, self.cluster.rank * len(self.places) + index)
            return nullcontext()
        self._seed(step)
        whole = len(self.places[index]) == self.order.batch_size
        return nullcontext() if whole else BatchDraws(self.places[index], self.order.batch_size)

    def _seed(self, step: int, stream: int = 0) -> None:
        """Randomness follows from seed and step, so that no generator's state has to be saved.

        `stream` concerns the model's own draws; `random` and numpy draw for the whole batch, such as mixup's share.
        """
        seed_cpu(mix(self.loop.seed, 2, step, 0))
        seed = mix(self.loop.seed, 2, step, stream)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.loop.precision == "bfloat16")

    def _fail(self, step: int, micro_batches: list[Any]) -> NoReturn:
        """Keep the batch that gave the non-finite value, replay it, and say what happened."""
        name = f"{BAD_BATCH}step-{step:08d}-rank-{self.cluster.rank}.safetensors"
        path = save_batches(micro_batches, self.run.path / name)
        self.optimizer.zero_grad()
        cause = find_cause(
            self.model,
            micro_batches,
            lambda batch: self._loss(self.local_step, batch).total,
            lambda index: self._draws(step - 1, index),
        )
        # Gradients may already be mixed over the ranks, so they are asked last.
        causes = self.cluster.gather(cause) + self.cluster.gather(bad_gradient(self.model))
        for index, text in enumerate(causes):
            if text is not None:
                rank = f"rank {index % self.cluster.world}: " if self.cluster.world > 1 else ""
                raise NonFiniteError(step, rank + text, path)
        raise NonFiniteError(
            step, "a replay of the step gave finite values only, so a sum overflowed or the cause does not repeat", path
        )


class _LossModule(nn.Module):
    """The whole computation of the loss as one module, so that DDP sees every use of the model."""

    def __init__(self, model: nn.Module, task: Task):
        super().__init__()
        self.model = model
        self.task = task

    def forward(self, batch: Any) -> Loss:
        loss = self.task.loss(self.model, batch)
        if not isinstance(loss, Loss) or loss.total.ndim != 0:
            raise UsageError(f"the task's loss must return a Loss with a scalar total, not {loss!r}")
        return loss


def _takes_all_as(model: nn.Module, dtype: torch.dtype) -> None:
    """Have `model` cast real inputs to `dtype`, also those that a task or a score hands to it."""

    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return to_device((args, kwargs), None, dtype)

    model.register_forward_pre_hook(cast, with_kwargs=True)


def to_device(batch: Any, device: torch.device | None, dtype: torch.dtype | None = None) -> Any:
    """`batch` with every tensor on `device`, real ones as `dtype` unless it is None; other values stay."""
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None, non_blocking=True)
    if hasattr(batch, "to"):
        return batch if device is None else batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device, dtype) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, dtype) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device, dtype) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in fields(batch):  # also of a frozen one, and without running its __post_init__ again
            object.__setattr__(moved, field.name, to_device(getattr(batch, field.name), device, dtype))
        return moved
    return batch
