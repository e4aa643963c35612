"""Finding where a NaN or an infinity came from: replay the batch and watch every module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from leafward.engine.optim import local
from leafward.errors import LeafwardError
from leafward.files import replacing


class NonFiniteError(LeafwardError):
    """A loss or gradient was NaN or infinite. The weights and the last checkpoint are from before it happened."""

    def __init__(self, step: int, cause: str, batch_file: Path | None = None):
        saved = f"; the batch is in {batch_file}" if batch_file else ""
        super().__init__(f"the loss or a gradient is not finite at step {step}: {cause}{saved}")
        self.step, self.cause, self.batch_file = step, cause, batch_file


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside nested mappings, sequences and dataclasses, with its dotted path."""
    if isinstance(value, Tensor):
        yield path or "batch", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_of(item, f"{path}.{index}" if path else str(index))
    elif is_dataclass(value):
        yield from tensors_of(vars(value), path)


def save_batches(micro_batches: list[Any], path: Path) -> Path | None:
    """All tensors of a step's micro-batches in one safetensors file, named `0.path.in.batch`; None if it cannot be."""
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors_of(micro_batches)}
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary)
    except (LeafwardError, SafetensorError):
        return None  # what went wrong before is the news, not that its record could not be kept
    return path


def find_cause(
    model: nn.Module,
    micro_batches: list[Any],
    loss_of: Callable[[Any], Tensor],
    draws: Callable[[int], AbstractContextManager[Any]] = nullcontext,
) -> str | None:
    """What made the loss or the gradients of this step non-finite, in words; None if nothing does on this rank.

    `loss_of(micro_batch)` computes the loss; `draws(index)` is the context that gives it
    its random numbers. The whole step is replayed even when the cause is known early, because
    the ranks of a sharded model have to compute together.
    """
    watch = _Watch(model)
    watch.first = _bad_value(micro_batches, model)
    try:
        with watch.attached():
            for index, batch in enumerate(micro_batches):
                with draws(index):
                    loss = loss_of(batch)
                    if watch.first is None and not _is_finite(loss):
                        watch.first = "the loss function gave a non-finite value from finite outputs of the model"
                    loss.backward()
    except RuntimeError as error:  # backward hooks forbid in-place operations on a module's output
        return watch.first or f"the replay that should find the module failed ({error})"
    return watch.first


def bad_gradient(model: nn.Module) -> str | None:
    """The first parameter whose gradient is not finite, in words."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _is_finite(parameter.grad):
            return f"the gradient of parameter {name!r} is not finite"
    return None


def _bad_value(micro_batches: list[Any], model: nn.Module) -> str | None:
    for name, tensor in tensors_of(micro_batches):
        if not _is_finite(tensor):
            return f"the batch itself has a non-finite value in {name!r}"
    # Not the buffers: a mask may hold infinities by right, and running statistics are spoilt by the bad step itself.
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            return f"the parameter {name!r} of the model is not finite"
    return None


class _Watch:
    """Hooks on every module that remember the first to turn finite inputs into something non-finite."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.first: str | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            # Compiled code skips hooks, and backward hooks cannot stand in-place activations.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
            stack.enter_context(_out_of_place(self.model))
            for name, module in self.model.named_modules():
                label = f"module {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
                for handle in self._hooks(module, label):
                    stack.callback(handle.remove)
            yield

    def _hooks(self, module: nn.Module, label: str) -> Iterator[RemovableHandle]:
        def forward(module: nn.Module, inputs: Any, output: Any) -> None:
            # Children finish before their parents, so the first to be seen is the innermost.
            if self.first is None and not _all_finite(output):
                self.first = f"{label} gave a non-finite output"

        def backward(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            if self.first is None and not _all_finite(grad_output):
                self.first = f"a non-finite gradient flows back into the output of {label}"
            elif self.first is None and not _all_finite(grad_input):
                self.first = f"{label} gave a non-finite gradient"

        yield module.register_forward_hook(forward)
        yield module.register_full_backward_hook(backward)


@contextmanager
def _out_of_place(model: nn.Module) -> Iterator[None]:
    changed = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    for module in changed:
        module.inplace = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in changed:
            module.inplace = True  # type: ignore[assignment]


def _is_finite(tensor: Tensor) -> bool:
    tensor = local(tensor.detach())
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor).all())


def _all_finite(value: Any) -> bool:
    return all(_is_finite(tensor) for _, tensor in tensors_of(value))
