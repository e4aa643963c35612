"""Where the projections of a transformer are, whoever wrote it.

Known layouts: separate linear layers (Hugging Face CLIP, SigLIP, BERT and other sentence encoders; EVA; Llama, Qwen and
those that are built like them), a packed `in_proj_weight` (`nn.MultiheadAttention` and open_clip's own attention), a
fused `qkv` (timm; HELM, there also with fewer heads of keys and values), GPT-2's matrices, which lie the other way
(`Conv1D`), keys and values from one latent point (`kv`: HELM-MiCE, DeepSeek), and pooling heads (`q` and `kv`, or an
`nn.MultiheadAttention` with other widths for key and value).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from leafward.errors import UsageError, nearest

Role = Literal["q", "k", "v", "kv", "out", "fc1", "fc2"]
Encoder = Literal["both", "image", "text"]
ATTENTION: tuple[Role, ...] = ("q", "k", "v")
ROLES: tuple[Role, ...] = (*ATTENTION, "out", "fc1", "fc2")
"""What most models have. Those with latent attention have one `kv` in place of k and v."""
_KNOWN: tuple[Role, ...] = (*ROLES, "kv")

STORE = "leafward_adapters"
"""The submodule of an adapted model that holds its adapters."""

# What the modules are called, longest first where one name ends in another.
_SINGLE: tuple[tuple[Role, tuple[str, ...]], ...] = (
    ("q", ("q_proj", "q_b_proj", "query", "query.2", "to_q", "q_lin", "q")),
    ("k", ("k_proj", "key", "to_k", "k_lin", "k")),
    ("v", ("v_proj", "value", "to_v", "v_lin", "v")),
    ("kv", ("kv_b_proj", "attention.expand")),
    ("out", ("attention.output.dense", "out_proj", "o_proj", "attn.proj", "attn_pool.proj", "out_lin", "attn.o")),
    ("out", ("attn.c_proj", "attention.out")),
    ("fc1", ("fc1", "c_fc", "intermediate.dense", "lin1", "gate_proj", "up_proj", "ffn.up")),
    ("fc2", ("fc2", "c_proj", "output.dense", "lin2", "down_proj", "ffn.down")),
)
_FUSED: dict[str, tuple[Role, ...]] = {
    "qkv": ATTENTION,
    "c_attn": ATTENTION,
    "to_qkv": ATTENTION,
    "Wqkv": ATTENTION,
    "kv": ("k", "v"),
    "to_kv": ("k", "v"),
}
_IMAGE = ("visual", "vision_model", "vision_tower", "image_encoder", "vision", "trunk")
_TEXT = ("text_model", "text", "transformer", "text_encoder")


@dataclass(frozen=True)
class Site:
    """One projection: the rows [start, stop) of the weight `parameter` (out, width) of the module `holder`."""

    name: str
    """Readable and unique, as in `visual.transformer.resblocks.0.attn.q`."""
    role: Role
    group: str
    """The attention or feed-forward part that the projection belongs to."""
    caller: str
    """The module whose call uses the weight."""
    holder: str
    parameter: str
    start: int
    stop: int
    width: int
    encoder: str
    """image, text, or empty where a model has but one encoder."""
    by_columns: bool = False
    """Whether the parameter is (width, out), with columns in place of rows."""

    def turned(self, weight: Tensor) -> Tensor:
        """The parameter as (out, width), or what has that shape as the parameter is."""
        return weight.mT if self.by_columns else weight


def without_layer(name: str) -> str:
    """A name without the numbers of layers: `blocks.3.attn.q` -> `blocks.attn.q`."""
    return re.sub(r"\.\d+(?=\.)", "", name)


def find_sites(model: nn.Module, roles: Sequence[Role], encoder: Encoder = "both") -> list[Site]:
    """The projections of the given roles in one encoder or both; what is not there is refused by name."""
    for role in roles:
        if role not in _KNOWN:
            raise UsageError(f"targets must be of {', '.join(_KNOWN)}, got {role!r}; {nearest(str(role), _KNOWN)}")
    if not roles:
        raise UsageError("targets must name at least one projection, got none")
    found = list(_all_sites(model))
    there = [site for site in found if encoder in ("both", site.encoder)]
    if not there:
        encoders = sorted({site.encoder or "one, without a name" for site in found}) or ["none that is known"]
        raise UsageError(
            f"encoder {encoder!r} has no projections in {type(model).__name__}; it has encoders: {', '.join(encoders)}"
        )
    for role in roles:
        if not any(site.role == role for site in there):
            have = sorted({site.role for site in there})
            raise UsageError(f"targets: {type(model).__name__} has no projection {role!r}; it has {', '.join(have)}")
    return [site for site in there if site.role in roles]


def _all_sites(model: nn.Module) -> Iterator[Site]:
    two = any(_head(path) in _IMAGE for path, _ in model.named_modules())
    inside_attention: set[str] = set()
    for path, module in model.named_modules():
        if path.startswith(STORE):
            continue
        head = _head(path)
        encoder = "image" if head in _IMAGE else "text" if two or head in _TEXT else ""
        if "in_proj_weight" in module._parameters:
            if isinstance(module, nn.MultiheadAttention):
                # Its output projection is never called: the attention reads the weight.
                inside_attention.add(f"{path}.out_proj")
            yield from _packed(path, module, encoder)
        elif path not in inside_attention and (isinstance(module, nn.Linear) or _turned(module)):
            parent = model.get_submodule(path.rpartition(".")[0])
            # timm's EVA, BEiT and Swin V2 with biases of their own read the weight and never call the module.
            caller = path if getattr(parent, "q_bias", None) is None else path.rpartition(".")[0]
            yield from _linear(path, module, encoder, caller, _heads(model, path))


def _head(path: str) -> str:
    """The first part of a path that says something, past wrappers."""
    return next((part for part in path.split(".") if part not in ("model", "module", "_orig_mod")), "")


def _packed(path: str, module: nn.Module, encoder: str) -> Iterator[Site]:
    weight = module._parameters["in_proj_weight"]
    if weight is not None:
        rows, width = len(weight) // 3, weight.shape[1]
        for index, role in enumerate(ATTENTION):
            span = index * rows, (index + 1) * rows
            yield Site(f"{path}.{role}", role, path, path, path, "in_proj_weight", *span, width, encoder)
    else:
        for role in ATTENTION:
            parameter = f"{role}_proj_weight"
            weight = module.get_parameter(parameter)
            rows, width = weight.shape
            yield Site(f"{path}.{role}", role, path, path, path, parameter, 0, rows, width, encoder)
    if isinstance(module, nn.MultiheadAttention):
        rows, width = module.out_proj.weight.shape
        holder = f"{path}.out_proj"
        yield Site(holder, "out", path, path, holder, "weight", 0, rows, width, encoder)


def _heads(model: nn.Module, path: str) -> tuple[int, int]:
    """How many heads queries and keys have, where the attention that holds `path` says so, else as many."""
    attention = model.get_submodule(path.removesuffix(".linear").rpartition(".")[0])
    heads, groups = getattr(attention, "heads", None), getattr(attention, "kv_heads", None)
    return (heads, groups) if isinstance(heads, int) and isinstance(groups, int) else (1, 1)


def _turned(module: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, a linear layer with the weight (in, out); that is not imported for this."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _linear(path: str, module: nn.Module, encoder: str, caller: str, heads: tuple[int, int]) -> Iterator[Site]:
    by_columns = _turned(module)
    weight = module.get_parameter("weight")
    rows, width = weight.shape[::-1] if by_columns else weight.shape
    name = path.removesuffix(".linear")  # of what HELM's layers hold
    group, _, last = name.rpartition(".")
    fused = _FUSED.get(last)
    if fused is not None:
        parts = _parts(path, rows, fused, *heads)
        for index, role in enumerate(fused):
            span = sum(parts[:index]), sum(parts[: index + 1])
            yield Site(f"{name}.{role}", role, group, caller, path, "weight", *span, width, encoder, by_columns)
        return
    for role, suffixes in _SINGLE:
        if any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes):
            yield Site(name, role, group, path, path, "weight", 0, rows, width, encoder, by_columns)
            return


def _parts(path: str, rows: int, fused: tuple[Role, ...], heads: int, groups: int) -> list[int]:
    """The rows of each of several projections in one matrix; queries have `heads`, keys and values `groups` of them."""
    counts = [heads if role == "q" else groups for role in fused]
    if rows % sum(counts):
        raise UsageError(f"{path} has {rows} rows, which do not split evenly into {', '.join(fused)}")
    return [rows // sum(counts) * count for count in counts]
