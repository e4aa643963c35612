"""What the HELM benchmarks share: shapes, the models at them, and reports that survive the failure of one side."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from leafward.files import finite, write_text
from leafward.nn import kernels
from leafward.systems.helm import HelmConfig, HelmForCausalLM

# Heads of 60 coordinates, and in latent attention 60 + 64 for a query: with the lanes of the time they fill the tiles
# of 64 and 128 that attention kernels work in. The names that end in 64 have heads of 64, which spill over into the
# next tile; their twins fill it exactly.
SHAPES: dict[str, dict[str, Any]] = {
    "768": {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "head_dim": 60,
        "intermediate_size": 2048,
    },
    "768-mice": {
        "kv_latent": 256,
        "nope_width": 28,
        "rope_width": 32,
        "value_width": 60,
        "num_experts": 8,
        "num_active_experts": 2,
        "num_shared_experts": 1,
        "expert_size": 1024,
    },
    "1b": {
        "vocab_size": 128_256,
        "hidden_size": 896,
        "num_hidden_layers": 16,
        "num_attention_heads": 14,
        "head_dim": 60,
        "intermediate_size": 3584,
    },
    "1b-mice": {
        "kv_latent": 256,
        "nope_width": 60,
        "rope_width": 64,
        "value_width": 64,
        "num_experts": 8,
        "num_active_experts": 2,
        "num_shared_experts": 1,
        "expert_size": 1792,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 12,
        "intermediate_size": 128,
    },
    "tiny-mice": {
        "kv_latent": 24,
        "nope_width": 12,
        "rope_width": 8,
        "value_width": 16,
        "num_experts": 4,
        "num_active_experts": 2,
        "num_shared_experts": 1,
        "expert_size": 64,
    },
}
WIDER = {
    "768": {"head_dim": 64},
    "768-mice": {"nope_width": 32, "value_width": 64},
    "1b": {"head_dim": 64},
    "1b-mice": {"nope_width": 64},
    "tiny": {"head_dim": 16},
    "tiny-mice": {"nope_width": 16},
}


def settings(shape: str, mice: bool, wider: bool, length: int) -> dict[str, Any]:
    """Arguments of HelmConfig."""
    chosen = {**SHAPES[shape], "max_position_embeddings": length, **(WIDER[shape] if wider else {})}
    if mice:
        chosen.update(SHAPES[f"{shape}-mice"], **(WIDER[f"{shape}-mice"] if wider else {}))
    return chosen


def helm(shape: str, geometry: str, mice: bool, wider: bool, length: int) -> HelmForCausalLM:
    return HelmForCausalLM(HelmConfig(**settings(shape, mice, wider, length), geometry=geometry))


def llama(shape: str, length: int) -> LlamaForCausalLM:
    """Llama of the same widths, with heads of 64."""
    own = settings(shape, mice=False, wider=True, length=length)
    config = LlamaConfig(**own, num_key_value_heads=own["num_attention_heads"], use_cache=False)
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def deepseek(shape: str, length: int, experts: str) -> DeepseekV3ForCausalLM:
    """DeepSeek-V3 of the same widths; `experts` is "eager" or "grouped_mm"."""
    own = settings(shape, mice=True, wider=True, length=length)
    config = DeepseekV3Config(
        vocab_size=own["vocab_size"],
        hidden_size=own["hidden_size"],
        num_hidden_layers=own["num_hidden_layers"],
        num_attention_heads=own["num_attention_heads"],
        num_key_value_heads=own["num_attention_heads"],
        intermediate_size=own["intermediate_size"],
        moe_intermediate_size=own["expert_size"],
        n_routed_experts=own["num_experts"],
        num_experts_per_tok=own["num_active_experts"],
        n_shared_experts=own["num_shared_experts"],
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        kv_lora_rank=own["kv_latent"],
        q_lora_rank=None,
        qk_nope_head_dim=own["nope_width"],
        qk_rope_head_dim=own["rope_width"],
        v_head_dim=own["value_width"],
        max_position_embeddings=length,
        num_mtp_layers=0,
        use_cache=False,
    )
    return DeepseekV3ForCausalLM._from_config(config, attn_implementation="sdpa", experts_implementation=experts)


def parameters(model: nn.Module) -> dict[str, int]:
    """How many there are, in all and without the token embedding and the head."""
    total = sum(p.numel() for p in model.parameters())
    tokens = sum(p.numel() for name, p in model.named_parameters() if "embed" in name or "head." in name)
    return {"parameters": total, "trunk": total - tokens}


class Report:
    """Measurements by name, written out after each, so that a run cut short leaves what it has."""

    def __init__(self, out: Path | None, seconds: float, facts: dict[str, Any]) -> None:
        self.out, self.deadline = out, time.monotonic() + seconds
        self.content: dict[str, Any] = {**facts, "sides": {}}

    def measure(self, name: str, call: Callable[[], dict[str, Any]]) -> None:
        """Note what `call` gives, or how it failed; where no time is left, that."""
        began = time.monotonic()
        if began > self.deadline:
            result: dict[str, Any] = {"error": "not run: out of time"}
        else:
            try:
                result = call()
            except Exception as error:  # one side that does not run must not cost the others
                traceback.print_exc(file=sys.stderr)
                result = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
            finally:
                kernels.use("auto")
                free()
        result["seconds"] = round(time.monotonic() - began, 1)
        self.content["sides"][name] = result
        print(f"{name}: {json.dumps(finite(result))[:300]}", file=sys.stderr, flush=True)
        self.write()

    def write(self, **more: Any) -> None:
        self.content.update(more)
        if self.out is not None:
            write_text(self.out, json.dumps(finite(self.content), indent=1))

    def ratios(self, key: str, pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
        """`key` of one side over that of another, where both have it as a number."""
        sides = self.content["sides"]
        found = [(a, b) for a, b in pairs if all(isinstance(sides.get(side, {}).get(key), float) for side in (a, b))]
        return {f"{a} / {b}": round(sides[a][key] / sides[b][key], 4) for a, b in found}


def free() -> None:
    """Give back what the last side held, compiled code too."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def facts(device: str) -> dict[str, Any]:
    import transformers

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def profile(step: Callable[[], object], device: str, steps: int = 2, top: int = 30) -> list[dict[str, Any]]:
    """The kernels that take the most time: milliseconds and launches per step."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device == "cuda" else activity.CPU]) as seen:
        for _ in range(steps):
            step()
        if device == "cuda":
            torch.cuda.synchronize()

    def spent(event: Any) -> float:
        return event.self_device_time_total if device == "cuda" else event.self_cpu_time_total

    events = sorted(seen.key_averages(), key=spent, reverse=True)
    rows = [{"kernel": e.key[:120], "ms": spent(e) / 1e3 / steps, "calls": e.count / steps} for e in events]
    rest = {
        "kernel": "all others",
        "ms": sum(r["ms"] for r in rows[top:]),
        "calls": sum(r["calls"] for r in rows[top:]),
    }
    return [*rows[:top], rest]
