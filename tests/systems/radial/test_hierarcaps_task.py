"""The HierarCaps scores against a plain loop from their description, and the authors' own paths."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau

from leafward.data.captions import Captions, read_captions
from leafward.errors import UsageError
from leafward.hierarchy import metrics
from leafward.stats.intervals import mean_interval
from leafward.systems.radial.hierarcaps import Candidates, paths, score


def random_case(seed: int, chains: int = 25, images: int = 15, vocabulary: int = 40):
    """Chains with repeated texts, several of them for some images, and unit vectors for all."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(chains):
        texts = rng.choice(vocabulary, 4, replace=False)
        image = i if i < images else int(rng.integers(images))
        made.append(Captions.chain([f"text {t}" for t in texts], image=f"{image}.jpg"))
    candidates = Candidates(made)

    def units(count: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=(count, 12))), dim=-1)

    return candidates, units(len(candidates.texts)), units(1), units(len(candidates.images))


def plain_scores(candidates: Candidates, text, root, images, steps: int):
    """One image, one threshold, one caption at a time."""
    vector = dict(zip(candidates.texts, text.numpy(), strict=True))
    centre = root[0].numpy()
    captions = [t for chain in candidates.chains for t in chain.texts]
    radius = {t: math.dist(vector[t], centre) for t in captions}
    low, high = min(radius.values()), max(radius.values())
    precision, recall, lengths = [], [], []
    for key, image in zip(candidates.images, images.numpy(), strict=True):
        path: list[str] = []
        for threshold in np.linspace(low, high, steps):
            near = [(float(vector[t] @ image), t) for t in captions if radius[t] <= threshold]
            best = max(near, key=lambda pair: pair[0])[1]
            if not path or path[-1] != best:
                path.append(best)
        chains = [candidates.chains[i].texts for i in candidates.chains_of[key]]
        truth = {t for chain in chains for t in chain}
        precision.append(len(set(path) & truth) / len(set(path)))
        recall.append(sum(any(chain[level] in path for chain in chains) for level in range(4)) / 4)
        lengths.append(len(path))
    taus = [kendalltau([radius[t] for t in chain.texts], [1, 2, 3, 4]).statistic for chain in candidates.chains]
    return np.mean(taus), np.mean(precision), np.mean(recall), np.mean(lengths)


@pytest.mark.parametrize("steps", [2, 7, 50])
@pytest.mark.parametrize("seed", range(4))
def test_batched_scores_equal_the_plain_loop(seed, steps):
    case = random_case(seed)
    found = score(*case, steps=steps)
    expected = plain_scores(*case, steps)
    assert (found.tau, found.precision, found.recall, found.path_length) == pytest.approx(expected, abs=1e-12)


def test_blocks_of_images_change_nothing(monkeypatch):
    case = random_case(5)
    whole = score(*case)
    monkeypatch.setattr("leafward.systems.radial.hierarcaps.LARGEST_BLOCK", 300)
    assert score(*case) == whole


def test_a_perfect_hierarchy_is_found():
    """Captions on rays from the root, the image at the end of its ray: all levels are found, in order."""
    made = [Captions.chain([f"{i}-{level}" for level in range(4)], image=f"{i}.jpg") for i in range(3)]
    candidates = Candidates(made)
    root = torch.eye(4, dtype=torch.float64)[:1]
    angle = torch.tensor([0.3, 0.6, 0.9, 1.2], dtype=torch.float64)
    rays = torch.eye(4, dtype=torch.float64)[1:]
    text = torch.cat([torch.cos(angle)[:, None] * root + torch.sin(angle)[:, None] * ray for ray in rays])
    images = torch.cos(torch.tensor(1.3)) * root + torch.sin(torch.tensor(1.3)) * rays
    found = score(candidates, text, root, images)
    assert (found.tau, found.precision, found.recall, found.path_length) == (1.0, 1.0, 1.0, 4.0)


def test_each_chain_is_measured_about_its_own_root():
    made = [Captions.chain(["a", "b"], root="x"), Captions.chain(["a", "b"], root="y")]
    candidates = Candidates(made)
    text = torch.eye(2)
    assert candidates.roots == ["x", "y"]
    assert score(candidates, text, text).tau == 0.0  # in order about one root, reversed about the other
    assert score(candidates, text, text[[0, 0]]).tau == 1.0


def test_queries_for_some_images_only():
    candidates, text, root, images = random_case(1)
    keys = candidates.images[::2]
    found = score(candidates, text, root, images[::2], keys)
    whole = paths(images, text[candidates.ids.ravel()], _radii(candidates, text, root), candidates.ids.ravel())
    predicted = [[candidates.texts[i] for i in path] for path in whole[::2]]
    true = [[candidates.chains[i].texts for i in candidates.chains_of[key]] for key in keys]
    assert found.images == len(keys)
    assert (found.precision, found.recall) == metrics.path_precision_recall(predicted, true)


def _radii(candidates, text, root):
    return (text[candidates.ids] - root[0]).norm(dim=-1).ravel()


def test_without_queries_the_order_alone_is_scored():
    candidates, text, root, _ = random_case(2)
    found = score(candidates, text, root)
    assert found.precision is None
    assert found.tau == score(*random_case(2)).tau


def test_what_does_not_fit_is_refused():
    candidates, text, root, images = random_case(3)
    with pytest.raises(UsageError, match="text must be"):
        score(candidates, text[:-1], root)
    with pytest.raises(UsageError, match="queries must be one for each"):
        score(candidates, text, root, images[:-1])
    with pytest.raises(UsageError, match="one length"):
        Candidates([Captions.chain(["a", "b"]), Captions.chain(["a"])])
    with pytest.raises(UsageError, match="steps"):
        score(candidates, text, root, images, steps=1)


PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "hierarcaps_paths.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("encoder", ["base", "tuned"])
def test_the_paths_that_the_authors_publish(encoder):
    """Paths of 73 test images by the authors' frozen and fine-tuned encoder, as hashes of their texts.

    Our scores equal set arithmetic image by image, and the means over all 1,000 images lie in the sample's intervals.
    """
    images = PUBLISHED["images"].values()
    paths, truth = [image[encoder] for image in images], [image["truth"] for image in images]
    right = [set(path) & set(chain) for path, chain in zip(paths, truth, strict=True)]
    by_image = {
        "precision": [len(found) / len(set(path)) for found, path in zip(right, paths, strict=True)],
        "recall": [len(found) / 4 for found in right],
    }
    scores = metrics.path_precision_recall(paths, [[chain] for chain in truth])
    for (name, values), found, whole in zip(by_image.items(), scores, PUBLISHED["all_images"][encoder], strict=True):
        mean, interval = mean_interval(values)
        assert interval is not None
        assert found == pytest.approx(mean, abs=1e-12)
        assert interval[0] < whole < interval[1]
        print(f"{encoder}: {name} {found:.4f} [{interval[0]:.4f}, {interval[1]:.4f}], of all 1,000 images {whole}")


def test_what_fine_tuning_changed_in_the_published_paths():
    """The paired difference over the images holds the difference of the means over all of them."""
    images = PUBLISHED["images"].values()
    scores = {
        encoder: np.array([metrics.path_precision_recall([image[encoder]], [[image["truth"]]]) for image in images])
        for encoder in ("base", "tuned")
    }
    whole = np.subtract(PUBLISHED["all_images"]["tuned"], PUBLISHED["all_images"]["base"])
    for name, values, expected in zip(
        ("precision", "recall"), (scores["tuned"] - scores["base"]).T, whole, strict=True
    ):
        mean, interval = mean_interval(values)
        assert interval is not None
        assert interval[0] < expected < interval[1]
        print(f"tuned − base: {name} {mean:+.4f} [{interval[0]:+.4f}, {interval[1]:+.4f}], of all {expected:+.3f}")


def test_the_published_paths_belong_to_the_test_set(shared_data):
    chains = read_captions(shared_data / "hierarcaps" / "hierarcaps_test.parquet")
    texts = {str(each.image).rpartition("/")[2]: each.texts for each in chains}
    for name, image in PUBLISHED["images"].items():
        assert image["truth"] == [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts[name]]
