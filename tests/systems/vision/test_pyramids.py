"""Backbones of timm under the dense heads: maps with the channels last, and models that are made for one size."""

import pytest
import timm
import torch

from leafward.errors import UsageError
from leafward.systems.himapper import HiMapper
from leafward.systems.vision.detection import Pyramid
from leafward.systems.vision.pyramids import any_size, coarsest, pyramid
from leafward.systems.vision.segmentation import SegmentationModel

SWIN = "swin_tiny_patch4_window7_224"
SMALL = {"window_size": 4, "embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
BACKBONES = {SWIN: SMALL, "test_vit": {}, "test_convnext": {}}


@pytest.mark.parametrize(
    ("name", "expected"),
    [(SWIN, {"strict_img_size": False}), ("test_vit", {"dynamic_img_size": True}), ("resnet18", {})],
)
def test_what_a_model_of_one_size_must_be_told(name, expected):
    assert any_size(name) == expected


def test_unknown_models_are_named():
    with pytest.raises(UsageError, match="timm has no model 'resnet_18'"):
        SegmentationModel("resnet_18", 2)


@pytest.mark.parametrize("mapped", [False, True])
def test_maps_have_their_channels_first(mapped):
    backbone = pyramid(SWIN, SMALL).eval()
    x = torch.randn(1, 3, 96, 64)
    if mapped:
        given, backbone = backbone, HiMapper(backbone, 4, 2, dim=8, heads=2).eval()
        assert given(x)[0].shape[1:] == (24, 16, 16)
    with torch.no_grad():
        maps = coarsest(backbone, x)
    assert [m.shape[1:] for m in maps] == [(16, 24, 16), (32, 12, 8), (64, 6, 4), (128, 3, 2)]


@pytest.mark.parametrize("name", BACKBONES)
def test_dense_heads_take_any_backbone_at_any_size(name):
    torch.manual_seed(0)
    segmenter = SegmentationModel(name, 3, arguments=BACKBONES[name]).eval()
    detector = Pyramid(name, BACKBONES[name]).eval()
    with torch.no_grad():
        for size in ((64, 64), (96, 64)):
            x = torch.randn(1, 3, *size)
            assert segmenter(x).shape == (1, 3, *size)
            levels = detector(x)
            assert len(levels) == 5
            assert all(level.shape[1] == 256 for level in levels.values())


def test_swin_sees_where_things_are():
    """Channels taken for rows would still give scores of the right shape for a square map as wide as it is deep."""
    torch.manual_seed(0)
    model = SegmentationModel(SWIN, 2, arguments=SMALL).eval()
    x = torch.zeros(1, 3, 64, 64)
    changed = x.clone()
    changed[..., :4, :4] = 5.0
    with torch.no_grad():
        difference = (timm_map(model, changed) - timm_map(model, x)).abs().sum(dim=1)[0]
    assert difference[0, 0] == difference.max()
    assert difference[8:, 8:].max() < 0.1 * difference[0, 0]


def timm_map(model, x):
    return coarsest(model.backbone, x)[0]


def test_timm_still_gives_swin_with_channels_last():
    """If this changes, `coarsest` must follow `output_fmt` all the same."""
    backbone = timm.create_model(SWIN, features_only=True, img_size=64, **SMALL)
    assert backbone.output_fmt == "NHWC"
