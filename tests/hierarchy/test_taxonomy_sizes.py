"""Taxonomies of a million nodes or edges: what is asked about pairs costs memory by the graph, not by its depth."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from leafward.hierarchy import Taxonomy, ancestry, metrics

from . import hierarchy_oracles as oracles

MEBIBYTE = 1 << 20


def chain(count: int) -> Iterator[tuple[str, str | None]]:
    return ((str(i), str(i - 1) if i else None) for i in range(count))


def dense(count: int) -> Iterator[tuple[str, str | None]]:
    """Every node under every node before it."""
    yield "0", None
    yield from ((str(i), str(j)) for i in range(1, count) for j in range(i))


def peak(job) -> tuple[object, float]:
    """What a job gives, and the most MiB that it held."""
    tracemalloc.start()
    try:
        return job(), tracemalloc.get_traced_memory()[1] / MEBIBYTE
    finally:
        tracemalloc.stop()


def test_a_chain_is_no_deeper_than_any_tree():
    tax = Taxonomy.from_edges(chain(3000))
    a, b = np.random.default_rng(0).integers(0, 3000, (2, 100_000))
    found, used = peak(lambda: tax.distance(a, b))
    assert (found == abs(a - b)).all()
    assert (tax.lca(a, b) == np.minimum(a, b)).all()
    assert (tax.entails(a, b) == (a <= b)).all()
    assert used < 100
    report, used = peak(lambda: metrics.evaluate(tax, a, b))
    assert report.tree_induced_error == abs(a - b).mean()
    assert report.level_accuracy[2000] == ((a >= 2000) & (b >= 2000)).sum() / (b >= 2000).sum()
    assert used < 100
    assert tax.under(2990).tolist() == list(range(2990, 3000))
    assert "ancestors" not in vars(tax)  # the matrix was never made


def test_a_dense_dag_holds_no_more_than_its_ancestors():
    tax = Taxonomy.from_edges(dense(400))
    a, b = np.random.default_rng(0).integers(0, 400, (2, 2000))
    found, used = peak(lambda: tax.distance(a, b))
    assert (found == (a != b)).all()
    assert used < 300
    assert tax.ancestor_counts.tolist() == list(range(1, 401))


@pytest.mark.parametrize("entries", [1, 40])
def test_searching_and_keeping_give_the_same(monkeypatch, entries):
    """Where the ancestors of all nodes are too many to be kept, those asked for are searched, in parts of any size."""
    rng = np.random.default_rng(1)
    tax = oracles.random_taxonomy(rng, 60, True)
    edges = list(tax.edges())
    a, b = rng.integers(0, 60, (2, 500))
    expected = tax.distance(a, b), tax.lca(a, b), tax.entails(a, b), metrics.evaluate(tax, a, b)
    monkeypatch.setattr("leafward.hierarchy.taxonomy.KEPT", 10)
    monkeypatch.setattr(ancestry, "ENTRIES", entries)
    monkeypatch.setattr(ancestry, "CELLS", 400)
    again = Taxonomy.from_edges([(child, parent or None) for child, parent in edges])
    assert again._kept is None
    for old, new in zip(expected[:3], (again.distance(a, b), again.lca(a, b), again.entails(a, b)), strict=True):
        assert (old == new).all()
    monkeypatch.setattr("leafward.hierarchy.taxonomy.KEPT", 1_000_000)
    assert metrics.evaluate(again, a, b) == expected[3]


def test_a_cycle_of_many_is_told_in_a_line():
    with pytest.raises(Exception, match="cycle: ") as told:
        Taxonomy.from_edges([(str(i), str((i + 1) % 50_000)) for i in range(50_000)])
    assert len(str(told.value)) < 500


MILLIONS = """
import resource, sys, numpy as np
from leafward.hierarchy import Taxonomy
tax = Taxonomy.load(sys.argv[1])
a, b = np.random.default_rng(0).integers(0, len(tax), (2, 100_000))
tax.distance(a, b), tax.lca(a[:1000], b[:1000])
print(len(tax), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def lines(kind: str) -> Iterator[str]:
    million, draw = 1_000_000, np.random.default_rng(0)
    if kind == "chain":
        yield from (f"n{i},{f'n{i - 1}' if i else ''}\n" for i in range(million))
    elif kind == "star":
        yield "root,\n"
        yield from (f"n{i},root\n" for i in range(million))
    elif kind == "dag":
        yield "n0,\nn1,n0\n"
        for i, (u, v) in enumerate(
            (draw.random((million // 2, 2)) * np.arange(2, million // 2 + 2)[:, None]).astype(int)
        ):
            yield from (f"n{i + 2},n{j}\n" for j in {int(u), int(v)})
    else:
        yield "n0,\n"
        yield from (f"n{i},n{j}\n" for i in range(1, 1415) for j in range(i))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["chain", "star", "dag", "dense dag"])
def test_a_million_nodes_or_edges_within_two_gigabytes_and_a_minute(kind, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("child,parent\n" + "".join(lines(kind)))
    began = os.times()
    done = subprocess.run([sys.executable, "-c", MILLIONS, path], capture_output=True, text=True, timeout=600)
    used = os.times()
    assert done.returncode == 0, done.stderr
    nodes, kibibytes = map(int, done.stdout.split())
    assert nodes >= 1415
    assert kibibytes / 2**20 < 2.0
    print(f"{kind}: {used.children_user - began.children_user:.0f} s of processor, {kibibytes / 2**20:.2f} GiB")
