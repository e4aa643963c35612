"""Tokens per second of decoding with the cache, HELM beside its Euclidean twins, and the size of the cache.

    python benchmarks/helm_decode.py --out decode.json      # on a CUDA device
    python benchmarks/helm_decode.py --device cpu           # a tiny shape, to see that it runs

A prompt fills a cache of the given context; then tokens are decoded greedily, one at a time, in bfloat16. On CUDA the
layers are compiled and one step, from token to next token, is captured as a graph: no time goes into launches. Sides:
d and mice with their twins in plain torch, and with our kernels where -triton stands behind the name. HELM-D's cache
holds lanes that are ready for the product, HELM-MiCE's the latent point, the shared key and the times of keys and
values.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from _helm import Report, facts, helm, parameters, profile
from _timing import graphed
from leafward.nn import Visible, kernels
from leafward.systems.helm import HelmConfig, HelmForCausalLM

SIDES = ("d", "d-triton", "d-twin", "d64", "d64-twin", "mice", "mice-triton", "mice-twin", "mice-twin-triton")
PAIRS = (
    *(("d", "d-twin"), ("d-triton", "d-twin"), ("d64", "d64-twin"), ("d", "d64-twin")),
    *(("mice", "mice-twin"), ("mice-triton", "mice-twin-triton"), ("mice-twin-triton", "mice-twin")),
)


def computed_bytes(config: HelmConfig, batch: int, length: int) -> int:
    """The cache from the configuration, in a half type: numbers per token and layer, times tokens and layers."""
    curved = config.space.curved

    def lanes(width: int, times: int) -> int:
        return -(-(width + (times if curved else 0)) // 8) * 8

    if config.kv_latent:
        numbers = config.kv_latent + config.rope_width + (1 + 2 * config.num_attention_heads if curved else 0)
    else:
        head = config.head_dim or config.hidden_size // config.num_attention_heads
        kv_heads = config.num_key_value_heads or config.num_attention_heads
        numbers = kv_heads * (lanes(head, 3) + lanes(head, 2))
    return 2 * numbers * config.num_hidden_layers * batch * length


def layer_step(
    layer: nn.Module, x: Tensor, table: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, at: Tensor
) -> Tensor:
    """One layer for one token per sequence (B,1,n), standing at `at` (1,); keys and values are the layer's buffers."""

    def store(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return keys.index_copy_(2, at, k), values.index_copy_(2, at, v)

    return layer(x, table, Visible(positions=at), store)[0]


class Decoder:
    """Greedy decoding into buffers of fixed size, so that one step can be captured as a graph."""

    def __init__(self, model: HelmForCausalLM, cache: Any, token: Tensor, room: int, compiled: bool) -> None:
        self.model, self.token = model, token.clone()
        self.at = torch.tensor([cache.get_seq_length()], device=token.device)
        self.start = self.at.clone()
        self.buffers = [tuple(_extended(x, room) for x in (layer.keys, layer.values)) for layer in cache.layers]
        self.layer_step = torch.compile(layer_step, fullgraph=True, dynamic=False) if compiled else layer_step
        self.tail = torch.compile(self._tail, fullgraph=True, dynamic=False) if compiled else self._tail
        self.table = torch.compile(self._table, fullgraph=True, dynamic=False) if compiled else self._table

    def _table(self, at: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.model.hope.table(at)

    def _tail(self, x: Tensor) -> Tensor:
        trunk = self.model.model
        return self.model.lm_head(trunk.norm(trunk.project(x))).argmax(dim=-1)

    def step(self) -> None:
        trunk = self.model.model
        x, table = trunk.embed(self.token), self.table(self.at)
        for layer, (keys, values) in zip(trunk.layers, self.buffers, strict=True):
            x = self.layer_step(layer, x, table, keys, values, self.at)
        self.token.copy_(self.tail(x))
        self.at.add_(1)

    def captured(self) -> Callable[[], object]:
        """The step as a CUDA graph."""
        return graphed(self.step, lambda: self.at.copy_(self.start))


def _extended(x: Tensor, room: int) -> Tensor:
    """x (B,G,S,w) with room for as many more tokens."""
    return torch.cat([x, x.new_zeros(*x.shape[:2], room, x.shape[3])], dim=2)


@torch.no_grad()
def measure(side: str, shape: str, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    kernels.use("triton" if side.endswith("triton") else "torch")
    cuda, context, tokens = arguments.device == "cuda", arguments.context, arguments.tokens
    geometry = "euclidean" if "twin" in side else "lorentz"
    with torch.device(arguments.device):
        model = helm(shape, geometry, side.startswith("mice"), "64" in side, context + tokens).eval().bfloat16()
    prompt = torch.randint(model.config.vocab_size, (batch, context), device=arguments.device)
    out = model(prompt, use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    result = {
        "batch": batch,
        "context": context,
        "cache_bytes": held,
        "cache_bytes_computed": computed_bytes(model.config, batch, context),
        **parameters(model),
    }
    decoder = Decoder(model, cache, out.logits.argmax(dim=-1), tokens, compiled=cuda)
    del cache, out
    step = decoder.captured() if cuda else decoder.step
    fastest = float("inf")
    for _ in range(arguments.rounds):
        decoder.at.copy_(decoder.start)
        began = _clock(cuda)
        for _ in range(tokens):
            step()
        fastest = min(fastest, _clock(cuda) - began)
    if side in arguments.profile.split(","):
        decoder.at.copy_(decoder.start)
        result["profile"] = profile(step, arguments.device, top=60)
    return {**result, "ms_per_token": 1e3 * fastest / tokens, "tokens_per_second": batch * tokens / fastest}


def _clock(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", default=None, help="of 768, 1b, tiny; by default 768, on the CPU tiny")
    parser.add_argument("--only", default="d,d-twin,mice,mice-twin", help=f"of {', '.join(SIDES)}, by commas")
    parser.add_argument("--batches", default=None, help="by default 1,32, on the CPU 2")
    parser.add_argument("--context", type=int, default=None, help="by default 2048, on the CPU 32")
    parser.add_argument("--tokens", type=int, default=None, help="decoded per round; by default 64, on the CPU 4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="no side begins after this time")
    parser.add_argument("--profile", default="", help="sides to list the most expensive kernels of, by commas")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    arguments.context = arguments.context or (2048 if cuda else 32)
    arguments.tokens = arguments.tokens or (64 if cuda else 4)
    shapes = (arguments.shapes or ("768" if cuda else "tiny")).split(",")
    batches = [int(b) for b in (arguments.batches or ("1,32" if cuda else "2")).split(",")]
    for side in arguments.only.split(","):
        if side not in SIDES:
            parser.error(f"unknown side {side!r}; allowed: {', '.join(SIDES)}")
    report = Report(arguments.out, arguments.seconds, {"benchmark": "helm_decode", **facts(arguments.device)})
    cases = [(shape, side, batch) for shape in shapes for batch in batches for side in arguments.only.split(",")]
    for shape, side, batch in cases:
        name = f"{shape} b{batch} {side}"
        report.measure(name, lambda case=(side, shape, batch): measure(*case, arguments))
    pairs = [(f"{s} b{b} {x}", f"{s} b{b} {y}") for s in shapes for b in batches for x, y in PAIRS]
    report.write(speed_ratios=report.ratios("tokens_per_second", pairs))
    print(json.dumps(report.content))


if __name__ == "__main__":
    main()
