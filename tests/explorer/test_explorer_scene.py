"""Targets of every kind into scenes: points, classes, hierarchy, neighbours and thumbnails."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from leafward.errors import DataError, LeafwardError, UsageError
from leafward.explorer import Options, build_scene, read_source
from leafward.explorer import scene as scene_module
from leafward.explorer import tsne as tsne_module
from leafward.explorer.neighbours import Neighbours
from leafward.geometry import Euclidean, Lorentz
from leafward.hierarchy import Taxonomy

ANIMALS = "child,parent\nanimal,\ndog,animal\ncat,animal\ntabby,cat\nsiamese,cat\nhusky,dog\n"


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    path = tmp_path / "animals.csv"
    path.write_text(ANIMALS)
    return path


@pytest.fixture
def items(tmp_path: Path) -> Path:
    """A folder of 30 vectors with names and labels, which are leaves of the animals."""
    folder = tmp_path / "items"
    folder.mkdir()
    np.save(folder / "embeddings.npy", np.random.default_rng(0).normal(size=(30, 8)).astype("f4"))
    (folder / "names.txt").write_text("\n".join(f"item{i}" for i in range(30)))
    (folder / "labels.txt").write_text("\n".join(["tabby", "siamese", "husky"][i % 3] for i in range(30)))
    return folder


def matrix(path: Path, rows: np.ndarray) -> Path:
    np.save(path, rows.astype("f4"))
    return path


# Targets


def test_a_matrix_has_a_curved_and_a_flat_view(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal(size=(50, 6))
    scene = build_scene(read_source(matrix(tmp_path / "m.npy", rows)))
    curved, flat = (view.describe() for view in scene.views)
    assert (curved["key"], curved["space"], curved["dim"], curved["curvature"]) == ("lorentz", "disk", 6, 1.0)
    assert (flat["key"], flat["space"], flat["dim"], flat["curvature"]) == ("euclidean", "plane", 6, None)
    assert scene.labels[:3] == ["0", "1", "2"]
    described = scene.describe("server")
    assert [described[key] for key in ("count", "levels", "edges", "root", "classes")] == [50, 0, 0, None, []]
    for view in scene.views:  # a tangent vector is as long as the radius of its point
        assert view.radius() == pytest.approx(np.linalg.norm(rows, axis=1), rel=1e-5)


def test_rows_may_be_space_parts_or_whole_points(tmp_path: Path) -> None:
    manifold = Lorentz(0.5)
    points = manifold.random_normal(40, 3, generator=torch.Generator().manual_seed(0))
    for vectors, rows in (("points", points), ("space", points[:, 1:])):
        path = matrix(tmp_path / f"{vectors}.npy", rows.numpy())
        scene = build_scene(read_source(path, Options(vectors=vectors, c=0.5)))
        assert scene.views[0].radius() == pytest.approx(manifold.dist0(points).numpy(), rel=1e-4)
        assert scene.views[0].describe()["dim"] == 3


def test_long_vectors_are_scaled_and_that_is_said(tmp_path: Path) -> None:
    path = matrix(tmp_path / "m.npy", 100 * np.eye(4)[[0, 1, 2, 3]])
    view = build_scene(read_source(path)).views[0]
    assert view.radius() == pytest.approx(3.0, rel=1e-5)
    assert "scaled by 0.03" in view.describe()["method"]
    view = build_scene(read_source(path, Options(radius=2.0))).views[0]
    assert view.radius() == pytest.approx(2.0, rel=1e-5)
    strong = build_scene(read_source(path, Options(c=100.0))).views[0]
    assert strong.radius() == pytest.approx(0.3, rel=1e-5)
    moved = build_scene(read_source(matrix(tmp_path / "n.npy", np.eye(4) + 9), Options(centre=True)))
    assert moved.views[0].radius() == pytest.approx(0.75**0.5, rel=1e-4)


def test_features_to_one_side_of_the_origin_are_laid_out_about_their_centroid(tmp_path: Path, animals: Path) -> None:
    rows = 0.5 * np.random.default_rng(5).normal(size=(60, 8)) + 3.0 * np.eye(8)[0]
    path = matrix(tmp_path / "m.npy", rows)
    assert "centroid" in build_scene(read_source(path)).views[0].describe()["method"]
    names = ["animal", "dog", "cat", "tabby", "siamese", "husky"]
    (tmp_path / "labels.txt").write_text("\n".join(names[i % 6] for i in range(60)))
    rooted = read_source(path, Options(labels=tmp_path / "labels.txt", taxonomy=str(animals)))
    assert "the origin" in build_scene(rooted).views[0].describe()["method"]  # a hierarchy says where the middle is


def test_points_at_the_rim_are_told_of(tmp_path: Path) -> None:
    path = matrix(tmp_path / "m.npy", 9 * np.eye(4))
    assert "--radius 3" in build_scene(read_source(path)).notes[0]
    assert build_scene(read_source(path, Options(radius=3.0))).notes == ()


def test_a_taxonomy_is_drawn_with_its_edges(animals: Path) -> None:
    scene = build_scene(read_source(animals))
    described = scene.describe("server")
    assert described["title"] == "animals.csv"
    assert [described[key] for key in ("count", "levels", "edges", "root")] == [6, 3, 5, 0]
    assert scene.level.tolist() == [0, 1, 1, 2, 2, 2]
    pairs = {(scene.labels[a], scene.labels[b]) for a, b in scene.edges}
    assert pairs == {("animal", "dog"), ("animal", "cat"), ("cat", "tabby"), ("cat", "siamese"), ("dog", "husky")}
    assert [scene.classes[i] for i in scene.class_of] == ["animal", "dog", "cat", "cat", "cat", "dog"]
    assert described["views"][0]["distortion"]["pairs"] == 15
    radius = dict(zip(scene.labels, scene.views[0].radius().tolist(), strict=True))
    assert [radius[name] for name in ("animal", "dog", "cat", "husky")] == pytest.approx([0, 1.5, 1.5, 3], abs=1e-5)


def test_a_part_of_wordnet_is_a_target(animals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Taxonomy, "from_wordnet", lambda: Taxonomy.load(animals))  # the database may not be installed
    scene = build_scene(read_source("wordnet:cat"))
    assert scene.labels == ["cat", "tabby", "siamese"]
    assert scene.title == "wordnet:cat"


def test_of_several_parents_the_drawn_one_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "dag.csv"
    path.write_text("child,parent\nr,\na,r\nb,r\nx,b\nx,a\ny,x\ny,a\n")
    scene = build_scene(read_source(path))
    of_y = [scene.labels[a] for a, b in scene.edges if scene.labels[b] == "y"]
    assert of_y == ["a", "x"]  # a is on the shortest way


def test_items_get_their_nodes_at_centroids(items: Path, animals: Path) -> None:
    scene = build_scene(read_source(items, Options(taxonomy=str(animals))))
    assert scene.labels[30:] == ["animal", "dog", "cat", "tabby", "siamese", "husky"]
    assert scene.level.tolist() == [3] * 30 + [0, 1, 1, 2, 2, 2]
    assert scene.root == 30
    parents = {scene.labels[b]: scene.labels[a] for a, b in scene.edges}
    assert (parents["item0"], parents["item1"], parents["item2"]) == ("tabby", "siamese", "husky")
    assert (parents["tabby"], parents["dog"]) == ("cat", "animal")
    lorentz, flat = (view.space for view in scene.views)
    cats = [i for i in range(30) if i % 3 < 2]
    cat = scene.labels.index("cat")
    assert isinstance(lorentz.manifold, Lorentz)
    torch.testing.assert_close(
        lorentz.points[cat], lorentz.manifold.centroid(lorentz.points[cats]), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(flat.points[cat], flat.points[cats].mean(dim=0), rtol=1e-4, atol=1e-5)


def test_an_index_is_read_with_its_taxonomy(items: Path, animals: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    from leafward.cli.dispatch import main

    index = tmp_path / "index"
    assert main(["data", "index", str(items), "--taxonomy", str(animals), "--out", str(index)]) == 0
    from_index, from_items = (
        build_scene(source) for source in (read_source(index), read_source(items, Options(taxonomy=str(animals))))
    )
    assert from_index.labels == from_items.labels
    torch.testing.assert_close(from_index.views[0].space.points, from_items.views[0].space.points)
    assert from_index.edges.tolist() == from_items.edges.tolist()


def run_directory(folder: Path, geometry: str, taxonomy: Path, seed: int) -> Path:
    """What a run of recipe taxonomy leaves behind."""
    folder.mkdir(parents=True)
    config = {"geometry": geometry, "c": 2.0, "data": str(taxonomy), "root": None}
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "env.json").write_text(json.dumps({"format": "leafward-run", "recipe": "taxonomy"}))
    rows = np.random.default_rng(seed).normal(size=(6, 5)).astype("f4")
    save_file({"tangent": rows}, folder / "embeddings.safetensors")
    (folder / "names.json").write_text(json.dumps(["animal", "dog", "cat", "tabby", "siamese", "husky"]))
    return folder


@pytest.mark.parametrize("twin", ["euclidean-0", "euclidean-seed0"])  # the second as earlier versions named it
@pytest.mark.parametrize("geometry", ["lorentz", "poincare"])
def test_a_run_has_its_twin_beside_it(animals: Path, tmp_path: Path, geometry: str, twin: str) -> None:
    run = run_directory(tmp_path / "run", geometry, animals, 0)
    run_directory(run / "members" / twin, "euclidean", animals, 1)
    scene = build_scene(read_source(run))
    assert [view.key for view in scene.views] == [geometry, "euclidean"]
    assert scene.views[0].describe()["curvature"] == 2.0
    assert len(scene.edges) == 5
    rows = np.random.default_rng(0).normal(size=(6, 5))
    assert scene.views[0].radius() == pytest.approx(np.linalg.norm(rows, axis=1), rel=1e-5)


def test_a_run_without_its_taxonomy_says_so(animals: Path, tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", "lorentz", tmp_path / "gone.csv", 0)
    scene = build_scene(read_source(run))
    assert "without its taxonomy" in scene.notes[0]
    assert len(scene.edges) == 0
    assert len(build_scene(read_source(run, Options(taxonomy=str(animals)))).edges) == 5


def test_a_run_without_embeddings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("features: somewhere.npz\n")
    with pytest.raises(DataError, match=r"holds no embeddings.*somewhere\.npz"):
        read_source(tmp_path)


def test_a_language_run_shows_its_tokens_and_those_of_its_twin(tmp_path: Path) -> None:
    from leafward.data.text.tokenizer import train_tokenizer
    from leafward.systems.helm import HelmConfig, HelmForCausalLM, save_model

    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "env.json").write_text(json.dumps({"format": "leafward-run", "recipe": "helm"}))
    with pytest.raises(DataError, match="no model yet"):
        read_source(tmp_path)
    tokenizer = train_tokenizer(["to be or not to be, that is the question"] * 9, 280)
    tables = {}
    for geometry, folder in (("lorentz", tmp_path), ("euclidean", tmp_path / "members" / "euclidean-0")):
        config = HelmConfig.preset("helm-d-tiny", geometry=geometry, vocab_size=len(tokenizer))
        model = HelmForCausalLM(config)
        tables[geometry] = model.state_dict()["model.embed.weight"]
        save_model(model, tokenizer, folder / "model")
    (folder / "config.yaml").write_text("geometry: euclidean")
    source = read_source(tmp_path)
    assert [space.label for space in source.spaces] == ["Lorentz", "Euclidean twin"]
    assert "␣be" in source.names
    assert len(source) == len(tokenizer)
    curved, flat = source.spaces
    assert torch.equal(curved.points[:, 1:], tables["lorentz"])
    assert torch.equal(flat.points, tables["euclidean"])
    with pytest.raises(UsageError, match="are tokens"):
        read_source(tmp_path, Options(taxonomy="wordnet"))


def test_feature_files_show_images_and_classes(tmp_path: Path, animals: Path) -> None:
    rng = np.random.default_rng(2)
    path = tmp_path / "features.npz"
    np.savez(
        path,
        image_features=rng.normal(size=(9, 4)).astype("f4"),
        text_features=rng.normal(size=(2, 4)).astype("f4"),
        labels=np.array([0, 1, 0, 1, 0, 1, 0, 1, 0]),
        class_names=np.array(["tabby", "husky"]),
    )
    scene = build_scene(read_source(path))
    assert scene.classes == ["husky", "tabby"]
    assert scene.labels[-2:] == ["tabby", "husky"]
    assert len(scene) == 11
    assert build_scene(read_source(path, Options(taxonomy=str(animals)))).root is not None


def test_another_target_stands_beside(items: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(items, other)
    order = np.random.default_rng(3).permutation(30)
    np.save(other / "embeddings.npy", np.load(items / "embeddings.npy")[order] * 2)
    for name in ("names.txt", "labels.txt"):
        lines = (items / name).read_text().splitlines()
        (other / name).write_text("\n".join(lines[i] for i in order))
    source = read_source(items).beside(read_source(other))
    assert [space.key for space in source.spaces] == ["lorentz", "euclidean", "lorentz-2", "euclidean-2"]
    torch.testing.assert_close(source.spaces[3].points, 2 * source.spaces[1].points)
    (other / "names.txt").write_text("\n".join(f"x{i}" for i in range(30)))
    with pytest.raises(DataError, match="no point 'item0'"):
        read_source(items).beside(read_source(other))


def test_a_drawing_may_stand_beside_a_run(animals: Path, tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", "lorentz", animals, 0)
    scene = build_scene(read_source(run).beside(read_source(animals)))
    assert [view.key for view in scene.views] == ["lorentz", "poincare"]
    assert "tree drawn" in scene.views[1].describe()["method"]


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "embeddings.npy", np.eye(3, dtype="f4"))
    (tmp_path / "names.json").write_text('["a\\ud800", "b", "c"]')
    with pytest.raises(DataError, match=r"names\.json: not valid JSON.*surrogates not allowed"):
        read_source(tmp_path)


# Limits and refusals


def test_a_limit_samples_points_and_keeps_the_top_of_a_tree(items: Path, animals: Path) -> None:
    few = read_source(items).limited(7)
    assert len(few) == 7
    assert "7 of 30" in few.notes[0]
    rows = [int(name.removeprefix("item")) for name in few.names]
    whole = read_source(items)
    torch.testing.assert_close(few.spaces[0].points, whole.spaces[0].points[rows])
    top = build_scene(read_source(animals).limited(3))
    assert top.labels == ["animal", "dog", "cat"]
    assert len(top.edges) == 2
    with pytest.raises(UsageError, match="limit"):
        read_source(items).limited(1)


def test_too_many_and_too_few_points(items: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene_module, "MOST_POINTS", 29)
    with pytest.raises(UsageError, match=r"30 points; at most 29 .*--limit"):
        build_scene(read_source(items))
    with pytest.raises(UsageError, match="at least two"):
        build_scene(read_source(matrix(tmp_path / "one.npy", np.ones((1, 3)))))


def test_tsne_falls_back_to_pca_with_a_message(items: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "t-SNE" in build_scene(read_source(items), "tsne").views[0].describe()["method"]
    monkeypatch.setattr(tsne_module, "MOST_POINTS", 29)
    scene = build_scene(read_source(items), "tsne")
    assert "t-SNE is for at most 29 points" in scene.notes[-1]
    assert "PCA" in scene.views[0].describe()["method"]


def test_files_that_are_no_target_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {
        "pickled.npy": lambda path: np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True),
        "text.bin": lambda path: path.write_text("x"),
        "broken.npz": lambda path: path.write_bytes(b"PK\x03\x04 nothing"),
        "broken.safetensors": lambda path: path.write_bytes(b"\xff" * 20),
        "vector.npy": lambda path: np.save(path, np.ones(4)),
        "huge.npy": lambda path: np.save(path, np.diag([1e30, 1.0, 1.0])),
        "nan.npy": lambda path: np.save(path, np.full((3, 2), np.nan)),
        "cycle.csv": lambda path: path.write_text("child,parent\na,b\nb,a\n"),
    }
    for name, write in bad.items():
        write(tmp_path / name)
        with pytest.raises(LeafwardError, match=name.split(".")[0]):
            read_source(tmp_path / name)
    with pytest.raises(DataError, match="no such file"):
        read_source(tmp_path / "nowhere")
    monkeypatch.setattr("leafward.explorer.sources.LARGEST_FILE", 100)
    matrix(tmp_path / "large.npy", np.ones((9, 9)))
    with pytest.raises(DataError, match=r"large\.npy.*at most 100"):
        read_source(tmp_path / "large.npy")


@pytest.mark.parametrize(
    "wrong",
    [{"c": 0.0}, {"radius": -1.0}, {"radius": 1.0, "vectors": "space"}, {"c": np.nan}, {"c": 1e9}, {"radius": 14.0}],
)
def test_wrong_options_are_refused(wrong: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Options(**wrong)


def test_unknown_labels_are_refused_by_name(items: Path, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("child,parent\nplant,\n")
    with pytest.raises(DataError, match="'tabby' is not a node"):
        read_source(items, Options(taxonomy=str(tmp_path / "other.csv")))


# Neighbours


@pytest.mark.parametrize("space", [Lorentz(1.0), Lorentz(0.2), Euclidean()], ids=["c=1", "c=0.2", "flat"])
def test_neighbours_are_those_of_all_distances(space: Lorentz | Euclidean) -> None:
    points = space.expmap0(2.0 * torch.randn(300, 10, generator=torch.Generator().manual_seed(4)))
    ids, gaps = Neighbours(space, points).of(torch.tensor([0, 7, 299]), 9)
    every = space.cdist(points.double(), points.double())
    every.fill_diagonal_(torch.inf)
    wanted = every[[0, 7, 299]].topk(9, dim=1, largest=False)
    assert ids.tolist() == wanted.indices.tolist()
    torch.testing.assert_close(gaps.double(), wanted.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("radius", [9.0, 12.5])
def test_neighbours_are_right_far_from_the_origin(radius: float) -> None:
    """Where float32 inner products cannot tell near points apart: clusters of 100 points at a large radius."""
    manifold = Lorentz(1.0)
    middle = radius * torch.nn.functional.normalize(
        torch.randn(5, 6, generator=torch.Generator().manual_seed(6)), dim=1
    )
    spread = torch.randn(500, 6, generator=torch.Generator().manual_seed(7))
    points = manifold.expmap0(middle.repeat_interleave(100, 0) + 1e-4 * spread)
    rows = torch.arange(0, 500, 25)
    ids, gaps = Neighbours(manifold, points).of(rows, 10)
    every = manifold.dist(points[rows].double()[:, None], points.double()[None])
    every[torch.arange(len(rows)), rows] = torch.inf
    torch.testing.assert_close(gaps.double(), every.topk(10, dim=1, largest=False).values, rtol=2e-2, atol=1e-3)
    assert (ids // 100 == rows[:, None] // 100).all()


def test_a_common_part_does_not_hide_flat_neighbours() -> None:
    points = 1e3 + torch.randn(300, 4, generator=torch.Generator().manual_seed(8))
    _, gaps = Neighbours(Euclidean(), points).of(torch.arange(300), 5)
    every = torch.cdist(points.double(), points.double()).fill_diagonal_(torch.inf)
    torch.testing.assert_close(gaps.double(), every.topk(5, dim=1, largest=False).values, rtol=1e-4, atol=1e-4)


def test_coinciding_points_are_neighbours_and_no_point_is_its_own() -> None:
    points = torch.zeros(20, 3)
    ids, gaps = Neighbours(Euclidean(), points).of(torch.arange(20), 5)
    assert not (ids == torch.arange(20)[:, None]).any()
    assert torch.equal(gaps, torch.zeros(20, 5))


# What the page loads


def test_parts_have_the_promised_bytes(items: Path, animals: Path) -> None:
    scene = build_scene(read_source(items, Options(taxonomy=str(animals))))
    parts = scene.parts()
    count = len(scene)
    assert json.loads(parts["labels.json"]) == scene.labels
    assert np.frombuffer(parts["attributes.bin"], "<i4").reshape(count, 2).tolist() == [
        [level, place] for level, place in zip(scene.level.tolist(), scene.class_of.tolist(), strict=True)
    ]
    assert np.frombuffer(parts["edges.bin"], "<i4").reshape(-1, 2).tolist() == scene.edges.tolist()
    for view in scene.views:
        xy = np.frombuffer(parts[f"view/{view.key}.bin"], "<f8").reshape(count, 2)
        assert np.array_equal(xy, view.layout.coordinates)
        assert np.array_equal(np.frombuffer(parts[f"radius/{view.key}.bin"], "<f4"), view.radius())
    assert json.loads(json.dumps(scene.describe("server"), allow_nan=False))["k"] == 12


# Thumbnails


def test_thumbnails_are_matched_by_name_then_class_and_made_small(items: Path, tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    import io

    folder = tmp_path / "pictures"
    (folder / "sub").mkdir(parents=True)
    image_module.new("RGB", (640, 320), (255, 0, 0)).save(folder / "sub" / "item0.png")
    image_module.new("RGBA", (30, 300), (0, 255, 0, 128)).save(folder / "husky.png")
    (folder / "item1.jpg").write_bytes(b"no image")
    (tmp_path / "item3.png").write_bytes((folder / "husky.png").read_bytes())
    (folder / "item3.png").symlink_to(tmp_path / "item3.png")  # leads out of the folder
    scene = build_scene(read_source(items), images=folder)
    assert sorted(scene.thumbnails) == [0, *range(2, 30, 3)]
    small = image_module.open(io.BytesIO(scene.thumbnails[0]))
    assert (small.format, small.size) == ("JPEG", (96, 48))
    assert any("1 images" in note for note in scene.notes)
    assert scene.describe("server")["thumbnails"] == sorted(scene.thumbnails)
    assert build_scene(read_source(items)).describe("server")["thumbnails"] == []
    with pytest.raises(DataError, match="none of its"):
        build_scene(read_source(items), images=items)
    with pytest.raises(DataError, match="not a folder"):
        build_scene(read_source(items), images=tmp_path / "nowhere")


def test_images_too_large_to_decode_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_module = pytest.importorskip("PIL.Image")
    from leafward.data import image_files
    from leafward.explorer import thumbnails

    path = tmp_path / "a.png"
    image_module.new("L", (50, 50)).save(path)
    assert thumbnails.thumbnail(path) is not None
    monkeypatch.setattr(image_files, "MOST_PIXELS", 2499)
    assert thumbnails.thumbnail(path) is None
    monkeypatch.setattr(image_files, "MOST_PIXELS", 10**9)
    monkeypatch.setattr(image_files, "LARGEST_FILE", 10)
    assert thumbnails.thumbnail(path) is None
