"""Dense features, cost aggregation, loss and inference of open-vocabulary segmentation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate

from leafward.adapters import BlockScaleConfig, adapters, attach
from leafward.data.scenes import IGNORED
from leafward.encoders import load_encoder
from leafward.errors import UsageError
from leafward.systems.hyperclip.segment import task as open_vocabulary
from leafward.systems.hyperclip.segment.cost_aggregation import ClassAttention, CostAggregation, SpatialAttention
from leafward.systems.hyperclip.segment.task import (
    LEFT_OUT,
    Segmenter,
    dense_features,
    mask_loss,
    probabilities,
    segment,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "adapters"))
from radial_toys import make

WORDS = ["dog", "car", "pizza"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("clip", tmp_path_factory.mktemp("clip"))


@pytest.fixture
def model(folder: Path) -> Segmenter:
    torch.manual_seed(0)
    return Segmenter(load_encoder(folder), channels=16, window=2).eval()


def pixels(side: int = 32) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))


def test_dense_features_are_the_value_path(model: Segmenter) -> None:
    """By hand: a patch's own value through the last block, with the class token as residual."""
    clip = model.encoder.model
    features, maps = dense_features(clip, pixels(16))
    vision = clip.vision_model
    states = vision.encoder.layers[0](vision.pre_layrnorm(vision.embeddings(pixels(16))), None)
    last = vision.encoder.layers[1]
    for place in range(4):
        normed = last.layer_norm1(states[:, place + 1])
        out = last.self_attn.out_proj(last.self_attn.v_proj(normed)) + states[:, 0]
        out = out + last.mlp(last.layer_norm2(out))
        expected = clip.visual_projection(vision.post_layernorm(out))
        torch.testing.assert_close(features[:, place // 2, place % 2], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(maps[0].flatten(2).mT, states[:, 1:])
    assert [tuple(each.shape) for each in maps] == [(2, 32, 2, 2)] * 3
    assert dense_features(clip, pixels(40))[0].shape == (2, 5, 5, 24)  # positions are interpolated
    with pytest.raises(UsageError, match="multiples of the patch size 8"):
        dense_features(clip, pixels(20))


def aggregation(**options: int) -> CostAggregation:
    torch.manual_seed(0)
    return CostAggregation(5, 7, [4, 3], channels=16, **options).eval()


def inputs(classes: int = 6, side: int = 5) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shallow = [draw(2, 4, side, side), draw(2, 3, side, side)]
    return draw(2, classes, side, side), draw(2, 5, side, side), draw(2, classes, 7), shallow


def test_the_order_of_the_classes_does_not_matter() -> None:
    cost, appearance, text, shallow = inputs()
    model = aggregation(window=3)
    out = model(cost, appearance, text, shallow)
    assert out.shape == (2, 6, 20, 20)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    turned = model(cost[:, order], appearance, text[:, order], shallow)
    torch.testing.assert_close(turned, out[:, order], rtol=1e-4, atol=1e-5)
    assert (out.std(dim=1) > 0).all()


@pytest.mark.parametrize("offset", [0, 2])
def test_windows_against_attention_with_a_mask(offset: int) -> None:
    """Places attend to those of their window and to no padding."""
    torch.manual_seed(0)
    block = SpatialAttention(16, 4, 4, offset)
    x, guide = torch.randn(1, 2, 16, 5, 7), torch.randn(1, 32, 5, 7)
    flat = x[0].permute(0, 2, 3, 1).reshape(2, 35, 16)
    normed = block.norm(flat)
    guided = torch.cat([normed, guide[0].permute(1, 2, 0).reshape(35, 32).expand(2, -1, -1)], dim=-1)
    rows, columns = torch.arange(5).repeat_interleave(7), torch.arange(7).repeat(5)
    number = (rows + offset) // 4 * 100 + (columns + offset) // 4
    same = number[:, None] == number
    q, k, v = (
        y.unflatten(-1, (4, 4)).transpose(1, 2) for y in (block.query(guided), block.key(guided), block.value(normed))
    )
    weights = ((q @ k.mT) / 2.0).masked_fill(~same, -torch.inf).softmax(dim=-1)
    expected = flat + block.out((weights @ v).transpose(1, 2).flatten(2))
    expected = expected + block.feed(block.after(expected))
    found = block(x, guide)[0].permute(0, 2, 3, 1).reshape(2, 35, 16)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_class_attention_against_loops() -> None:
    torch.manual_seed(0)
    block = ClassAttention(8)
    x, guide = torch.randn(1, 3, 8, 1, 2), torch.randn(1, 3, 32)
    found = block(x, guide)
    for place in range(2):
        tokens = x[0, :, :, 0, place]
        normed = block.norm(tokens)
        guided = torch.cat([normed, guide[0]], dim=-1)
        q = torch.nn.functional.elu(block.query(guided)) + 1
        k = torch.nn.functional.elu(block.key(guided)) + 1
        weights = q @ k.mT
        mixed = tokens + block.out(weights / weights.sum(dim=1, keepdim=True) @ block.value(normed))
        mixed = mixed + block.feed(block.after(mixed))
        torch.testing.assert_close(found[0, :, :, 0, place], mixed, rtol=1e-4, atol=1e-5)


def test_many_classes_are_cut_to_the_best_of_each_image(model: Segmenter, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["dog", "car", "pizza", "cat", "bus"]
    whole = model(pixels(), words)
    monkeypatch.setattr(open_vocabulary, "MOST_CLASSES", 2)
    part = model(pixels(), words)
    features, _ = dense_features(model.encoder.model, pixels())
    cosine = (
        torch.nn.functional.normalize(features, dim=-1) @ torch.nn.functional.normalize(model.text(words), dim=-1).mT
    )
    best = cosine.flatten(1, 2).amax(dim=1).topk(2, dim=1).indices
    for image in range(2):
        kept = (part[image] > LEFT_OUT).flatten(1).all(dim=1)
        assert set(kept.nonzero().flatten().tolist()) == set(best[image].tolist())
    assert whole.shape == part.shape == (2, 5, 16, 16)


def test_ignored_pixels_do_not_count() -> None:
    """The published loss takes them as pixels of no class."""
    logits = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    masks = torch.randint(0, 3, (1, 8, 8), generator=torch.Generator().manual_seed(1))
    masks[0, :3] = IGNORED
    loss = mask_loss(logits, masks)
    up = interpolate(logits, size=(8, 8), mode="bilinear", align_corners=False)
    target = torch.nn.functional.one_hot(masks[0, 3:].long(), 3).permute(2, 0, 1).float()
    expected = binary_cross_entropy_with_logits(up[0, :, 3:], target)
    torch.testing.assert_close(loss.total / loss.count, expected)
    full = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
    mask_loss(full, masks).total.backward()
    assert (full.grad[0, :, :3] == 0).all()  # pyright: ignore
    assert (full.grad[0, :, 3:] != 0).all()  # pyright: ignore
    everything = mask_loss(logits, torch.full_like(masks, IGNORED))
    assert (float(everything.total), int(everything.count)) == (0.0, 0)


def test_windows_and_the_whole_view_cover_every_pixel(model: Segmenter) -> None:
    image = torch.randint(0, 255, (3, 20, 33), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = probabilities(model, image, WORDS, 16)
    assert found.shape == (3, 20, 33)
    assert ((found > 0) & (found < 1)).all()
    # A model that says the same everywhere says it in the mean of all views as well.
    for parameter in model.decoder.head.parameters():
        torch.nn.init.zeros_(parameter)
    torch.testing.assert_close(probabilities(model, image, WORDS, 16), torch.full((3, 20, 33), 0.5))
    assert (segment(model, image, WORDS, 16, background=0.6) == -1).all()
    assert (segment(model, image, WORDS, 16) >= 0).all()


@pytest.mark.parametrize("score", ["cosine", "lorentz", "cosine+radius"])
def test_gradients_reach_decoder_and_adapters(folder: Path, score: str) -> None:
    torch.manual_seed(0)
    model = Segmenter(load_encoder(folder), channels=16, window=2, score=score)  # pyright: ignore
    attach(model.encoder.model, BlockScaleConfig(block_size=8))
    masks = torch.randint(0, 3, (2, 32, 32), generator=torch.Generator().manual_seed(0))
    mask_loss(model(pixels(), WORDS), masks).total.backward()
    assert all(parameter.grad is not None for parameter in model.decoder.parameters())
    for name, parameter in adapters(model.encoder.model)["default"].named_parameters():
        # Queries and keys of the last image block are not on the value path.
        idle = "vision_model/encoder/layers/1" in name and ("q_proj" in name or "k_proj" in name)
        assert (parameter.grad is None) == idle, name


def test_templates_are_averaged(folder: Path) -> None:
    model = Segmenter(load_encoder(folder), channels=16, templates=("a photo of a {}", "the {}"))
    text = model.encoder.encode_text(["a photo of a dog", "the dog"])
    torch.testing.assert_close(model.text(["dog"])[0], text.mean(dim=0), rtol=1e-4, atol=1e-5)


def test_refusals(folder: Path, tmp_path: Path) -> None:
    encoder = load_encoder(folder)
    for options, message in [
        ({"score": "dot"}, "score must be one of"),
        ({"templates": ("a photo",)}, "templates must be texts with {}"),
    ]:
        with pytest.raises(UsageError, match=message):
            Segmenter(encoder, **options)
    with pytest.raises(UsageError, match="need a Hugging Face CLIP model, not 'siglip'"):
        Segmenter(load_encoder(make("siglip", tmp_path)))
    model = Segmenter(encoder, channels=16)
    for words in ([], "cat"):
        with pytest.raises(UsageError, match="words must be a list with at least one word"):
            model.text(words)
    with pytest.raises(UsageError, match=r"image must be bytes \(3, H, W\)"):
        segment(model, torch.rand(3, 20, 20), WORDS, 16)
    with pytest.raises(UsageError, match=r"image must be bytes \(3, H, W\), got \(20, 20, 3\)"):
        segment(model, torch.zeros(20, 20, 3, dtype=torch.uint8), WORDS, 16)


def test_texts_are_encoded_once_for_all_windows(model: Segmenter, monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.randint(0, 256, (3, 40, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    calls = []
    text = model.encoder._text
    monkeypatch.setattr(model.encoder, "_text", lambda tokens: calls.append(1) or text(tokens))
    found = probabilities(model, image, WORDS, 16)
    assert len(calls) == 1
    with torch.no_grad():
        features = model.text(WORDS)
    torch.testing.assert_close(probabilities(model, image, features, 16), found)
    assert len(calls) == 2  # none of them in `probabilities`
    assert torch.equal(segment(model, image, features, 16), found.argmax(dim=0))


def test_the_iou_of_each_class() -> None:
    table = torch.tensor([[6, 2, 0], [1, 3, 0], [0, 0, 0]])  # truth in rows; the third class is nowhere
    assert open_vocabulary.class_ious(table) == [6 / 9, 3 / 6, None]
