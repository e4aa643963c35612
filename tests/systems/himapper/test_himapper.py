"""Hi-Mapper around backbones: six families, classification and dense, and what must hold for any of them."""

import copy
import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leafward
from leafward.engine import parameter_groups
from leafward.errors import UsageError
from leafward.systems.himapper import HiMapper
from leafward.systems.himapper.mapper import Attention

timm = pytest.importorskip("timm")

leafward.register("timm")

SMALL: dict[str, Any] = {"leaves": 8, "levels": 3, "dim": 16, "heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "efficientnet_lite0": {},
    "deit_tiny_patch16_224": {"img_size": 64, "depth": 3},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "window_size": 4,
        "embed_dim": 16,
        "depths": (1, 1, 1, 1),
        "num_heads": (1, 1, 2, 2),
    },
    "convnext_atto": {"depths": (1, 1, 1, 1)},
    "hcformer_nano": {"depths": (1, 1, 1, 1)},
}


@functools.cache
def pristine(name: str, dense: bool) -> nn.Module:
    torch.manual_seed(0)
    extra: dict[str, Any] = {"features_only": True} if dense else {"num_classes": 5}
    return timm.create_model(name, **FAMILIES[name], **extra)


def mapped(name: str = "resnet10t", dense: bool = False, **settings: Any) -> HiMapper:
    torch.manual_seed(0)
    return HiMapper(copy.deepcopy(pristine(name, dense)), **SMALL, **settings)


def awake(model: HiMapper) -> HiMapper:
    """With a v^L that is not zero."""
    torch.manual_seed(5)
    nn.init.normal_(model.mapper.encoding.leave[1].weight, std=0.2)  # pyright: ignore[reportArgumentType]
    return model


def images(count: int = 2, height: int = 64, width: int = 64) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(3))


def channels_first(model: HiMapper, maps: Tensor) -> Tensor:
    return maps.permute(0, 3, 1, 2) if maps.shape[1] != model.channels else maps


@pytest.mark.parametrize("mixture", ["sample", "moments"])
@pytest.mark.parametrize("geometry", ["lorentz", "euclidean"])
@pytest.mark.parametrize("dense", [False, True], ids=["classification", "dense"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, dense: bool, geometry: str, mixture: str) -> None:
    model = mapped(name, dense, geometry=geometry, mixture=mixture)
    x = images()
    model.eval()
    with torch.no_grad():
        plain, ours = model.backbone(x), model(x)
    for map_, expected in zip(ours, plain, strict=True):  # a pretrained model begins with its own accuracy
        torch.testing.assert_close(map_, expected)

    before = plain[-1].clone() if dense else plain.clone()
    awake(model)
    found = model.hierarchy(x)
    assert found.nodes.shape == (2, 14, 16)
    assert found.attention.shape[:2] == (2, 14)
    torch.testing.assert_close(found.attention.sum(dim=(2, 3)), torch.ones(2, 14))
    assert found.points.shape == (2, 14, 17 if geometry == "lorentz" else 16)
    with torch.no_grad():
        after = model(x)[-1] if dense else model(x)
    assert after.shape == before.shape
    assert (after - before).abs().max() > 1e-3
    if dense:  # the same vector at every place
        shift = channels_first(model, after - before).flatten(2)
        torch.testing.assert_close(shift, shift[:, :, :1].expand_as(shift), atol=1e-4, rtol=1e-4)

    model.train()
    out, losses = model(x, losses=True)
    (sum(map_.square().mean() for map_ in out) + losses.total()).backward()
    for parameter_name, parameter in model.mapper.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        # a bias of the keys moves all scores alike, which the softmax does not see
        assert parameter.grad.any() or parameter_name.endswith("bias"), parameter_name


@pytest.mark.parametrize("name", FAMILIES)
def test_the_surface_of_timm(name: str) -> None:
    model, x = awake(mapped(name)).eval(), images()
    backbone = model.backbone
    with torch.no_grad():
        features = model.forward_features(x)
        torch.testing.assert_close(features, backbone.forward_features(x))  # pyright: ignore[reportCallIssue]
        torch.testing.assert_close(model.forward_head(features), model(x))
        v_hat = model.forward_head(features, pre_logits=True)
        v = backbone.forward_head(features, pre_logits=True)  # pyright: ignore[reportCallIssue]
        shift, _ = model.mapper(model._tokens(features), v)
        torch.testing.assert_close(v_hat, v + shift)
    assert v_hat.shape == (2, model.head_hidden_size)
    assert model.num_features == backbone.num_features
    assert model.pretrained_cfg is backbone.pretrained_cfg
    model.reset_classifier(3)
    assert model.num_classes == 3
    assert model(x).shape == (2, 3)
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), v_hat)


def test_a_pyramid_keeps_its_description_and_refuses_a_classifier() -> None:
    model = mapped(dense=True)
    assert model.feature_info.channels() == [64, 64, 128, 256, 512]
    assert model.feature_info.reduction() == [2, 4, 8, 16, 32]
    for call in (model.get_classifier, lambda: model.reset_classifier(3), lambda: model.forward_features(images())):
        with pytest.raises(UsageError, match="features_only=True"):
            call()


class Layout(nn.Module):
    """The same features in a layout of choice."""

    num_features = 6

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.num_prefix_tokens = 2 if layout == "prefix" else 0
        self.fc = nn.Linear(6, 4)

    def forward_features(self, x: Tensor) -> Tensor:
        if self.layout in ("NCHW", "NHWC"):
            return x if self.layout == "NCHW" else x.permute(0, 2, 3, 1)
        tokens = x.flatten(2).mT
        prefix = torch.full((len(x), self.num_prefix_tokens, 6), 1e3)
        return torch.cat([prefix, tokens], dim=1)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        if self.layout in ("NCHW", "NHWC"):
            v = features.mean(dim=(2, 3) if self.layout == "NCHW" else (1, 2))
        else:
            v = features[:, self.num_prefix_tokens :].mean(dim=1)
        return v if pre_logits else self.fc(v)

    def get_classifier(self) -> nn.Module:
        return self.fc


def test_every_layout_gives_the_same() -> None:
    x, results = torch.randn(2, 6, 4, 8), []
    for layout in ("NCHW", "NHWC", "tokens", "prefix"):
        torch.manual_seed(0)
        model = awake(HiMapper(Layout(layout), **SMALL)).eval()
        results.append((model(x), model.hierarchy(x).attention))
    for logits, attention in results:
        torch.testing.assert_close(logits, results[0][0])
        torch.testing.assert_close(attention, results[0][1])
        assert attention.shape == (2, 14, 4, 8)


@pytest.mark.parametrize(
    ("name", "settings", "grid"),
    [
        ("xcit_nano_12_p16_224", {"depth": 1}, (4, 6)),  # class tokens that timm does not count
        ("cait_xxs24_224", {"depth": 1, "img_size": 64}, (4, 4)),
        ("coat_lite_tiny", {"img_size": 64}, (2, 2)),
        ("resnetv2_18", {"layers": (1, 1, 1, 1), "channels": (16, 16, 16, 32)}, (2, 3)),  # classifiers by convolution
        ("dla46_c", {}, (2, 3)),
    ],
)
def test_families_with_a_surface_of_their_own(name: str, settings: dict[str, Any], grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    backbone = timm.create_model(name, num_classes=5, **settings)
    model, x = HiMapper(backbone, **SMALL).eval(), images(height=64, width=64 if grid[0] == grid[1] else 96)
    with torch.no_grad():
        torch.testing.assert_close(model(x), backbone(x))
        assert (awake(model)(x) - backbone(x)).abs().max() > 1e-3
    assert model.hierarchy(x).attention.shape == (2, 14, *grid)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)


class Misreported(Layout):
    """Says that its map is wider than it is, as SAM's encoder does."""

    num_features, head_hidden_size, output_fmt = 8, 6, "NCHW"


def test_features_that_are_no_map_are_refused() -> None:
    with torch.device("meta"):
        pairs = timm.create_model("crossvit_9_240")
        only_class = timm.create_model("pit_ti_224")
        with pytest.raises(UsageError, match="one feature map; CrossVit gives a list"):
            HiMapper(pairs)(torch.empty(2, 3, 240, 240))
        with pytest.raises(UsageError, match=r"PoolingVisionTransformer must be places .* got the shape \(2, 1, 256\)"):
            HiMapper(only_class)(torch.empty(2, 3, 224, 224))
        with pytest.raises(UsageError, match="its 8 channels; got the shape"):
            HiMapper(Misreported("NCHW"), **SMALL)(torch.empty(2, 6, 4, 4))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_maps_keep_their_rows_and_columns(layout: str) -> None:
    """A backbone that rounds up gives four rows for 97 pixels, which the proportions of the image would call three."""
    features = torch.randn(1, 6, 4, 4)
    backbone = Layout(layout)
    backbone.forward_features = lambda x: Layout.forward_features(backbone, features)  # type: ignore[method-assign]
    found = HiMapper(backbone, **SMALL).eval().hierarchy(torch.zeros(1, 3, 97, 128))
    assert found.attention.shape == (1, 14, 4, 4)


def test_attention_is_that_of_torch() -> None:
    ours, theirs = Attention(12, 3), nn.MultiheadAttention(12, 3, batch_first=True)
    theirs.load_state_dict(
        {
            "in_proj_weight": torch.cat([ours.query.weight, ours.key_value.weight]),
            "in_proj_bias": torch.cat([ours.query.bias, ours.key_value.bias]),
            "out_proj.weight": ours.out.weight,
            "out_proj.bias": ours.out.bias,
        }
    )
    x, memory = torch.randn(1, 5, 12), torch.randn(2, 7, 12)
    expected, weights = theirs(x.expand(2, -1, -1), memory, memory)
    torch.testing.assert_close(ours(x, memory), expected)
    torch.testing.assert_close(ours.weights(x, memory), weights)


def test_noise_in_training_and_none_in_evaluation() -> None:
    model, x = awake(mapped(freeze_backbone=True)), images()
    model.train()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(("mixture", "backend"), [("sample", "aot_eager"), ("moments", "eager")])
def test_compiles_whole(mixture: str, backend: str) -> None:
    model, x = awake(HiMapper(Layout("NCHW"), **SMALL, mixture=mixture)), torch.randn(2, 6, 4, 4)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    model.eval()
    torch.testing.assert_close(compiled(x), model(x))
    model.train()
    torch.manual_seed(7)
    _, expected = model(x, losses=True)
    torch.manual_seed(7)
    _, found = compiled(x, losses=True)
    torch.testing.assert_close(found, expected)
    found.total().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_compiled_under_autocast_its_weights_are_cast_together_to_the_same_values(dtype: torch.dtype) -> None:
    model, x = awake(HiMapper(Layout("NCHW"), **SMALL)).eval().to(dtype), torch.randn(2, 6, 4, 4, dtype=dtype)
    graphs: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()  # a process compiles one function a few times only

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.compile(model, fullgraph=True, backend=keep)(x), model(x))
    assert ("split" in graphs[0].code) == (dtype == torch.float32)  # autocast leaves the others as they are


@pytest.mark.parametrize("dense", [False, True])
def test_compiles_whole_with_a_backbone_of_timm(dense: bool) -> None:
    model, x = awake(mapped("deit_tiny_patch16_224", dense)).eval(), images()
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="eager")(x)
        torch.testing.assert_close(found[-1], model(x)[-1])


def test_bfloat16_by_autocast_and_as_a_whole() -> None:
    model, x = awake(mapped("deit_tiny_patch16_224")).eval(), images()
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        logits, losses = model.train()(x, losses=True)
        assert {values.dtype for values in losses.each.values()} == {torch.float32}
        (logits.float().square().mean() + losses.total()).backward()
        assert (model.eval()(x).float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    whole = model.bfloat16()
    found = whole(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert whole.hierarchy(x.bfloat16()).points.dtype == torch.float32


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "convnext_atto"])
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    x, grads = images(), []
    for enable in (False, True):
        model = awake(mapped(name)).train()
        model.set_grad_checkpointing(enable)
        torch.manual_seed(11)
        logits, losses = model(x, losses=True)
        (logits.square().mean() + losses.total()).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*grads)


def test_a_frozen_backbone_stays_and_its_classifier_learns() -> None:
    model = mapped(freeze_backbone=True).train()
    before = copy.deepcopy(model.backbone.state_dict())
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    logits, losses = model(images(), losses=True)
    (logits.square().mean() + losses.total()).backward()
    optimizer.step()
    changed = {name for name, value in model.backbone.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"fc.weight", "fc.bias"}


def test_a_trained_backbone_learns_too() -> None:
    model = mapped().train()
    logits, _ = model(images(), losses=True)
    logits.square().mean().backward()
    assert all(p.grad is not None for p in model.backbone.parameters())


def test_the_places_of_the_tree_are_not_decayed() -> None:
    model = mapped("deit_tiny_patch16_224")
    decayed = {id(p) for p in parameter_groups(model, 0.1)[0]["params"]}
    named = dict(model.named_parameters())
    spared = ("mapper.tree.mean", "mapper.tree.log_variance", "mapper.manifold._c.theta", "backbone.pos_embed")
    for name in spared:
        assert id(named[name]) not in decayed, name
    assert id(named["mapper.encoding.enter.1.weight"]) in decayed
    assert {"mapper.tree.mean", "backbone.pos_embed"} <= model.no_weight_decay()


def test_state_dicts_hold_parameters_only_and_make_a_round_trip() -> None:
    model = awake(mapped()).eval()
    assert {k for k in model.state_dict() if k.startswith("mapper.")} == {
        f"mapper.{name}" for name, _ in model.mapper.named_parameters()
    }
    other = mapped().eval()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(images()), model(images()))


def test_the_hierarchy_is_learned_through_the_whole_model() -> None:
    """The contrast orders parent, sibling and cousin also where the points come out of attention to a map."""
    model = mapped(freeze_backbone=True)
    features = model.eval().forward_features(images(8)).detach()
    model.train()
    optimizer = torch.optim.Adam(model.mapper.parameters(), lr=3e-3)
    first = last = 0.0
    for _ in range(120):
        loss = model.mapper.losses(model._sharpened(features)[1]).total(contrast=1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = loss.item()
        first = first or last
    assert last < 0.5 * first
    model.eval()
    points = model.mapper.points(model._sharpened(features)[1])
    d = model.mapper.manifold.cdist(points, points).mean(dim=0)[:8]
    leaf = torch.arange(8)
    cousins = leaf[:, None] // 2 != leaf // 2
    parent, sibling, cousin = d[leaf, 8 + leaf // 2].mean(), d[leaf, leaf ^ 1].mean(), d[:, :8][cousins].mean()
    assert parent < sibling < cousin


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"geometry": "lorenz"}, "did you mean 'lorentz'"),
        ({"mixture": "mean"}, "mixture: unknown value 'mean'"),
        ({"dim": 10, "heads": 4}, "dim must be a multiple of heads"),
        ({"leaves": 12, "levels": 4}, "got 12 leaves with 4 levels"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HiMapper(Layout("NCHW"), **settings)


def test_backbones_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="Linear has no num_features"):
        HiMapper(nn.Linear(2, 2))
    distilled = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=1)
    with pytest.raises(UsageError, match="several"):
        HiMapper(distilled)
    with torch.device("meta"):
        second = timm.create_model("volo_d1_224")
    with pytest.raises(UsageError, match="VOLO has several"):
        HiMapper(second)
    unpooled = timm.create_model("resnet10t", num_classes=0, global_pool="")
    with pytest.raises(UsageError, match="must pool its features"):
        HiMapper(unpooled, **SMALL)(images())
    with pytest.raises(UsageError, match="global_pool must not be empty"):
        mapped().reset_classifier(0, "")


class Strip(Layout):
    """Three places out of an image that is nearly square."""

    def forward_features(self, x: Tensor) -> Tensor:
        return super().forward_features(x)[:, :3]


def test_places_that_form_no_grid_are_refused() -> None:
    with pytest.raises(UsageError, match=r"3 places of the feature map do not form a grid .* 4×4 pixels"):
        HiMapper(Strip("tokens"), **SMALL).hierarchy(torch.randn(1, 6, 4, 4))


def test_the_outline_alone_can_be_made() -> None:
    """On the meta device, as sharded training begins."""
    with torch.device("meta"):
        model = HiMapper(Layout("NCHW"), **SMALL)
        assert model(torch.empty(2, 6, 4, 4)).shape == (2, 4)


def test_imports_without_timm_and_transformers() -> None:
    program = (
        "import sys; sys.modules['timm'] = sys.modules['transformers'] = None\n"
        "from leafward.systems.himapper import HiMapper; print(HiMapper.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "HiMapper", done.stderr
