"""Ranks: set-up from torchrun's variables, reductions, and sharing a model with DDP or FSDP2."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

from leafward.config import to_dict
from leafward.engine.blocks import blocks
from leafward.engine.config import TIMEOUT
from leafward.engine.run import RunDirectory
from leafward.errors import LeafwardError, UsageError

T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""How long ranks wait for work that the first one does alone; if it dies, its connections close and they know."""
JOINING = timedelta(minutes=5)
"""How long they wait at least for each other to be started."""


class RankLostError(LeafwardError):
    """Another rank died, or did not come to a collective operation in time."""


@dataclass(frozen=True)
class Cluster:
    """This process among the others. Every method that talks to them must be called on every rank."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    patient: dist.ProcessGroup | None = None
    """The same ranks, for waits that may be long; None: the default group."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """The (small, picklable) values of all ranks, on each."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def parts(self, *counts: int) -> list[float]:
        """Each of this rank's counts as a part of its sum over the ranks."""
        if self.world == 1:
            return [1.0] * len(counts)
        own = torch.tensor(counts, dtype=torch.float64)
        return (own / self.sum(own.clone()).clamp_min(1.0)).tolist()

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and give its (small, picklable) value, or its failure, to all.

        It may take longer than the time-out of collective operations.
        """
        if self.world == 1:
            return action()
        outcome: list[Any] = [None, None]
        failure: Exception | None = None
        if self.main:
            try:
                outcome[0] = action()
            except Exception as error:
                failure, outcome[1] = error, f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(outcome, src=0, group=self.patient, device=torch.device("cpu"))
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise LeafwardError(f"rank 0 failed: {outcome[1]}")
        return outcome[0]

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give rank 0's values to all, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)


@contextmanager
def session(device: str = "auto", timeout: float = TIMEOUT) -> Iterator[Cluster]:
    """The cluster that torchrun started, or this process alone; the process group ends with the block.

    `timeout`: seconds that a rank waits in a collective operation for the others, once all have joined. Raises
    `RankLostError` where it waited longer, or where another rank died.
    """
    rank, world, local_rank = (_integer(name, default) for name, default in _TORCHRUN.items())
    chosen = _device(device, local_rank)
    if world == 1:
        yield Cluster(device=chosen)
        return
    backend = "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        backend = "cpu:gloo,cuda:nccl"
    try:
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=max(limit, JOINING))
        patient = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(patient, dist.ProcessGroup)
        _set_timeout(limit)  # from here on; before, nobody is late who has only just been started
    except (ValueError, RuntimeError) as error:
        broken = _broken_connection(error) if dist.is_initialized() else None
        if broken is not None:  # the others were there, and one died before this rank had reached them all
            raise _lost(rank, world, timeout, broken) from error
        raise LeafwardError(
            f"rank {rank} of {world} cannot join the others (start them with torchrun): {error}"
        ) from error
    try:
        yield Cluster(rank, world, chosen, patient)
    except Exception as error:
        broken = _broken_connection(error)
        if broken is None:
            raise
        raise _lost(rank, world, timeout, broken) from error
    finally:
        dist.destroy_process_group()


def _lost(rank: int, world: int, timeout: float, broken: BaseException) -> RankLostError:
    return RankLostError(
        f"rank {rank} of {world} has lost another rank: that one died, or was more than loop.timeout = {timeout:g} "
        "seconds behind (look for the first error of the other ranks). The checkpoints are good: go on with "
        f"--resume, on any number of ranks. [{str(broken).strip().splitlines()[0]:.200}]"
    )


def create_run(
    cluster: Cluster,
    path: str | Path,
    config: Any,
    *,
    resume: bool = False,
    overwrite: bool = False,
    may_change: Iterable[str] = (),
) -> RunDirectory:
    """`RunDirectory.create` on rank 0; the other ranks get the same directory and never write to it."""
    may_change = frozenset(may_change)

    def create() -> None:
        RunDirectory.create(path, config, resume=resume, overwrite=overwrite, may_change=may_change)

    cluster.on_main(create)
    return RunDirectory(path, to_dict(config), may_change, writes=cluster.main)


def share(model: nn.Module, step: nn.Module, strategy: str, cluster: Cluster, unused_parameters: bool) -> nn.Module:
    """`step` (which computes the loss of `model`) so that its gradients are averaged over the ranks.

    DDP wraps `step`; FSDP2 shards the parameters of `model` in place, block by block. Scalars, such as a learned
    curvature, it cannot shard: they stay whole, and their gradients are the caller's to average.
    """
    if cluster.world == 1:
        return step
    if strategy == "fsdp" and unused_parameters:
        raise UsageError("strategy fsdp cannot train a task with unused_parameters; use ddp")
    if strategy != "fsdp":
        return nn.parallel.DistributedDataParallel(
            step, gradient_as_bucket_view=True, find_unused_parameters=unused_parameters
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    cluster.broadcast(model.state_dict().values())
    mesh = init_device_mesh(cluster.device.type, (cluster.world,))
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    for block in blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)
    # The root stays whole until its backward pass: a task may have a gradient flow into it beside its output.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=scalars)
    return step


@contextmanager
def accumulating(step: nn.Module, model: nn.Module, active: bool) -> Iterator[None]:
    """While `active`, backward passes add to the local gradients and do not talk to other ranks."""
    if active and isinstance(step, nn.parallel.DistributedDataParallel):
        with step.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(not active)  # type: ignore[operator]
    yield


def _broken_connection(error: BaseException) -> BaseException | None:
    """What in the chain of causes of `error` says that ranks no longer reach each other. gloo has no type for it."""
    seen: list[BaseException] = [error]
    for each in seen:  # grows as we go
        if isinstance(each, dist.DistError) or (isinstance(each, RuntimeError) and _CONNECTION.search(str(each))):
            return each
        causes = [each.__cause__, each.__context__]
        if isinstance(each, CheckpointException):
            causes += [failure for failure, _ in each.failures.values()]
        seen += [cause for cause in causes if cause is not None and cause not in seen]
    return None


_CONNECTION = re.compile(r"gloo/|\bNCCL\b|Connection (closed|reset) by peer|Timed out waiting", re.IGNORECASE)
# In the oldest torch that is supported it has a name of its own.
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
_TORCHRUN = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(f"the environment variable {name} must be an integer, not {text!r}") from error


def need_cuda() -> None:
    """Refuse a CUDA device where there is none."""
    if not torch.cuda.is_available():
        raise UsageError("device is cuda, but torch finds no CUDA device here; use cpu or auto")


def _device(device: str, local_rank: int) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device must be auto, cpu or cuda, not {device!r}")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    need_cuda()
    if local_rank >= torch.cuda.device_count():
        raise UsageError(f"rank {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}")
    return torch.device("cuda", local_rank)
