"""Chains from captions: parsing and filtering by hand, and the whole way with tiny random models."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from leafward.errors import DataError, UsageError
from leafward.systems.radial.generalise import Generaliser, Inference, generate_chains, parse_chain

CAPTIONS = ["a brown dog on a sofa", "a red car in the street", "two cats on a bed"]
WORDS = "a brown dog on sofa red car in the street two cats bed animal pet vehicle => . thing"


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS.split()])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[PAD]", model_max_length=256)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny random models in the layouts of GPT-2, T5 and a BERT with the classes of MNLI."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        T5Config,
        T5ForConditionalGeneration,
    )

    base, size = tmp_path_factory.mktemp("models"), len(tokenizer())
    torch.manual_seed(0)
    causal = GPT2Config(vocab_size=size, n_positions=256, n_embd=16, n_layer=1, n_head=2, eos_token_id=0)
    GPT2LMHeadModel(causal).save_pretrained(base / "causal")
    t5 = T5Config(vocab_size=size, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(t5).save_pretrained(base / "seq2seq")
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    nli = BertConfig(vocab_size=size, **sizes, id2label=labels, label2id={v: k for k, v in labels.items()})
    BertForSequenceClassification(nli).save_pretrained(base / "nli")
    other = BertConfig(vocab_size=size, **sizes, num_labels=2)
    BertForSequenceClassification(other).save_pretrained(base / "other")
    for name in ("causal", "seq2seq", "nli", "other"):
        tokenizer().save_pretrained(base / name)
    return base


@pytest.mark.parametrize(
    ("written", "chain"),
    [
        ("dog on a sofa => dog => animal.", ["animal", "dog", "dog on a sofa", CAPTIONS[0]]),
        ("a brown dog on a sofa => a dog => dog => animal", ["animal", "dog", "a dog", CAPTIONS[0]]),
        ("dog on a sofa => dog => animal => thing => more", ["animal", "dog", "dog on a sofa", CAPTIONS[0]]),
        ("dog => animal", None),
        ("dog => a big brown dog => animal", None),
        ("dog => dog => animal", None),
        ("dog on a sofa =>  => animal", None),
        ("", None),
    ],
)
def test_chains_are_parsed_or_refused(written, chain):
    assert parse_chain(CAPTIONS[0], written, 4) == chain


class Scripted:
    """Stands in for the two models, so that the choice between their answers can be followed."""

    def __init__(self, *more):
        steps = [(CAPTIONS[0], "dog"), ("dog", "animal"), (CAPTIONS[1], "car"), ("car", "vehicle")]
        self.true = {*steps, (CAPTIONS[2], "cats"), *more}

    def write(self, captions, levels, *, seed):
        answers = {
            CAPTIONS[0]: ["dog => vehicle", "dog => animal"],
            CAPTIONS[1]: ["car => vehicle", "nothing"],
            CAPTIONS[2]: ["cats => vehicle", "dog"],
        }
        return [answers[caption] for caption in captions]

    def entails(self, premises, hypotheses):
        return torch.tensor([0.9 if pair in self.true else 0.1 for pair in zip(premises, hypotheses, strict=True)])


def test_the_chain_that_holds_is_kept_and_negatives_do_not_follow():
    models = Scripted()
    pairs = [(caption, f"{i}.jpg") for i, caption in enumerate(CAPTIONS)]
    found = list(generate_chains(pairs, models, models, levels=3))
    assert [(each.texts, each.image) for each in found] == [
        (("animal", "dog", CAPTIONS[0]), "0.jpg"),
        (("vehicle", "car", CAPTIONS[1]), "1.jpg"),
    ]
    assert found[0].negatives == ("vehicle", "car", CAPTIONS[1])
    assert found[1].negatives == ("animal", "dog", CAPTIONS[0])


def test_a_negative_that_follows_is_left_out():
    models = Scripted((CAPTIONS[0], "vehicle"))
    found = list(generate_chains([(caption, None) for caption in CAPTIONS], models, models, levels=3))
    assert found[0].negatives == (None, "car", CAPTIONS[1])


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_real_models_write_and_judge(folders, kind):
    writer = Generaliser(folders / kind)
    answers = writer.write(CAPTIONS, 3, seed=0, tries=2)
    assert [len(each) for each in answers] == [2, 2, 2]
    assert answers == writer.write(CAPTIONS, 3, seed=0, tries=2)
    assert not any(caption in text for caption, each in zip(CAPTIONS, answers, strict=True) for text in each)
    judge = Inference(folders / "nli", batch_size=2)
    sure = judge.entails(CAPTIONS, ["animal", "vehicle", "pet"])
    assert sure.shape == (3,)
    assert ((sure > 0) & (sure < 1)).all()
    torch.testing.assert_close(judge.entails(CAPTIONS[2:], ["pet"]), sure[2:], atol=1e-5, rtol=0)
    # Random models write nonsense; whatever passes must still be a chain of the caption.
    for each in generate_chains([(c, None) for c in CAPTIONS], writer, judge, levels=2, accept=0.0, refuse=1.0):
        assert each.texts[-1] in CAPTIONS
        assert len(each.texts) == 2


def test_the_class_of_entailment_is_found_by_its_name(folders):
    assert Inference(folders / "nli").entailment == 2
    with pytest.raises(DataError, match="entailment"):
        Inference(folders / "other")


@pytest.mark.parametrize(
    ("kind", "opened", "gone"), [("causal", Generaliser, "h.0.mlp"), ("nli", Inference, "classif")]
)
def test_models_whose_files_lack_weights_are_refused(folders, tmp_path, kind, opened, gone):
    """transformers would put random ones in their place, a random judge among them."""
    shutil.copytree(folders / kind, tmp_path / kind)
    file = tmp_path / kind / "model.safetensors"
    state = load_file(file)
    kept = {name: value for name, value in state.items() if gone not in name}
    assert len(kept) < len(state)
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match=rf"weights of the model are not in its files, for instance '.*{gone}"):
        opened(tmp_path / kind)


def test_bad_settings_are_refused():
    with pytest.raises(UsageError, match="levels"):
        list(generate_chains([], None, None, levels=1))  # type: ignore[arg-type]
