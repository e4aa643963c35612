"""Norm over all places and channels of an image, and the residual sum before it, for maps with channels last.

    mean m and rate r = 1/√(variance + eps) of each image;   x̂ = r (x − m);   h = w x̂ + b;
    back: ∂x = r (∂h w − mean(∂h w) − x̂ mean(∂h w x̂)), ∂w = Σ ∂h x̂, ∂b = Σ ∂h.

An image is cut into tiles of `tile_rows` places. Each tile gives its own mean and sum of squares about it, which are
put together by Chan's formula: no difference of large sums. The sum z = x + keep γ y takes its tile's part of them
while z is at hand, so that the norm reads z once.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from leafward.nn.kernels.launch import operator, single, tile, wrap_triton

_STRIP = {"BLOCK": 64, "ROWS": 32, "STEPS": 4, "num_warps": 4}
"""Channels, places at a time, times and warps of a program that sums over places."""


def tile_rows(width: int) -> int:
    """Places of an image that one program takes; a power of two."""
    return max(1, 8192 // max(128, triton.next_power_of_2(width)))


@triton.jit
def _tile(places, tiles, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Image, lanes, where a program's tile lies in a map, and which of it there is."""
    image = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    at = (image * places + row)[:, None] * WIDTH + lane[None, :]
    return image, lane, at, (row < places)[:, None] & (lane < WIDTH)[None, :]


@triton.jit
def _keep_tile_moments(x, inside, part_ptr, places, tiles, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Mean and sum of squares about it of one tile."""
    count = tl.minimum(places - tl.program_id(0) % tiles * ROWS, ROWS) * WIDTH
    mean = tl.sum(tl.sum(tl.where(inside, x, 0.0), axis=1), axis=0) / count
    away = tl.where(inside, x - mean, 0.0)
    to = part_ptr + tl.program_id(0) * 2
    tl.store(to, mean)
    tl.store(to + 1, tl.sum(tl.sum(away * away, axis=1), axis=0))


@triton.jit
def _tile_moments(x_ptr, part_ptr, places, tiles, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    _, _, at, inside = _tile(places, tiles, WIDTH, ROWS, BLOCK)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    _keep_tile_moments(x, inside, part_ptr, places, tiles, WIDTH, ROWS)


@triton.jit
def _add(
    x_ptr, y_ptr, gamma_ptr, keep_ptr, z_ptr, part_ptr, places, tiles,
    KEEP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image, lane, at, inside = _tile(places, tiles, WIDTH, ROWS, BLOCK)
    scale = tl.load(gamma_ptr + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
    if KEEP:
        scale *= tl.load(keep_ptr + image).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    z = (x + scale[None, :] * y).to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + at, z, mask=inside)
    _keep_tile_moments(z.to(tl.float32), inside, part_ptr, places, tiles, WIDTH, ROWS)


@triton.jit
def _join(part_ptr, moments_ptr, places, tiles, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Moments of an image from those of its tiles."""
    image = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, TILES)
    here = index < tiles
    at = part_ptr + (image * tiles + index) * 2
    mean = tl.load(at, mask=here, other=0.0)
    squares = tl.load(at + 1, mask=here, other=0.0)
    count = tl.where(here, tl.minimum(places - index * ROWS, ROWS), 0).to(tl.float32)
    middle = tl.sum(count * mean, axis=0) / places
    squares += count * WIDTH * (mean - middle) * (mean - middle)
    tl.store(moments_ptr + image * 2, middle)
    tl.store(moments_ptr + image * 2 + 1, 1.0 / tl.sqrt(tl.sum(squares, axis=0) / WIDTH / places + single(eps)))


@triton.jit
def _apply(
    x_ptr, moments_ptr, w_ptr, b_ptr, h_ptr, places, tiles,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image, lane, at, inside = _tile(places, tiles, WIDTH, ROWS, BLOCK)
    mean, rate = tl.load(moments_ptr + image * 2), tl.load(moments_ptr + image * 2 + 1)
    w = tl.load(w_ptr + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    h = (x - mean) * (rate * w)[None, :] + b[None, :]
    tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sums(
    x_ptr, moments_ptr, w_ptr, dh_ptr, part_ptr, dw_ptr, db_ptr, places, strips,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a strip of BLOCK channels adds to Σ ∂h w and Σ ∂h w x̂ of its image, and to the gradients of w and b. Rows
    are summed at the end only, because warps wait for each other there."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    strip = (tl.program_id(0) // blocks).to(tl.int64)
    image, lane = strip // strips, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mean, rate = tl.load(moments_ptr + image * 2), tl.load(moments_ptr + image * 2 + 1)
    first = (strip % strips).to(tl.int32) * (ROWS * STEPS)
    db, dw = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(STEPS):
        row = first + step * ROWS + tl.arange(0, ROWS)
        at = (image * places + row)[:, None] * WIDTH + lane[None, :]
        inside = (row < places)[:, None] & (lane < WIDTH)[None, :]
        dh = tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
        db += dh
        dw += dh * (tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) - mean)
    db, dw = tl.sum(db, axis=0), tl.sum(dw, axis=0) * rate
    w = tl.load(w_ptr + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
    to = part_ptr + tl.program_id(0).to(tl.int64) * 2
    tl.store(to, tl.sum(db * w, axis=0))
    tl.store(to + 1, tl.sum(dw * w, axis=0))
    tl.store(dw_ptr + strip * WIDTH + lane, dw, mask=lane < WIDTH)
    tl.store(db_ptr + strip * WIDTH + lane, db, mask=lane < WIDTH)


@triton.jit
def _backward(
    x_ptr, moments_ptr, w_ptr, dh_ptr, part_ptr, dz_ptr, dx_ptr, places, tiles, parts,
    ADD: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image, lane, at, inside = _tile(places, tiles, WIDTH, ROWS, BLOCK)
    mean, rate = tl.load(moments_ptr + image * 2), tl.load(moments_ptr + image * 2 + 1)
    index = tl.arange(0, PARTS)
    part = part_ptr + (image * parts + index) * 2
    pull = tl.sum(tl.load(part, mask=index < parts, other=0.0), axis=0) / places / WIDTH
    turn = tl.sum(tl.load(part + 1, mask=index < parts, other=0.0), axis=0) / places / WIDTH
    w = tl.load(w_ptr + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dx = rate * (dh * w[None, :] - pull - (x - mean) * rate * turn)
    if ADD:
        dx += tl.load(dz_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_backward(
    y_ptr, gamma_ptr, keep_ptr, dz_ptr, dy_ptr, dgamma_ptr, places, tiles,
    KEEP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image, lane, at, inside = _tile(places, tiles, WIDTH, ROWS, BLOCK)
    gamma = tl.load(gamma_ptr + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
    dz = tl.load(dz_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if KEEP:
        dz *= tl.load(keep_ptr + image).to(tl.float32)
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dy_ptr + at, (gamma[None, :] * dz).to(dy_ptr.dtype.element_ty), mask=inside)
    program = tl.program_id(0).to(tl.int64)
    tl.store(dgamma_ptr + program * WIDTH + lane, tl.sum(dz * y, axis=0), mask=lane < WIDTH)


class Tiles:
    """How a map (B, ..., C) is cut into tiles: `grid` has one program for each, those of an image side by side."""

    def __init__(self, x: Tensor) -> None:
        self.images, self.width = x.shape[0], x.shape[-1]
        self.places = math.prod(x.shape[1:-1])
        self.rows = tile_rows(self.width)
        self.count = triton.cdiv(self.places, self.rows)
        self.grid = (self.images * self.count,)
        (_, block), warps = tile(self.rows, self.width)
        self.given = {"places": self.places, "tiles": self.count, "WIDTH": self.width, "ROWS": self.rows}
        # On an H200 eight warps take twice as long as four where a tile is summed up: they wait for each other.
        self.given |= {"BLOCK": block, "num_warps": min(4, warps)}
        self.all = triton.next_power_of_2(self.count)

    def parts(self, like: Tensor, *columns: int) -> list[Tensor]:
        """Room in float32 for numbers that every tile gives."""
        return [like.new_empty(*self.grid, column, dtype=torch.float32) for column in columns]


def _joined(tiles: Tiles, part: Tensor, eps: float) -> Tensor:
    """Moments (B, 2) of the images from those of the tiles."""
    moments = part.new_empty(tiles.images, 2)
    sizes = {"WIDTH": tiles.width, "ROWS": tiles.rows, "TILES": tiles.all}
    wrap_triton(_join)[(tiles.images,)](part, moments, tiles.places, tiles.count, eps, num_warps=1, **sizes)
    return moments


@operator
def image_moments(x: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    tiles = Tiles(x)
    (part,) = tiles.parts(x, 2)
    wrap_triton(_tile_moments)[tiles.grid](x, part, **tiles.given)
    return _joined(tiles, part, eps)


@image_moments.register_fake
def _(x, eps):
    return x.new_empty(x.shape[0], 2, dtype=torch.float32)


def _no_gradient(ctx, grad):
    """The gradient through the moments is part of the norm's own."""
    return None, None


image_moments.register_autograd(_no_gradient)


@operator
def image_norm(x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    tiles, h = Tiles(x), torch.empty_like(x, dtype=dtype)
    wrap_triton(_apply)[tiles.grid](x, moments, weight, bias, h, **tiles.given)
    return h, _valueless(x, weight)


def _valueless(x: Tensor, weight: Tensor) -> Tensor:
    """Of the shape of x, but one place in memory."""
    return x.new_empty((), dtype=torch.promote_types(x.dtype, weight.dtype)).expand(x.shape)


@image_norm.register_fake
def _(x, moments, weight, bias, dtype):
    return x.new_empty(x.shape, dtype=dtype), _valueless(x, weight)


def norm_backward(
    x: Tensor, moments: Tensor, weight: Tensor, dh: Tensor, dz: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; `dz` is what reaches x beside the norm."""
    tiles, dx = Tiles(x), torch.empty_like(x)
    block = min(_STRIP["BLOCK"], triton.next_power_of_2(tiles.width))
    strips, blocks = triton.cdiv(tiles.places, _STRIP["ROWS"] * _STRIP["STEPS"]), triton.cdiv(tiles.width, block)
    part = x.new_empty(tiles.images, strips * blocks, 2, dtype=torch.float32)
    dw, db = (x.new_empty(tiles.images * strips, tiles.width, dtype=torch.float32) for _ in range(2))
    sizes = _STRIP | {"WIDTH": tiles.width, "BLOCK": block}
    wrap_triton(_sums)[(part.shape[0] * part.shape[1],)](
        x, moments, weight, dh, part, dw, db, tiles.places, strips, **sizes
    )
    kinds = {"ADD": dz is not None, "PARTS": triton.next_power_of_2(part.shape[1])}
    wrap_triton(_backward)[tiles.grid](
        x, moments, weight, dh, part, x if dz is None else dz, dx, parts=part.shape[1], **kinds, **tiles.given
    )
    return dx, dw.sum(dim=0).to(weight.dtype), db.sum(dim=0).to(weight.dtype)


@operator
def image_norm_backward(
    x: Tensor, moments: Tensor, weight: Tensor, dh: Tensor, dz: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return norm_backward(x.contiguous(), moments, weight, dh.contiguous(), None if dz is None else dz.contiguous())


@image_norm_backward.register_fake
def _(x, moments, weight, dh, dz):
    return x.new_empty(x.shape), torch.empty_like(weight), torch.empty_like(weight)


def _norm_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # nobody need use the second result, and zeros for it would be a map of them
    ctx.save_for_backward(*inputs[:3])


def _norm_gradient(ctx, dh, dz):
    x, *others = ctx.saved_tensors
    if dh is None:
        return None if dz is None else dz.to(x.dtype), None, None, None, None
    dx, dw, db = torch.ops.leafward.image_norm_backward(x, *others, dh, dz)
    return dx, None, dw, db, None


image_norm.register_autograd(_norm_gradient, setup_context=_norm_setup)


@operator
def scaled_add(
    x: Tensor, y: Tensor, gamma: Tensor, keep: Tensor | None, eps: float, stead: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, y = x.contiguous(), y.contiguous()
    tiles, z = Tiles(x), torch.empty_like(x, dtype=torch.promote_types(x.dtype, gamma.dtype))
    (part,) = tiles.parts(x, 2)
    wrap_triton(_add)[tiles.grid](
        x, y, gamma, gamma if keep is None else keep, z, part, KEEP=keep is not None, **tiles.given
    )
    return z, _joined(tiles, part, eps)


@scaled_add.register_fake
def _(x, y, gamma, keep, eps, stead):
    z = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, gamma.dtype))
    return z, x.new_empty(x.shape[0], 2, dtype=torch.float32)


@operator
def scaled_add_backward(y: Tensor, gamma: Tensor, keep: Tensor | None, dz: Tensor) -> tuple[Tensor, Tensor]:
    y, dz = y.contiguous(), dz.contiguous()
    tiles, dy = Tiles(y), torch.empty_like(y)
    (dgamma,) = tiles.parts(y, tiles.width)
    wrap_triton(_add_backward)[tiles.grid](
        y, gamma, gamma if keep is None else keep, dz, dy, dgamma, KEEP=keep is not None, **tiles.given
    )
    return dy, dgamma.sum(dim=0).to(gamma.dtype)


@scaled_add_backward.register_fake
def _(y, gamma, keep, dz):
    return y.new_empty(y.shape), torch.empty_like(gamma)


def _add_setup(ctx, inputs, output) -> None:
    x, y, gamma, keep, _, stead = inputs
    ctx.x_type, ctx.stead = x.dtype, stead is not None
    ctx.save_for_backward(y, gamma, keep)


def _add_gradient(ctx, dz, _):
    dy, dgamma = torch.ops.leafward.scaled_add_backward(*ctx.saved_tensors, dz)
    own, instead = (None, dz) if ctx.stead else (dz.to(ctx.x_type), None)
    return own, dy, dgamma, None, None, instead


scaled_add.register_autograd(_add_gradient, setup_context=_add_setup)
