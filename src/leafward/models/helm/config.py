"""Configuration and presets of HELM."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedConfig

from leafward.errors import UsageError, nearest
from leafward.nn import HoPE, Space, Stretch

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
    rope_stretch: arguments of `leafward.nn.Stretch` to reach beyond the trained context, or None.
    """

    model_type = "helm"
    keys_to_ignore_at_inference = ("past_key_values",)

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
        given = locals()
        for name in _own_names():
            setattr(self, name, given[name])
        self.expert_curvatures = list(expert_curvatures)
        _ = self.space, self.hope  # refuse what makes no sense now, not in the middle of a run
        super().__init__(**{**kwargs, "tie_word_embeddings": tie_word_embeddings})

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

    @property
    def hope(self) -> HoPE:
        width = self.rope_width if self.kv_latent else self.head_dim or self.hidden_size // self.num_attention_heads
        return HoPE(width, self.rope_theta, Stretch(**self.rope_stretch) if self.rope_stretch else None)

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.num_dense_layers


def _own_names() -> list[str]:
    """The settings that are HELM's own."""
    return [
        n
        for n in inspect.signature(HelmConfig.__init__).parameters
        if n not in ("self", "kwargs", "tie_word_embeddings")
    ]
