"""The shared memory that kernels take, by the compiler for a device that need not be there, as a program.

python kernels_memory_check.py
"""

import torch
from absent_device import pretend
from triton.runtime.jit import JITFunction

import leafward.systems.hcformer.kernels  # noqa: F401  (provides its operators)
from leafward.nn import kernels

TAKEN: list[int] = []
"""Bytes of every kernel that was launched."""


def compile_only(self, *arguments, warmup, compiled=JITFunction.run, **options):
    TAKEN.append(compiled(self, *arguments, warmup=True, **options).metadata.shared)


def clusters() -> None:
    """`cluster_fits` counts with seven times tokens · (channels + 16)."""
    for side, tokens, d, dtype in (
        (7, 64, 32, torch.float32),
        (7, 64, 64, torch.bfloat16),
        (16, 256, 32, torch.bfloat16),
    ):
        e, out = torch.zeros(2, side, side, 4 * d, dtype=dtype), torch.zeros(2, side, side, 2 * d, dtype=dtype)
        scale, table, sums = torch.ones(2), torch.zeros(2, 4, side, 4, side), torch.zeros(2, 2, side, side)
        windows = torch.zeros(2, side * side + 16, 4 * d, dtype=dtype)
        TAKEN.clear()
        torch.ops.leafward.cluster_patches(e, scale, table, side, side, 4)
        torch.ops.leafward.cluster_patches_backward(e, scale, table, out, sums, side, side, 4)
        torch.ops.leafward.cluster_windows(windows, scale, scale, table)
        torch.ops.leafward.cluster_windows_backward(windows, scale, scale, table, out.flatten(1, 2))
        assert max(TAKEN) <= 7 * tokens * (d + 16) * dtype.itemsize, (side, d, dtype, TAKEN)


def mlps() -> None:
    """`mlp_fits` counts with 1 KiB a channel."""
    for width in (32, 128):
        x, narrow, wide = torch.zeros(2, 8, 8, width), torch.ones(width), torch.ones(64)
        weights = narrow, narrow, torch.zeros(64, width), wide, torch.zeros(width, 64), narrow, narrow
        given = x, torch.ones(2, 2), *weights, None, torch.bfloat16
        TAKEN.clear()
        torch.ops.leafward.normed_mlp(*given)
        torch.ops.leafward.normed_mlp_backward(*given, x)
        assert max(TAKEN) <= 1024 * width, (width, TAKEN)


SHAPES = (  # heads, latent, rope, value, type
    (12, 256, 32, 60, torch.bfloat16),
    (2, 200, 64, 128, torch.float32),
    (16, 1024, 64, 16, torch.bfloat16),
)


def decoding() -> None:
    """`decoding_fits` counts with `kernels.decoding_memory`."""
    for heads, latent, rope, value, dtype in SHAPES:
        rows = heads * (16 + value)
        column, weight, bias = (torch.zeros(rows, n, dtype=dtype) for n in (1, latent, 1))
        query, point = (
            torch.zeros(1, 1, heads * (16 + rope), dtype=dtype),
            torch.zeros(1, 1, latent + rope, dtype=dtype),
        )
        t, table, one = torch.ones(1, 1, 1), (torch.ones(1, rope // 2), torch.ones(1, rope // 2)), torch.ones(1)
        expansion, out = (weight, column, bias), (torch.zeros(512, heads * value, dtype=dtype), query[0, 0], bias)
        TAKEN.clear()
        asked = kernels.latent_ask(
            (query, t, query.mT), (point, t, point.mT), point, expansion, table, one, heads, 16, 1e-6, 1.0
        )
        memory = torch.zeros(1, 1, 9, latent + rope, dtype=dtype), torch.zeros(1, 1, 9, 1 + 2 * heads, dtype=dtype)
        kernels.latent_recall(asked[:2], memory, torch.zeros(1, dtype=torch.long), None, None, expansion, out, 16, 1.0)
        assert len(TAKEN) == 4
        assert max(TAKEN) <= kernels.decoding_memory(latent, rope, dtype), (latent, dtype, TAKEN)


if __name__ == "__main__":
    pretend()
    JITFunction.run = compile_only
    kernels.use("triton")
    for check in (clusters, mlps, decoding):
        check()
        print(check.__name__, "ok", flush=True)
