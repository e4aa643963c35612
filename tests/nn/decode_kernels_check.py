"""The kernels of inference against float64 and in whole models, as a program (see kernels_check.py).

TRITON_INTERPRET=1 python decode_kernels_check.py cpu
"""

import functools
import sys

import torch
from kernels_check import error, noted
from torch import Tensor, nn
from transformers import DynamicCache

from leafward.nn import HoPE, LatentAttention, MiCE, Space, Visible, kernels
from leafward.systems.helm import HelmConfig, HelmForCausalLM

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"


def stirred(layer: nn.Module) -> nn.Module:
    """With no parameter where its start would hide it."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.to(DEVICE)


@torch.no_grad()
def blended() -> None:
    for active, shared, c, reach in ((2, 1, 1.0, 1.0), (3, 0, 0.37, 20.0), (2, 2, 2.0, 1.0), (1, 1, 1.0, 100.0)):
        layer = stirred(MiCE(16, 24, 5, active, shared, learn_curvatures=True, space=Space(c=c)))
        s = reach * torch.randn(2, 9, 16, device=DEVICE)
        kernels.use("torch")
        exact = layer.double()(s.double())[0]
        kernels.use("triton")
        assert error(layer.float()(s)[0], exact) < 5e-6, (active, shared, error(layer(s)[0], exact))


SHAPES = (  # width, heads, latent, nope, rope, value, latent queries, coordinates that turn
    (24, 3, 16, 4, 8, 12, None, 8),
    (20, 2, 24, 6, 8, 9, 10, 4),
    (16, 18, 40, 3, 2, 5, None, 2),
)


def decode(layer: LatentAttention, s: Tensor, memory: tuple[Tensor, Tensor], rule: Visible, turning: int):
    """The layer for one token behind what is remembered, and what the cache is given of it."""
    kept: list[Tensor] = []

    def store(*new: Tensor) -> tuple[Tensor, Tensor]:
        kept.extend(new)
        if rule.positions is None:
            return torch.cat([memory[0], new[0]], dim=2), torch.cat([memory[1], new[1]], dim=2)
        for old, row in zip(memory, new, strict=True):
            old[:, :, rule.positions] = row
        return memory

    # Positions of each sequence, of all of them, or one row for all.
    positions = torch.arange(7, 7 + len(s), device=DEVICE)[:, None]
    given = {8: positions, 4: positions[:1], 2: positions[0]}[turning]
    return layer(s, HoPE(turning).table(given, s.dtype), rule, store), kept


def compared(layer: LatentAttention, s: Tensor, memory: tuple[Tensor, Tensor], rule: Visible, turning: int, dtypes):
    """Result and what is left in the cache, against plain torch in float64."""
    kernels.use("torch")
    exact, exact_kept = decode(layer.double(), s.double(), tuple(x.double() for x in memory), rule, turning)
    kernels.use("triton")
    for dtype in dtypes:
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        ours, kept = decode(layer.to(dtype), s.to(dtype), tuple(x.to(dtype) for x in memory), rule, turning)
        assert error(ours, exact) < bound, (layer, rule, dtype, error(ours, exact))
        for new, wanted in zip(kept, exact_kept, strict=True):
            assert new.shape == wanted.shape
            assert not wanted.numel() or error(new, wanted) < bound


@torch.no_grad()
def decoded() -> None:
    keys = 150  # several parts, of several steps each
    ids = torch.arange(keys + 9, device=DEVICE) // torch.tensor(
        [[60], [200]], device=DEVICE
    )  # more than there are keys
    all_but_one = torch.tensor([keys - 1], device=DEVICE)
    rules = (
        {"window": 70},
        {"documents": ids},
        {"positions": torch.tensor([keys - 40], device=DEVICE)},
        {"positions": all_but_one, "documents": ids, "window": 140},
    )
    for place, (width, heads, latent, nope, rope, value, query, turning) in enumerate(SHAPES):
        batch = 17 if place == 1 else 2  # more than a program takes
        for space in (Space(c=0.37), Space("euclidean")):
            layer = stirred(LatentAttention(width, heads, latent, nope, rope, value, query_latent=query, space=space))
            s = torch.randn(batch, 1, width, device=DEVICE)
            times = 1 + 2 * heads if space.curved else 0
            points = torch.randn(batch, 1, keys, latent + rope, device=DEVICE)
            memory = points, 5.0 + torch.rand(batch, 1, keys, times, device=DEVICE)
            before = memory[0][:, :, 1:], memory[1][:, :, 1:]
            compared(layer, s, before, Visible(), turning, (torch.float32, torch.float16))
            for options in rules if place == 0 else ():
                rule = Visible(**options)
                given = before if rule.positions is None else memory
                compared(layer, s, given, rule, turning, (torch.float32,))


@torch.no_grad()
def served() -> None:
    """Where a token is decoded, compiled or not, the kernels do it; with gradients they do not."""
    layer = stirred(LatentAttention(24, 3, 16, 4, 8, 12))
    memory = torch.randn(1, 1, 5, 24, device=DEVICE), 5.0 + torch.rand(1, 1, 5, 7, device=DEVICE)
    s = torch.randn(1, 1, 24, device=DEVICE)
    kernels.use("triton")
    graphs: list[str] = []
    call = torch.compile(
        lambda s: decode(layer, s, memory, Visible(), 8)[0],
        fullgraph=True,
        backend=functools.partial(noted, graphs=graphs),
    )
    torch.testing.assert_close(call(s), decode(layer, s, memory, Visible(), 8)[0])
    assert "leafward.latent_recall" in graphs[0]
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(call(s.requires_grad_()).sum(), s)
    assert gradient.isfinite().all()
    assert "latent_recall" not in graphs[1]


def generated() -> None:
    """Text by beams and with prompts of two lengths, with caches that grow and that do not."""
    for geometry in ("lorentz", "euclidean"):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_dense_layers": 0, "vocab_size": 64}
        model = stirred(HelmForCausalLM(HelmConfig.preset("helm-mice-tiny", geometry=geometry, **sizes))).eval()
        prompt = torch.randint(1, 64, (2, 6), device=DEVICE)
        mask = torch.ones_like(prompt)
        mask[0, :3] = 0
        how = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        for options in ({"num_beams": 2}, {"cache_implementation": "static", "disable_compile": True}):
            texts = []
            for which in ("torch", "triton"):
                kernels.use(which)
                texts.append(model.generate(prompt, **how, **options))
            assert torch.equal(*texts), (geometry, options)
        with torch.no_grad():  # from an empty cache on, with what stands in it
            caches = []
            for which in ("torch", "triton"):
                kernels.use(which)
                cache = DynamicCache(config=model.config)
                for token in prompt[:, :2].split(1, dim=1):
                    logits = model(token, past_key_values=cache, use_cache=True).logits
                with torch.autocast(DEVICE, torch.float16):
                    half = model(prompt[:, 2:3], past_key_values=cache, use_cache=True).logits
                caches.append((logits, half, cache))
        torch.testing.assert_close(caches[0][0], caches[1][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(caches[0][1], caches[1][1], rtol=2e-2, atol=2e-2)
        for old, new in zip(caches[0][2].layers, caches[1][2].layers, strict=True):
            torch.testing.assert_close(old.keys, new.keys, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(old.values, new.values, rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    for check in (blended, decoded, served, generated):
        torch.manual_seed(0)
        check()
        print(check.__name__, "ok", flush=True)
