"""For training loops that are not ours: gates that keep their balance, and weight decay that spares what it should.

transformers' Trainer, TRL's trainers and plain loops get both without asking for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import trainer_pt_utils

from leafward.nn import Gate

if TYPE_CHECKING:
    from leafward.systems.helm.model import HelmForCausalLM

_watched: WeakSet[HelmForCausalLM] = WeakSet()


def watch(model: HelmForCausalLM) -> None:
    """From now on the gates of `model` are rebalanced after each step of an optimiser that trains them.

    Not in the forward pass, because recomputed activations must see the biases of the first time.
    """
    _install()
    _watched.add(model)


@cache
def _install() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    trained: set[int] | None = None
    for model in list(_watched):
        gate = next((module for module in model.modules() if isinstance(module, Gate)), None)
        if model.balance_rate is None or gate is None:
            continue
        trained = trained or {id(each) for group in optimizer.param_groups for each in group["params"]}
        if id(gate.weight) in trained:
            model.rebalance(model.balance_rate)


def _sparing(names_of: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """transformers' list of the parameters that decay, without those that a model names in `no_weight_decay()`.

    It goes by parts of names, such as "bias", and would let curvatures, temperatures and time columns decay.
    """

    @wraps(names_of)
    def names(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
        spared = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()  # pyright: ignore
        return [name for name in names_of(model, *args, **kwargs) if name not in spared]

    return names


def teach_trainer() -> None:
    """Put `_sparing` into transformers, before or after its Trainer has been imported."""
    if not hasattr(trainer_pt_utils.get_parameter_names, "__wrapped__"):
        trainer_pt_utils.get_parameter_names = _sparing(trainer_pt_utils.get_parameter_names)
        if (trainer := sys.modules.get("transformers.trainer")) is not None:
            trainer.get_parameter_names = trainer_pt_utils.get_parameter_names  # pyright: ignore
