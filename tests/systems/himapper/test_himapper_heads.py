"""Hi-Mapper on backbones of timm whose head is more than the classifier that they name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leafward.errors import UsageError
from leafward.systems.himapper import HiMapper

timm = pytest.importorskip("timm")

SMALL: dict[str, Any] = {"leaves": 8, "levels": 3, "dim": 16, "heads": 2}
HEADS: dict[str, dict[str, Any]] = {
    "efficientvit_m0": {"img_size": 128, "depth": (1, 1, 1)},  # a norm before the classifier
    "shvit_s1": {"depth": (1, 1, 1)},
    "sequencer2d_s": {"layers": (1, 1, 1, 1)},  # the pooling before it
}


def seen(backbone: nn.Module) -> nn.Module:
    """A backbone for evaluation, with statistics in its norms and weights in its classifier."""
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.3)  # pyright: ignore[reportArgumentType]
            nn.init.uniform_(module.running_var, 0.5, 2.0)  # pyright: ignore[reportArgumentType]
    for parameter in backbone.get_classifier().parameters():  # pyright: ignore[reportCallIssue]
        nn.init.normal_(parameter, std=0.1)
    return backbone.eval()


def images() -> Tensor:
    return torch.randn(2, 3, 128, 128)


@pytest.mark.parametrize("name", HEADS)
def test_a_whole_head_follows_the_sharpened_feature(name: str) -> None:
    backbone, x = seen(timm.create_model(name, num_classes=5, **HEADS[name])), images()
    model = HiMapper(backbone, **SMALL).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), backbone(x))  # v^L begins at zero
        nn.init.normal_(model.mapper.encoding.leave[1].weight)  # pyright: ignore[reportArgumentType]
        assert (model(x) - backbone(x)).abs().max() > 1e-3
        if name == "shvit_s1":  # LSTMs do not compile
            torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), model.forward_head(model.forward_features(x), pre_logits=True))


@pytest.mark.parametrize("name", HEADS)
def test_heads_without_classes_and_with_a_frozen_backbone(name: str) -> None:
    bare, x = HiMapper(timm.create_model(name, num_classes=0, **HEADS[name]), **SMALL), images()
    assert bare(x).shape == (2, bare.head_hidden_size)
    frozen = HiMapper(timm.create_model(name, num_classes=5, **HEADS[name]), **SMALL, freeze_backbone=True)
    frozen(x).sum().backward()
    learned = {tuple(p.shape) for p in frozen.backbone.parameters() if p.grad is not None}
    assert learned == {(5, frozen.head_hidden_size), (5,)}


def test_several_heads_are_refused_also_without_classes() -> None:
    with torch.device("meta"), pytest.raises(UsageError, match="must have one classifier"):
        HiMapper(timm.create_model("deit_tiny_distilled_patch16_224", num_classes=0), **SMALL)
