"""Nearest neighbours among Lorentz points: build and query times and recall, beside faiss's plain indexes.

    python benchmarks/retrieval.py --rows 1000000 --width 64
    python benchmarks/retrieval.py --rows 20000 --queries 100        # seconds

Points are taxonomy-like: a random tree whose nodes drift from their parents, scaled to a maximal radius. The truth is
the float64 distance to every point. The plain inner-product indexes of faiss (flat, IVF, HNSW) hold the points as
they are, time flipped in the query; the graph of the last is built with time unflipped, which is why it fails.
Times are CPU seconds; with OMP_NUM_THREADS=1 they are those of one core. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor

from leafward.geometry import Lorentz
from leafward.hierarchy import LorentzIndex

K = 10
BRANCHING = 32


def taxonomy_like(rows: int, width: int, radius: float, seed: int = 0) -> Tensor:
    """Tangent vectors (rows, width) at the origin: node i hangs under a node near i/BRANCHING and drifts from it by
    a step that shrinks with depth; the longest has the given length."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.zeros(rows, width)
    first, count, step = 1, BRANCHING, 1.0
    while first < rows:
        last = min(rows, first + count)
        parent = (torch.arange(first, last) - 1) // BRANCHING
        v[first:last] = v[parent] + step * torch.randn(last - first, width, generator=generator) / width**0.5
        first, count, step = last, count * BRANCHING, 0.7 * step
    return v * (radius / v.norm(dim=1).max())


def queries_near(v: Tensor, count: int, seed: int = 1) -> Tensor:
    """Tangent vectors (count, width) of queries: points moved by 2 % of the largest radius."""
    generator = torch.Generator().manual_seed(seed)
    picked = v[torch.randint(len(v), (count,), generator=generator)]
    noise = torch.randn(picked.shape, generator=generator) / v.shape[1] ** 0.5
    return picked + 0.02 * float(v.norm(dim=1).max()) * noise


def exact(manifold: Lorentz, points: Tensor, queries: Tensor, k: int = K, block: int = 65536) -> Tensor:
    """The k nearest by float64 distance to every point, block by block: ids (B, k)."""
    best, ids = torch.empty(len(queries), 0, dtype=torch.float64), torch.empty(len(queries), 0, dtype=torch.int64)
    for first in range(0, len(points), block):
        gaps = manifold.cdist(queries.double(), points[first : first + block].double())
        near, place = torch.cat([best, gaps], dim=1).topk(k, largest=False)
        numbers = torch.arange(first, first + gaps.shape[1]).expand(len(queries), -1)
        best, ids = near, torch.cat([ids, numbers], dim=1).gather(1, place)
    return ids


def recall(found: Any, truth: Tensor) -> float:
    """Share of the true neighbours found: (B, k), (B, k)."""
    return float((torch.as_tensor(found)[:, :, None] == truth[:, None, :]).any(dim=1).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--radius", type=float, nargs="+", default=[0.9, 1.5, 4.5], help="largest tangent radius")
    parser.add_argument("--probes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--c", type=float, default=1.0)
    parser.add_argument("--hnsw", action="store_true", help="also the inner-product graph (minutes to build)")
    arguments = parser.parse_args()
    results = [measure(arguments, radius) for radius in arguments.radius]
    threads = faiss.omp_get_max_threads()
    print(json.dumps({**vars(arguments), "threads": threads, "cpus": os.cpu_count(), "results": results}, indent=2))


def measure(arguments: argparse.Namespace, radius: float) -> dict[str, Any]:
    """Every index on one set of points."""
    manifold = Lorentz(arguments.c)
    v = taxonomy_like(arguments.rows, arguments.width, radius)
    points, queries = manifold.expmap0(v), manifold.expmap0(queries_near(v, arguments.queries))
    (truth, seconds), table = timed(lambda: exact(manifold, points, queries)), {}
    table["brute force, float64"] = {"build_cpu_s": 0.0, "query_cpu_ms": 1e3 * seconds / len(queries), "recall": 1.0}

    def note(name: str, build_s: float, search: Callable[[], Any]) -> None:
        found, took = timed(search)
        each = 1e3 * took / len(queries)
        table[name] = {"build_cpu_s": build_s, "query_cpu_ms": each, "recall": recall(found, truth)}

    for storage in ("float32", "float16"):
        index, built = timed(lambda storage=storage: LorentzIndex(manifold, points, storage=storage))
        note(f"leafward flat, {storage}", built, lambda index=index: index.search(queries, K).ids)
    for storage in ("float32", "float16"):
        index, built = timed(lambda storage=storage: LorentzIndex(manifold, points, kind="ivf", storage=storage))
        for probes in arguments.probes:
            name = f"leafward ivf, {storage}, {probes} probes"
            note(name, built, lambda index=index, probes=probes: index.search(queries, K, probes=probes).ids)
    plain(arguments, points.numpy(), queries.numpy(), note)
    return {"radius": radius, "indexes": table}


def plain(arguments: argparse.Namespace, points: np.ndarray, queries: np.ndarray, note: Callable[..., None]) -> None:
    """faiss's own inner-product indexes: full points inside, flipped time in the query."""
    flipped = queries * np.array([-1.0] + [1.0] * arguments.width, np.float32)
    width, metric = points.shape[1], faiss.METRIC_INNER_PRODUCT
    flat = faiss.IndexFlatIP(width)
    note("faiss flat", timed(lambda: flat.add(points))[1], lambda: flat.search(flipped, K)[1])
    coarse = faiss.IndexFlatIP(width)
    ivf = faiss.IndexIVFFlat(coarse, width, max(1, round(len(points) ** 0.5)), metric)
    built = timed(lambda: (ivf.train(points), ivf.add(points)))[1]
    for probes in arguments.probes:
        ivf.nprobe = probes
        note(f"faiss ivf, {probes} probes", built, lambda: ivf.search(flipped, K)[1])
    if arguments.hnsw:
        graph = faiss.IndexHNSWFlat(width, 32, metric)
        note("faiss hnsw", timed(lambda: graph.add(points))[1], lambda: graph.search(flipped, K)[1])


def timed(job: Callable[[], Any]) -> tuple[Any, float]:
    """CPU seconds of this process over all its threads, which other work on the machine disturbs less than a clock."""
    began = time.process_time()
    result = job()
    return result, time.process_time() - began


if __name__ == "__main__":
    main()
