"""Attach adapters to any model, list them, switch them, merge them, take them off again.

An adapter is a module of its own, kept under the name ``leafward_adapters`` beside the base model's parts, and acts
through hooks: no base module is replaced, so every key of the base model's state dict stays as it was. Several named
adapters may sit on one model; the active ones act in the order in which they were attached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from leafward.adapters.layouts import STORE, Site
from leafward.config import Settings, checked
from leafward.errors import UsageError, nearest, need
from leafward.files import whole_path
from leafward.geometry.scalars import wide

Model = TypeVar("Model", bound=nn.Module)


class AdapterConfig(Settings, frozen=True):
    """What `attach` takes: settings that name their method and build the adapter for a model."""

    method: ClassVar[str]

    @classmethod
    def trained_as(cls, name: str, model: nn.Module, wanted: Mapping[str, Any]) -> AdapterConfig:
        """The settings with which a training that compares methods trains this one under `name`, one of those in
        `adapters.registry`: of what is `wanted`, the settings that it knows."""
        return checked(cls, {field: wanted[field] for field in cls.__struct_fields__ if field in wanted})

    def build(self, model: nn.Module) -> Adapter:
        raise NotImplementedError


class Adapter(nn.Module, ABC):
    """Trainable parameters beside a base model, and the hooks through which they act while `enabled`."""

    freezes_base: ClassVar[bool] = True
    """Whether attaching it takes the gradients of the base model's own parameters away."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config
        self.enabled = True
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def install(self, model: nn.Module) -> list[RemovableHandle]:
        """Put the hooks into `model`; they must do nothing while the adapter is not `enabled`."""

    def merge_into(self, model: nn.Module) -> None:
        """Write the adapter into the base weights."""
        raise UsageError(f"an adapter of method {self.config.method!r} cannot be merged into its base model")


class WeightAdapter(Adapter):
    """An adapter that acts on weights alone: each of its `sites` computes with `effective(site, weight)`."""

    def __init__(self, config: AdapterConfig, sites: Sequence[Site]) -> None:
        super().__init__(config)
        self.sites = tuple(sites)

    @abstractmethod
    def effective(self, site: Site, weight: Tensor) -> Tensor:
        """What takes the place of the rows of one site, in float32 or better: (out, in) -> (out, in)."""

    def install(self, model: nn.Module) -> list[RemovableHandle]:
        handles = []
        for place, sites in self._places().items():
            swap = _Swap(self, model.get_submodule(place.holder), place.parameter, sites)
            caller = model.get_submodule(place.caller)
            handles.append(caller.register_forward_pre_hook(swap.before))
            # Last in, first out: each of several adapters puts back what it found.
            handles.append(caller.register_forward_hook(swap.after, prepend=True, always_call=True))
        return handles

    def merge_into(self, model: nn.Module) -> None:
        for place, sites in self._places().items():
            weight = model.get_submodule(place.holder).get_parameter(place.parameter)
            weight.data.copy_(self.whole(sites, weight.detach()).detach())

    def whole(self, sites: Sequence[Site], weight: Tensor) -> Tensor:
        """The effective weight of one parameter, its untouched rows included, in the type of `weight`."""
        weight = sites[0].turned(weight)
        parts, row = [], 0
        for site in sites:
            parts += [weight[row : site.start]] if row < site.start else []
            # The product is taken in float32 and rounded once, so that a merged model computes the same.
            parts.append(self.effective(site, wide(weight[site.start : site.stop])).to(weight.dtype))
            row = site.stop
        parts += [weight[row:]] if row < len(weight) else []
        # Effective rows tend to lie by columns in memory, and are put together so.
        whole = torch.cat([part.mT for part in parts], dim=1).mT if len(parts) > 1 else parts[0]
        return sites[0].turned(whole)

    def _places(self) -> dict[Place, list[Site]]:
        """The sites of each parameter, by rows."""
        places: dict[Place, list[Site]] = {}
        for site in sorted(self.sites, key=lambda site: site.start):
            places.setdefault(Place(site.caller, site.holder, site.parameter), []).append(site)
        return places


@dataclass(frozen=True)
class Place:
    """A parameter of the module `holder` that is used when the module `caller` is called."""

    caller: str
    holder: str
    parameter: str


class _Swap:
    """Puts the effective weight in the place of a module's own for the time of one call.

    The hooks are bound methods, so that a deep copy of the model has hooks of its own.
    """

    def __init__(self, adapter: WeightAdapter, holder: nn.Module, parameter: str, sites: Sequence[Site]) -> None:
        self.adapter, self.holder, self.parameter, self.sites = adapter, holder, parameter, sites
        self.kept: nn.Parameter | None = None

    def before(self, module: nn.Module, args: Any) -> None:
        if self.adapter.enabled:
            parameters: dict[str, Any] = self.holder._parameters
            weight = parameters[self.parameter]
            parameters[self.parameter] = self.adapter.whole(self.sites, weight)
            self.kept = weight

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.kept is not None:
            self.holder._parameters[self.parameter] = self.kept
            self.kept = None


@dataclass(frozen=True)
class BaseModel:
    """Which model an adapter belongs to; empty where nobody said."""

    name: str = ""
    revision: str = ""
    kind: str = ""
    """The model's class."""


class AdapterStore(nn.Module):
    """The adapters of one model by name, what it is, and which of its parameters they froze."""

    def __init__(self, base: BaseModel) -> None:
        super().__init__()
        self.base = base
        self.frozen: set[str] = set()

    def items(self) -> Iterator[tuple[str, Adapter]]:
        for name, adapter in self.named_children():
            assert isinstance(adapter, Adapter)
            yield name, adapter


def attach(
    model: Model,
    config: AdapterConfig,
    name: str = "default",
    *,
    base_model: str | None = None,
    revision: str | None = None,
) -> Model:
    """Put an adapter of `config` on `model` (changed in place and returned).

    The base parameters lose their gradients (unless the method trains along with its base), so that an optimiser of
    `model.parameters()` trains the adapter alone; `detach` and `merge` give them back. `base_model` and `revision`
    name the base model in saved files; by default they come from the model itself.
    """
    need(isinstance(config, AdapterConfig), "config", "the configuration of an adapter", config)
    config = checked(type(config), config)
    fits = isinstance(name, str) and name.isidentifier() and not hasattr(AdapterStore(BaseModel()), name)
    need(fits, "name", "a word of letters, digits and underscores that no module has for itself", name)
    held = adapters(model)
    if name in held:
        raise UsageError(f"the model already has an adapter {name!r}; detach it or choose another name")
    adapter = config.build(model)
    store = model._modules.get(STORE)
    if not isinstance(store, AdapterStore):
        store = AdapterStore(identity(model))
        model.add_module(STORE, store)
    if base_model is not None or revision is not None:
        name_of_base = whole_path(base_model) if base_model else store.base.name
        store.base = BaseModel(name_of_base, revision or store.base.revision, store.base.kind)
    if adapter.freezes_base:
        for key, parameter in model.named_parameters():
            if not key.startswith(f"{STORE}.") and parameter.requires_grad:
                parameter.requires_grad_(False)
                store.frozen.add(key)
    store.add_module(name, adapter)
    adapter._handles = adapter.install(model)
    return model


def detach(model: Model, name: str | None = None) -> Model:
    """Take one adapter off (without a name: all of them); the base model then computes as before."""
    for each in chosen(model, name):
        adapter = adapters(model)[each]
        for handle in adapter._handles:
            handle.remove()
        adapter._handles = []
        delattr(store_of(model), each)
    if not adapters(model):
        for key in store_of(model).frozen:
            model.get_parameter(key).requires_grad_(True)
        delattr(model, STORE)
    return model


def merge(model: Model, name: str | None = None) -> Model:
    """Write one adapter (without a name: the active ones, in their order) into the base weights and take it off.

    The model then is a plain one, as fast as before and with the same state-dict keys. Merging without a name takes
    the inactive ones off as well. A merge cannot be undone: keep the base weights where both are wanted.
    """
    names = chosen(model, name)
    held = adapters(model)
    if name is not None:
        _check_order(held, name)
    for each in names:
        if held[each].enabled or name is not None:
            held[each].merge_into(model)
    return detach(model, name)


def _check_order(held: dict[str, Adapter], name: str) -> None:
    """Refuse to write an adapter into weights that an earlier one still changes: the two would change places."""

    def weights(adapter: Adapter) -> set[tuple[str, str]]:
        sites = adapter.sites if isinstance(adapter, WeightAdapter) else ()
        return {(site.holder, site.parameter) for site in sites}

    for each, earlier in held.items():
        if each == name:
            return
        if earlier.enabled and weights(earlier) & weights(held[name]):
            raise UsageError(f"adapter {name!r} acts after {each!r} on the same weights; merge {each!r} first, or all")


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """The adapters on `model` by name, in the order in which they act."""
    store = model._modules.get(STORE)
    return dict(store.items()) if isinstance(store, AdapterStore) else {}


def set_adapter(model: nn.Module, names: str | Sequence[str]) -> None:
    """Let the named adapters act and no others; an empty list gives the base model for a while."""
    wanted = {names} if isinstance(names, str) else set(names)
    for name in wanted:
        chosen(model, name)
    for name, adapter in adapters(model).items():
        adapter.enabled = name in wanted


def trainable_parameters(model: nn.Module) -> tuple[int, int]:
    """How many parameters are trained, and how many there are in all."""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)


def print_trainable_parameters(model: nn.Module) -> None:
    """Print `trainable_parameters` in PEFT's words."""
    trained, total = trainable_parameters(model)
    print(f"trainable params: {trained:,} || all params: {total:,} || trainable%: {100 * trained / max(total, 1):.4f}")


def identity(model: nn.Module) -> BaseModel:
    """What a model says about itself: the name it was loaded by (Hugging Face, timm), its revision and class."""
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "") or getattr(config, "name_or_path", "") or ""
    if not name:
        timm = getattr(model, "pretrained_cfg", None) or {}
        name = timm.get("architecture", "") if isinstance(timm, dict) else ""
    return BaseModel(whole_path(str(name)), str(getattr(config, "_commit_hash", None) or ""), type(model).__name__)


def store_of(model: nn.Module) -> AdapterStore:
    """Where an adapted model keeps its adapters."""
    store = model._modules.get(STORE)
    assert isinstance(store, AdapterStore)
    return store


def chosen(model: nn.Module, name: str | None) -> list[str]:
    """The named adapter, or all of them; one that is not there is refused."""
    held = adapters(model)
    if not held:
        raise UsageError(f"{type(model).__name__} has no adapter")
    if name is None:
        return list(held)
    if name not in held:
        raise UsageError(f"the model has no adapter {name!r}; {nearest(name, held)}")
    return [name]
