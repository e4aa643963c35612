"""A tiny task with all that makes training hard to repeat: random augmentation, dropout, unequal counts per sample,
evaluation on the average of the weights, and a best checkpoint. Child processes train it and write what they got."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from leafward.config import Settings, load_yaml
from leafward.engine import Interrupted, LoopConfig, Loss, OptimConfig, create_run, publish, session, train_loop
from ranks import become, finish, free_port, launch

CLASSES, WIDTH, LENGTH = 5, 6, 4


class Points:
    """Sequences of LENGTH points with noise; each sample counts only its first `n` of them, n from 1 to LENGTH."""

    def __init__(self, size: int, noise: float):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, LENGTH, WIDTH, generator=generator)
        self.y = torch.randint(CLASSES, (size, LENGTH), generator=generator)
        self.n = torch.randint(1, LENGTH + 1, (size,), generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        wobble = torch.randn(LENGTH, WIDTH) * random.random() * float(np.random.rand())  # noqa: NPY002
        return {"x": self.x[index] + self.noise * wobble, "y": self.y[index], "n": self.n[index]}


class Block(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Toy(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


class Sparing(Toy):
    """Uses one layer only for samples that count in full, and not at all when there are none."""

    def __init__(self, dropout: float = 0.0):
        super().__init__(dropout)
        self.spare = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, n: torch.Tensor | None = None) -> torch.Tensor:
        full = torch.zeros(len(x), dtype=torch.bool) if n is None else n == LENGTH
        out = super().forward(x)
        return out + full[:, None, None] * self.spare(x) if full.any() else out


class ToyTask:
    monitor, mode, model = "loss", "min", Toy

    def __init__(self, size: int = 23, noise: float = 0.1):
        self.dataset = Points(size, noise)
        self.held_out = Points(16, 0.0)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        logits = model(batch["x"])
        counted = torch.arange(LENGTH, device=logits.device) < batch["n"][:, None]
        losses = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none").view_as(counted)
        right = (logits.argmax(-1) == batch["y"]) & counted
        return Loss((losses * counted).sum(), counted.sum(), {"accuracy": right.sum()})

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        logits = model(self.held_out.x.to(next(model.parameters()).device)).cpu()
        return {"loss": float(F.cross_entropy(logits.flatten(0, 1), self.held_out.y.flatten()))}

    def scalars(self, model: Any) -> dict[str, Any]:
        return {"width": float(WIDTH)}


class SparingTask(ToyTask):
    unused_parameters, model = True, Sparing

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        return super().loss(lambda x: model(x, batch["n"]), batch)  # type: ignore[arg-type]


class Stopped(ToyTask):
    """Sends this process SIGTERM in the middle of the `calls`-th step."""

    def __init__(self, calls: int, noise: float):
        super().__init__(noise=noise)
        self.calls = calls

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        self.calls -= 1
        if self.calls == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


class ToyConfig(Settings, frozen=True):
    loop: LoopConfig = LoopConfig(
        steps=12, batch_size=8, eval_every=5, checkpoint_every=3, log_every=2, ema=0.9, device="cpu"
    )
    optim: OptimConfig = OptimConfig(lr=0.05, warmup_steps=2)
    dropout: float = 0.0
    noise: float = 0.1


def may_change() -> set[str]:
    from leafward.engine.config import CHANGEABLE_LOOP

    return {f"loop.{name}" for name in CHANGEABLE_LOOP}


def train(path: Path, config: ToyConfig, resume: bool = False, task: ToyTask | None = None) -> None:
    """Train in `path`, publish the weights beside it, and finish the run."""
    with session(config.loop.device, config.loop.timeout) as cluster:
        run = create_run(cluster, path, config, resume=resume, may_change=may_change())
        torch.manual_seed(config.loop.seed)
        task = task or ToyTask(noise=config.noise)
        model = task.model(config.dropout)
        result = train_loop(model, task, config.loop, config.optim, run, cluster)
        publish(model, run.path / "model", config, cluster)
        run.finish({"step": result.step, "best": result.best, "best_step": result.best_step})


def train_rank(rank: int, world: int, port: int, path: Path, config: ToyConfig, resume: bool, task: Any = None) -> None:
    become(rank, world, port)
    train(path, config, resume, task)


def train_rank_some(calls: int, rank: int, world: int, port: int, path: Path, config: ToyConfig) -> None:
    """Go on until the last rank, and it alone, gets SIGTERM in the `calls`-th step from here."""
    task = Stopped(calls if rank == world - 1 else 0, noise=config.noise)
    try:
        train_rank(rank, world, port, path, config, True, task)
    except Interrupted as stop:
        sys.exit(0 if stop.exit_code == 128 + signal.SIGTERM else 1)
    sys.exit("the signal did not stop this rank")


def train_until_event(kill_at: int, record: Path, path: Path, config: ToyConfig, resume: bool) -> None:
    """Train, and die by SIGKILL just before the `kill_at`-th time that this process touches a file of the run.

    With `kill_at` < 0 nothing dies and `record` gets the list of those moments.
    """
    events: list[str] = []

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            return
        if not str(arguments[0]).startswith(str(path)) or "tensorboard" in str(arguments[0]):
            return
        if len(events) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        events.append(f"{event} {Path(str(arguments[0])).relative_to(path)}")

    torch.set_num_threads(1)
    sys.addaudithook(count)
    train(path, config, resume)
    record.write_text(json.dumps(events))


def train_limited(limit: int, *arguments: Any) -> None:
    """`train_rank` where no file may grow beyond `limit` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    train_rank(*arguments)


def train_as_nobody(path: Path, config: ToyConfig, resume: bool) -> None:
    """Train without the rights of root, so that permission bits count."""
    if os.getuid() == 0:
        os.setuid(65534)
    train(path, config, resume)


def reporting(out: Path, target: Any, *args: Any) -> None:
    """Run `target`; write the error's type and text to `out` and exit with 1 if it raises."""
    try:
        target(*args)
    except Exception as error:
        out.write_text(f"{type(error).__name__}: {error}")
        sys.exit(getattr(error, "exit_code", 1))


def train_ranks(world: int, path: Path, config: ToyConfig, resume: bool = False) -> None:
    port = free_port()
    processes = [launch(train_rank, rank, world, port, path, config, resume) for rank in range(world)]
    assert finish(*processes) == [0] * world


def record(path: Path) -> tuple[list[dict[str, Any]], bytes, dict[str, Any]]:
    """What a run left: its metrics without timings, its published weights and its result."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("time", None)
    result = json.loads((path / "result.json").read_text())
    return lines, (path / "model" / "model.safetensors").read_bytes(), result


if __name__ == "__main__":
    train(Path(sys.argv[1]), load_yaml(ToyConfig, sys.argv[2]), "--resume" in sys.argv)
