"""A checkpoint of GPT-2 small's shapes: exact columns against bare products, sampled columns, Ricci curvature.

    python benchmarks/audit_checkpoint.py
    python benchmarks/audit_checkpoint.py --layers 1   # memory of a layer of 8192 × 28672, bfloat16

Weights are random. Seconds are of the processor (one process; set OMP_NUM_THREADS), memory is beyond the start.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from scipy.linalg import eigvalsh

from leafward.data.arrays import RowReader, rows_of_safetensors
from leafward.measure import distances, ricci, survey
from leafward.measure.moments import Rows, moments

BLOCK = (
    ("attn.c_attn", (768, 2304)),
    ("attn.c_proj", (768, 768)),
    ("mlp.c_fc", (768, 3072)),
    ("mlp.c_proj", (3072, 768)),
)
WIDE = (8192, 28672)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=int, default=0, help="names of one wide layer, for its memory, in place of all else"
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = wide(Path(folder), arguments.layers) if arguments.layers else gpt2(Path(folder), arguments.rounds)
    print(json.dumps(found, indent=2))


def gpt2(folder: Path, rounds: int) -> dict[str, object]:
    names = {f"h.{layer}.{name}.weight": shape for layer in range(12) for name, shape in BLOCK}
    names |= {"wte.weight": (50257, 768), "wpe.weight": (1024, 768)}
    generator = torch.Generator().manual_seed(0)
    save_file(
        {name: torch.randn(shape, generator=generator) for name, shape in names.items()}, folder / "m.safetensors"
    )
    reader = rows_of_safetensors(folder / "m.safetensors", "wte.weight")
    survey(torch.randn(100, 16), quick=True)  # libraries are loaded before the clock runs
    before = memory(reset=True)
    exact, whole = seconds(lambda: survey(folder, quick=True), rounds)
    peak = memory() - before
    bare, _ = seconds(lambda: products(reader), rounds)
    ours, _ = seconds(lambda: moments(Rows(reader, 50257), 4096, 0), rounds)
    row, _ = seconds(lambda: survey(torch.randn(4096, 768, generator=generator)), 1)
    points = torch.randn(5000, 256, generator=generator).numpy()
    neighbours, _ = distances.nearest(distances.euclidean(points), 10)
    edges = np.stack([np.repeat(np.arange(5000), 10), neighbours.ravel()], axis=1)
    curved, _ = seconds(lambda: ricci.neighbour_curvatures(neighbours, edges), rounds)
    return {
        "matrices": len(whole.rows),
        "exact columns, whole checkpoint, s": exact,
        "memory beyond the start, GB": peak / 2**30,
        "50257 × 768: three bare products and two spectra, s": bare,
        "50257 × 768: exact columns, s": ours,
        "50257 × 768: ratio": ours / bare,
        "4096 × 768: all columns with their nulls, s": row,
        "Ricci curvature of 50,000 edges of 5,000 points, s": curved,
    }


def products(reader: RowReader) -> None:
    """What cannot be spared: the rows are read twice, three m × m products are taken, and two spectra."""
    first, second = np.zeros((2, 768, 768)), np.zeros((768, 768))
    for _, block in Rows(reader, 50257).slices():
        first[0] += block.T @ block
        first[1] += block.T @ block
    for _, block in Rows(reader, 50257).slices():
        second += block.T @ block
    for gram in first:
        eigvalsh(gram.astype(np.float32), check_finite=False)


def wide(folder: Path, layers: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    layer = torch.empty(WIDE, dtype=torch.bfloat16)
    for start in range(0, WIDE[0], 512):
        layer[start : start + 512] = torch.randn(512, WIDE[1], generator=generator)
    save_file({"w": layer}, folder / "layer.safetensors")
    del layer
    reader = rows_of_safetensors(folder / "layer.safetensors", "w")
    before = memory(reset=True)
    began = time.process_time()
    for _ in range(layers):
        moments(Rows(reader, WIDE[0]), 4096, 0)
    return {
        "layers": layers,
        "s": time.process_time() - began,
        "peak, GB": memory() / 2**30,
        "beyond the start, GB": (memory() - before) / 2**30,
    }


def seconds(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """The least processor time of several rounds, and what the last one gave."""
    least, found = float("inf"), None
    for _ in range(rounds):
        began = time.process_time()
        found = work()
        least = min(least, time.process_time() - began)
    return least, found


def memory(reset: bool = False) -> float:
    """Peak resident bytes of this process, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * float(status.partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    main()
