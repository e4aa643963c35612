"""HELM as in the paper's figure: embedding, blocks of attention and feed-forward, projection, norm, head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from leafward.errors import UsageError
from leafward.nn import (
    Attention,
    Embedding,
    FeedForward,
    Gate,
    Head,
    LatentAttention,
    Linear,
    MiCE,
    Residual,
    RMSNorm,
    Visible,
)
from leafward.nn.attention import PointStore, Store
from leafward.nn.head import IGNORED
from leafward.nn.linear import renamed
from leafward.nn.rotary import Table
from leafward.systems.helm.masks import packed, paged_store, rule_of
from leafward.systems.helm.model_config import HelmConfig
from leafward.systems.helm.training import refuse_quantised, teach_trainer, watch

teach_trainer()

SHIM = "modeling_leafward.py"
SHIM_TEXT = '''"""Says where the classes of this model are: in the package leafward, which must be installed.

Programs that do not import leafward (such as the command lm_eval) load this folder with trust_remote_code=True.
"""

from leafward.systems.helm import HelmConfig, HelmForCausalLM, HelmModel  # noqa: F401
'''
AUTO_MAP = {
    "AutoConfig": "modeling_leafward.HelmConfig",
    "AutoModel": "modeling_leafward.HelmModel",
    "AutoModelForCausalLM": "modeling_leafward.HelmForCausalLM",
}
_HOLDERS = (
    *(f"attention.{name}" for name in ("qkv", "out", "query", "query.0", "query.2", "compress", "expand")),
    *("ffn.up", "ffn.down", "project"),
)
FORMER_NAMES = {
    **{rf"{name}.{part}": f"{name}.linear.{part}" for name in _HOLDERS for part in ("weight", "bias")},
    "^head.weight": "lm_head.linear.weight",
    "^head.time_weight": "lm_head.time_weight",
    "^head.log_scale": "lm_head.log_scale",
}
"""Names of weights before a layer held a plain `nn.Linear` -> their names, as transformers reads them."""


class Block(GradientCheckpointingLayer):
    """x ⊕ attention(norm(x)), then ⊕ feed-forward(norm(·)): (B,T,n) -> (B,T,n) and the balance losses (B), if any.

    Equation 5 of docs/helm.md.
    """

    def __init__(self, config: HelmConfig, layer: int) -> None:
        super().__init__()
        width, space, eps = config.hidden_size, config.space, config.rms_norm_eps
        scale = config.residual_scale or (width + 1) ** 0.5 * (1.0 if config.num_experts else 4.0)
        self.space = space
        self.attention_norm, self.ffn_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.attention_residual, self.ffn_residual = Residual(scale, space=space), Residual(scale, space=space)
        self.attention = _attention(config)
        self.attention.layer_idx = layer
        self.ffn = (
            MiCE(
                width,
                config.expert_size,
                config.num_experts,
                config.num_active_experts,
                config.num_shared_experts,
                curvatures=(config.expert_curvatures[0], config.expert_curvatures[1]),
                learn_curvatures=config.learn_curvatures,
                space=space,
            )
            if config.has_experts(layer)
            else FeedForward(width, config.intermediate_size, space)
        )

    def forward(
        self, x: Tensor, table: Table, rule: Visible, store: Store | PointStore | None
    ) -> tuple[Tensor, Tensor | None]:
        h, t = self.attention_norm.lifted(x, self.space)
        x, h, t = self.attention_residual.normed(x, self.attention(h, table, rule, store, t), self.ffn_norm)
        out = self.ffn(h, t)
        y, balance = out if isinstance(out, tuple) else (out, None)
        return self.ffn_residual(x, y), balance


def _attention(config: HelmConfig) -> Attention | LatentAttention:
    width, heads, space = config.hidden_size, config.num_attention_heads, config.space
    if not config.kv_latent:
        return Attention(
            width,
            heads,
            head_width=config.head_dim,
            kv_heads=config.num_key_value_heads,
            sharpness=config.hope.sharpness,
            space=space,
        )
    return LatentAttention(
        width,
        heads,
        latent=config.kv_latent,
        nope_width=config.nope_width,
        rope_width=config.rope_width,
        value_width=config.value_width,
        query_latent=config.query_latent,
        sharpness=config.hope.sharpness,
        eps=config.rms_norm_eps,
        space=space,
    )


@dataclass
class HelmModelOutput(BaseModelOutputWithPast):
    """With the sum over layers of the gates' balance losses, one for each sequence (B)."""

    balance: Tensor | None = None


class HelmPreTrainedModel(PreTrainedModel):
    config: HelmConfig
    config_class = HelmConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (the name and type that transformers reads)
    _keep_in_fp32_modules_strict = ["gate", "curvature"]  # noqa: RUF012 (as they do where a model is cast)

    def _init_weights(self, module: nn.Module) -> None:
        """Called by transformers for what a checkpoint did not fill: also for a gate's counter, which none keeps.

        A plain `nn.Linear` is drawn by the layer that holds it. Where only a part of a layer was filled, transformers
        sees to it that `torch.nn.init` leaves that part alone.
        """
        if type(module) is nn.Linear:
            held = module
            module = next((m for m in self.modules() if isinstance(m, Linear | Head) and m.linear is held), held)
            module._is_hf_initialized = True  # pyright: ignore[reportArgumentType]
        own = list(module.parameters()) if isinstance(module, Linear | Head) else list(module.parameters(recurse=False))
        if own and all(getattr(p, "_is_hf_initialized", False) for p in own):
            if isinstance(module, Gate):
                nn.init.zeros_(module.load)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    @classmethod
    def from_pretrained(cls, *args: Any, key_mapping: dict[str, str] | None = None, **kwargs: Any) -> Any:
        """As transformers does it; weights may have the names that earlier versions gave them."""
        found = super().from_pretrained(*args, key_mapping={**FORMER_NAMES, **(key_mapping or {})}, **kwargs)
        model = found[0] if isinstance(found, tuple) else found
        # Else they would be saved under their former names.
        model._weight_conversions = None  # pyright: ignore[reportArgumentType]
        return found

    def no_weight_decay(self) -> set[str]:
        """For optimisers that ask: biases, also of experts, time columns, and all that has fewer than two dimensions
        (norms, temperatures, residual weights, curvatures)."""
        spared = ("bias", "time_weight")
        return {n for n, p in self.named_parameters() if p.ndim < 2 or n.rpartition(".")[2] in spared}

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """As transformers does it, with a file that says where the classes are: so the folder loads in programs that do
        not import leafward, with trust_remote_code=True."""
        self.config.auto_map = AUTO_MAP
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            Path(save_directory, SHIM).write_text(SHIM_TEXT, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing: what was loaded by the file beside it would be saved with copies of our modules in its place."""


class HelmModel(HelmPreTrainedModel):
    """Tokens to the normalised space part that the head reads: (B,T) -> (B,T,n)."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012 (as transformers reads it)

    def __init__(self, config: HelmConfig) -> None:
        super().__init__(config)
        width, space = config.hidden_size, config.space
        self.embed = Embedding(config.vocab_size, width, config.first_radius, space=space)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.project = Linear(width, width, space=space)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.hope = config.hope
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        documents: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **more: Any,
    ) -> HelmModelOutput:
        """`attention_mask` (B,S): 1 for tokens, 0 for padding; or (B,·,T,S), which says for all pairs what is seen, as
        True or as what is added to the scores. `documents` (B,T): ids of packed sequences; without them, a mask and a
        cache, `position_ids` (B,T) that start again begin a new one. `more` goes to attention functions."""
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("give exactly one of input_ids and inputs_embeds")
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if documents is None:
            documents = packed(position_ids, attention_mask, past_key_values, x.shape[0])
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and documents is None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        places = past + torch.arange(x.shape[1], device=x.device)
        table = self.hope.table(places if position_ids is None else position_ids, x.dtype)
        rule = rule_of(self.config, x, attention_mask, documents, past_key_values, places, more)
        states, balance = [x], x.new_zeros(x.shape[0], dtype=torch.float32)
        for index, layer in enumerate(self.layers):
            store = paged_store(more, self.config, index)
            if past_key_values is not None:
                store = partial(past_key_values.update, layer_idx=index)
            x, extra = layer(x, table, rule, store)
            balance = balance if extra is None else balance + extra
            states.append(x)
        return HelmModelOutput(
            last_hidden_state=self.norm(self.project(x)),
            past_key_values=past_key_values,
            hidden_states=tuple(states) if output_hidden_states else None,  # pyright: ignore[reportArgumentType]
            balance=balance,
        )


def _mean_by_labels(balance: Tensor, labels: Tensor) -> Tensor:
    """The mean of the sequences' balance losses (B), each weighted by its labels (B,T), as in the rest of the loss.

    A plain mean would make the loss of a step depend on how its sequences are split over ranks and micro-batches.
    """
    counts = (labels[:, 1:] != IGNORED).sum(dim=1)
    return (balance * counts).sum() / counts.sum().clamp_min(1)


class Augmented:
    """The base model of a `HelmForCausalLM` whose last hidden state is augmented by the time, [s; t; 0…]: times the
    `weight` of the head, which has a column for the time, it gives the logits. TRL's trainers compute them so."""

    def __init__(self, whole: HelmForCausalLM) -> None:
        self.whole = whole

    def __call__(self, *args: Any, **kwargs: Any) -> HelmModelOutput:
        out = self.whole.model(*args, **kwargs)
        out.last_hidden_state = self.whole.lm_head.augmented(out.last_hidden_state)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole.model, name)


class HelmForCausalLM(HelmPreTrainedModel, GenerationMixin):
    """HELM with a head: loss by chunks where labels are given, logits in float32 otherwise and in evaluation."""

    balance_rate: float | None = 1e-3
    """Step by which the gates' biases move after each step of an optimiser; None: whoever trains calls `rebalance`."""
    _tied_weights_keys = {"lm_head.linear.weight": "model.embed.weight"}  # noqa: RUF012 (as transformers reads it)

    def __init__(self, config: HelmConfig) -> None:
        super().__init__(config)
        self.model = HelmModel(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size, config.head, config.space)
        self.post_init()
        watch(self)

    def train(self, mode: bool = True) -> HelmForCausalLM:
        if mode:
            refuse_quantised(self)
            watch(self)  # a copy was not constructed
        return super().train(mode)

    @property
    def base_model(self) -> Augmented:  # pyright: ignore[reportIncompatibleMethodOverride]
        """For tools that multiply what it returns by the weight of the head themselves."""
        return Augmented(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **more: Any) -> None:
        for name in ("weight", "time_weight", "log_scale"):
            renamed(state_dict, f"{prefix}head.{name}", f"{prefix}lm_head.{name}")
        super()._load_from_state_dict(state_dict, prefix, *rest, **more)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    @torch.no_grad()
    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Room for more or fewer tokens; new ones start as in a new model, whatever `mean_resizing` says.

        That of transformers knows plain heads only: it would stop half-way, with the embedding changed.
        """
        embed, config = cast(nn.Embedding, self.model.embed), self.config
        multiple = pad_to_multiple_of or 1
        rows = -(-(config.vocab_size if new_num_tokens is None else new_num_tokens) // multiple) * multiple
        if rows == config.vocab_size:
            return embed
        width, space = config.hidden_size, config.space
        fresh = Embedding(rows, width, config.first_radius, space=space), Head(width, rows, config.head, space)
        for new, old in zip(fresh, (embed, self.lm_head), strict=True):
            new.to(device=self.device, dtype=self.dtype).train(self.training)
            for name, value in old.named_parameters():
                new.get_parameter(name)[: len(value)] = value[:rows]
        self.model.embed, self.lm_head = fresh
        config.vocab_size = rows
        self.tie_weights()
        return fresh[0]

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: object) -> Tensor | None:
        """The mask (B,S) as it is: for caches of fixed size transformers would make one of tokens by cache."""
        return attention_mask

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        documents: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """Labels are the tokens themselves, shifted in here; -100 does not count. In training mode with labels the
        logits are not returned: they would be the largest tensor by far.

        `num_items_in_batch`: labels of a whole step, of which this is a part; the losses of its parts then add up to
        its mean. transformers' Trainer gives it, and leaves the division by the number of parts to the model."""
        out = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            documents,
            output_hidden_states,
            **more,
        )
        s, loss, logits = out.last_hidden_state, None, None
        if labels is not None:
            loss = self.lm_head.loss(s[:, :-1], labels[:, 1:])
            if self.training and self.config.num_experts:
                loss = loss + self.config.balance_weight * _mean_by_labels(out.balance, labels)
            if num_items_in_batch is not None:
                loss = loss * ((labels[:, 1:] != IGNORED).sum() / num_items_in_batch)
        if labels is None or not self.training:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(s[:, kept])
        return CausalLMOutputWithPast(
            loss=loss,  # pyright: ignore[reportArgumentType]
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
        )

    def rebalance(self, rate: float = 1e-3) -> None:
        """Move the gates' biases towards even loads; once per optimiser step."""
        for module in self.modules():
            if isinstance(module, Gate):
                module.rebalance(rate)
