"""HCFormer as a timm model: every registered variant under timm's contract, and the faults of the published code."""

import pytest
import timm
import torch

import leafward.systems.hcformer.model
from leafward.errors import UsageError
from leafward.systems.hcformer import HCFormer
from leafward.systems.hcformer.model import PUBLISHED_PARAMETERS

NAMES = timm.list_models("hcformer*")
variants = pytest.mark.parametrize("name", NAMES)
COMBINATIONS = [("euclidean", "euclidean"), ("lorentz", "lorentz"), ("lorentz", "euclidean")]


def build(name: str = "hcformer_nano", **settings) -> HCFormer:
    return timm.create_model(name, **({"num_classes": 7} | settings)).eval()


def images(*size: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, *size)


def test_all_variants_are_registered():
    assert sorted(PUBLISHED_PARAMETERS) == NAMES


@variants
def test_parameters_are_as_published_and_the_twin_has_as_many(name):
    with torch.device("meta"):
        curved, flat = (
            sum(p.numel() for p in timm.create_model(name, geometry=g).parameters()) for g in ("lorentz", "euclidean")
        )
    assert abs(curved / PUBLISHED_PARAMETERS[name] - 1) < 0.05
    assert abs(curved / flat - 1) < 0.01


@variants
def test_contract(name):
    """Forward, backward, sizes, features, head and state dict of one variant."""
    model = build(name).train()
    model(images(48, 48)).square().sum().backward()
    for path, parameter in model.named_parameters():
        # In the published code twelve tensors of the third stage's window branch never learn.
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
        assert parameter.grad.abs().max() > 0, path
    model.eval()
    with torch.no_grad():
        for size in ((32, 32), (33, 70)):
            assert model(images(*size)).shape == (2, 7)
            assert model(images(*size)).isfinite().all()
        x = images(64, 96)
        features = model.forward_features(x)
        assert features.shape == (2, model.num_features, 2, 3)
        assert torch.equal(model.forward_head(features), model(x))
        assert model.forward_head(features, pre_logits=True).shape == (2, model.head_hidden_size)
        logits = model(x)
        copy = build(name)
        copy.load_state_dict(model.state_dict())
        assert torch.equal(copy(x), logits)
        twin = build(name, geometry="euclidean")
        assert twin(x).isfinite().all()
        apart = set(twin.state_dict()) ^ set(model.state_dict())
        assert apart
        assert all(path.endswith("window_level.similarity.log_scale") for path in apart)
        final, maps = model.forward_intermediates(x, indices=[1, 3], norm=True)
        assert torch.equal(final, features)
        assert torch.equal(maps[1], features)
        assert [m.shape[2:] for m in maps] == [(8, 12), (2, 3)]
        model.reset_classifier(0)
        assert model(x).shape == (2, model.num_features)
        model.reset_classifier(0, "")
        assert model(x).shape == (2, model.num_features, 2, 3)
        model.reset_classifier(5, "avg")
        assert model(x).shape == (2, 5)
        assert model.num_classes == 5
        config = model.pretrained_cfg
        assert f"{config['classifier']}.weight" in model.state_dict()
        assert f"{config['first_conv']}.weight" in model.state_dict()
        pyramid = timm.create_model(name, features_only=True, out_indices=(0, 2, 3)).eval()
        shapes = [tuple(m.shape[1:]) for m in pyramid(images(70, 64))]
        assert [c for c, _, _ in shapes] == pyramid.feature_info.channels()
        assert pyramid.feature_info.reduction() == [4, 16, 32]
        assert [s[1:] for s in shapes] == [(17, 16), (5, 4), (3, 2)]


@pytest.mark.parametrize(("geometry", "patch_geometry"), COMBINATIONS)
def test_geometries_train(geometry, patch_geometry):
    torch.manual_seed(0)
    settings = {"geometry": geometry, "patch_geometry": patch_geometry, "init_values": 0.1}
    model = build(**settings, learn_curvature=True).train()
    x, target = images(36, 32, batch=4), torch.tensor([0, 1, 2, 3])
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(7):
        loss = torch.nn.functional.cross_entropy(model(x), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    curvatures = [p for name, p in model.named_parameters() if name.endswith("curvature.theta")]
    assert len(curvatures) == 10 * (geometry == "lorentz") + 12 * (patch_geometry == "lorentz")


@pytest.mark.parametrize("size", [(4, 4), (32, 57), (100, 36), (225, 224), (800, 1333)], ids=str)
def test_any_size(size):
    with torch.no_grad():
        assert build()(images(*size, batch=1)).isfinite().all()


def test_too_small_is_said():
    with pytest.raises(UsageError, match="at least 4×4 pixels, got 3×64"):
        build()(images(3, 64))
    with pytest.raises(UsageError, match="at least 4×4"):
        build().set_input_size(2)
    build().set_input_size((37, 81))


def test_unknown_arguments_are_refused():
    """The published code swallows them in **kwargs, `features_only` and `in_chans` among them."""
    with pytest.raises(UsageError, match="has no argument 'geometri'; did you mean 'geometry'"):
        build(geometri="lorentz")
    assert build(in_chans=1)(torch.randn(1, 1, 32, 32)).shape == (1, 7)
    with pytest.raises(UsageError, match="depths must be four"):
        build(depths=(1, 2))


def test_pruned_pyramid_and_early_stop():
    model = build()
    x = images(64, 64)
    with torch.no_grad():
        whole = model.forward_intermediates(x, intermediates_only=True)
        early = model.forward_intermediates(x, indices=[0, 1], stop_early=True, intermediates_only=True)
        assert all(torch.equal(a, b) for a, b in zip(early, whole, strict=False))
        swapped = model.forward_intermediates(x, indices=[1], output_fmt="NHWC", intermediates_only=True)
        assert torch.equal(swapped[0], whole[1].permute(0, 2, 3, 1))
        assert model.prune_intermediate_layers([0, 1], prune_norm=True) == [0, 1]
        assert len(model.stages) == 2
        assert torch.equal(model.forward_intermediates(x, [1], intermediates_only=True)[0], whole[1])


def test_weight_decay_spares_biases_and_scales():
    model = build(learn_curvature=True)
    spared = model.no_weight_decay()
    names = dict(model.named_parameters())
    assert spared <= set(names)
    kept = set(names) - spared
    assert all(name.endswith("weight") and names[name].ndim > 1 for name in kept)
    assert not any("bias" in name for name in kept)


def test_groups_cover_every_parameter():
    from timm.models._manipulate import group_parameters

    model = build()
    count = sum(1 for _ in model.parameters())
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse=coarse))
        assert sum(len(names) for names in groups.values()) == count
        assert len(groups) > 4


def test_gradient_checkpointing_changes_nothing():
    model = build(drop_path_rate=0.2).train()
    x = images(40, 40)
    grads = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))
    torch.testing.assert_close(*grads)


def test_channels_last_and_bfloat16_follow():
    model = build(init_values=0.5)
    x = images(64, 64)
    with torch.no_grad():
        exact = model(x)
        torch.testing.assert_close(
            model.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last)), exact
        )
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(x).float()
        pure = model.bfloat16()(x.bfloat16()).float()
    for rough in (mixed, pure):
        assert (rough - exact).norm() < 0.05 * exact.norm()


def test_features_are_channels_last_in_memory():
    for feature in build(features_only=True)(images(64, 64)):
        assert feature.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
@variants
def test_compiles_without_a_break_and_exports(name):
    """With one block in each stage, as tracing takes long. Sizes that are not known yet take four times as long, and
    nothing about them depends on the widths, so the smallest variant alone has them."""
    model = build(name, depths=(1, 1, 1, 1)).train()
    x = images(40, 64)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    model.eval()
    if name != "hcformer_nano":
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
        return
    dims = {0: torch.export.Dim("batch", max=64), 2: torch.export.Dim("height", min=64, max=1400)}
    shapes = {"x": dims | {3: torch.export.Dim("width", min=64, max=1400)}}
    exported = torch.export.export(model, (images(100, 130),), dynamic_shapes=shapes).module()
    for x in (images(64, 64, batch=1), images(224, 97, batch=3)):
        torch.testing.assert_close(exported(x), model(x))


def test_features_by_graph():
    """timm's third way to a pyramid, by torch.fx; the published code's loops over sizes cannot be traced so."""
    settings = {"depths": (1, 1, 1, 1), "features_only": True}
    pyramid, graph = build(**settings), build(**settings, feature_cls="fx")
    graph.graph_module.load_state_dict(pyramid.model.state_dict(), strict=False)
    x = images(40, 64)
    for one, other in zip(pyramid(x), graph(x), strict=True):
        assert torch.equal(one, other)


def test_the_last_maps_can_stay_fine():
    """DeepLab's and PAN's decoders ask timm for an output stride of 16 or 8."""
    x = images(64, 96)
    for stride, sizes in ((16, [(8, 12), (4, 6), (4, 6)]), (8, [(8, 12)] * 3)):
        pyramid = build(depths=(1, 1, 1, 1), features_only=True, output_stride=stride)
        assert pyramid.feature_info.reduction() == [4, 8, min(16, stride), stride]
        assert [tuple(map_.shape[2:]) for map_ in pyramid(x)[1:]] == sizes
    with pytest.raises(UsageError, match="output_stride must be 8, 16 or 32, got 4"):
        build(output_stride=4)


def test_assignments_are_those_of_the_forward_pass():
    model = build()
    x = images(72, 64)
    seen = {}

    def record(name):
        return lambda module, inputs, output: seen.__setitem__(name, (inputs, output))

    for s, stage in enumerate(model.stages):
        for b, block in enumerate(stage.blocks):
            block.mixer.register_forward_hook(record((s, b)))
    found = model.assignments(x)
    assert [(a.stage, a.block) for a in found if a.level == "patch"] == sorted(seen)
    assert {a.stage for a in found if a.level == "window"} == {0, 1, 2}
    for a in found:
        inputs, output = seen[a.stage, a.block]
        mixer = model.stages[a.stage].blocks[a.block].mixer
        again, weights = mixer.mix(*inputs)
        assert torch.equal(again, output)
        assert torch.equal(weights[a.level], a.weights)
        # No level has a softmax over one centre.
        assert a.weights.shape[-1] >= 4
    assert not any(block.mixer._forward_pre_hooks for stage in model.stages for block in stage.blocks)


def test_models_import_names_what_is_missing():
    with pytest.raises(AttributeError, match="no attribute 'HCFormr'"):
        leafward.systems.HCFormr  # noqa: B018


def test_layouts_serve_inference_and_training():
    model = build()
    small, large = images(32, 48), images(64, 48)
    with torch.inference_mode():
        first = model(small)
    model(small).sum().backward()
    with torch.no_grad():
        assert model(large).shape == (2, 7)
        torch.testing.assert_close(model(small), first)


def test_width_of_the_third_stage_is_aligned():
    """The published 196 is no multiple of eight, which matrix products on a GPU are slow with."""
    for name in NAMES:
        with torch.device("meta"):
            widths = timm.create_model(name, features_only=True).feature_info.channels()
        assert all(width % 8 == 0 for width in widths)


def test_feed_forward_keeps_one_hidden_layer():
    """Of the units before and after GELU only the former stay for the way back; gradients are the usual ones."""
    torch.manual_seed(0)
    layer = leafward.systems.hcformer.model.FeedForward(8, 64)
    x = torch.randn(4, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        out = layer(x)
    assert kept.count((4, 64)) == 1
    plain = layer.fc2(torch.nn.functional.gelu(layer.fc1(x)))
    torch.testing.assert_close(out, plain)
    leaves = [x, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), leaves), torch.autograd.grad(plain.square().sum(), leaves)
    )
