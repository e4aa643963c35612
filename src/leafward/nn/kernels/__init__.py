"""Triton kernels for what the compiler does not fuse by itself, each beside a plain form of equal value.

    from leafward.nn import kernels
    kernels.use("torch")         # or LEAFWARD_KERNELS=torch in the environment: the plain forms everywhere

The choices are "auto", where kernels take what lies on a CUDA device if Triton is installed, "triton", which also says
so if it is not, and "torch". A kernel serves float32 and half types; under "triton" with TRITON_INTERPRET=1 also on the
CPU. The layers ask `serve` and go on in plain torch where the answer is no. Each kernel is an operator of PyTorch that
a compiled graph launches as it does its own kernels, with its own gradient or for inference alone; none has a second
derivative.
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
_MODULES = (
    *("residual_norm", "swiglu", "head_lanes", "latent_lanes", "latent_decode", "experts"),
    *("image_norm", "mlp", "cluster", "cluster_pool"),
)
_SERVED = (torch.float32, torch.bfloat16, torch.float16)
MOST_CENTRES = 16  # of a tile, which is one program's work
_MOST_TOKENS = 256
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


def _load() -> None:
    """Import the kernels. That touches no device, so that the process can still fork and its children use one."""
    global _loaded
    for name in _MODULES:
        import_module(f"leafward.nn.kernels._{name}")
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
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program can have; the interpreter has no limit."""
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
    """Heads of product + bias + t w_t, rotated, as lanes of queries, keys and values in a half type:
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


def image_moments(x: Tensor, eps: float) -> Tensor:
    """Mean and 1/√(variance + eps) over all places and channels of each image: (B, ..., C) -> (B, 2) in float32."""
    return torch.ops.leafward.image_moments(x, eps)


def image_norm(x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x normed by its own `moments`, then w · + b, in `dtype`, and what `scaled_add` takes to stand for x:
    (B, ..., C), (B, 2), (C,), (C,) -> (B, ..., C), (B, ..., C).

    The second has no values. The gradient of x from the sum goes there, and so to the way back of the norm, which adds
    it to its own in the same pass over memory.
    """
    return torch.ops.leafward.image_norm(x, moments, weight, bias, dtype)


def scaled_add(
    x: Tensor, y: Tensor, gamma: Tensor, keep: Tensor | None, eps: float, stead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """z = x + keep · γ · y in the wider type of x and γ, and its `image_moments`; the gradient of x goes to `stead`
    where that is given: (B, ..., C), (B, ..., C), (C,), (B,) -> (B, ..., C), (B, 2)."""
    return torch.ops.leafward.scaled_add(x, y, gamma, keep, eps, stead)


def mlp_fits(width: int, hidden: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `normed_mlp` takes maps of so many channels: tiles are powers of two, and wide ones fill a program, as
    weights in float32 do. By the compiler for compute capability 9.0 it needs 1 KiB of shared memory a channel."""
    if width not in (16, 32, 64, 128) or hidden % 64 or (dtype == torch.float32 and not INTERPRETED):
        return False
    return 1024 * width <= _shared_memory(device)


def normed_mlp(
    x: Tensor,
    moments: Tensor,
    norm: tuple[Tensor, Tensor],
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
    gamma: Tensor,
    keep: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """x + keep · γ · second(GELU(first(norm(x)))), norm by `image_moments`, products in `dtype`, all three as pairs of
    weight and bias: (B, ..., C), (B, 2) -> (B, ..., C). What lies between the two products is never in memory."""
    return torch.ops.leafward.normed_mlp(x, moments, *norm, *first, *second, gamma, keep, dtype)


Summands = tuple[Tensor, Tensor, Tensor, Tensor]
"""A linear map before its sum: product, bias, time of the input, time column."""


def latent_lanes(
    queries: Summands,
    latents: Summands,
    k_rope: Tensor,
    table: tuple[Tensor, Tensor],
    scale: Tensor,
    heads: int,
    c: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Lanes of latent attention in a half type, all of one width: from the maps of queries, (B,T,H(nope+rope)), and of
    latent points, (B,T,H(nope+value)), and the shared key (B,T,rope), already rotated -> three of (B,H,T,·)."""
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
    """Whether `latent_ask` and `latent_recall` take points of so many coordinates: products are over 16 keys at least,
    and a program has to hold them."""
    return decoding_keys(latent, dtype) >= 16 and decoding_memory(latent, rope, dtype) <= _shared_memory(device)


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


def cluster_fits(
    tokens: int, centres: int, head_dim: int, dtype: torch.dtype, device: torch.device, back: bool = True
) -> bool:
    """Whether the kernels of the cluster mixer take windows of so many tokens and centres, or so many windows and
    global centres; `cluster_patches` without a way `back` takes any number of tokens."""
    if centres > MOST_CENTRES or head_dim > 64:
        return False
    return not back or tokens <= most_tokens(head_dim, dtype.itemsize, device)


@torch.compiler.assume_constant_result
def most_tokens(head_dim: int, itemsize: int, device: torch.device) -> int:
    """Of a window, that fit the shared memory of a multiprocessor at once: a power of two.

    The way back of `cluster_patches`, which needs the most, takes 5.2 to 6.9 times tokens · (channels + centres), by
    the compiler for compute capability 9.0.
    """
    channels = max(16, 1 << (head_dim - 1).bit_length())
    room = _shared_memory(device) // (7 * itemsize * (channels + 16))
    return min(_MOST_TOKENS, 1 << room.bit_length() - 1)


def pool_fits(tokens: int, centres: int) -> bool:
    """Whether `cluster_pool` takes windows of so many tokens and so many global centres."""
    return tokens <= _MOST_TOKENS and centres <= MOST_CENTRES


def cluster_pool(x: Tensor, side: tuple[int, int], centres: int) -> Tensor:
    """Means over windows of p × q tokens and over the regions of k × k global centres, of a map without padding:
    (B, H, W, C) -> (B, G + k², C)."""
    return torch.ops.leafward.cluster_pool(x, *side, centres)


def cluster_patches(
    e: Tensor, alpha: Tensor, bias: Tensor, side: tuple[int, int], centres: int
) -> tuple[Tensor, Tensor]:
    """The patch level on an embedded map, cut into windows of p × q tokens with k × k centres, and the sums of its
    result and of its squares over channels: (B, H, W, 2hd), (h,), (h, k, p, k, q) -> (B, H, W, hd), (2, B, H, W)."""
    return torch.ops.leafward.cluster_patches(e, alpha, bias, *side, centres)


def cluster_windows(e: Tensor, sharpness: Tensor, reach: Tensor | None, bias: Tensor) -> Tensor:
    """The window level on embedded windows and global centres, by Lorentz distances, or by cosines without `reach`:
    (B, G + K, 2hd), (h,), (h,), (h, k, n, k, m) -> (B, G, hd)."""
    return torch.ops.leafward.cluster_windows(e, sharpness, reach, bias)


# Here and not at a first call or in a constructor: the call may be traced, where nothing can be imported, and a model
# that comes out of a file or from another process was constructed elsewhere.
use(os.environ.get("LEAFWARD_KERNELS", "auto"))
