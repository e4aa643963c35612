"""Tokenizer, split, shards and windows."""

import json
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
import torch

from leafward.data.text import Corpus, Shard, Windows, load_tokenizer, prepare, train_tokenizer
from leafward.data.text.corpus import held_out
from leafward.data.text.shards import token_type, write_shards
from leafward.data.text.tokenizer import END, encode, size
from leafward.errors import DataError, UsageError
from leafward.systems.helm import HelmConfig, HelmForCausalLM

TEXTS = [f"The {animal} said {n} times: leaf, root, leaf.\n" for n in range(12) for animal in ("fox", "owl", "ünï")]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


@hypothesis.given(st.text())
def test_any_text_comes_back(tokenizer, text):
    (tokens,) = encode(tokenizer, [text])
    assert tokenizer.decode(tokens) == text


def test_the_name_of_a_special_token_is_only_text(tokenizer):
    assert tokenizer.eos_token_id not in encode(tokenizer, [f"a{END}b"])[0]
    assert tokenizer("a").input_ids == [tokenizer.bos_token_id, *encode(tokenizer, ["a"])[0]]


def test_a_trained_tokenizer_has_the_size_that_was_asked_for(tokenizer):
    assert len(train_tokenizer(TEXTS, 270)) == 270
    assert len(tokenizer) <= 300  # where the text has no more pairs to join
    with pytest.raises(UsageError, match="vocab_size must be at least 257"):
        train_tokenizer(TEXTS, 256)


def test_tokenizers_that_are_given(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "folder")
    for name in (tmp_path / "folder", tmp_path / "folder" / "tokenizer.json"):
        loaded = load_tokenizer(name)
        assert encode(loaded, TEXTS) == encode(tokenizer, TEXTS)
        assert (loaded.bos_token_id, loaded.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "bare.json"))
    with pytest.raises(DataError, match=r"bare.json says no token that ends a text"):
        load_tokenizer(tmp_path / "bare.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match=r"cannot read the tokenizer .*broken.json"):
        load_tokenizer(tmp_path / "broken.json")
    with pytest.raises(DataError, match="there is no tokenizer at"):
        load_tokenizer(tmp_path / "missing.json")


def test_a_tokenizer_that_cuts_and_fills_texts_does_neither_here(tmp_path, tokenizer):
    """The tokenizer.json of an encoder says how long its texts are; documents would be cut to that without a word."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.enable_truncation(16)
    backend.enable_padding(length=20, pad_token=END)
    backend.save(str(tmp_path / "tokenizer.json"))
    texts = ["The fox", TEXTS[0] * 20]
    assert encode(load_tokenizer(tmp_path / "tokenizer.json"), texts) == encode(tokenizer, texts)


def test_a_tokenizer_that_cannot_encode_is_named(tmp_path):
    words = tokenizers.models.WordLevel({"leaf": 0, "</s>": 1}, unk_token="[UNK]")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"cannot encode the text: .*\[UNK\]"):
        encode(load_tokenizer(tmp_path / "tokenizer.json"), ["root"])


def test_the_numbers_of_tokens_may_have_gaps(tmp_path):
    words = tokenizers.models.WordLevel({"leaf": 0, "</s>": 70_000}, unk_token="leaf")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("leaf leaf")
    corpus = prepare(tmp_path / "a.txt", tmp_path / "cache", tokenizer=tmp_path / "tokenizer.json")
    assert size(corpus.tokenizer) == 70_001 > len(corpus.tokenizer)
    assert corpus.train.tokens.max() == 70_000


def test_shards_equal_direct_tokenisation(folder, tokenizer):
    tokenizer.save_pretrained(folder / "given")
    corpus = prepare(folder / "data.jsonl", folder / "cache", tokenizer=str(folder / "given"), validation=0.2)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    direct = {text: [begin, *tokenizer.encode(text, add_special_tokens=False), end] for text in TEXTS}
    found = []
    for shard in (corpus.train, corpus.held_out):
        for index in range(len(shard.starts)):
            tokens = shard.document(index).tolist()
            text = tokenizer.decode(tokens[1:-1])
            assert tokens == direct[text]
            assert shard.sizes[index] == len(text.encode())
            found.append(text)
    assert sorted(found) == sorted(TEXTS)
    assert corpus.counts["train"]["tokens"] == len(corpus.train.tokens)
    assert corpus.train.tokens.dtype == np.uint16
    assert isinstance(corpus.train.tokens, np.memmap)


@pytest.mark.parametrize(("size", "kind"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_the_type_of_tokens_follows_the_vocabulary(size, kind):
    assert token_type(size) == kind
    assert np.iinfo(token_type(size)).max >= size - 1


def test_tokens_are_made_once_and_again_when_anything_changes(folder, monkeypatch):
    data, cache = folder / "data.jsonl", folder / "cache"
    first = prepare(data, cache, vocab_size=280)
    with monkeypatch.context() as patch:
        patch.setattr("leafward.data.text.corpus._build", lambda *_: pytest.fail("tokenised twice"))
        assert prepare(data, cache, vocab_size=280).key == first.key
    assert prepare(data, cache, vocab_size=290).key != first.key
    assert prepare(data, cache, vocab_size=280, validation=0.3).key != first.key
    with open(data, "a") as file:
        file.write('{"text": "one more"}\n')
    assert prepare(data, cache, vocab_size=280).key != first.key


def test_nothing_is_left_of_a_failure(folder):
    with open(folder / "data.jsonl", "a") as file:
        file.write('{"other": "field"}\n')
    with pytest.raises(DataError, match=r"data.jsonl, line 37: there is no field 'text'"):
        prepare(folder / "data.jsonl", folder / "cache", vocab_size=280)
    assert not (folder / "cache").exists()


def test_a_shard_that_was_cut_off_is_refused(folder):
    corpus = prepare(folder / "data.jsonl", folder / "cache", vocab_size=280)
    path = corpus.folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train.bin has .* tokens, which is not what its table of documents says"):
        Corpus.open(corpus.folder)


def test_the_split_is_by_document_and_by_content(folder):
    corpus = prepare(folder / "data.jsonl", folder / "cache", vocab_size=280, validation=0.25)
    assert len(corpus.held_out.starts) == 9
    lines = (folder / "data.jsonl").read_text().splitlines(keepends=True)
    (folder / "turned.jsonl").write_text("".join(lines[::-1]))
    turned = prepare(folder / "turned.jsonl", folder / "cache", vocab_size=280, validation=0.25)
    held = [{each.tokenizer.decode(each.held_out.document(i)) for i in range(9)} for each in (corpus, turned)]
    assert len(held[0]) == 9
    assert held[0] == held[1]


@hypothesis.given(st.lists(st.integers(0, 50), min_size=2), st.floats(0.01, 0.99))
def test_equal_documents_stay_on_one_side(hashes, part):
    hashes = np.array(hashes, np.uint64)
    if len(set(hashes.tolist())) == 1:
        with pytest.raises(DataError, match="are the same"):
            held_out(hashes, part)
        return
    chosen = held_out(hashes, part)
    assert 0 < chosen.sum() < len(hashes)
    assert not set(hashes[chosen].tolist()) & set(hashes[~chosen].tolist())


def test_a_single_document_is_cut_at_its_end(tmp_path):
    text = "".join(f"line {n}\n" for n in range(500))
    (tmp_path / "a.txt").write_text(text)
    corpus = prepare(tmp_path / "a.txt", tmp_path / "cache", vocab_size=280, validation=0.1)
    parts = [corpus.tokenizer.decode(shard.document(0)[1:-1]) for shard in (corpus.train, corpus.held_out)]
    assert "".join(parts) == text
    assert parts[1].startswith("line ")
    assert len(parts[1]) == pytest.approx(0.1 * len(text), rel=0.02)
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(DataError, match="too short"):
        prepare(tmp_path / "b.txt", tmp_path / "cache", vocab_size=280)


def shard_of(lengths):
    tokens = np.arange(sum(lengths), dtype=np.uint16) % 500 + 1
    return Shard(tokens, np.cumsum([0, *lengths[:-1]]), np.array(lengths))


@hypothesis.given(st.lists(st.integers(2, 30), min_size=1, max_size=20), st.integers(2, 40))
def test_every_token_but_the_first_of_a_document_is_predicted_once(lengths, length):
    shard = shard_of(lengths)
    predicted = np.zeros(len(shard.tokens), int)
    windows = Windows(shard, length)
    for index in range(len(windows)):
        sample = {name: values.numpy() for name, values in windows[index].items()}
        first = index * (length - 1)
        for place in range(length):
            if sample["documents"][place] < 0:
                assert sample["labels"][place] == -100
                continue
            token = first + place
            assert sample["input_ids"][place] == shard.tokens[token]
            document = sample["documents"][place]
            begin = max(shard.starts[document], first)
            assert sample["position_ids"][place] == token - begin
            if place and sample["labels"][place] != -100:
                assert sample["labels"][place] == shard.tokens[token]
                predicted[token] += 1
    expected = np.ones(len(predicted), int)
    expected[shard.starts] = 0
    assert (predicted == expected).all()
    with pytest.raises(UsageError, match="at least 2 tokens"):
        Windows(shard, 1)


@pytest.mark.parametrize("preset", ["helm-d-tiny", "helm-mice-tiny"])
@pytest.mark.parametrize("geometry", ["lorentz", "euclidean"])
def test_a_packed_window_has_the_loss_of_its_documents_apart(preset, geometry):
    torch.manual_seed(0)
    model = HelmForCausalLM(HelmConfig.preset(preset, geometry=geometry)).double().eval()
    lengths = [7, 2, 12, 9]
    shard = shard_of(lengths)
    sample = {name: values[None] for name, values in Windows(shard, 40)[0].items()}
    total = count = 0.0
    with torch.no_grad():
        packed = model(**sample).loss.item()
        for index in range(len(lengths)):
            tokens = torch.from_numpy(shard.document(index).astype(np.int64))[None]
            total += model(tokens, labels=tokens).loss.item() * (tokens.shape[1] - 1)
            count += tokens.shape[1] - 1
        without = model(sample["input_ids"], labels=sample["labels"]).loss.item()
    assert packed == pytest.approx(total / count, rel=1e-9)
    assert not math.isclose(without, packed, rel_tol=1e-4)  # attention across documents would be seen


def test_shards_of_several_names(tmp_path, tokenizer):
    counts = write_shards(tmp_path, [("a", "one"), ("b", "two"), ("a", "three")], tokenizer)
    assert counts["a"]["documents"] == 2
    assert counts["b"]["bytes"] == 3
    assert len(Shard.open(tmp_path, "a", "uint16").starts) == 2
    with pytest.raises(DataError, match="no readable shard 'c'"):
        Shard.open(tmp_path, "c", "uint16")
