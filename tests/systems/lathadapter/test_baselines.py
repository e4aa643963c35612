"""The baselines against their formulas, and all of them in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_models import build
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from leafward.config import replace
from leafward.data.fewshot import FeatureSet, seeded_split, write_feature_set
from leafward.errors import UsageError
from leafward.systems.lathadapter import train
from leafward.systems.lathadapter.config import Config, all_baselines
from leafward.systems.lathadapter.prompts import Host, ZeroShot
from leafward.systems.lathadapter.prompts.baselines import Clap, ClipLora, Gda, LinearProbe, TaskRes, TipAdapterF

CLASSES, WIDTH = 4, 10


def data() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    texts = torch.randn(CLASSES, WIDTH, generator=generator).double()
    labels = torch.arange(24) % CLASSES
    images = texts[labels] + 0.9 * torch.randn(24, WIDTH, generator=generator).double()
    turn = (torch.eye(WIDTH) + 0.3 * torch.randn(WIDTH, WIDTH, generator=generator)).double()
    return images @ turn, labels, texts


def made(name: Any) -> Host:
    images, labels, texts = data()
    host = name(texts, 30.0)
    if hasattr(host, "remember"):
        host.remember(images, labels)
    return host


@pytest.mark.parametrize("name", [LinearProbe, Clap, TaskRes])
def test_probes_begin_at_zero_shot_and_learn_their_classes_alone(name: Any) -> None:
    images, labels, texts = data()
    host = made(name)
    torch.testing.assert_close(host(images).logits, ZeroShot(texts, 30.0)(images).logits)
    optimizer = torch.optim.Adam(host.parameters(), lr=0.02)
    first = cross_entropy(host(images).logits, labels).item()
    for _ in range(50):
        optimizer.zero_grad()
        host(images, labels).loss.backward()
        optimizer.step()
    assert cross_entropy(host(images).logits, labels).item() < 0.7 * first
    other = texts.flip(0)[:3]
    torch.testing.assert_close(host(images, classes=other).logits, ZeroShot(texts, 30.0)(images, classes=other).logits)
    # A class of the training that is met in another data set takes along what was learned.
    met = host.known(other, [1], [2])  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(host(images, classes=met).logits[:, 1], host(images).logits[:, 2])
    torch.testing.assert_close(met[[0, 2]], other[[0, 2]])


def test_the_pull_of_the_probes_against_loops() -> None:
    images, labels, texts = data()
    unit_z, unit_t = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (images.numpy(), texts.numpy()))
    chances = np.exp(30.0 * unit_z @ unit_t.T)
    chances /= chances.sum(axis=1, keepdims=True)
    for name in (LinearProbe, Clap):
        host = made(name)
        with torch.no_grad():
            host.weight.add_(torch.randn(host.weight.shape, generator=torch.Generator().manual_seed(1)).double())  # pyright: ignore
        expected = 0.0
        for c in range(CLASSES):
            mine = [chances[i, c] for i in range(24) if labels[i] == c]
            strength = 0.1 if name is LinearProbe else sum(mine) / len(mine)
            expected += strength * np.sum((host.weight[c].detach().numpy() - unit_t[c]) ** 2) / CLASSES  # pyright: ignore
        assert float(host(images, labels).losses["pull"].detach()) == pytest.approx(float(expected), rel=1e-9)


def test_tip_adapter_f_trains_its_keys() -> None:
    images, labels, _ = data()
    host = made(TipAdapterF)
    assert [name for name, _ in host.named_parameters()] == ["keys"]
    optimizer = torch.optim.Adam(host.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = host(images, labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_gda_against_loops() -> None:
    images, labels, texts = data()
    host = made(Gda)
    unit = normalize(images, dim=1).numpy()
    means = [unit[labels.numpy() == c].mean(axis=0) for c in range(CLASSES)]
    spread = sum(np.outer(z - means[int(y)], z - means[int(y)]) for z, y in zip(unit, labels, strict=True))
    precision = WIDTH * np.linalg.inv(spread + np.trace(spread) / 23 * np.eye(WIDTH))
    expected = 30.0 * unit @ normalize(texts, dim=1).numpy().T
    for i, z in enumerate(unit):
        for c, mean in enumerate(means):
            expected[i, c] += 0.01 * (mean @ precision @ z - 0.5 * mean @ precision @ mean)
    np.testing.assert_allclose(host(images).logits.numpy(), expected, rtol=1e-8)
    host.choose(images, labels)  # pyright: ignore[reportCallIssue]
    best = float((host(images).logits.argmax(dim=1) == labels).double().mean())
    assert best >= float((torch.from_numpy(expected).argmax(dim=1) == labels).double().mean())
    one = Gda(texts, 30.0)
    one.remember(images[:CLASSES], labels[:CLASSES])
    assert bool(one(images).logits.isfinite().all())


def test_clip_lora_changes_a_copy_of_the_model() -> None:
    model, _ = build("hf_clip")
    numbers = torch.tensor([[62, 7, 8, 9, 20 + c, 63, 1, 1] for c in range(CLASSES)])
    pictures = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    labels = torch.arange(8) % CLASSES
    host = ClipLora(model, numbers)
    assert {p.shape[0] if n.startswith("a") else p.shape[1] for n, p in host.encoder.factors.named_parameters()} == {2}  # pyright: ignore
    before = host(pictures).logits.detach()
    frozen = model.get_image_features(pixel_values=pictures)  # pyright: ignore
    optimizer = torch.optim.Adam(host.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = host(pictures, labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    again = ClipLora(model, numbers)
    torch.testing.assert_close(again(pictures).logits, before)
    again.load_state_dict(host.state_dict())
    torch.testing.assert_close(again(pictures).logits, host(pictures).logits)
    after = model.get_image_features(pixel_values=pictures)  # pyright: ignore
    assert torch.equal(getattr(after, "pooler_output", after), getattr(frozen, "pooler_output", frozen))


def test_every_baseline_in_one_run(tmp_path: Path) -> None:
    images, labels, texts = (x.repeat_interleave(3, dim=0) if len(x) == 24 else x for x in data())
    images = images + 0.3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(4))
    names = tuple(f"class {c}" for c in range(CLASSES))
    toy = FeatureSet("toy", images.float(), labels, texts.float(), names, seeded_split(labels))
    write_feature_set(tmp_path / "toy.npz", toy)
    given = {
        "features": tmp_path / "toy.npz",
        "hosts": (),
        "shots": (8,),
        "seeds": 2,
        "steps": 40,
        "lr": 0.05,
        "warmup_steps": 5,
    }
    config = replace(all_baselines(), **given)
    result = train.run(config, tmp_path / "run")
    means = {row["method"]: row["accuracy"] for row in result["table"]}
    assert set(means) == set(config.baselines)
    for name in ("linear-probe", "clap", "taskres"):
        assert means[name] > means["zero-shot"]
    far = replace(config, protocol="domain", targets=(tmp_path / "toy.npz",))
    found = {(row["method"], row["test"]): row["accuracy"] for row in train.run(far, tmp_path / "far")["table"]}
    for name in config.baselines:  # the same data under another name: what was learned goes along
        assert found[name, "toy (2)"] == pytest.approx(found[name, "toy"])
    with pytest.raises(UsageError, match="clip-lora changes the encoders and needs images"):
        train.run(replace(Config(), features=tmp_path / "toy.npz", baselines=("clip-lora",)), tmp_path / "other")
