"""Attach, train, save, load and merge on every layout, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from adapter_models import LAYOUTS, WIDTH, build
from torch import nn

from leafward.adapters import (
    BlockScaleConfig,
    adapters,
    attach,
    detach,
    from_pretrained,
    merge,
    print_trainable_parameters,
    save_pretrained,
    set_adapter,
    trainable_parameters,
)
from leafward.adapters.layouts import STORE, find_sites
from leafward.errors import DataError, UsageError

SMALL = BlockScaleConfig(block_size=8)


def disturb(model: nn.Module, name: str = "default", seed: int = 3) -> None:
    """Random adapter weights in the place of the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters(model)[name].parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def base_keys(model: nn.Module) -> list[str]:
    return [key for key in model.state_dict() if not key.startswith(STORE)]


@pytest.mark.parametrize("constraint", ["free", "diagonal", "orthogonal", "orthogonal_diagonal"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attach_save_load_merge(layout: str, constraint: str, tmp_path: Path) -> None:
    model, call = build(layout)
    keys, before = list(model.state_dict()), call(model).detach()
    config = BlockScaleConfig(block_size=8, constraint=constraint)  # pyright: ignore[reportArgumentType]
    assert attach(model, config) is model
    assert base_keys(model) == keys
    torch.testing.assert_close(call(model), before, rtol=0, atol=1e-6)  # begins as the identity

    disturb(model)
    adapted = call(model)
    assert (adapted - before).abs().max() > 1e-3
    save_pretrained(model, tmp_path)

    fresh, _ = build(layout)
    from_pretrained(fresh, tmp_path)
    # Nothing in it requires gradients, so attention may take another way through the same numbers.
    torch.testing.assert_close(call(fresh), adapted, rtol=1e-6, atol=2e-6)
    merge(fresh)
    assert list(fresh.state_dict()) == keys
    assert all(parameter.requires_grad for parameter in fresh.parameters())
    torch.testing.assert_close(call(fresh), adapted, rtol=1e-6, atol=1e-6)

    detach(model)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(call(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_scale_is_trained_and_nothing_else(layout: str) -> None:
    """The authors' installer leaves the adapters of half the layers of a ViT-L without effect; here none is."""
    model, call = build(layout)
    attach(model, SMALL)
    weights = torch.randn(call(model).shape, generator=torch.Generator().manual_seed(5))
    (call(model) * weights).sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith(STORE):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name
            assert not parameter.requires_grad, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_projections_are_found_and_used(layout: str) -> None:
    """Also out, fc1 and fc2, whether they are called or read by an attention."""
    model, call = build(layout)
    before = call(model).detach()
    for role in ("out", "fc1", "fc2"):
        attach(model, BlockScaleConfig(block_size=8, targets=(role,), constraint="diagonal"))  # pyright: ignore
        disturb(model)
        adapted = call(model)
        assert (adapted - before).abs().max() > 1e-4
        torch.testing.assert_close(call(merge(copy.deepcopy(model))), adapted, rtol=1e-6, atol=1e-6)
        detach(model)


def test_sites_have_the_widths_of_their_layers() -> None:
    model, _ = build("open_clip")
    sites = find_sites(model, ("q", "k", "v"))
    assert len(sites) == 3 * 4
    assert {site.encoder for site in sites} == {"image", "text"}
    assert all(site.width == WIDTH and site.stop - site.start == WIDTH for site in sites)
    head, _ = build("pooling_head")
    assert {"attn_pool.q", "attn_pool.kv.k", "attn_pool.kv.v"} <= {s.name for s in find_sites(head, ("q", "k", "v"))}


def test_pooler_with_another_width_for_keys() -> None:
    """open_clip's attentional pooler: `nn.MultiheadAttention` with separate weights."""
    pooler = nn.Sequential()
    pooler.attn_pool = nn.MultiheadAttention(WIDTH, 2, kdim=16, vdim=16, batch_first=True)
    query, context = torch.randn(2, 3, WIDTH), torch.randn(2, 5, 16)
    before = pooler.attn_pool(query, context, context)[0]
    attach(pooler, SMALL)
    disturb(pooler)
    adapted = pooler.attn_pool(query, context, context)[0]
    assert (adapted - before).abs().max() > 1e-3
    merge(pooler)
    torch.testing.assert_close(pooler.attn_pool(query, context, context)[0], adapted, rtol=1e-6, atol=1e-6)


def test_fused_attention_with_biases_of_its_own_does_not_bypass_the_adapter() -> None:
    """timm's EVA, BEiT and Swin V2 read the weight of `qkv` and never call it."""
    from timm.models.eva import EvaAttention

    model, x = nn.ModuleDict({"attn": EvaAttention(WIDTH, 2, norm_layer=nn.LayerNorm)}), torch.randn(2, 5, WIDTH)
    before = model["attn"](x)
    attach(model, SMALL)
    disturb(model)
    adapted = model["attn"](x)
    assert (adapted - before).abs().max() > 1e-3
    adapted.sum().backward()
    assert all(parameter.grad is not None for parameter in adapters(model)["default"].parameters())
    torch.testing.assert_close(merge(model)["attn"](x), adapted, rtol=1e-6, atol=1e-6)


def test_encoder_layer_of_torch_does_not_bypass_the_adapter() -> None:
    """Its fast path at inference reads the weights of the attention without calling it."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True).eval()
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        before = layer(x)
        attach(layer, SMALL)
        disturb(layer)
        adapted = layer(x)
        assert (adapted - before).abs().max() > 1e-3
        torch.testing.assert_close(layer(x), merge(layer)(x), rtol=1e-5, atol=1e-5)


def test_an_adapter_is_not_merged_under_one_that_acts_before_it() -> None:
    """W S₁ᵀ S₂ᵀ is not W S₂ᵀ S₁ᵀ: the model would compute something else without a word."""
    model, call = build("hf_clip")
    for place, name in enumerate(("first", "second")):
        attach(model, SMALL, name)
        disturb(model, name, seed=place)
    adapted = call(model)
    with pytest.raises(UsageError, match="'second' acts after 'first'"):
        merge(model, "second")
    assert list(adapters(model)) == ["first", "second"]
    torch.testing.assert_close(call(merge(model, "first")), adapted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(call(merge(model, "second")), adapted, rtol=1e-6, atol=1e-6)


def test_a_base_model_in_a_directory_is_named_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that was trained on ./clip is put to use from elsewhere."""
    (tmp_path / "clip").mkdir()
    monkeypatch.chdir(tmp_path)
    model, _ = build("hf_clip")
    save_pretrained(attach(model, SMALL, base_model="clip"), "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model"]["name"] == str(
        (tmp_path / "clip").resolve()
    )


def test_several_adapters_act_in_order_and_can_be_switched() -> None:
    model, call = build("hf_clip")
    before = call(model).detach()
    for seed, name in enumerate(("first", "second")):
        attach(model, SMALL, name)
        disturb(model, name, seed)
    both = call(model)
    set_adapter(model, "first")
    first = call(model)
    set_adapter(model, [])
    torch.testing.assert_close(call(model), before, rtol=0, atol=0)
    set_adapter(model, ["first", "second"])
    merged = merge(copy.deepcopy(model))
    assert not adapters(merged)
    torch.testing.assert_close(call(merged), both, rtol=1e-6, atol=1e-6)
    detach(model, "second")
    torch.testing.assert_close(call(model), first, rtol=0, atol=0)
    assert list(adapters(model)) == ["first"]
    assert not any(p.requires_grad for n, p in model.named_parameters() if not n.startswith(STORE))


def test_a_deep_copy_has_an_adapter_of_its_own() -> None:
    model, call = build("timm_fused")
    attach(model, SMALL)
    twin = copy.deepcopy(model)
    before = call(model).detach()
    disturb(twin)
    torch.testing.assert_close(call(model), before, rtol=0, atol=0)
    assert (call(twin) - before).abs().max() > 1e-3


def test_a_failing_call_leaves_the_weights_as_they_were() -> None:
    model, call = build("open_clip")
    attach(model, SMALL)
    disturb(model)
    adapted = call(model)
    with pytest.raises(Exception, match=r"."):
        model.visual.transformer.resblocks[0].attn(torch.randn(2, 3, 5), torch.randn(2, 3, 5), torch.randn(2, 3, 5))
    assert isinstance(model.visual.transformer.resblocks[0].attn.in_proj_weight, nn.Parameter)
    torch.testing.assert_close(call(model), adapted, rtol=0, atol=0)


def test_half_precision_weights_are_scaled_in_float32() -> None:
    """One rounding: the merged weight is the float32 product, rounded."""
    layer = nn.Sequential()
    layer.q_proj = nn.Linear(WIDTH, WIDTH).bfloat16()
    weight = layer.q_proj.weight.detach().clone()
    attach(layer, BlockScaleConfig(block_size=8, targets=("q",)))
    disturb(layer)
    (scale,) = adapters(layer)["default"].scales.values()  # pyright: ignore
    dense = torch.block_diag(*scale.matrix().double())
    merge(layer)
    assert layer.q_proj.weight.dtype == torch.bfloat16
    expected = (weight.double() @ dense.mT).float().bfloat16()
    assert (layer.q_proj.weight != expected).float().mean() < 0.01  # float32 rounds a tie otherwise now and then
    torch.testing.assert_close(layer.q_proj.weight, expected, rtol=2**-8, atol=1e-6)


def test_counts(capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = build("hf_clip")
    total = sum(parameter.numel() for parameter in model.parameters())
    attach(model, SMALL)
    added = 2 * 2 * 3 * (WIDTH // 8) * 8 * 8  # encoders, layers, projections, blocks
    assert trainable_parameters(model) == (added, total + added)
    print_trainable_parameters(model)
    assert f"trainable params: {added:,}" in capsys.readouterr().out


def test_the_published_count_for_vit_b() -> None:
    """5,898,240 parameters in CLIP ViT-B: 12 layers of width 768 and 12 of width 512, blocks of 128."""
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "visual": nn.ModuleList(nn.MultiheadAttention(768, 12) for _ in range(12)),
                "transformer": nn.ModuleList(nn.MultiheadAttention(512, 8) for _ in range(12)),
            }
        )
        attach(model, BlockScaleConfig())
    assert trainable_parameters(model)[0] == 5_898_240


@pytest.mark.parametrize(
    ("share", "scales", "blocks"),
    [
        ((), 12, 4),
        (("blocks",), 12, 1),
        (("projections",), 4, 4),
        (("layers",), 6, 4),
        (("blocks", "projections", "layers"), 2, 1),
    ],
)
@pytest.mark.parametrize("layout", ["hf_clip", "open_clip"])
def test_sharing(layout: str, share: tuple[str, ...], scales: int, blocks: int) -> None:
    model, call = build(layout)
    attach(model, BlockScaleConfig(block_size=8, share=share))  # pyright: ignore[reportArgumentType]
    held = adapters(model)["default"].scales  # pyright: ignore[reportAttributeAccessIssue]
    assert len(held) == scales  # pyright: ignore[reportArgumentType]
    assert {len(scale.offset) for scale in held.values()} == {blocks}  # pyright: ignore
    disturb(model)
    adapted = call(model)
    torch.testing.assert_close(call(merge(model)), adapted, rtol=1e-6, atol=1e-6)


def test_weight_decay_pulls_to_the_identity() -> None:
    model, call = build("timm_fused")
    before = call(model).detach()
    attach(model, SMALL)
    disturb(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, weight_decay=1.0)
    for _ in range(100):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    torch.testing.assert_close(call(model), before, rtol=0, atol=1e-3)


def test_the_record_of_a_saved_adapter(tmp_path: Path) -> None:
    model, _ = build("hf_clip")
    attach(model, SMALL, base_model="openai/clip-vit-base-patch16", revision="abc")
    save_pretrained(model, tmp_path)
    record = json.loads((tmp_path / "adapter_config.json").read_text())
    from leafward import __version__

    assert record["method"] == "block_scale"
    assert record["leafward_version"] == __version__
    base = record["base_model"]
    assert (base["name"], base["revision"], base["class"]) == ("openai/clip-vit-base-patch16", "abc", "CLIPModel")
    assert base["dtype"] == "float32"
    assert 16 <= len(base["weights"]) <= 32
    for name, value in base["weights"].items():
        weight = model.get_parameter(name)
        assert value == float(weight[tuple(side // 2 for side in weight.shape)])
    assert record["config"]["block_size"] == 8
    assert (tmp_path / "adapter_model.safetensors").is_file()


def without_weights(folder: Path, **base: str) -> None:
    """An adapter as it was written before the weights of its base were."""
    path = folder / "adapter_config.json"
    record = json.loads(path.read_text())
    record["base_model"] = {key: record["base_model"][key] for key in ("name", "revision", "class")} | base
    path.write_text(json.dumps(record))


def test_a_base_model_is_known_by_its_weights_and_not_by_its_folder(tmp_path: Path) -> None:
    model, _ = build("hf_clip")
    save_pretrained(attach(model, SMALL, base_model="somebody/clip"), tmp_path)

    moved, _ = build("hf_clip")
    moved.config._name_or_path = "elsewhere/renamed"
    from_pretrained(moved, tmp_path)
    assert list(adapters(moved)) == ["default"]
    for dtype in (torch.bfloat16, torch.float16):  # loaded in another type
        from_pretrained(build("hf_clip")[0].to(dtype), tmp_path)

    namesake, _ = build("hf_clip", seed=1)
    namesake.config._name_or_path = "somebody/clip"
    with pytest.raises(
        UsageError, match=r"another base model somebody/clip: the middle of its text_model\..* is .*here"
    ):
        from_pretrained(namesake, tmp_path)
    assert not adapters(namesake)
    from_pretrained(namesake, tmp_path, check_base=False)

    tuned, _ = build("hf_clip")
    with torch.no_grad():  # as a fine-tuning of the attention alone would
        for site in find_sites(tuned, ("q", "k", "v")):
            tuned.get_submodule(site.holder).get_parameter(site.parameter).mul_(1 + 1e-4)
    with pytest.raises(UsageError, match="another base model"):
        from_pretrained(tuned, tmp_path)


def test_an_adapter_in_half_precision_fits_its_base_in_single(tmp_path: Path) -> None:
    model, _ = build("hf_clip")
    save_pretrained(attach(model.bfloat16(), SMALL), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model"]["dtype"] == "bfloat16"
    from_pretrained(build("hf_clip")[0], tmp_path)
    with pytest.raises(UsageError, match="another base model"):
        from_pretrained(build("hf_clip", seed=1)[0], tmp_path)


def test_older_adapters_know_their_base_by_name(tmp_path: Path) -> None:
    model, _ = build("hf_clip")
    save_pretrained(attach(model, SMALL, base_model="somebody/clip-a"), tmp_path)
    without_weights(tmp_path)
    other, _ = build("hf_clip")
    other.config._name_or_path = "else/clip-b"
    with pytest.raises(UsageError, match=r"base model of name 'clip-a', not 'clip-b'"):
        from_pretrained(other, tmp_path)
    assert not adapters(other)
    other.config._name_or_path = "else/clip-a"
    from_pretrained(other, tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"weights": []}, {"weights": {"a": "1"}}, {"weights": {"a": 10**400}}, {"dtype": "int8"}, {"dtype": None}],
)
def test_a_description_of_the_base_that_is_none(change: dict, tmp_path: Path) -> None:
    model, _ = build("hf_clip")
    save_pretrained(attach(model, SMALL), tmp_path)
    path = tmp_path / "adapter_config.json"
    record = json.loads(path.read_text())
    record["base_model"] |= change
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match="'weights' of 'base_model' must be numbers by name"):
        from_pretrained(build("hf_clip")[0], tmp_path)


def test_refusals_of_foreign_adapters(tmp_path: Path) -> None:
    model, _ = build("hf_clip")
    attach(model, SMALL, base_model="somebody/clip-a")
    save_pretrained(model, tmp_path)
    other, _ = build("hf_clip")

    with pytest.raises(UsageError, match="of class 'CLIPModel', not 'SiglipModel'"):
        from_pretrained(build("hf_siglip")[0], tmp_path)
    with pytest.raises(
        DataError, match=r"lacks scales.encoder/layers/0/self_attn/k_proj.offset, which this model needs"
    ):
        from_pretrained(other.vision_model, tmp_path, "second", check_base=False)
    assert not adapters(other.vision_model)
    shallow = copy.deepcopy(model)
    detach(shallow)
    del shallow.text_model.encoder.layers[1]
    with pytest.raises(UsageError, match=r"it has a parameter text_model\..*layers\.1\..*, and this model has none"):
        from_pretrained(shallow, tmp_path)
    with pytest.raises(DataError, match=r"holds scales.text_model/.*/1/.*, for which this model has no target"):
        from_pretrained(shallow, tmp_path, check_base=False)


@pytest.mark.parametrize("layout", ["hf_clip", "timm_fused"])
def test_an_adapted_model_compiles_in_one_graph(layout: str) -> None:
    model, call = build(layout)
    attach(model, SMALL)
    disturb(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(call(compiled), call(model), rtol=1e-6, atol=1e-6)


def test_refusals_of_files(tmp_path: Path) -> None:
    model, _ = build("timm_fused")
    with pytest.raises(DataError, match="does not hold an adapter"):
        from_pretrained(model, tmp_path)
    attach(model, SMALL)
    save_pretrained(model, tmp_path)
    config = tmp_path / "adapter_config.json"
    text = config.read_text()
    other, _ = build("timm_fused")
    for old, new, message in [
        ('"block_size": 8', '"block_size": 16', r"has shape \(4, 8, 8\), but this model needs \(2, 16, 16\)"),
        ('"block_size"', '"block_sise"', "did you mean 'block_size'"),
        ('"method": "block_scale"', '"method": "blockscale"', "did you mean 'block_scale'"),
        ('"method": "block_scale"', '"method": ["block_scale"]', "unknown method"),
        ("leafward-adapter", "peft", "was not written by leafward"),
    ]:
        config.write_text(text.replace(old, new))
        with pytest.raises((DataError, UsageError), match=message):
            from_pretrained(other, tmp_path)
        assert not adapters(other)
    config.write_text(text)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot read adapter_model"):
        from_pretrained(other, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be"),
        ({"block_size": 8.5}, "block_size must be an integer ≥ 1, got 8.5"),
        ({"block_size": True}, "block_size must be an integer ≥ 1, got True"),
        ({"block_size": "eight"}, "block_size must be an integer ≥ 1, got 'eight'"),
        ({"block_size": 7}, "block_size 7 does not divide the width 32 of blocks.0.attn.qkv.q"),
        ({"targets": ("q", "gate")}, r"targets\[1\] must be one of .*'gate'"),
        ({"targets": ()}, "at least one"),
        ({"encoder": "text"}, "encoder 'text' has no projections in VisionTransformer"),
        ({"constraint": "unitary"}, "constraint must be one of .*free"),
        ({"share": ("heads",)}, r"share\[0\] must be one of blocks"),
        ({"share": "layers"}, "share must be a list, each one of blocks, layers, projections, got 'layers'"),
        ({"targets": "qk"}, "targets must be a list, each one of .*got 'qk'"),
        ({"encoder": None}, "encoder must be one of both, image, text, got None"),
        ({"constraint": None}, "constraint must be one of .*got None"),
    ],
)
def test_refusals_of_settings(options: dict, message: str) -> None:
    model, _ = build("timm_fused")
    with pytest.raises(UsageError, match=message):
        attach(model, BlockScaleConfig(**{"block_size": 8, **options}))


@pytest.mark.parametrize("name", ["base", "frozen", "train", "half", 3])
def test_a_name_that_is_taken_is_refused_and_leaves_no_trace(name: str) -> None:
    model, _ = build("timm_fused")
    keys, trained = list(model.state_dict()), trainable_parameters(model)
    with pytest.raises(UsageError, match=f"name must be a word .*, got {name!r}"):
        attach(model, SMALL, name)
    assert list(model.state_dict()) == keys
    assert trainable_parameters(model) == trained
    assert not adapters(model)


def test_refusals_of_names_and_missing_targets() -> None:
    model, _ = build("timm_fused")
    with pytest.raises(UsageError, match="has no adapter"):
        merge(model)
    with pytest.raises(UsageError, match="must be a word"):
        attach(model, SMALL, "a.b")
    for config in (None, "block_scale", {"block_size": 8}):
        with pytest.raises(UsageError, match="config must be the configuration of an adapter"):
            attach(model, config)  # pyright: ignore[reportArgumentType]
    attach(model, SMALL)
    with pytest.raises(UsageError, match="already has an adapter 'default'"):
        attach(model, SMALL)
    with pytest.raises(UsageError, match="did you mean 'default'"):
        detach(model, "defolt")
    with pytest.raises(UsageError, match="no projections"):
        attach(nn.Sequential(nn.Linear(8, 8)), SMALL)
    attention = nn.Sequential()
    attention.q_proj = nn.Linear(8, 8)
    with pytest.raises(UsageError, match="no projection 'k'; it has q"):
        attach(attention, SMALL)
