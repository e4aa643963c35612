"""One surface over four kinds of encoders: the same promises from each."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from PIL import Image
from radial_toys import KINDS, make
from transformers import CLIPTextModel

from leafward.adapters import BlockScaleConfig, adapters, attach, save_pretrained
from leafward.encoders.encoder import load_encoder, make_trainable, merge_adapters
from leafward.errors import DataError, UsageError
from leafward.systems.radial.loss import RadialModel
from leafward.systems.radial.objective import RadialConfig

TEXTS = ["a small dog", "", "animal", "a red car on the grass", "animal"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("encoders")
    return {kind: make(kind, base) for kind in KINDS}


@pytest.fixture(params=list(KINDS))
def encoder(request, folders):
    return load_encoder(folders[request.param])


def picture(colour: str) -> Image.Image:
    return Image.new("RGB", (20, 24), colour)


def test_texts_become_unit_vectors_in_their_order(encoder):
    together = encoder.encode_text(TEXTS)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(len(TEXTS)))
    for text, row in zip(TEXTS, together, strict=True):
        torch.testing.assert_close(encoder.encode_text([text])[0], row, atol=1e-5, rtol=0)
    torch.testing.assert_close(encoder.encode_text(TEXTS, batch_size=2), together, atol=1e-5, rtol=0)
    assert not torch.allclose(together[0], together[3], atol=1e-3)


def test_images_where_there_is_an_image_side(encoder, tmp_path):
    if not encoder.has_images:
        with pytest.raises(UsageError, match="no image side"):
            encoder.encode_image([picture("red")])
        return
    picture("blue").save(tmp_path / "blue.png")
    rows = encoder.encode_image([picture("red"), tmp_path / "blue.png", (tmp_path / "blue.png").read_bytes()])
    assert rows.shape == (3, encoder.encode_text([""]).shape[1])
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(3))
    torch.testing.assert_close(rows[1], rows[2])
    assert not torch.allclose(rows[0], rows[1], atol=1e-3)
    with pytest.raises(DataError, match="image 0 of those given cannot be read as an image"):
        encoder.encode_image([b"no image"])
    broken = tmp_path / "broken.png"
    broken.write_bytes((tmp_path / "blue.png").read_bytes()[:-30])
    with pytest.raises(DataError, match=r"broken\.png cannot be read as an image"):
        encoder.encode_image([broken])
    raw = encoder.encode_image([tmp_path / "blue.png"], unit=False)
    assert abs(float(raw.norm()) - 1) > 1e-3
    torch.testing.assert_close(torch.nn.functional.normalize(raw, dim=-1)[0], rows[1])


@pytest.mark.parametrize("how", ["full", "lora", "blocks"])
def test_the_text_side_learns_and_the_rest_stays(encoder, how):
    before = encoder.encode_text(TEXTS)
    images = encoder.encode_image([picture("red")]) if encoder.has_images else None
    weights = {name: tensor.clone() for name, tensor in encoder.model.state_dict().items()}
    make_trainable(encoder, how, rank=2, block_size=8)
    torch.testing.assert_close(encoder.encode_text(TEXTS), before, atol=1e-6, rtol=0)
    learned = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD(learned, lr=0.3)
    encoder.train()
    for _ in range(2):  # the second factor of a low-rank update gets its first gradient after the first step
        encoder.text_features(encoder.tokenize(TEXTS))[:, 0].sum().backward()
        optimiser.step()
        optimiser.zero_grad()
    after = encoder.encode_text(TEXTS)
    assert (after - before).norm(dim=-1).min() > 1e-4
    merge_adapters(encoder)
    torch.testing.assert_close(encoder.encode_text(TEXTS), after, atol=1e-5, rtol=0)
    assert encoder.model.state_dict().keys() == weights.keys()
    changed = {name for name, tensor in encoder.model.state_dict().items() if not torch.equal(tensor, weights[name])}
    assert changed
    assert all(encoder.is_text(name) for name in changed)
    if images is not None:
        torch.testing.assert_close(encoder.encode_image([picture("red")]), images, atol=0, rtol=0)


def test_adapters_learn_few_parameters(encoder):
    whole = copy.deepcopy(encoder)
    make_trainable(whole, "full")
    make_trainable(encoder, "lora", rank=2)
    count = [sum(p.numel() for p in each.parameters() if p.requires_grad) for each in (whole, encoder)]
    assert 0 < count[1] < count[0]


def test_saved_and_loaded_again(encoder, tmp_path):
    encoder.save_pretrained(tmp_path / "saved")
    again = load_encoder(tmp_path / "saved")
    assert type(again) is type(encoder)
    torch.testing.assert_close(again.encode_text(TEXTS), encoder.encode_text(TEXTS), atol=1e-6, rtol=0)
    if encoder.has_images:
        images = [picture("red")]
        torch.testing.assert_close(again.encode_image(images), encoder.encode_image(images), atol=1e-6, rtol=0)


def test_training_mode_brings_no_dropout(encoder):
    encoder.train()
    tokens = encoder.tokenize(TEXTS)
    torch.testing.assert_close(encoder.text_features(tokens), encoder.text_features(tokens), atol=0, rtol=0)
    assert not any(module.training for module in encoder.modules())


def test_clip_embedding_is_the_projection_and_not_the_hidden_states(folders):
    """transformers 5 returns an output object whose item 0 is the hidden states, of shape (N, L, width)."""
    encoder = load_encoder(folders["clip"])
    tokens = encoder.tokenize(TEXTS)
    pooled = encoder.model.text_model(**tokens).pooler_output
    expected = torch.nn.functional.normalize(encoder.model.text_projection(pooled), dim=-1)
    found = encoder.text_features(tokens)
    assert found.shape == (len(TEXTS), 24)
    torch.testing.assert_close(found, expected)


def test_siglip_reads_its_padding(folders):
    """It takes the state of the last position, so neither the padding nor the mask may shorten a text."""
    encoder = load_encoder(folders["siglip"])
    tokens = encoder.tokenize(["dog"])
    assert {name: tensor.shape for name, tensor in tokens.items()} == {"input_ids": (1, 16)}
    last = encoder.model.text_model(**tokens).last_hidden_state[:, -1]
    expected = torch.nn.functional.normalize(encoder.model.text_model.head(last), dim=-1)
    torch.testing.assert_close(encoder.text_features(tokens), expected)


def test_pooling_of_sentence_transformers_files(folders, tmp_path):
    encoder = load_encoder(folders["sentence"])
    tokens = encoder.tokenize(["a small dog", "dog"])
    states = encoder.model(**tokens).last_hidden_state
    mean = torch.stack([states[0].mean(dim=0), states[1, :3].mean(dim=0)])  # [CLS] dog [SEP]
    torch.testing.assert_close(encoder.text_features(tokens), torch.nn.functional.normalize(mean, dim=-1))
    encoder.pooling = "cls"
    encoder.save_pretrained(tmp_path / "cls")
    again = load_encoder(tmp_path / "cls")
    torch.testing.assert_close(again.text_features(tokens), torch.nn.functional.normalize(states[:, 0], dim=-1))
    modules = json.loads((tmp_path / "cls" / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (tmp_path / "cls" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(DataError, match="Dense"):
        load_encoder(tmp_path / "cls")


def test_what_is_no_model_is_refused(tmp_path, folders):
    with pytest.raises(DataError, match="holds no model"):
        load_encoder(tmp_path)
    half = load_encoder(folders["clip"])  # its text side alone has no embedding to offer, only states
    CLIPTextModel(half.model.config.text_config).save_pretrained(tmp_path / "half")
    half.tokenizer.save_pretrained(tmp_path / "half")
    with pytest.raises(DataError, match="whole dual encoder"):
        load_encoder(tmp_path / "half")


def test_roots_by_text_and_learned(folders):
    encoder = load_encoder(folders["sentence"])
    by_text = RadialModel(encoder, RadialConfig(), ("", "a photo of"))
    torch.testing.assert_close(by_text.roots(), encoder.encode_text(["", "a photo of"]))
    assert by_text.free_roots is None
    learned = RadialModel(encoder, RadialConfig(root="learned"), ("",))
    torch.testing.assert_close(learned.roots(), encoder.encode_text([""]))
    learned.learned_roots()[0, 0].backward()
    assert learned.free_roots.grad.abs().sum() > 0


def test_an_adapter_is_a_model_where_it_names_its_base(folders, tmp_path):
    model = load_encoder(folders["clip"])
    attach(model.model, BlockScaleConfig(block_size=8), base_model=str(folders["clip"]))
    with torch.no_grad():
        for parameter in adapters(model.model)["default"].parameters():
            parameter.normal_(std=0.3)
    save_pretrained(model.model, tmp_path / "adapter")
    again = load_encoder(tmp_path / "adapter")
    assert torch.equal(again.encode_text(TEXTS), model.encode_text(TEXTS))
    config = tmp_path / "adapter" / "adapter_config.json"
    record = json.loads(config.read_text())
    record["base_model"]["name"] = str(tmp_path / "gone")
    config.write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"base model .*gone of the adapter in .* is not there.*--base MODEL"):
        load_encoder(tmp_path / "adapter")
    with pytest.raises(DataError, match=r"there is no folder .*nothing, where a model should be"):
        load_encoder(tmp_path / "nothing")
    record["base_model"]["name"] = ""
    config.write_text(json.dumps(record))
    with pytest.raises(DataError, match="does not name the base model of the adapter"):
        load_encoder(tmp_path / "adapter")
