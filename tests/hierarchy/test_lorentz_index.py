"""The index against brute force in float64, on points spread like a taxonomy at three radii."""

import faiss
import numpy as np
import pytest
import torch

from leafward.errors import DataError, LeafwardError, UsageError
from leafward.geometry import Lorentz, PoincareBall, lorentz
from leafward.hierarchy import LorentzIndex, Taxonomy, stores
from retrieval import exact, queries_near, recall, taxonomy_like

from . import hierarchy_oracles as oracles

ROWS, WIDTH = 6000, 16
RADII = (0.9, 1.5, 4.5)


def scene(radius: float, c: float = 1.0, rows: int = ROWS):
    manifold = Lorentz(c)
    v = taxonomy_like(rows, WIDTH, radius)
    return manifold, manifold.expmap0(v), manifold.expmap0(queries_near(v, 200))


@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_recall_at_ten(kind, radius):
    manifold, points, queries = scene(radius, c=0.7)
    hits = LorentzIndex(manifold, points, kind=kind).search(queries, 10)
    truth = exact(manifold, points, queries)
    assert recall(hits.ids, truth) >= 0.99
    expected = manifold.dist(queries.double()[:, None], points.double()[hits.ids])
    torch.testing.assert_close(hits.distances.double(), expected, rtol=1e-4, atol=1e-5)
    assert (hits.distances.diff(dim=1) >= 0).all()


@pytest.mark.parametrize("radius", RADII)
def test_graph_search_would_fail_and_flat_does_not(radius):
    """faiss's HNSW with inner product is built with time unflipped and finds few of the neighbours."""
    manifold, points, queries = scene(radius)
    truth = exact(manifold, points, queries)
    graph = faiss.IndexHNSWFlat(WIDTH + 1, 32, faiss.METRIC_INNER_PRODUCT)
    graph.add(points.numpy())
    found = graph.search(stores.probes(queries[:, 1:], 1.0), 10)[1]
    assert recall(found, truth) < 0.9 < recall(LorentzIndex(manifold, points).search(queries).ids, truth)


def test_general_points_are_found_from_far_out(monkeypatch):
    """Points near the origin are among the neighbours of all, in cells near to few: without the core they are lost."""
    manifold = Lorentz(1.0)
    v = taxonomy_like(20_000, 32, 9.0)
    points, queries = manifold.expmap0(v), manifold.expmap0(queries_near(v, 100))
    truth = exact(manifold, points, queries)
    assert recall(LorentzIndex(manifold, points, kind="ivf").search(queries).ids, truth) >= 0.99
    monkeypatch.setattr(stores, "CORE", 0)
    assert recall(LorentzIndex(manifold, points, kind="ivf").search(queries).ids, truth) < 0.95


def test_half_storage_keeps_what_differs():
    """At a small radius t ≈ 1/√c fills float16's bits; without that constant the order survives."""
    manifold, points, queries = scene(0.05)
    truth = exact(manifold, points, queries)
    plain = faiss.IndexScalarQuantizer(WIDTH + 1, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
    plain.add(points.numpy())
    with_constant = recall(plain.search(stores.probes(queries[:, 1:], 1.0), 10)[1], truth)
    without = recall(LorentzIndex(manifold, points, storage="float16").search(queries).ids, truth)
    assert without >= 0.98
    assert without > with_constant + 0.1


@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_half_storage_recall(kind):
    manifold, points, queries = scene(1.5)
    index = LorentzIndex(manifold, points, kind=kind, storage="float16")
    assert recall(index.search(queries).ids, exact(manifold, points, queries)) >= 0.98


def test_ranking_again_resolves_what_the_inner_product_cannot():
    """Far out, neighbours at distances of 1e-4 to 1e-2 have equal float32 products; the distance tells them apart."""
    manifold = Lorentz(1.0)
    centre = manifold.expmap0(torch.tensor([[5.0, 0.0, 0.0]], dtype=torch.float64))
    steps = torch.logspace(-3, -1, 30, dtype=torch.float64)[torch.randperm(30)]
    u = torch.zeros(30, 3, dtype=torch.float64)
    u[:, 1] = steps
    points = manifold.expmap(centre, manifold.transport0(centre, u))
    hits = LorentzIndex(manifold, points).search(centre, 30)
    assert hits.ids[0].tolist() == steps.argsort().tolist()


def test_centres_equal_the_lorentz_centroid():
    space = torch.randn(60, 5, dtype=torch.float64) * 3
    group = torch.arange(60) % 4
    found = stores.centres(stores.group_sums(space, group, 4, 0.3), 0.3)
    expected = torch.stack([lorentz.centroid(space[group == g], None, 0.3) for g in range(4)])
    torch.testing.assert_close(found, expected)


def test_filters():
    manifold, points, queries = scene(1.5, rows=800)
    tax = oracles.random_taxonomy(np.random.default_rng(0), 30, dag=True)
    nodes = np.random.default_rng(1).integers(0, 30, 800)
    for kind in ("flat", "ivf"):
        index = LorentzIndex(manifold, points, kind=kind, taxonomy=tax, nodes=nodes)
        node = int(np.argsort(tax.height)[-4])
        below = np.flatnonzero(np.isin(nodes, tax.under(node)))
        truth = torch.from_numpy(below)[exact(manifold, points[below], queries, 5)]
        assert recall(index.search(queries, 5, under=tax.names[node]).ids, truth) >= 0.99
        assert recall(index.search(queries, 5, within=below).ids, truth) >= 0.99
        few = index.search(queries, 5, within=[3, 4], under=int(nodes[3]))
        assert set(few.ids.unique().tolist()) <= {-1, 3, 4}
        assert torch.isinf(few.distances[few.ids == -1]).all()
        assert (index.search(queries, 2, within=[]).ids == -1).all()
    with pytest.raises(UsageError, match="'nobody' is not a node"):
        index.search(queries, under="nobody")
    with pytest.raises(UsageError, match="800 is not in the index"):
        index.search(queries, within=[800])
    with pytest.raises(UsageError, match="needs a taxonomy"):
        LorentzIndex(manifold, points).search(queries, under=3)


def planted(rows: int = 2000):
    """Points about the leaves of a tree that lies in the space as it should: three levels, eight ways each."""
    manifold = Lorentz(1.0)
    v = taxonomy_like(1 + 8 + 64 + 512, 16, 4.0)
    names = ["r"] + [f"{i}" for i in range(584)]
    pairs = [("r", None)] + [(names[i], names[(i - 1) // 8]) for i in range(1, 585)]
    tax = Taxonomy.from_edges(pairs)
    for i in range(1, 585):  # children about their parents
        v[i] = v[(i - 1) // 8] + torch.randn(16, generator=torch.Generator().manual_seed(i)) * (0.4 if i > 72 else 0.7)
    rng = np.random.default_rng(0)
    leaf = rng.integers(73, 585, rows)
    leaf[:5] = 3  # some hang on an inner node
    jitter = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0)) * 0.05
    return manifold, tax, tax.ids([names[i] for i in leaf]), manifold.expmap0(v[leaf] + jitter)


def test_coarse_to_fine():
    manifold, tax, nodes, points = planted()
    index = LorentzIndex(manifold, points, taxonomy=tax, nodes=nodes)
    queries = points[:100]
    truth = exact(manifold, points, queries, 3)
    wide = index.coarse_to_fine(queries, 3, beam=600)
    assert recall(wide.ids, truth) >= 0.99  # nothing is left out
    torch.testing.assert_close(wide.distances, index.search(queries, 3).distances, rtol=1e-4, atol=1e-5)
    narrow = recall(index.coarse_to_fine(queries, 3, beam=4).ids, truth)
    assert 0.6 < narrow <= 1.0
    alone = LorentzIndex(manifold, points[:2], taxonomy=tax, nodes=nodes[:2]).coarse_to_fine(queries[:1], 3)
    assert sorted(alone.ids[0].tolist()) == [-1, 0, 1]


@pytest.mark.parametrize("radius", RADII)
def test_entailment_equals_the_cone(radius):
    manifold, generator = Lorentz(0.8), torch.Generator().manual_seed(0)
    v = torch.nn.functional.normalize(torch.randn(20, 1, WIDTH, generator=generator), dim=-1) * radius / 3
    outwards = 1.0 + 2.0 * torch.rand(20, 80, 1, generator=generator)
    aside = 0.01 * radius * torch.randn(20, 80, WIDTH, generator=generator)
    points = manifold.expmap0((outwards * v + aside).flatten(0, 1))
    index = LorentzIndex(manifold, points)
    concepts = manifold.expmap0(torch.cat([v[:, 0], torch.zeros(1, WIDTH)]))
    hits = index.entailed(concepts, aperture=0.2)
    for x, (ids, distances) in zip(concepts.double(), hits, strict=True):
        angle, width = manifold.exterior_angle(x, points.double()), manifold.half_aperture(x, 0.2)
        inside = angle <= width
        unsure = (angle - width).abs() < 1e-3  # float32 may decide either way
        mask = torch.zeros(len(points), dtype=torch.bool)
        mask[ids] = True
        assert (mask == inside)[~unsure].all()
        assert (distances.diff() >= 0).all()
    assert len(hits[-1].ids) == len(points)
    assert any(1 < len(hit.ids) < len(points) for hit in hits)
    with pytest.raises(UsageError, match="aperture must be positive, got 0"):
        index.entailed(concepts, aperture=0)


@pytest.mark.parametrize("kind", ["flat", "ivf"])
@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_add_remove_save_load(tmp_path, kind, storage):
    manifold, points, queries = scene(1.5, c=2.0, rows=900)
    tax = oracles.random_taxonomy(np.random.default_rng(0), 20, dag=True)
    nodes = np.random.default_rng(1).integers(0, 20, 900)
    settings = {"kind": kind, "storage": storage, "taxonomy": tax}
    index = LorentzIndex(manifold, points[:600], ids=1000 + np.arange(600), nodes=nodes[:600], **settings)
    index.add(points[600:], nodes=nodes[600:])
    assert index.ids[-1] == 1899
    gone = 1000 + np.arange(0, 900, 3)
    index.remove(gone)
    assert len(index) == 600
    kept = np.flatnonzero(np.arange(900) % 3 != 0)
    truth = 1000 + torch.from_numpy(kept)[exact(manifold, points[kept], queries)]
    hits = index.search(queries)
    assert recall(hits.ids, truth) >= 0.98
    path = tmp_path / "catalogue.index"
    index.save(path)
    back = LorentzIndex.load(path)
    assert repr(back) == repr(index)
    assert [file.name for file in tmp_path.iterdir()] == ["catalogue.index"]
    for one, other in zip(back.search(queries), hits, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(back.search(queries, under=3).ids, index.search(queries, under=3).ids)
    assert back.taxonomy is not None
    assert back.taxonomy.names == tax.names
    back.add(points[:1], ids=[1000], nodes=[0])
    assert back.search(points[:1], 1).ids.item() == 1000


def test_everything_can_be_removed():
    manifold, points, queries = scene(0.9, rows=50)
    index = LorentzIndex(manifold, points, taxonomy=Taxonomy.from_nested({"a": ["b"]}), nodes=["b"] * 50)
    index.remove(index.ids)
    assert len(index) == 0
    assert (index.search(queries, 3).ids == -1).all()
    assert [len(hit.ids) for hit in index.entailed(queries[:2])] == [0, 0]
    with pytest.raises(UsageError, match="ids: 3 is not in the index"):
        index.remove([3])
    assert (index.coarse_to_fine(queries, 3).ids == -1).all()
    index.add(points, nodes=["b"] * 50)
    assert index.search(points[:1], 1).ids.item() == 0
    assert index.search(queries[:0], 3).ids.shape == index.coarse_to_fine(queries[:0], 3).ids.shape == (0, 3)
    assert index.entailed(queries[:0]) == []


@pytest.mark.parametrize("name", ["ids", "nodes", "cell"])
def test_damaged_files_are_refused(tmp_path, name):
    """A number that faiss would take for a place in memory must not get that far."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    manifold, points, _ = scene(0.9, rows=50)
    LorentzIndex(manifold, points, kind="ivf").save(tmp_path / "good")
    with safe_open(tmp_path / "good", "pt") as file:
        tensors, header = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    for damaged in (tensors[name][:-1], tensors[name] * 0 - 7, tensors[name] * 0 + 1000):
        if name == "ids" and damaged.min() == 1000:
            continue  # any number that is not negative may be an id
        save_file({**tensors, name: damaged.contiguous()}, tmp_path / "bad", header)
        with pytest.raises(DataError, match=f"damaged index: '{name}'"):
            LorentzIndex.load(tmp_path / "bad")


def test_bad_input_is_refused(tmp_path):
    manifold, points, queries = scene(0.9, rows=50)
    index = LorentzIndex(manifold, points)
    refused = {
        "manifold must be a Lorentz, got PoincareBall": lambda: LorentzIndex(PoincareBall(1.0), points),
        "not on the hyperboloid of c=2": lambda: LorentzIndex(Lorentz(2.0), points),
        r"queries: row 0 is not on the hyperboloid": lambda: index.search(torch.randn(2, WIDTH + 1)),
        r"queries must be .* \(N, 17\), got \(2, 16\)": lambda: index.search(queries[:2, 1:]),
        "row 0 is not on the hyperboloid.*nan": lambda: index.add(points * float("nan")),
        "kind must be one of flat, ivf, got 'hnsw'": lambda: LorentzIndex(manifold, points, kind="hnsw"),
        "storage must be one of": lambda: LorentzIndex(manifold, points, storage="int8"),
        "lists must lie between 1 and": lambda: LorentzIndex(manifold, points, kind="ivf", lists=51),
        "lists belongs to": lambda: LorentzIndex(manifold, points, lists=5),
        "at least one point": lambda: LorentzIndex(manifold, points[:0]),
        "k must be a whole number ≥ 1, got 0": lambda: index.search(queries, 0),
        "probes must be": lambda: index.search(queries, probes=0),
        "ids: 7 is taken": lambda: index.add(points[:1], ids=[7]),
        "ids: 90 is taken": lambda: index.add(points[:2], ids=[90, 90]),
        "ids must be 2 numbers": lambda: index.add(points[:2], ids=[90]),
        "ids must be whole numbers": lambda: index.add(points[:1], ids=[9.5]),
        "nodes needs a taxonomy": lambda: index.add(points[:1], nodes=["a"]),
        "does not fit storage='float16'": lambda: LorentzIndex(
            manifold, manifold.expmap0(torch.full((1, 4), 7.0)), storage="float16"
        ),
    }
    for message, call in refused.items():
        with pytest.raises(UsageError, match=message):
            call()
    assert len(index) == 50  # a refused addition leaves nothing behind
    with pytest.raises(UsageError, match=r"nodes must name one node .* got none"):
        LorentzIndex(manifold, points, taxonomy=Taxonomy.from_nested({"a": None}))
    (tmp_path / "foreign").write_bytes(b"\x00" * 64)
    for path in (tmp_path / "foreign", tmp_path / "absent"):
        with pytest.raises(DataError, match="not an index"):
            LorentzIndex.load(path)


def test_missing_faiss_is_named(monkeypatch):
    import sys

    manifold, points, _ = scene(0.9, rows=5)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(LeafwardError, match=r"leafward\[search\]"):
        LorentzIndex(manifold, points)


def test_points_and_nodes_by_id():
    manifold, points, _ = scene(0.9, rows=4)
    tax = Taxonomy.from_nested({"a": ["b"]})
    index = LorentzIndex(manifold, points, ids=[7, 3, 9, 1], taxonomy=tax, nodes=["b", "a", "a", "b"])
    torch.testing.assert_close(index.points([9, 7]), points[[2, 0]])
    assert [tax.names[node] for node in index.nodes([1, 3])] == ["b", "a"]
    assert index.width == WIDTH
    assert LorentzIndex(manifold, points).nodes([0]).tolist() == [-1]
    with pytest.raises(UsageError, match="ids: 2 is not in the index"):
        index.points([2])
