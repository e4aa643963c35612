"""The hosts: where they begin, what their losses are, and that each learns, alone and with a latent hierarchy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from leafward.adapters import attach
from leafward.errors import UsageError
from leafward.systems.lathadapter import LatentHierarchyConfig
from leafward.systems.lathadapter.prompts import (
    ClipAdapter,
    Coop,
    FeaturePrompts,
    Host,
    MaPLe,
    PromptKD,
    PromptSRC,
    TipAdapter,
    ZeroShot,
)
from leafward.systems.lathadapter.prompts.hosts import GaussianAverage

CLASSES, WIDTH = 5, 12


def data(batch: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    classes = 3.0 * torch.randn(CLASSES, WIDTH, generator=generator)
    labels = torch.arange(batch) % CLASSES
    turn = torch.linalg.qr(torch.eye(WIDTH) + 0.2 * torch.randn(WIDTH, WIDTH, generator=generator)).Q
    return (classes[labels] + 2.0 * torch.randn(batch, WIDTH, generator=generator)) @ turn, labels, classes


def make(name: str) -> Host:
    torch.manual_seed(0)
    _, _, classes = data()
    if name == "coop":
        return Coop(FeaturePrompts(WIDTH), classes)
    if name == "maple":
        return MaPLe(FeaturePrompts(WIDTH, depth=2, sides="coupled"), classes)
    if name == "promptsrc":
        return PromptSRC(FeaturePrompts(WIDTH, sides="both"), classes)
    if name == "promptkd":
        return PromptKD(FeaturePrompts(WIDTH, sides="both"), classes, WIDTH)
    return ClipAdapter(classes)


def zero_shot(images: Tensor, classes: Tensor) -> Tensor:
    return 100.0 * normalize(images, dim=-1) @ normalize(classes, dim=-1).mT


@pytest.mark.parametrize("name", ["coop", "maple", "promptsrc", "promptkd"])
def test_training_begins_at_zero_shot(name: str) -> None:
    images, _, classes = data()
    torch.testing.assert_close(make(name)(images).logits, zero_shot(images, classes), rtol=1e-5, atol=1e-4)
    other = classes.flip(0)[:3]
    torch.testing.assert_close(make(name)(images, classes=other).logits, zero_shot(images, other), rtol=1e-5, atol=1e-4)


def test_zero_shot_has_nothing_to_train() -> None:
    images, labels, classes = data()
    host = ZeroShot(classes)
    assert not list(host.parameters())
    torch.testing.assert_close(host(images, labels).loss, cross_entropy(zero_shot(images, classes), labels))


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ["coop", "maple", "promptsrc", "promptkd", "clip_adapter"])
def test_each_host_learns(name: str, adapted: bool) -> None:
    images, labels, classes = data()
    host = make(name)
    if adapted:
        attach(host, LatentHierarchyConfig(attributes=6, queue=40))
    # The teacher sees the classes themselves, so its logits are right.
    teacher = classes[labels] if name == "promptkd" else None
    host.prepare(60)
    optimizer = torch.optim.Adam(host.parameters(), lr=0.02)
    before = cross_entropy(host.eval()(images).logits, labels).item()
    torch.manual_seed(0)
    host.train()
    for _ in range(60):
        optimizer.zero_grad()
        host(images, labels, teacher=teacher).loss.backward()
        optimizer.step()
    host.finish()
    assert cross_entropy(host.eval()(images).logits, labels).item() < 0.7 * before


def test_maple_couples_the_image_side_to_the_text_side() -> None:
    images, labels, _ = data()
    host = make("maple")
    encoder = host.encoder
    assert isinstance(encoder, FeaturePrompts)
    encoder.image(images).square().sum().backward()
    assert encoder.text_context.values.grad.abs().max() > 0  # pyright: ignore
    alone = make("coop").encoder
    assert isinstance(alone, FeaturePrompts)
    assert alone.image(images) is images
    with torch.no_grad():
        encoder.text_context.values.normal_()
    assert (encoder.image(images) - images).abs().max() > 0.1
    assert labels.shape == (40,)


def test_prompts_against_loops() -> None:
    torch.manual_seed(0)
    prompts = FeaturePrompts(WIDTH, tokens=3, depth=2)
    with torch.no_grad():
        prompts.text_context.values.normal_()
    x = data()[2].double().numpy()
    keys = prompts.text_context.keys.detach().double().numpy()
    values = prompts.text_context.values.detach().double().numpy()
    for key, value in zip(keys, values, strict=True):
        rows = []
        for row in x:
            scores = np.exp(10.0 * key @ row / np.linalg.norm(row))
            rows.append(row + np.linalg.norm(row) * (scores / scores.sum()) @ value)
        x = np.array(rows)
    np.testing.assert_allclose(prompts.text(data()[2]).detach().numpy(), x, rtol=1e-5, atol=1e-5)


def test_promptsrc_holds_to_the_frozen_model() -> None:
    images, labels, classes = data()
    host = make("promptsrc")
    losses = host(images, labels).losses
    for name in ("text_drift", "image_drift", "logit_drift"):
        assert float(losses[name]) == pytest.approx(0.0, abs=1e-6)
    encoder = host.encoder
    assert isinstance(encoder, FeaturePrompts)
    with torch.no_grad():
        encoder.text_context.values.normal_(std=0.3)
    output = host(images, labels)
    gap = (normalize(output.text, dim=-1) - normalize(classes, dim=-1)).abs().mean()
    torch.testing.assert_close(output.losses["text_drift"], 25.0 * gap)
    ours, frozen = output.logits.log_softmax(dim=-1), zero_shot(images, classes).log_softmax(dim=-1)
    torch.testing.assert_close(
        output.losses["logit_drift"], (frozen.exp() * (frozen - ours)).mean(), rtol=1e-4, atol=1e-5
    )
    assert float(output.losses["image_drift"]) == pytest.approx(0.0, abs=1e-6)


def test_gaussian_average_is_the_weighted_mean() -> None:
    model = nn.Linear(1, 1)
    average = GaussianAverage(model, steps=40, centre=0.75, width=0.05)
    values = np.linspace(-1, 1, 40)
    for value in values:
        with torch.no_grad():
            model.weight.fill_(value)
        average.update(model)
    weights = np.exp(-0.5 * ((np.arange(40) - 30) / 2.0) ** 2)
    average.copy_to(model)
    assert float(model.weight) == pytest.approx(float(weights @ values / weights.sum()), rel=1e-5)


def test_promptsrc_averages_all_that_is_trained_and_resumes() -> None:
    images, labels, _ = data()
    host = make("promptsrc")
    attach(host, LatentHierarchyConfig(attributes=6))
    host.prepare(10)
    assert isinstance(host, PromptSRC)
    assert host.average is not None
    assert any("attributes" in name for name in host.average.names)
    host(images, labels)
    kept = {name: value.clone() for name, value in host.state_dict().items()}
    again = make("promptsrc")
    attach(again, LatentHierarchyConfig(attributes=6))
    again.prepare(10)
    again.load_state_dict(kept)
    assert float(again.average.step) == 1.0  # pyright: ignore


def test_promptkd_learns_nothing_from_a_teacher_like_itself() -> None:
    images, _, classes = data()
    host = make("promptkd")
    assert float(host(images, teacher=images).loss) == pytest.approx(0.0, abs=1e-3)
    assert not host(images).losses
    wide = torch.randn(CLASSES, 20)
    assert PromptKD(FeaturePrompts(WIDTH), wide, WIDTH)(images).logits.shape == (40, CLASSES)
    assert classes.shape == (CLASSES, WIDTH)


def test_tip_adapter_against_loops() -> None:
    images, labels, classes = data(10)
    host = TipAdapter(classes)
    torch.testing.assert_close(host(images).logits, zero_shot(images, classes))
    host.remember(images[:6], labels[:6])
    expected = zero_shot(images, classes).double().numpy()
    unit = normalize(images, dim=-1).double().numpy()
    for row, image in enumerate(unit):
        for key, label in zip(unit[:6], labels[:6], strict=True):
            expected[row, int(label)] += np.exp(-5.5 * (1.0 - image @ key))
    np.testing.assert_allclose(host(images).logits.numpy(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(host(images, classes=classes[:2]).logits, zero_shot(images, classes[:2]))
    with pytest.raises(UsageError, match="equally many, got 3 and 2"):
        host.remember(images[:3], labels[:2])
