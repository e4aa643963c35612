"""``data index`` and ``--task search`` on folders of embeddings: right neighbours by name, wrong files named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from leafward.cli.dispatch import main
from leafward.errors import DataError, LeafwardError, UsageError
from leafward.geometry import Lorentz
from leafward.hierarchy import Taxonomy, metrics
from leafward.systems.taxonomy import evaluate_search
from leafward.systems.taxonomy import index as data_index

TREE = "child,parent\nanimal,\ndog,animal\ncat,animal\npoodle,dog\ncorgi,dog\ntabby,cat\n"
LABELS = ["poodle", "poodle", "corgi", "tabby", "tabby", "dog"]
NAMES = ["rex", "fido", "queenie", "tom", "misty", "some dog"]
QUIET = Console(quiet=True)


@pytest.fixture
def scene(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A taxonomy and a folder of six tangent vectors with names and labels."""
    (tmp_path / "tree.csv").write_text(TREE)
    folder = tmp_path / "vectors"
    folder.mkdir()
    vectors = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    np.save(folder / "embeddings.npy", vectors)
    (folder / "names.json").write_text(json.dumps(NAMES))
    (folder / "labels.csv").write_text("id,label\n" + "\n".join(f"{i},{label}" for i, label in enumerate(LABELS)))
    return tmp_path, vectors


def build(folder: Path, source: str | Path = "vectors", out: str = "index", **more):
    more = {"taxonomy": str(folder / "tree.csv"), **more}
    return data_index.run(data_index.Args(folder / source, folder / out, **more), QUIET)


def search(folder: Path, index: str = "index", **more):
    return evaluate_search.run(evaluate_search.Args(folder / index, **more), QUIET)


def names(result) -> list[list[str]]:
    return [[near["name"] for near in query["neighbours"]] for query in result["queries"]]


def by_distance(vectors: np.ndarray, query: np.ndarray, c: float = 1.0) -> list[str]:
    """Names by float64 distance, nearest first."""
    manifold = Lorentz(c)
    points, one = (manifold.expmap0(torch.from_numpy(np.atleast_2d(v)).double()) for v in (vectors, query))
    return [NAMES[i] for i in manifold.dist(one, points).argsort().tolist()]


@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_neighbours_by_name(scene, kind):
    folder, vectors = scene
    assert build(folder, kind=kind, c=0.5)["points"] == 6
    queries = vectors[:3] + 0.1
    np.save(folder / "queries.npy", queries)
    result = search(folder, queries=folder / "queries.npy", k=4, out=folder / "found.json")
    assert names(result) == [by_distance(vectors, query, 0.5)[:4] for query in queries]
    assert [query["query"] for query in result["queries"]] == ["0", "1", "2"]
    nodes = {near["name"]: near["node"] for query in result["queries"] for near in query["neighbours"]}
    assert nodes == {name: LABELS[NAMES.index(name)] for name in nodes}
    assert json.loads((folder / "found.json").read_text()) == {"evaluation": "Search", **result}


def test_search_like_an_item_leaves_it_out(scene):
    folder, vectors = scene
    build(folder)
    result = search(folder, like=("rex", "tom"), k=3)
    assert names(result) == [by_distance(vectors, vectors[i])[1:4] for i in (0, 3)]
    with pytest.raises(UsageError, match=r"--like 'toom' is not an item of .*index; did you mean 'tom'"):
        search(folder, like=("toom",))


def test_subtree_walk_and_cone(scene):
    folder, vectors = scene
    build(folder)
    dogs = [name for name, label in zip(NAMES, LABELS, strict=True) if label in ("dog", "poodle", "corgi")]
    found = names(search(folder, like=("tom",), under="dog"))[0]
    assert found == [name for name in by_distance(vectors, vectors[3]) if name in dogs]
    everything = names(search(folder, like=("tom",), coarse_to_fine=True, beam=9))[0]
    assert everything == by_distance(vectors, vectors[3])[1:]
    np.save(folder / "origin.npy", np.zeros((1, 4), np.float32))
    assert len(names(search(folder, queries=folder / "origin.npy", entailed=0.1))[0]) == 6
    with pytest.raises(UsageError, match=r"--under: 'dgo' is not a node.*did you mean 'dog'"):
        search(folder, like=("tom",), under="dgo")


def test_a_single_vector_is_one_query(scene):
    folder, vectors = scene
    build(folder, c=0.5)
    np.save(folder / "one.npy", vectors[2])
    (found,) = names(search(folder, queries=folder / "one.npy", k=3))
    assert found == by_distance(vectors, vectors[2], 0.5)[:3]
    np.save(folder / "cube.npy", vectors[None])
    with pytest.raises(DataError, match=r"cube.npy: expected one matrix"):
        search(folder, queries=folder / "cube.npy")
    np.savez(folder / "two.npz", first=vectors[0], second=vectors[1])
    with pytest.raises(DataError, match=r"two.npz: expected one matrix"):
        search(folder, queries=folder / "two.npz")


def test_the_page_draws_distances_by_rank(scene):
    folder, _ = scene
    build(folder)
    search(folder, like=("rex",), k=3, out=folder / "found")
    html = (folder / "found" / "report.html").read_text(encoding="utf-8")
    assert html.count("<svg ") == 1
    assert "one query in" in html
    search(folder, like=("rex", "tom"), k=1, out=folder / "found")
    html = (folder / "found" / "report.html").read_text(encoding="utf-8")
    assert "2 queries in" in html
    assert "<svg " not in html  # a single neighbour makes no curve


def test_scores_against_the_queries_nodes(scene):
    folder, vectors = scene
    build(folder)
    np.save(folder / "queries.npy", vectors)
    (folder / "true.txt").write_text("\n".join(LABELS))
    result = search(folder, queries=folder / "queries.npy", k=2, true=folder / "true.txt")
    ranked = [[near["node"] for near in query["neighbours"]] for query in result["queries"]]
    assert result["scores"] == metrics.evaluate(Taxonomy.from_csv(folder / "tree.csv"), ranked, LABELS).to_dict()
    assert result["scores"]["accuracy"] == 1.0
    (folder / "true.txt").write_text("poodle")
    with pytest.raises(DataError, match=r"true.txt: 1 labels for 6 queries"):
        search(folder, queries=folder / "queries.npy", true=folder / "true.txt")


def test_every_layout_of_embeddings_gives_the_same_index(scene):
    folder, vectors = scene
    build(folder)
    expected = names(search(folder, like=("rex",), k=5))[0]
    # one .npy for each item, in a folder for each label
    for name, label, vector in zip(NAMES, LABELS, vectors, strict=True):
        (folder / "folders" / label).mkdir(parents=True, exist_ok=True)
        np.save(folder / "folders" / label / f"{name}.npy", vector)
    build(folder, "folders", "by-folder")
    found = names(search(folder, "by-folder", like=("poodle/rex",), k=5))[0]
    assert found == [f"{LABELS[NAMES.index(name)]}/{name}" for name in expected]
    # one file, in bfloat16's company, with labels beside it
    save_file({"v": torch.from_numpy(vectors), "note": torch.zeros(3)}, folder / "v.safetensors")
    build(folder, "v.safetensors", "by-file", labels=folder / "vectors/labels.csv")
    assert names(search(folder, "by-file", like=("0",), k=5))[0] == [str(NAMES.index(name)) for name in expected]
    # Lorentz points and their space parts
    points = Lorentz(1.0).expmap0(torch.from_numpy(vectors))
    for kind, rows in {"points": points, "space": points[:, 1:]}.items():
        np.save(folder / f"{kind}.npy", rows.numpy())
        build(folder, f"{kind}.npy", kind, vectors=kind, labels=folder / "vectors/labels.csv")
        np.save(folder / "queries.npy", rows[:1].numpy())
        found = names(search(folder, kind, queries=folder / "queries.npy", k=6))[0]
        assert found == ["0", *(str(NAMES.index(name)) for name in expected)]


def test_without_a_taxonomy_and_with_names_that_are_nodes(scene):
    folder, vectors = scene
    np.save(folder / "plain.npy", vectors)
    build(folder, "plain.npy", "plain", taxonomy=None)
    assert names(search(folder, "plain", like=("0",), k=2))
    with pytest.raises(UsageError, match="--under needs an index with a taxonomy"):
        search(folder, "plain", like=("0",), under="dog")
    (folder / "nodes").mkdir()
    np.save(folder / "nodes/embeddings.npy", vectors)
    (folder / "nodes/names.txt").write_text("animal\ndog\ncat\npoodle\ncorgi\ntabby\n")
    build(folder, "nodes", "nodes-index")
    assert set(names(search(folder, "nodes-index", like=("poodle",), under="cat"))[0]) == {"cat", "tabby"}


def test_long_vectors_are_scaled_on_request(scene):
    """With a radius the queries are scaled by the index's factor, not by their own length."""
    folder, vectors = scene
    np.save(folder / "long.npy", 100 * vectors)
    with pytest.raises(DataError, match=r"long.npy: the longest vector has length .*--radius"):
        build(folder, "long.npy", "long", labels=folder / "vectors/labels.csv")
    scale = build(folder, "long.npy", "long", labels=folder / "vectors/labels.csv", radius=1.0)["scale"]
    assert scale * 100 * np.linalg.norm(vectors, axis=1).max() == pytest.approx(1.0)
    np.save(folder / "queries.npy", 100 * vectors[2:3])
    near = search(folder, "long", queries=folder / "queries.npy", k=1)["queries"][0]["neighbours"][0]
    assert near["name"] == "2"
    assert near["distance"] == pytest.approx(0, abs=1e-5)


def test_wrong_files_are_named(scene):
    folder, vectors = scene
    (folder / "few.txt").write_text("poodle\ncorgi\n")
    (folder / "typo.txt").write_text("\n".join([*LABELS[:5], "dgo"]))
    np.save(folder / "cube.npy", np.zeros((2, 2, 2)))
    np.save(folder / "nan.npy", np.full((3, 2), np.nan))
    np.save(folder / "words.npy", np.array([["a"]]))
    (folder / "empty").mkdir()
    (folder / "two").mkdir()
    np.save(folder / "two/embeddings.npy", vectors)
    np.savez(folder / "two/embeddings.npz", vectors)
    (folder / "ragged/poodle").mkdir(parents=True)
    np.save(folder / "ragged/poodle/a.npy", np.zeros(3))
    np.save(folder / "ragged/poodle/b.npy", np.zeros(4))
    np.save(folder / "off.npy", vectors)
    refused = {
        "no such file or folder: .*absent": lambda: build(folder, "absent"),
        r"few.txt: 2 labels for 6 vectors": lambda: build(folder, labels=folder / "few.txt"),
        r"typo.txt .*'dgo' is not a node.*did you mean 'dog'": lambda: build(folder, labels=folder / "typo.txt"),
        r"cube.npy: expected one matrix, found array \(2, 2, 2\)": lambda: build(folder, "cube.npy"),
        r"nan.npy: array: 3 rows hold a number": lambda: build(folder, "nan.npy"),
        r"words.npy: array must be a matrix of numbers": lambda: build(folder, "words.npy"),
        r"empty: holds neither embeddings": lambda: build(folder, "empty"),
        r"two: holds embeddings.npy and embeddings.npz": lambda: build(folder, "two"),
        r"b.npy: expected one vector \(3,\) as in .*a.npy, got shape \(4,\)": lambda: build(folder, "ragged"),
        r"off.npy: points: row 0 is not on the hyperboloid": lambda: build(
            folder, "off.npy", vectors="points", taxonomy=None
        ),
        r"no.csv": lambda: build(folder, taxonomy=str(folder / "no.csv")),
        r"holds no array 'x'": lambda: build(folder, array="x"),
        "c must be positive": lambda: build(folder, c=0.0),
        "radius must be positive": lambda: build(folder, radius=-1.0),
        "labels need --taxonomy": lambda: build(folder, taxonomy=None, labels=folder / "typo.txt"),
        "not an index that": lambda: search(folder, "vectors", like=("rex",)),
    }
    for message, call in refused.items():
        with pytest.raises(LeafwardError, match=message):
            call()
    build(folder)
    np.save(folder / "narrow.npy", vectors[:, :3])
    refused = {
        r"narrow.npy: vectors of 3 numbers, but the index .* was built from vectors of 4": {
            "queries": folder / "narrow.npy"
        },
        "give --queries FILE or --like": {},
        "k must be": {"like": ("rex",), "k": 0},
        "--entailed looks at the whole": {"like": ("rex",), "under": "dog", "entailed": 0.1},
        "not both": {"like": ("rex",), "coarse_to_fine": True, "entailed": 0.1},
    }
    for message, more in refused.items():
        with pytest.raises(LeafwardError, match=message):
            search(folder, **more)
    with pytest.raises(UsageError, match="holds an index; use --overwrite"):
        build(folder)
    build(folder, overwrite=True)
    (folder / "index/items.json").write_text('{"version": 1, "names": ["a"], "scale": 1, "vectors": "tangent"}')
    with pytest.raises(DataError, match="1 names for 6 points"):
        search(folder, like=("a",))


def test_command_line(scene, capsys):
    folder, _ = scene
    words = ["data", "index", str(folder / "vectors"), "--taxonomy", str(folder / "tree.csv")]
    assert main([*words, "--out", str(folder / "index")]) == 0
    words = ["evaluate", str(folder / "index"), "--task", "search", "--like", "rex", "--k", "2"]
    assert main([*words, "--coarse-to-fine"]) == 0
    shown = capsys.readouterr().out
    assert "rex:" in shown
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["queries"][0]["neighbours"]) == 2
