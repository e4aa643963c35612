"""The repeated blocks of a model, and what is done block by block: sharding, recomputation, compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks(model: nn.Module) -> list[nn.Module]:
    """`model.shard_blocks()` if it has one, else the elements with parameters of its outermost lists of modules."""
    if hasattr(model, "shard_blocks"):
        return list(model.shard_blocks())  # type: ignore[operator]
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(model, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += [child] if next(child.parameters(), None) is not None else []
        else:
            found += blocks(child)
    return found


@contextmanager
def activation_checkpoints(model: nn.Module) -> Iterator[None]:
    """Inside, activations are recomputed in the backward pass: by the model's own switch (timm, HF), else by block."""
    with ExitStack() as stack:
        if hasattr(model, "set_grad_checkpointing"):
            model.set_grad_checkpointing(True)  # type: ignore[operator]
            stack.callback(model.set_grad_checkpointing, False)  # type: ignore[arg-type]
        elif hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            stack.callback(model.gradient_checkpointing_disable)  # type: ignore[arg-type]
        else:
            stack.enter_context(_forward_through(blocks(model), _recomputed))
        yield


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return partial(checkpoint, forward, use_reentrant=False)


@contextmanager
def compiled(model: nn.Module, world: int) -> Iterator[None]:
    """Inside, `model` runs through torch.compile: as a whole, or block by block where several ranks share the work.

    A graph of the whole model would hold all gradients back to the end; blocks let their reduction overlap.
    """
    with _forward_through(blocks(model) if world > 1 else [model], torch.compile):
        yield


@contextmanager
def _forward_through(modules: list[nn.Module], wrap: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Inside, `forward` of each module is wrapped. Parameters keep their names; hooks of FSDP2 stay outside."""
    before = {module: module.__dict__.get("forward") for module in modules}
    for module in modules:
        module.forward = wrap(module.forward)
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward
