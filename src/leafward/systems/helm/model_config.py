"""Configuration and presets of HELM."""

from __future__ import annotations

import inspect
import math
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from leafward.errors import UsageError, nearest, need
from leafward.nn import HoPE, Space, Stretch
from leafward.nn.head import KINDS

PRESETS: dict[str, dict[str, Any]] = {
    # The published shapes count the time coordinate (390 = 1 + 389, heads of 65, latents of 65 …). These count space
    # coordinates only, rounded to widths that fill the hardware's tiles: 384 for 389, 896 for 909.
    "helm-d-115m": {
        "vocab_size": 128_256,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
    },
    "helm-mice-120m": {
        "vocab_size": 128_256,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
        "kv_latent": 64,
        "nope_width": 32,
        "rope_width": 16,
        "value_width": 32,
        "num_experts": 4,
        "num_active_experts": 2,
        "num_shared_experts": 1,
        "expert_size": 768,
    },
    "helm-mice-1b": {
        "vocab_size": 128_256,
        "hidden_size": 896,
        "num_hidden_layers": 16,
        "num_attention_heads": 14,
        "intermediate_size": 3584,
        "kv_latent": 256,
        "nope_width": 64,
        "rope_width": 64,
        "value_width": 64,
        "num_experts": 8,
        "num_active_experts": 2,
        "num_shared_experts": 1,
        "expert_size": 1792,
    },
    "helm-d-tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
    },
    "helm-mice-tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "kv_latent": 24,
        "nope_width": 16,
        "rope_width": 8,
        "value_width": 16,
        "num_experts": 4,
        "num_active_experts": 2,
        "num_shared_experts": 1,
        "expert_size": 64,
    },
}


class HelmConfig(PreTrainedConfig):
    """A HELM model. All widths count space coordinates.

    Without experts it is HELM-D: multi-head attention and dense feed-forward layers. With `kv_latent` attention is
    latent (HMLA; `query_latent` makes queries latent too), with `num_experts` all layers after the first
    `num_dense_layers` are mixtures of curvature experts (MiCE): together HELM-MiCE.

    geometry: "lorentz", or "euclidean" for the twin (Llama-like, or DeepSeek-V3-like) through the same code.
    curvature: c of the main hyperboloid, sectional curvature -c.
    residual_scale: factor on the stream after each residual; None gives the authors' 4√(n+1), with experts √(n+1).
    embedding_radius: geodesic radius at which tokens start; None: see `first_radius`.
    head: "linear" on [t; s], or "distance".
    expert_curvatures: bounds within which the experts' curvatures are spread evenly (in log space), or learned; both
        the same: one constant for all.
    rope_stretch: arguments of `leafward.nn.Stretch` to reach beyond the trained context, or None.
    sliding_window: tokens that a token sees, itself included; None: all before it. Caches keep no more than these.
    head_dim: coordinates of a head, by default hidden_size/num_attention_heads; with `kv_latent` those of its longest
        vector, which follow from the other widths.

    Many settings also have the names that other models give them (`attribute_map`), for tools that look for those.
    """

    model_type = "helm"
    attribute_map: ClassVar[dict[str, str]] = {
        "num_experts_per_tok": "num_active_experts",
        "n_routed_experts": "num_experts",
        "num_local_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "moe_intermediate_size": "expert_size",
        "first_k_dense_replace": "num_dense_layers",
        "kv_lora_rank": "kv_latent",
        "q_lora_rank": "query_latent",
        "qk_nope_head_dim": "nope_width",
        "qk_rope_head_dim": "rope_width",
        "v_head_dim": "value_width",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]  # the Trainer adds a list to it

    def __init__(
        self,
        vocab_size: int = 32_000,
        hidden_size: int = 384,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 6,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int = 1536,
        kv_latent: int | None = None,
        query_latent: int | None = None,
        nope_width: int = 32,
        rope_width: int = 16,
        value_width: int = 32,
        num_experts: int = 0,
        num_active_experts: int = 2,
        num_shared_experts: int = 1,
        num_dense_layers: int = 1,
        expert_size: int = 768,
        expert_curvatures: tuple[float, float] = (0.2, 5.0),
        learn_curvatures: bool = False,
        balance_weight: float = 1e-4,
        geometry: str = "lorentz",
        curvature: float = 1.0,
        residual_scale: float | None = None,
        embedding_radius: float | None = None,
        head: str = "linear",
        rope_theta: float = 10_000.0,
        rope_stretch: dict[str, Any] | None = None,
        sliding_window: int | None = None,
        max_position_embeddings: int = 2048,
        rms_norm_eps: float = 1e-6,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        given = {**locals(), **_renamed(kwargs)}
        for name in _own_names():
            setattr(self, name, given[name])
        _check(self)  # refuse what makes no sense now, not in the middle of a run
        self.head_dim = self._head_dim()
        self.expert_curvatures = list(expert_curvatures)
        super().__init__(**{**kwargs, "tie_word_embeddings": tie_word_embeddings})

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: see `HelmPreTrainedModel.register_for_auto_class`."""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> HelmConfig:
        """A named configuration with changes; unknown names are refused."""
        if name not in PRESETS:
            raise UsageError(f"unknown preset {name!r}; {nearest(name, PRESETS)}")
        allowed = {*_own_names(), "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
        for key in changes:
            if key not in allowed:
                raise UsageError(f"unknown setting {key!r}; {nearest(key, allowed)}")
        return cls(**{**PRESETS[name], **changes})

    @property
    def space(self) -> Space:
        return Space(self.geometry, self.curvature)

    @property
    def first_radius(self) -> float:
        """Where tokens start: at `embedding_radius`, else at 0.25 where the head shares the weights, else at 1.

        In flat space the last is √n, coordinates of size 1 like those that the layers add. The Lorentz residual
        normalises the sum and scales it up, so that the radius hardly matters there; a flat stream keeps its scale,
        its first layers would drown tokens of radius 1, and the twin would lose by its start, not by its geometry.
        """
        if self.embedding_radius is not None:
            return self.embedding_radius
        if self.tie_word_embeddings:
            return 0.25
        return 1.0 if self.geometry == "lorentz" else self.hidden_size**0.5

    def _head_dim(self) -> int:
        if self.kv_latent is not None:
            return max(self.nope_width + self.rope_width, self.value_width)
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def turned_width(self) -> int:
        """Coordinates of a head that positions turn."""
        return self.rope_width if self.kv_latent else self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def hope(self) -> HoPE:
        return HoPE(
            self.turned_width, self.rope_theta, None if self.rope_stretch is None else Stretch(**self.rope_stretch)
        )

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.num_dense_layers


LEAST = {
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), 1),
    **dict.fromkeys(("nope_width", "value_width", "num_active_experts", "expert_size", "max_position_embeddings"), 1),
    **dict.fromkeys(("num_experts", "num_shared_experts", "num_dense_layers"), 0),
    "rope_width": 2,
}
"""Whole numbers and the least that each may be."""
LEAST_IF_ANY = {"num_key_value_heads": 1, "head_dim": 2, "kv_latent": 1, "query_latent": 1, "sliding_window": 2}
"""The same of those that may be None. (In a window of one a token would see nothing but itself.)"""


def _check(config: HelmConfig) -> None:
    """Refuse settings that make no model, by their names."""
    for name, least in (LEAST | LEAST_IF_ANY).items():
        value, optional = getattr(config, name), name in LEAST_IF_ANY
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        allowed = f"a whole number >= {least}{', or None' * optional}"
        need(whole or (optional and value is None), name, allowed, value)
    for name, optional in {"rms_norm_eps": False, "residual_scale": True, "embedding_radius": True}.items():
        value = getattr(config, name)
        allowed = f"a positive finite number{', or None' * optional}"
        need(_positive(value) or (optional and value is None), name, allowed, value)
    weight = config.balance_weight
    need(weight == 0 or _positive(weight), "balance_weight", "a finite number >= 0", weight)
    need(isinstance(config.learn_curvatures, bool), "learn_curvatures", "True or False", config.learn_curvatures)
    need(config.head in KINDS, "head", f"one of {', '.join(KINDS)}", config.head)
    _check_attention(config)
    _check_experts(config)
    _ = config.space, config.hope


def _check_attention(config: HelmConfig) -> None:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if config.kv_latent is None:
        need(config.query_latent is None, "query_latent", "None where kv_latent is", config.query_latent)
        splits = config.head_dim is not None or config.hidden_size % heads == 0
        need(splits, "num_attention_heads", f"a divisor of hidden_size={config.hidden_size} (or give head_dim)", heads)
        divides = groups is None or heads % groups == 0
        need(divides, "num_key_value_heads", f"a divisor of num_attention_heads={heads}", groups)
    else:
        need(groups is None, "num_key_value_heads", "None where kv_latent is set: all heads share one latent", groups)
    turned = "head_dim" if config.kv_latent is None else "rope_width"
    even = config.turned_width % 2 == 0
    need(even, turned, "even, since positions turn pairs of coordinates", config.turned_width)
    if (stretch := config.rope_stretch) is not None:
        names = inspect.signature(Stretch).parameters
        need(isinstance(stretch, dict), "rope_stretch", f"a mapping of {', '.join(names)}, or None", stretch)
        for name in stretch:
            if name not in names:
                raise UsageError(f"unknown setting {name!r} of rope_stretch; {nearest(name, names)}")
        for name in ("factor", "trained"):
            need(_positive(stretch.get(name)), f"{name} of rope_stretch", "a positive number", stretch.get(name))


def _check_experts(config: HelmConfig) -> None:
    active, experts, bounds = config.num_active_experts, config.num_experts, config.expert_curvatures
    need(not experts or active <= experts, "num_active_experts", f"at most num_experts={experts}", active)
    pair = isinstance(bounds, list | tuple) and len(bounds) == 2 and all(map(_positive, bounds))
    need(pair and bounds[0] <= bounds[1], "expert_curvatures", "two positive numbers, the smaller first", bounds)
    apart = not config.learn_curvatures or bounds[0] < bounds[1]
    need(apart, "expert_curvatures", "two different numbers where learn_curvatures is set", bounds)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < math.inf


def _renamed(settings: dict[str, Any]) -> dict[str, Any]:
    """Takes out of `settings` those that go by another model's name, and gives them under ours."""
    names = {theirs: ours for theirs, ours in HelmConfig.attribute_map.items() if theirs in settings}
    return {ours: settings.pop(theirs) for theirs, ours in names.items()}


def _own_names() -> list[str]:
    """The settings that are HELM's own."""
    return [
        n
        for n in inspect.signature(HelmConfig.__init__).parameters
        if n not in ("self", "kwargs", "tie_word_embeddings")
    ]
