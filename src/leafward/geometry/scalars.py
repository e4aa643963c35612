"""Scalar functions that every curved space needs, accurate near zero and with finite gradients everywhere.

Shapes: ``x (..., n)`` is a batch of vectors; norms keep the last dimension, ``(..., 1)``, so that they
broadcast against the vectors and against a curvature given per row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Curv = float | Tensor
"""A curvature ``c > 0`` (sectional curvature ``-c``): a number, or a tensor that broadcasts against (..., 1)."""

_HALF = (torch.float16, torch.bfloat16)
_HIGHEST = torch.finfo(torch.float16).max


def wide(x: Tensor) -> Tensor:
    """`x` in the type geometry is computed in: float32, or float64 where that was given."""
    if not x.dtype.is_floating_point:
        raise TypeError(f"coordinates must be real floating-point numbers, got a tensor of {x.dtype}")
    return x.float() if x.dtype in _HALF else x


def double(x: Tensor) -> Tensor:
    """`x` in float64, which not every device has."""
    if x.device.type == "mps":
        raise ValueError(
            "this is computed in float64, which the device mps does not have: pass precise=False where that is "
            "offered, or tensors on the CPU"
        )
    return x.double()


def some(x: Tensor) -> None:
    """Refuse an empty set of points (..., k, n): it has no centre."""
    if x.shape[-2] == 0:
        raise ValueError(f"x must hold at least one point, got shape {tuple(x.shape)}")


def largest(dtype: torch.dtype) -> float:
    """The length at which a vector of `dtype` saturates: far beyond any that can be trusted (float32 has lost all
    digits of a radial difference at √c·radius 17; this is 23), and small enough that cubes do not overflow."""
    if dtype == torch.float16:
        return 3e4
    return 1e100 if dtype == torch.float64 else 1e10


def tiny(dtype: torch.dtype) -> float:
    """A length so small that nothing depends on it, and whose square is still a normal number."""
    return 1e-150 if dtype == torch.float64 else 1e-18


def polar(x: Tensor) -> tuple[Tensor, Tensor]:
    """`wide` rows, those beyond `largest` pulled back along their ray so that nothing later overflows,
    and their lengths: (..., n) -> (..., n), (..., 1).

    A row is beyond if its largest coordinate is (for float16, whose range is small, its norm).
    """
    z, limit = wide(x), largest(x.dtype)
    # Looking at a value is free on the CPU and saves a pass; elsewhere it would wait for the device.
    if z.device.type == "cpu" and not _traced(z):
        length = norm(z)
        if bool((length <= limit).all()):
            return z, length
    bare = z.detach()
    if x.dtype == torch.float16:
        reach = torch.linalg.vector_norm(bare, dim=-1, keepdim=True)
    else:
        reach = torch.maximum(bare.amax(dim=-1, keepdim=True), -bare.amin(dim=-1, keepdim=True))
    z = z * (limit / reach.clamp_min(limit))
    return z, norm(z)


def tame(x: Tensor) -> Tensor:
    """The rows of `polar` without their lengths."""
    return polar(x)[0]


def bounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in `dtype`; in float16 those beyond its range are its largest ones instead of infinite."""
    return value.clamp(-_HIGHEST, _HIGHEST).to(dtype) if dtype == torch.float16 else value.to(dtype)


def narrow(z: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `z` (..., n) in `dtype`; in float16, whose range is small, long ones are pulled back along their ray."""
    if dtype != torch.float16:
        return z.to(dtype)
    reach = torch.linalg.vector_norm(z.detach(), dim=-1, keepdim=True)
    return (z * (largest(dtype) / reach.clamp_min(largest(dtype)))).to(dtype)


def _traced(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x)  # pyright: ignore


class _Norm(torch.autograd.Function):
    """Euclidean norm over the last dimension, kept. Its backward is one pass over x instead of torch's three."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.linalg.vector_norm(x, dim=-1, keepdim=True)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, length = ctx.saved_tensors
        return x * (grad / _or_infinite(length))

    @staticmethod
    def jvp(ctx, tangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, length = ctx.saved_tensors
        return dot(x, tangent) / _or_infinite(length)


def _or_infinite(length: Tensor) -> Tensor:
    """`length`, infinite where it is next to nothing, so that dividing by it gives zero."""
    return torch.where(length > tiny(length.dtype), length, math.inf)


def norm(x: Tensor) -> Tensor:
    """Euclidean norm (..., n) -> (..., 1); a vector shorter than `tiny` has gradient zero."""
    if torch.compiler.is_compiling():  # fused there anyway
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.where(length > tiny(x.dtype), length, length.detach())
    return _Norm.apply(x)  # pyright: ignore[reportReturnType]


def unit(x: Tensor, length: Tensor | None = None) -> Tensor:
    """Direction of `x` (..., n); a vector shorter than `tiny` counts as zero, with gradient zero."""
    return x / _or_infinite(norm(x) if length is None else length)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean inner product (..., n), (..., n) -> (..., 1)."""
    return (x * y).sum(dim=-1, keepdim=True)


def hypot(a: Tensor, b: Tensor) -> Tensor:
    """√(a² + b²) that squares no small number, so that second derivatives are finite too; where both are shorter than
    `tiny` the gradient is zero."""
    reach = torch.maximum(a.abs(), b.abs()).detach()
    scale = reach.clamp_min(tiny(reach.dtype))
    p, q = a / scale, b / scale
    return reach * torch.sqrt((p * p + q * q).clamp_min(0.5))  # 1 to 2, but where both are tiny


def sqrt(x: Tensor) -> Tensor:
    """Square root whose gradient at zero is zero instead of infinite; less than `tiny`² counts as zero."""
    positive = x > tiny(x.dtype) ** 2
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def asinh(x: Tensor) -> Tensor:
    """Inverse hyperbolic sine for x >= 0, accurate to rounding for small x in eager, compiled and exported form."""
    return torch.log1p(x + x * x / (1.0 + torch.sqrt(1.0 + x * x)))


def _even_series(x: Tensor, limit: float, coefficients: tuple[float, ...], direct: Tensor) -> Tensor:
    """The series sum_k a_k x^(2k) where |x| < limit, else `direct`.

    The ratio of two small numbers would do for the value, but its derivative cancels; the series does not.
    """
    square = torch.where(x.abs() < limit, x, 0.0) ** 2
    total = torch.full_like(square, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * square + coefficient
    return torch.where(x.abs() < limit, total, direct)


def _away_from_zero(x: Tensor, limit: float) -> Tensor:
    return torch.where(x.abs() < limit, 1.0, x)


_SINHC = tuple(1.0 / math.factorial(2 * k + 1) for k in range(8))
_ASINHC = tuple((-1) ** k * math.comb(2 * k, k) / (4**k * (2 * k + 1)) for k in range(9))
_ATANHC = tuple(1.0 / (2 * k + 1) for k in range(9))
_TANHC = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075, -929569 / 638512875)


def sinhc(x: Tensor) -> Tensor:
    """sinh(x) / x, one at zero."""
    z = _away_from_zero(x, 0.5)
    e = torch.exp(z)  # not torch.sinh: the compiler hoists exp out of the row's inner loop, and it is as accurate here
    return _even_series(x, 0.5, _SINHC, 0.5 * (e - 1.0 / e) / z)


def asinhc(x: Tensor) -> Tensor:
    """asinh(x) / x for x >= 0, one at zero."""
    z = _away_from_zero(x, 0.1)
    return _even_series(x, 0.1, _ASINHC, asinh(z) / z)


def tanhc(x: Tensor) -> Tensor:
    """tanh(x) / x, one at zero."""
    z = _away_from_zero(x, 0.1)
    return _even_series(x, 0.1, _TANHC, torch.tanh(z) / z)


def atanhc(x: Tensor) -> Tensor:
    """atanh(x) / x for |x| < 1, one at zero."""
    z = _away_from_zero(x, 0.1)
    return _even_series(x, 0.1, _ATANHC, torch.atanh(torch.where(x.abs() < 0.1, 0.5, x)) / z)


def angle(u: Tensor, v: Tensor) -> Tensor:
    """Angle between vectors (..., n), (..., n) -> (...), by Kahan's half-angle form: accurate near 0 and π.

    A zero vector has angle π/2 to everything, with gradient zero.
    """
    p, q = unit(u), unit(v)
    return 2.0 * atan2(norm(p - q), norm(p + q)).squeeze(-1)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """atan2 whose gradient at (0, 0) is zero, and which does not square small numbers."""
    scale = torch.maximum(y.abs(), x.abs()).detach()
    at_zero = scale == 0
    scale = torch.where(at_zero, 1.0, scale)
    return torch.where(at_zero, 0.0, torch.atan2(y / scale, torch.where(at_zero, 1.0, x / scale)))
