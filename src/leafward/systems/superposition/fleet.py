"""Fleets: many toy models of superposition trained at once, each with its own width, decay, data and seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from leafward.errors import DataError, UsageError, nearest
from leafward.measure.devices import compute_device
from leafward.systems.superposition.laws import Law, frequencies
from leafward.systems.superposition.measures import describe
from leafward.systems.superposition.optim import OPTIMISERS
from leafward.systems.superposition.pack import Pack
from leafward.systems.superposition.sampler import Stream

MODELS_PER_CPU_PACK = 6  # more make rows of P so long that they leave the cache of one core
_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class ModelSpec:
    """One toy model y = ReLU(W Wᵀx + b).

    Models with the same law, density and seed see the same batches; models with the same width and seed start from
    the same W and b: comparisons within a fleet are paired.
    """

    width: int
    decay: float = 0.0  # γ; below 0 it pulls the rows of W to unit norm
    law: Law = "power:1"
    density: float | None = 1.0  # E = Σp; None: the law's weights are the probabilities
    seed: int = 0
    lr: float = 0.01
    bias_lr: float | None = None  # None: as lr


@dataclass(frozen=True)
class FleetOptions:
    """What the models of a fleet share."""

    features: int = 1000
    batch: int = 2048
    steps: int = 20_000
    warmup: float = 0.1  # fraction of the steps
    optimiser: str = "adamw"
    loss: str = "mse"
    loss_scale: float = 1.0  # of the training loss; Adam's ε makes it matter
    constraint: str = "none"  # "sphere": rows of W are put back to unit norm after each step
    correlation: str | None = None  # "block:SIZE:RHO", see `sampler.Blocks`
    dataset_rows: int | None = None  # None: fresh data; D: training rows are drawn from D fixed ones
    precision: str = "float32"
    device: str = "cpu"


def width_scaled_rates(width: int) -> dict[str, float]:
    """Learning rates of the large experiment: 0.02 (8/m)^¼ for W and 2/m for b."""
    return {"lr": 0.02 * (8 / width) ** 0.25, "bias_lr": 2 / width}


def log_steps(steps: int, count: int) -> list[int]:
    """About `count` step numbers from 1 to `steps`, evenly spaced in the logarithm, without repeats."""
    if steps < 1 or count < 1:
        raise UsageError(f"steps and count must be at least 1, got {steps} and {count}")
    return sorted({round(step) for step in np.geomspace(1, steps, count)})


class Fleet:
    """Trains and measures many models.

    >>> fleet = Fleet([ModelSpec(width=m, decay=-0.556) for m in (10, 25, 63)], features=1000, steps=20_000)
    >>> fleet.run()
    >>> table = fleet.measure()  # one dict per model, in the order given
    """

    def __init__(self, models: Iterable[ModelSpec], options: FleetOptions | None = None, **changes: Any):
        """`changes` are fields of `FleetOptions`."""
        known = [entry.name for entry in fields(FleetOptions)]
        for name in changes:
            if name not in known:
                raise UsageError(f"unknown fleet option {name!r}; {nearest(name, known)}")
        self.models = tuple(models)
        self.options = replace(options or FleetOptions(), **changes)
        _check(self.models, self.options)
        self.step = 0
        self._packs: list[Pack] = []
        self._place: dict[int, tuple[Pack, int]] = {}  # model -> its pack and position there
        for stream, members in self._groups():
            self._add_pack(stream, members)

    def _groups(self) -> Iterator[tuple[Stream, list[int]]]:
        """Models by the data they share, in order of width; on a CPU in small packs of like total width."""
        options, device = self.options, torch.device(self.options.device)
        shared: dict[tuple[bytes, int], list[int]] = {}
        for index, model in enumerate(self.models):
            p = frequencies(model.law, options.features, model.density)
            shared.setdefault((p.tobytes(), model.seed), []).append(index)
        for (p, seed), members in shared.items():
            stream = Stream(
                np.frombuffer(p).copy(),
                seed,
                options.batch,
                correlation=options.correlation,
                dataset_rows=options.dataset_rows,
                pad=device.type == "cuda",
                device=device,
                dtype=_DTYPES[options.precision],
            )
            members.sort(key=lambda index: self.models[index].width)
            packs = 1 if device.type == "cuda" else -(-len(members) // MODELS_PER_CPU_PACK)
            for first in range(packs):
                yield stream, members[first::packs]

    def _add_pack(self, stream: Stream, members: list[int]) -> None:
        options, models = self.options, [self.models[index] for index in members]
        pack = Pack(
            stream,
            [model.width for model in models],
            steps=options.steps,
            warmup=round(options.warmup * options.steps),
            loss=options.loss,
            loss_scale=options.loss_scale,
            optimiser=options.optimiser,
            lr=[model.lr for model in models],
            bias_lr=[model.lr if model.bias_lr is None else model.bias_lr for model in models],
            decay=[model.decay for model in models],
            sphere=options.constraint == "sphere",
        )
        self._packs.append(pack)
        self._place |= {index: (pack, position) for position, index in enumerate(members)}

    def run(
        self,
        steps: int | None = None,
        callback: Callable[[Fleet], object] | None = None,
        at: Iterable[int] = (),
    ) -> None:
        """Train `steps` more steps (default: all that are left), and never beyond `options.steps`.

        `callback(fleet)` is called at the step numbers `at` that are passed, and at the end; it may measure or save.
        """
        if steps is not None and steps < 1:
            raise UsageError(f"steps must be at least 1, got {steps}")
        end = self.options.steps if steps is None else min(self.step + steps, self.options.steps)
        for stop in sorted({step for step in at if self.step < step < end} | {end}):
            with _matmul_precision(self.options.precision):
                self._each(lambda pack, stop=stop: pack.train(self.step, stop))
            self.step = stop
            if callback is not None:
                callback(self)

    def measure(self, rows: int | None = None) -> list[dict[str, Any]]:
        """One dict per model: what it is, its loss on `rows` fresh rows (default 100 batches), its geometry.

        `loss` is the mean over rows of the sum over features, `loss_error` its standard error, `loss_floor` the
        entropy of the targets (cross-entropy only, else 0), and `train_loss` the mean of the last 100 training
        losses. Rows are rounded up to whole batches. See `measures.describe` for the rest.
        """
        count = 100 if rows is None else -(-rows // self.options.batch)
        if count < 1:
            raise UsageError(f"rows must be at least 1, got {rows}")
        with _matmul_precision("float32"):
            scores = dict(zip(self._packs, self._each(lambda pack: pack.evaluate(count)), strict=True))
            recent = {pack: pack.train_loss(self.step) for pack in self._packs}
            table = []
            for index, model in enumerate(self.models):
                pack, position = self._place[index]
                table.append(
                    {
                        "model": index,
                        "step": self.step,
                        "width": model.width,
                        "decay": model.decay,
                        "law": model.law if isinstance(model.law, str) else "given",
                        "density": float(pack.stream.p.sum()),
                        "seed": model.seed,
                        "loss": scores[pack].loss[position],
                        "loss_error": scores[pack].error[position],
                        "loss_floor": scores[pack].floor,
                        "train_loss": recent[pack][position],
                        **describe(self.weights(index)[0], torch.from_numpy(pack.stream.p)),
                    }
                )
        return table

    def weights(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of W (n, m) and b (n,) of model `index`."""
        if index not in self._place:
            raise UsageError(f"index must be in 0…{len(self.models) - 1}, got {index}")
        pack, position = self._place[index]
        joined = pack.packed[:, pack.columns[position]]
        return joined[:, :-1].clone(), joined[:, -1].clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that continuing needs, as tensors on the CPU; columns are [W|b] of the models in the order given.

        The layout does not depend on the device, so that a fleet may continue on another one.
        """
        places = [self._place[index] for index in range(len(self.models))]
        state = {"step": torch.tensor(self.step)}
        for name in self._packs[0].slots:
            parts = [pack.slots[name][:, pack.columns[position]] for pack, position in places]
            state[name] = torch.cat(parts, dim=1).cpu()
        state["recent"] = torch.stack([pack.recent[:, position] for pack, position in places], dim=1).cpu()
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from the `state_dict()` of a fleet with the same models and options."""
        expected = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if expected != found:
            raise DataError(f"this is the state of another fleet: expected {expected}, found {found}")
        self.step = int(state["step"])
        start = 0
        for index, model in enumerate(self.models):
            pack, position = self._place[index]
            stop = start + model.width + 1
            for name, slot in pack.slots.items():
                slot[:, pack.columns[position]] = state[name][:, start:stop].to(slot)
            pack.recent[:, position] = state["recent"][:, index].to(pack.recent)
            start = stop

    def _each(self, work: Callable[[Pack], Any]) -> list[Any]:
        """`work(pack)` for every pack; on a CPU one thread for each of several packs."""
        threads = torch.get_num_threads()
        workers = min(threads, len(self._packs)) if self.options.device == "cpu" else 1
        if workers == 1:
            return [work(pack) for pack in self._packs]
        try:
            with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return list(pool.map(work, self._packs))
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _check(models: Sequence[ModelSpec], options: FleetOptions) -> None:
    """Refuse what cannot be trained, by name."""
    if not models:
        raise UsageError("models: a fleet needs at least one model")
    for name, least in (("features", 2), ("batch", 1), ("steps", 1), ("dataset_rows", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"{name} must be at least {least}, got {value}")
    for name, allowed in (
        ("optimiser", OPTIMISERS),
        ("loss", ("mse", "ce")),
        ("constraint", ("none", "sphere")),
        ("precision", tuple(_DTYPES)),
    ):
        value = getattr(options, name)
        if value not in allowed:
            raise UsageError(f"{name}: {value!r} is unknown; {nearest(value, allowed)}")
    if not 0 <= options.warmup <= 1:
        raise UsageError(f"warmup is a fraction of the steps, 0 to 1, got {options.warmup}")
    if not (math.isfinite(options.loss_scale) and options.loss_scale > 0):
        raise UsageError(f"loss_scale must be a positive number, got {options.loss_scale}")
    if compute_device(options.device).type != "cuda" and options.precision == "tf32":
        raise UsageError("precision 'tf32' needs device 'cuda'")
    for index, model in enumerate(models):
        _check_model(f"model {index}", model, options)


def _check_model(label: str, model: ModelSpec, options: FleetOptions) -> None:
    if not 1 <= model.width <= options.features:
        raise UsageError(f"{label}: width must be in 1…{options.features} (the features), got {model.width}")
    if not math.isfinite(model.decay):
        raise UsageError(f"{label}: decay must be finite, got {model.decay}")
    if model.decay and options.optimiser == "adam":
        raise UsageError(f"{label}: decay {model.decay} with optimiser 'adam', which has none; take 'adamw'")
    if model.decay and options.constraint == "sphere":
        raise UsageError(f"{label}: decay {model.decay} with constraint 'sphere', which fixes the norms; take 0")
    for name, rate in (("lr", model.lr), ("bias_lr", model.bias_lr)):
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise UsageError(f"{label}: {name} must be a positive number, got {rate}")
    if model.seed < 0:
        raise UsageError(f"{label}: seed must be 0 or more, got {model.seed}")
