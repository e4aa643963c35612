"""Retrieval, zero-shot classification, BREEDS, and features from files, each against a plain loop."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from leafward.data import fewshot
from leafward.data.features import PAIR, read_vectors
from leafward.encoders import zeroshot
from leafward.encoders.scores import similarity
from leafward.errors import DataError, UsageError
from leafward.hierarchy import Taxonomy, metrics
from leafward.systems.radial import breeds
from leafward.systems.radial.retrieval import recall_at_k


def units(count: int, width: int = 8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(count, width, generator=generator), dim=-1)


@pytest.mark.parametrize("block", [1 << 25, 20])
def test_recall_by_sorting(monkeypatch, block):
    monkeypatch.setattr("leafward.systems.radial.retrieval.LARGEST_BLOCK", block)
    image, text = units(12), units(30, seed=1)
    owner = torch.arange(30) % 10  # two images have no text
    found = recall_at_k(image, text, owner, ks=(1, 3))
    near = image @ text.mT
    for k in (1, 3):
        right = [int(owner[j]) in near[:, j].argsort(descending=True)[:k].tolist() for j in range(30)]
        assert found[f"text_to_image@{k}"] == pytest.approx(np.mean(right))
        right = [bool((owner[near[i].argsort(descending=True)[:k]] == i).any()) for i in range(10)]
        assert found[f"image_to_text@{k}"] == pytest.approx(np.mean(right))


def test_a_collapsed_model_finds_nothing():
    same = units(1).expand(20, -1)
    assert set(recall_at_k(same, same, ks=(1, 5)).values()) == {0.0}


def test_recall_refuses_what_does_not_fit():
    with pytest.raises(UsageError, match="as many"):
        recall_at_k(units(3), units(4))
    with pytest.raises(UsageError, match="owner"):
        recall_at_k(units(3), units(4), torch.tensor([0, 1, 2, 3]))
    with pytest.raises(UsageError, match="ks"):
        recall_at_k(units(3), units(3), ks=(0,))


def test_recall_of_real_clip_features(shared_data):
    """CLIP ViT-B/32 on 500 COCO pairs: R@1 of 55.2 % and 50.6 % as published with the features."""
    file = shared_data / "clip_vitb32_features" / "coco_pairs_image_text_2x500x512_f32.npy"
    features = read_vectors(file, PAIR)
    found = recall_at_k(features["image_features"], features["text_features"])
    assert sorted((found["image_to_text@1"], found["text_to_image@1"])) == pytest.approx([0.506, 0.552])


def test_zero_shot_scores_and_metrics():
    tax = Taxonomy.from_nested({"animal": {"dog": {}, "cat": {}}, "vehicle": {"car": {}, "bus": {}}}, root="thing")
    names = ["car", "dog", "bus", "cat"]
    classes, image = units(4), units(50, seed=2)
    label = torch.arange(50) % 4
    found = zeroshot.score(image, classes, label, names, tax)
    best = (image @ classes.mT).argmax(dim=1)
    assert found["top1"] == pytest.approx(float((best == label).double().mean()))
    assert found["top5"] == 1.0
    plain = metrics.evaluate(tax, [names[i] for i in best], [names[i] for i in label])
    assert found["hierarchical"]["tree_induced_error"] == pytest.approx(plain.tree_induced_error)
    with pytest.raises(UsageError, match="label"):
        zeroshot.score(image, classes, label + 1)


@pytest.mark.parametrize(
    ("p", "answer"),
    [((0.01, 0.97, 0.01, 0.01), "dog"), ((0.02, 0.48, 0.02, 0.48), "animal"), ((0.24, 0.40, 0.24, 0.12), "animal")],
)
def test_zero_shot_answers_may_be_inner_nodes(p, answer):
    tax = Taxonomy.from_nested({"animal": {"dog": {}, "cat": {}}, "vehicle": {"car": {}, "bus": {}}}, root="thing")
    names = ["car", "dog", "bus", "cat"]
    expected = {
        node: sum(share * int(tax.distance(node, name)) for share, name in zip(p, names, strict=True))
        for node in tax.names
    }
    assert min(expected, key=lambda node: expected[node]) == answer
    image = torch.tensor([p]).log()
    compare = zeroshot.Comparison(scale=float(image.norm()))  # the logits are then log p
    found = zeroshot.score(image, torch.eye(4), torch.tensor([1]), names, tax, compare)
    plain = metrics.evaluate(tax, [answer], ["dog"]).to_dict()
    assert found["least_expected_distance"] == plain
    assert found["backed_off"] == plain | {"true": 1.0}


@pytest.mark.parametrize("name", ["cosine", "lorentz", "cosine+radius"])
def test_zero_shot_by_another_score(name):
    image, classes = 3.0 * units(30, seed=4), torch.linspace(0.5, 4.0, 5)[:, None] * units(5)
    label = torch.arange(30) % 5
    found = zeroshot.score(image, classes, label, compare=zeroshot.Comparison(name, c=0.3, weight=0.7))
    best = similarity(image, classes, name, c=0.3, weight=0.7).argmax(dim=1)
    assert found["score"] == name
    assert found["top1"] == pytest.approx(float((best == label).double().mean()))


def test_templates(tmp_path):
    (tmp_path / "t.txt").write_text("a photo of a {}.\n\nart of the {}\n")
    assert zeroshot.read_templates(tmp_path / "t.txt") == ("a photo of a {}.", "art of the {}")
    (tmp_path / "t.txt").write_text("a photo\n")
    with pytest.raises(UsageError, match="a photo"):
        zeroshot.read_templates(tmp_path / "t.txt")


def test_labelled_images_of_a_folder(tmp_path):
    for name in ("dog/1.jpg", "cat/2.PNG", "cat/notes.txt"):
        (tmp_path / "val" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "val" / name).write_bytes(b"")
    images, labels = zeroshot.labelled_images(tmp_path, split="val")
    assert [image.name for image in images] == ["2.PNG", "1.jpg"]
    assert labels == ["cat", "dog"]
    with pytest.raises(DataError, match="holds no class folders"):
        zeroshot.labelled_images(tmp_path / "val" / "dog")
    with pytest.raises(DataError, match="nowhere is not a folder"):
        zeroshot.labelled_images(tmp_path / "nowhere")
    with pytest.raises(DataError, match="brings no split and has no folder 'test'"):
        zeroshot.labelled_images(tmp_path / "val", split="test")
    for part in ("train", "test"):
        (tmp_path / part / "cat").mkdir(parents=True)
        (tmp_path / part / "cat" / f"{part}.jpg").write_bytes(b"")
    images, labels = zeroshot.labelled_images(tmp_path)  # of parts, the one that is there to be scored
    assert ([image.name for image in images], labels) == (["test.jpg"], ["cat"])
    shutil.rmtree(tmp_path / "test")
    images, labels = zeroshot.labelled_images(tmp_path)  # without test/, what is held out is what is scored
    assert ([image.name for image in images], labels) == (["2.PNG", "1.jpg"], ["cat", "dog"])


def test_labelled_images_of_a_split_file(tmp_path):
    rows = {part: [[f"{part}.jpg", 0, "cat"]] for part in ("train", "val", "test")}
    for part in rows:
        (tmp_path / f"{part}.jpg").write_bytes(b"")
    (tmp_path / "split_zhou_Pets.json").write_text(json.dumps(rows))
    for split, name in ((None, "test"), ("val", "val"), ("train", "train")):
        images, labels = zeroshot.labelled_images(tmp_path, split=split)
        assert ([image.name for image in images], labels) == ([f"{name}.jpg"], ["cat"])
    with pytest.raises(UsageError, match="split must be one of train, val, test, got 'dev'"):
        zeroshot.labelled_images(tmp_path, split="dev")


@pytest.fixture
def breeds_folder(tmp_path):
    (tmp_path / "class_hierarchy.txt").write_text("r a\nr b\na x\na y\nb z\nb w\nw v\nr unused\n")
    lines = ["r\tentity", "a\tanimal, beast", "b\tvehicle", "x\tdog", "y\tcat", "z\tcar", "w\tboat", "v\tcanoe"]
    (tmp_path / "node_names.txt").write_text("\n".join(lines) + "\n")
    info = [[0, "x", "dog"], [1, "y", "cat"], [2, "z", "car"], [3, "v", "canoe"]]
    (tmp_path / "dataset_class_info.json").write_text(json.dumps(info))
    return tmp_path


def test_breeds_levels_by_hand(breeds_folder):
    found = breeds.read_breeds(breeds_folder)
    assert set(found.tax.leaf_names) == {"x", "y", "z", "v"}
    assert found.words[found.tax.names.index("a")] == "animal"
    nodes, queries = units(len(found.tax)), units(12, seed=3)
    label = np.array([found.tax.leaves[i % 4] for i in range(12)])
    scores = breeds.score(found, queries, label, nodes)
    for depth in (1, 2, 3):
        level = [i for i in range(len(found.tax)) if found.tax.depth[i] == depth]
        hits = []
        for query, leaf in zip(queries, label, strict=True):
            way = [n for n in found.tax.paths([leaf])[0] if n >= 0]
            if len(way) > depth:
                hits.append(max(level, key=lambda n: float(nodes[n] @ query)) == way[depth])
        assert scores["accuracy_by_depth"][depth] == pytest.approx(np.mean(hits))
    without = breeds.score(found, queries, label, nodes, with_leaf=False)
    assert set(without["accuracy_by_depth"]) == {1, 2}


def test_breeds_is_perfect_where_every_query_is_its_ancestors_sum(breeds_folder):
    found = breeds.read_breeds(breeds_folder)
    nodes = torch.eye(len(found.tax))
    ways = found.tax.paths(found.tax.leaves)
    queries = torch.stack([nodes[[n for n in way if n >= 0]].sum(dim=0) for way in ways])
    scores = breeds.score(found, queries, found.tax.leaves, nodes)
    assert scores["mean_accuracy"] == 1.0
    assert scores["consistent_paths"] == 1.0


def test_breeds_real_tree(shared_data):
    found = breeds.read_breeds(shared_data / "breeds_hierarchy")
    assert len(found.tax.leaves) == 890  # BREEDS' tree leaves out 110 of the 1,000 classes
    assert found.tax.is_tree


def test_breeds_refuses_a_foreign_folder(tmp_path):
    with pytest.raises(DataError, match="BREEDS"):
        breeds.read_breeds(tmp_path)


def test_features_from_files(tmp_path):
    image = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float16)
    label = np.array([0, 1, 1, 0])
    save_file({"image": image, "label": label}, tmp_path / "f.safetensors")
    np.savez(tmp_path / "f.npz", image=image, label=label)
    np.savez(tmp_path / "full.npz", image_features=image, labels=label)
    for name in ("f.safetensors", "f.npz", "full.npz"):
        found = read_vectors(tmp_path / name, ("image_features",), ("labels",))
        torch.testing.assert_close(found["image_features"].norm(dim=-1), torch.ones(4))
        assert found["labels"].tolist() == [0, 1, 1, 0]
        short = read_vectors(tmp_path / name, ("image",), ("label",))
        assert torch.equal(short["image"], found["image_features"])
        assert torch.equal(short["label"], found["labels"])
    with pytest.raises(DataError, match="no use for the array 'labels'"):
        read_vectors(tmp_path / "f.npz", ("image_features",))
    with pytest.raises(DataError, match="holds no array 'text_features'"):
        read_vectors(tmp_path / "f.npz", ("text_features",), ("image_features", "labels"))
    np.savez(tmp_path / "twice.npz", image=image, image_features=image)
    with pytest.raises(DataError, match="holds both 'image_features' and 'image', which is short for it"):
        read_vectors(tmp_path / "twice.npz", ("image_features",))
    np.savez(tmp_path / "zero.npz", image=np.zeros((2, 3)))
    with pytest.raises(DataError, match="zero or not finite"):
        read_vectors(tmp_path / "zero.npz", ("image_features",))
    np.savez(tmp_path / "widths.npz", image=np.ones((2, 3)), text=np.ones((2, 4)))
    with pytest.raises(DataError, match=r"one width, got {'image_features': 3, 'text_features': 4}"):
        read_vectors(tmp_path / "widths.npz", PAIR)
    np.savez(tmp_path / "object.npz", image=np.array([{}], dtype=object))
    with pytest.raises(DataError, match=r"cannot be read as \.npz"):
        read_vectors(tmp_path / "object.npz", ("image_features",))
    np.save(tmp_path / "pair.npy", np.ones((2, 5, 3)))
    assert read_vectors(tmp_path / "pair.npy", PAIR)["text_features"].shape == (5, 3)


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_zero_shot_reads_the_files_of_data_features(tmp_path, ending):
    images, texts, labels = 3.0 * units(30), 2.0 * units(4, seed=1), torch.arange(30) % 4
    split = torch.arange(30) % 3
    names = ("ant", "bee", "cat", "dog")
    file = tmp_path / f"toy.{ending}"
    fewshot.write_feature_set(file, fewshot.FeatureSet("toy", images, labels, texts, names, split))
    for part, number in (("train", 0), ("val", 1), ("test", 2), (None, 2)):
        image, text, label, found = zeroshot.labelled_features(file, part)
        assert found == list(names)
        rows = split == number
        scores = zeroshot.score(image, text, label)
        expected = float(
            ((images @ (texts / texts.norm(dim=1, keepdim=True)).mT).argmax(1) == labels)[rows].double().mean()
        )
        assert scores["top1"] == pytest.approx(expected)
    with pytest.raises(UsageError, match="split must be one of train, val, test, got 'dev'"):
        zeroshot.labelled_features(file, "dev")
