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
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import trainer_pt_utils

from leafward.errors import UsageError
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


def refuse_quantised(model: nn.Module) -> None:
    """Quantised weights take no gradient: training would silently move norms and biases alone. Adapters are trained on
    a base that is frozen."""
    quantised = next((name for name, p in model.named_parameters() if _quantised(p)), None)
    if quantised is None:
        return
    for module in model.modules():  # those of adapters lie in modules of others
        ours = type(module).__module__.startswith("leafward.")
        if ours and any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            raise UsageError(
                f"the model is quantised ({quantised}) and cannot be trained; train an adapter on it with its own "
                "parameters frozen, as PEFT does, or train first and quantise then"
            )


def _quantised(parameter: nn.Parameter) -> bool:
    return is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, DTensor)


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
