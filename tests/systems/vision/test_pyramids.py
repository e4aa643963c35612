"""Backbones of timm under the dense heads: maps with the channels last, and models that are made for one size."""

import pytest
import timm
import torch

from leafward.errors import UsageError
from leafward.systems.himapper import HiMapper
from leafward.systems.vision.detection import Pyramid, detector
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


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "test_vit"])
def test_a_vit_has_a_pyramid(name):
    """All maps had stride 16, of the last four blocks, so that a detector read every region from one of them."""
    made = pyramid(name, {}).eval()
    assert made.feature_info.reduction() == [4, 8, 16, 32]
    blocks = made.body.feature_info.out_indices
    assert (len(blocks), blocks[-1] - blocks[0] > 3) == (4, True)
    with torch.no_grad():
        maps = coarsest(made, torch.randn(1, 3, 96, 80))
    assert [m.shape[2:] for m in maps] == [(24, 20), (12, 10), (6, 5), (3, 3)]


def test_small_and_large_things_of_a_vit_are_read_from_different_maps():
    model = detector("test_vit", 2, size=64).eval()
    with torch.no_grad():
        model([torch.rand(3, 64, 64)])
    pooler = model.roi_heads.box_roi_pool
    assert pooler.scales == [1 / 4, 1 / 8, 1 / 16, 1 / 32]
    boxes = [torch.tensor([[0.0, 0.0, side, side] for side in (20.0, 120.0, 240.0, 500.0)])]
    assert pooler.map_levels(boxes).tolist() == [0, 1, 2, 3]


def test_patches_of_14_pixels_pass_as_16():
    made = pyramid("vit_tiny_patch16_224", {"patch_size": 14, "img_size": 56})
    with torch.no_grad():
        assert [m.shape[2] for m in coarsest(made, torch.randn(1, 3, 56, 56))] == [16, 8, 4, 2]


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
