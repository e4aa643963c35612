"""What is given in float64 is computed in float64: against numpy, to more digits than float32 has."""

import numpy as np
import pytest
import torch
from adapter_models import build
from torch import nn

from leafward.encoders.encoder import HuggingFaceEncoder
from leafward.encoders.scores import distances, hyperbolic_radius, similarity
from leafward.systems.himapper.losses.contrast import HierarchyContrast
from leafward.systems.himapper.tree import TreeShape
from leafward.systems.hyperclip.segment.task import mask_loss
from leafward.systems.lathadapter.attributes import refine
from leafward.systems.lathadapter.prompts.host import cosine

DIGITS = {"rtol": 1e-13, "atol": 1e-13}


@pytest.fixture
def features():
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(count, 5, generator=generator, dtype=torch.float64) for count in (4, 3))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_scores_of_features(features):
    image, text = features
    x, y = image.numpy(), text.numpy()
    cosines = unit(x) @ unit(y).T
    np.testing.assert_allclose(cosine(image, text), cosines, **DIGITS)
    np.testing.assert_allclose(similarity(image, text), cosines, **DIGITS)
    lengths = 2 * np.linalg.norm(x, axis=1)
    np.testing.assert_allclose(hyperbolic_radius(image), lengths, **DIGITS)
    flat = 2 * np.linalg.norm(x[:, None] - y[None], axis=2)
    np.testing.assert_allclose(distances(image, text, None), flat, rtol=1e-12)
    c = 0.3  # by the law of cosines of the hyperbolic plane
    a, b = 2 * c**0.5 * np.linalg.norm(x, axis=1)[:, None], 2 * c**0.5 * np.linalg.norm(y, axis=1)
    bent = np.arccosh(np.cosh(a) * np.cosh(b) - np.sinh(a) * np.sinh(b) * cosines) / c**0.5
    np.testing.assert_allclose(distances(image, text, c), bent, rtol=1e-11)


def test_refinement_of_classes(features):
    attributes, classes = features
    both = np.concatenate([classes.numpy(), attributes.numpy()])
    affinity = np.maximum(unit(both) @ unit(both).T, 0)
    share = affinity / np.sqrt(np.outer(affinity.sum(1), affinity.sum(1)))
    np.testing.assert_allclose(refine(classes, attributes, 0.1), (both + 0.1 * share @ both)[:3], **DIGITS)


def test_features_of_an_encoder_in_float64():
    """float32 features would be equal to their own rounding."""
    encoder = HuggingFaceEncoder(build("hf_clip")[0], None).to(torch.float64)
    tokens = {"input_ids": torch.tensor([[62, 5, 9, 63]])}
    for found in (encoder.text_features(tokens), encoder.encode_tokens(tokens)):
        assert found.dtype == encoder.dtype == torch.float64
        assert (found != found.float().double()).any()


def test_the_loss_of_masks():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 2, 4, 4, generator=generator, dtype=torch.float64)
    masks = torch.randint(0, 2, (1, 4, 4), generator=generator)
    truth = np.stack([(masks == k).numpy() for k in (0, 1)], axis=1)
    expected = np.logaddexp(0, np.where(truth, -1, 1) * logits.numpy()).mean(axis=1).sum()
    assert mask_loss(logits, masks).total.item() == pytest.approx(expected, rel=1e-13)


def test_the_contrast_of_a_hierarchy():
    shape = TreeShape(4, 2)
    contrast = HierarchyContrast(shape, temperature=0.3).to(torch.float64)
    assert isinstance(contrast, nn.Module)
    distance = torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    losses = []
    for child, parent in enumerate((4, 4, 5, 5)):
        rivals = [node for node in (0, 1, 2, 3, parent) if node != child]
        logits = -distance[0, child].numpy() / 0.3
        losses.append(np.logaddexp.reduce(logits[rivals]) - logits[parent])
    assert contrast(distance).item() == pytest.approx(np.mean(losses), rel=1e-13)
