"""Triton kernels for what the compiler does not fuse by itself, each beside a plain form of equal value.

    from leafward.nn import kernels
    kernels.use("torch")         # or LEAFWARD_KERNELS=torch in the environment: the plain forms everywhere

The choices are "auto", where kernels take what lies on a CUDA device if Triton is installed, "triton", which also says
so if it is not, and "torch". A kernel serves float32 and half precision; under "triton" with TRITON_INTERPRET=1 also on
the CPU. The layers ask `serve` and go on in plain torch where the answer is no. Each kernel is an operator of PyTorch
that a compiled graph launches as it does its own kernels, with its own gradient or for inference alone; none has a
second derivative.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from leafward.errors import UsageError, nearest, require

CHOICES = ("auto", "triton", "torch")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs in its interpreter, on the CPU: settled when the kernels are loaded."""
_modules = [
    "leafward.nn.kernels.residual",
    "leafward.nn.kernels.swiglu",
    "leafward.nn.kernels.heads",
    "leafward.nn.kernels.latents",
    "leafward.nn.kernels.latent_decode",
    "leafward.nn.kernels.experts",
]
"""Named unlike the functions below: a module that is loaded becomes an attribute of its package."""
_SERVED = (torch.float32, torch.bfloat16, torch.float16)
_choice = "auto"
_loaded = False


def use(which: str) -> None:
    """Choose "auto", "triton" or "torch" for all layers from now on."""
    global _choice
    if which not in CHOICES:
        raise UsageError(f"kernels are {which!r}; {nearest(which, CHOICES)}")
    if which == "triton":
        require("triton", "lm")
        _load()
    elif which == "auto" and torch.backends.cuda.is_built() and find_spec("triton") is not None:
        try:
            _load()
        except ImportError as error:
            warnings.warn(f"Triton is installed but not usable, so layers run in plain torch: {error}", stacklevel=2)
    _choice = which


def provide(*modules: str) -> None:
    """Add modules with kernels of layers elsewhere: they are loaded with those here, at once if these are. The package
    of such layers calls this as it is imported; the layers ask `serve` as those here do."""
    _modules.extend(name for name in modules if name not in _modules)
    if _loaded:
        use(_choice)


def _load() -> None:
    """Import the kernels. That touches no device, so that the process can still fork and its children use one."""
    global _loaded
    _loaded = False  # all of them or none
    for name in _modules:
        import_module(name)
    _loaded = True


def chosen() -> str:
    return _choice


def serve(x: Tensor) -> bool:
    """Whether kernels take `x`. Not while a model is exported: what comes out shall run without Triton."""
    if _choice == "torch" or not _loaded or x.dtype not in _SERVED or _exporting():
        return False
    return x.is_cuda or (INTERPRETED and _choice == "triton")


def serve_rows(x: Tensor) -> bool:
    """`serve`, of the kernels that go row by row. A compiled graph without gradients does without them: its own kernels
    are as good there, and take in what stands before and behind, so that a token is decoded in fewer launches."""
    return serve(x) and (torch.is_grad_enabled() or not torch.compiler.is_compiling())


def serve_inference(x: Tensor) -> bool:
    """`serve`, of the kernels that have no way back."""
    return serve(x) and not torch.is_grad_enabled()


@torch.compiler.assume_constant_result
def _exporting() -> bool:
    """Asked outside of the graph: inside of one that torch.compile traces, PyTorch 2.11 says yes to everybody."""
    return torch.compiler.is_exporting()


@torch.compiler.assume_constant_result
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have; the interpreter has no limit."""
    if device.type != "cuda":
        return 2**30
    properties = torch.cuda.get_device_properties(device)
    # AMD's devices have no more than the one that needs no asking for.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def residual_norm(
    x: Tensor, y: Tensor, log_weight: Tensor, gain: Tensor, scale: float, eps: float, c: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """z = scale · (x + w y)/(√c|x + w y|_L), its RMSNorm h in `dtype` and the time of h:
    (..., n), (..., n), log w (1,), (n,) -> (..., n), (..., n), (..., 1)."""
    return torch.ops.leafward.residual_norm(x, y, log_weight, gain, scale, eps, c, dtype)


def swiglu_lift(product: Tensor, bias: Tensor, t: Tensor, time_weight: Tensor, c: float) -> tuple[Tensor, Tensor]:
    """silu(gate) · value of (gate, value) = product + bias + t w_t, and its time:
    (..., 2h), (2h,), (..., 1), (2h, 1) -> (..., h), (..., 1)."""
    return torch.ops.leafward.swiglu_lift(product, bias, t, time_weight, c)


def head_lanes_fits(dtype: torch.dtype) -> bool:
    """Whether `head_lanes` gives lanes in `dtype`: in half precision alone, as the fused attention wants them."""
    return dtype.itemsize == 2


def head_lanes(
    product: Tensor,
    bias: Tensor,
    t: Tensor,
    time_weight: Tensor,
    table: tuple[Tensor, Tensor],
    scale: Tensor,
    heads: int,
    kv_heads: int,
    c: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of product + bias + t w_t, rotated, as lanes of queries, keys and values in a half-precision type:
    (B,T,(H+2G)d), ((H+2G)d,), (B,T,1), ((H+2G)d, 1) -> (B,H,T,·), (B,G,T,·), (B,G,T,·)."""
    lanes = torch.ops.leafward.head_lanes(product, bias, t, time_weight, *table, scale, heads, kv_heads, c)
    q, k, v = (x.transpose(1, 2) for x in lanes)
    return q, k, v


def expert_swiglu(
    p: Tensor, t: Tensor, w: Tensor, b: Tensor, over: Tensor, c: Tensor, expert: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """silu(gate) · value of (gate, value) = over_e (p + t w_e) + b_e, and its time at curvature -c_e, for rows sorted
    by expert e: (M, 2h), (M, 1), (E, 2h), (E, 2h), (E,), (E,), (M,), (E,) -> (M, h), (M, 1)."""
    return torch.ops.leafward.expert_swiglu(p, t, w, b, over, c, expert, ends)


def expert_combine(routed: Tensor, everywhere: Tensor, slot: Tensor, share: Tensor, c: float) -> Tensor:
    """Centroid of each token's points, `routed` (M, n) at rows `slot` (N, k) with weights `share` (N, k) and
    `everywhere` (S·N, n) with weight one -> (N, n)."""
    return torch.ops.leafward.expert_combine(routed, everywhere, slot, share, c)


Bank = tuple[Tensor, Tensor, Tensor]
"""One linear map of several experts: the θ (E,) of their curvatures, time columns w and biases b (E, n)."""


def expert_hidden(
    t: Tensor,
    order: Tensor,
    expert: Tensor,
    routed: tuple[Tensor, Bank],
    shared: tuple[Tensor, Bank],
    bounds: tuple[float, float],
    c: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`expert_swiglu` of products of routed rows (M, 2h), copies of tokens with times t (N, 1) that `order` (M,) sorted
    by `expert` (M,), and of shared ones (S·N, 2h), expert by expert: h and its time of both. Curvatures lie within
    `bounds`. No gradients."""
    (p, own), (q, others) = routed, shared
    return torch.ops.leafward.expert_hidden(t, order, expert, p, *own, q, *others, *bounds, c)


def expert_blend(
    expert: Tensor,
    slot: Tensor,
    share: Tensor,
    routed: tuple[Tensor, Tensor, Bank],
    shared: tuple[Tensor, Tensor, Bank],
    bounds: tuple[float, float],
    c: float,
) -> Tensor:
    """`expert_combine` of the points (p + t w_e + b_e)/ρ_e of rows with products p (M, n) and times t (M, 1): `routed`
    ones by `expert` (M,), at `slot` (N, k) with weights `share` (N, k); `shared` ones with weight one -> (N, n). No
    gradients."""
    (p, t, own), (q, u, others) = routed, shared
    return torch.ops.leafward.expert_blend(expert, slot, share, p, t, *own, q, u, *others, *bounds, c)


Summands = tuple[Tensor, Tensor, Tensor, Tensor]
"""A linear map before its sum: product, bias, time of the input, time column."""


def latent_lanes_fits(nope: int, dtype: torch.dtype) -> bool:
    """Whether `latent_lanes` takes heads with `nope` coordinates without position: it rotates whole pairs of lanes."""
    return head_lanes_fits(dtype) and nope % 2 == 0


def latent_lanes(
    queries: Summands,
    latents: Summands,
    k_rope: Tensor,
    table: tuple[Tensor, Tensor],
    scale: Tensor,
    heads: int,
    c: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Lanes of latent attention in half precision, all of one width: from the maps of queries, (B,T,H(nope+rope)), and
    of latent points, (B,T,H(nope+value)), and the shared key (B,T,rope), already rotated -> three of (B,H,T,·)."""
    lanes = torch.ops.leafward.latent_lanes(*queries, *latents, k_rope, *table, scale, heads, c)
    q, k, v = (x.transpose(1, 2) for x in lanes)
    return q, k, v


Mapped = tuple[Tensor, Tensor | None, Tensor | None]
"""A linear map but for the term of time: product with bias, time of the input, time column; none in flat space."""


def decoding_keys(latent: int, dtype: torch.dtype) -> int:
    """Keys that `latent_recall` holds at once: 32 KiB of latent points, 64 keys at most."""
    return max(1, min(64, 2**15 // (dtype.itemsize << (latent - 1).bit_length())))


def decoding_memory(latent: int, rope: int, dtype: torch.dtype) -> int:
    """Bytes of shared memory that decoding needs at most: by the compiler for compute capability 9.0 two tiles of keys,
    three in float32, and one of queries; and 88 KiB for matrices, whose tiles do not depend on the width of points."""
    wide = sum(1 << max(4, (size - 1).bit_length()) for size in (latent, rope))
    rows = (3 if dtype.itemsize > 2 else 2) * decoding_keys(latent, dtype) + 16
    return max(88 << 10, rows * wide * dtype.itemsize + (8 << 10))


def decoding_fits(latent: int, rope: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `latent_ask` and `latent_recall` take points of so many coordinates: pairs of `rope` are rotated,
    products are over 16 keys at least, and a program has to hold them."""
    fits = decoding_keys(latent, dtype) >= 16 and decoding_memory(latent, rope, dtype) <= shared_memory(device)
    return fits and rope % 2 == 0


def latent_ask(
    queries: Mapped,
    latents: Mapped,
    gain: Tensor,
    expansion: tuple[Tensor, Tensor | None, Tensor],
    table: tuple[Tensor, Tensor],
    scale: Tensor,
    heads: int,
    nope: int,
    eps: float,
    c: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token per sequence, from the maps of queries (B,1,H(nope+rope)) and of latent points (B,1,latent+rope), with
    the `gain` of their norm, and the `expansion` to keys and values (weight, time column, bias): what it asks of the
    cache, (B,H,latent+rope) and (B,H,2), and leaves there, (B,1,1,latent+rope) and (B,1,1,1+2H). No gradients."""
    at = *expansion, *table, scale, heads, nope, eps, c
    return torch.ops.leafward.latent_ask(*queries, *latents, gain, *at)


def latent_recall(
    asked: tuple[Tensor, Tensor],
    memory: tuple[Tensor, Tensor],
    at: Tensor,
    window: int | None,
    documents: Tensor | None,
    expansion: tuple[Tensor, Tensor | None, Tensor],
    out: tuple[Tensor, Tensor | None, Tensor],
    nope: int,
    c: float,
) -> Tensor:
    """What the cache (B,1,S,·) answers to `latent_ask`ed queries that stand at `at` (1,), through the linear map `out`
    of the heads (weight, time columns, bias): -> (B,1,width). No gradients."""
    return torch.ops.leafward.latent_recall(*asked, *memory, at, window, documents, *expansion, *out, nope, c)


# Here and not at a first call or in a constructor: the call may be traced, where nothing can be imported, and a model
# that comes out of a file or from another process was constructed elsewhere.
use(os.environ.get("LEAFWARD_KERNELS", "auto"))
