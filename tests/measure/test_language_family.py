"""Bits per byte, hidden states, radius by level, and a family of language models up to its width exponent."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from leafward.cli.dispatch import main
from leafward.errors import DataError, UsageError
from leafward.files import read_record
from leafward.hierarchy import Taxonomy
from leafward.measure.activations import Reservoir, hidden_states, survey_states
from leafward.measure.language import bits_per_byte, load_language_model
from leafward.measure.levels import radius_by_level
from leafward.measure.named_rows import named_radii

transformers = pytest.importorskip("transformers")
TEXTS = Path(__file__).parents[3] / "shared" / "data" / "text"
VOCABULARY = 256


def tokenizer(folder: Path) -> None:
    """One token for each byte: a tokenizer that needs no training and whose bytes are known."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)


def gpt2(folder: Path, width: int, text: str = "", steps: int = 0, seed: int = 0, layers: int = 2) -> Path:
    """A GPT-2 of this width, trained on a text for some steps."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=VOCABULARY, n_positions=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    tokenizer(folder)
    if steps:
        coded = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
        ids = torch.tensor(coded)
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(steps):
            starts = torch.randint(0, len(ids) - 64, (16,), generator=torch.Generator().manual_seed(step))
            batch = torch.stack([ids[at : at + 64] for at in starts.tolist()])
            loss = model(input_ids=batch, labels=batch).loss
            for group in optimiser.param_groups:
                group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.save_pretrained(folder)
    return folder


PROSE = "The quick brown fox jumps over the lazy dog. “Naïve” café owners, too, drink tea — in Łódź. " * 8


def test_bits_per_byte_are_those_of_the_definition(tmp_path: Path) -> None:
    folder = gpt2(tmp_path / "m", 16)
    (tmp_path / "t.txt").write_text(PROSE, encoding="utf-8")
    language = load_language_model(folder, "m")
    found = bits_per_byte(language, tmp_path / "t.txt")
    ids = torch.tensor(language.tokenizer(PROSE)["input_ids"])
    assert len(ids) == len(PROSE.encode())
    nats = 0.0
    for start in range(0, len(ids) - 1, 63):
        window = ids[start : start + 64]
        with torch.no_grad():
            nats += float(language.model(input_ids=window[None], labels=window[None]).loss) * (len(window) - 1)
    # A byte token inside a letter of several bytes ends where the letter does, so a few bytes move between windows.
    assert found.tokens == len(ids) - 1
    assert found.bytes == pytest.approx(len(PROSE.encode()) - 1, abs=12)
    assert found.value == pytest.approx(nats / math.log(2) / found.bytes, rel=1e-5)
    assert found.value == pytest.approx(8, abs=0.3)  # untrained: nearly uniform over 256 bytes
    assert found.interval is not None
    assert found.interval[0] < found.value < found.interval[1]


def test_what_is_no_language_model_or_text_gets_a_sentence(tmp_path: Path) -> None:
    folder = gpt2(tmp_path / "m", 16)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"empty\.txt is empty"):
        bits_per_byte(load_language_model(folder, "m"), tmp_path / "empty.txt")
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(DataError, match="fewer than two tokens"):
        bits_per_byte(load_language_model(folder, "m"), tmp_path / "one.txt")
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises((DataError, UsageError), match="tokenizer"):
        load_language_model(folder, "m")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(DataError, match="no causal language model"):
        load_language_model(tmp_path / "other", "other")


def test_a_family_goes_from_checkpoints_to_the_width_exponent(tmp_path: Path, capsys) -> None:
    """The smoke case of the test below: four models that were not trained, three columns of the result."""
    (tmp_path / "t.txt").write_text(PROSE, encoding="utf-8")
    (tmp_path / "u.txt").write_text(PROSE[::-1], encoding="utf-8")
    folders = [str(gpt2(tmp_path / f"g{width}", width)) for width in (8, 12, 16, 24)]
    words = [
        "audit",
        *folders,
        "--text",
        str(tmp_path / "t.txt"),
        str(tmp_path / "u.txt"),
        "--out",
        str(tmp_path / "o"),
    ]
    status = main(words)
    said = capsys.readouterr()
    found = read_record(tmp_path / "o" / "audit.json") if status == 0 else {}
    if status:  # losses of untrained models need not fall with width, which is said by name
        assert "does not fall" in said.err
        return
    assert [each["m"] for each in found["language"][::2]] == [8, 12, 16, 24]
    assert set(found["family"]["overlap_fits"]) == {"raw", "mean removed"}
    assert main(["audit", folders[0], "--text", str(tmp_path / "t.txt")]) == 2
    assert "two or more" in capsys.readouterr().err


def test_wrong_names_of_a_losses_table_are_said_before_any_work(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("leafward.measure.audit_matrix.scan", None)
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.eye(8, dtype="f4"))
    (tmp_path / "l.csv").write_text("model,corpus,m,loss\na,x,8,3\nbb,x,8,2\n")
    files = [str(tmp_path / f"{name}.npy") for name in ("a", "b")]
    assert main(["audit", *files, "--losses", str(tmp_path / "l.csv"), "--out", str(tmp_path / "o")]) == 1
    assert "no row is about b; did you mean 'bb'?" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not TEXTS.is_dir(), reason="the texts are not here")
def test_six_trained_models_give_an_exponent(tmp_path: Path) -> None:
    """GPT-2s of width 32 to 192, trained here on Shakespeare: loss falls with width, and overlaps are fitted."""
    text = (TEXTS / "tinyshakespeare.txt").read_text(encoding="utf-8")
    (tmp_path / "held.txt").write_text(text[-20_000:], encoding="utf-8")
    (tmp_path / "wiki.txt").write_text((TEXTS / "wikitext2_valid.txt").read_text(encoding="utf-8")[:20_000])
    folders = [str(gpt2(tmp_path / f"g{m}", m, text[:400_000], 150)) for m in (32, 48, 64, 96, 128, 192)]
    words = ["audit", *folders, "--text", str(tmp_path / "held.txt"), str(tmp_path / "wiki.txt")]
    assert main([*words, "--out", str(tmp_path / "o")]) == 0
    found = read_record(tmp_path / "o" / "audit.json")
    losses = {(each["corpus"], each["m"]): each["bits_per_byte"] for each in found["language"]}
    assert losses["held", 192] < losses["held", 32]
    fit = found["family"]["width_fit"]
    assert fit["loss"]["exponent"] > 0
    assert fit["growth"] == pytest.approx(1.9, abs=0.3)
    assert fit["product"] is not None
    assert "depth is 2 for all models" in fit["summary"]
    # The table that was measured is one that the other two commands read.
    losses_file = str(tmp_path / "o" / "losses.csv")
    assert main(["fit", losses_file, "--x", "m", "--out", str(tmp_path / "f")]) == 0
    assert main(["audit", *folders, "--losses", losses_file, "--out", str(tmp_path / "again")]) == 0
    again = read_record(tmp_path / "again" / "audit.json")
    assert again["family"]["width_fit"]["loss"]["exponent"] == pytest.approx(fit["loss"]["exponent"], rel=1e-6)


# hidden states


def test_a_reservoir_holds_every_row_with_the_same_chance() -> None:
    times = np.zeros(60)
    for seed in range(400):
        held = Reservoir(12, seed)
        for start in range(0, 60, 7):
            rows = torch.arange(start, min(start + 7, 60)).float()[:, None].expand(-1, 2)
            held.offer({"layer": rows}, rows[:, 0].numpy().astype(np.int64))
        found = held.states(dict.fromkeys(range(60), 1))
        assert found.ids is not None
        np.testing.assert_array_equal(found.layers["layer"][:, 0], found.ids)
        times[found.ids] += 1
    # Binomial with mean 80 and deviation 8.
    assert np.abs(times - 80).max() < 4.5 * 8


def test_hidden_states_of_a_text_are_those_of_the_model(tmp_path: Path, capsys) -> None:
    folder = gpt2(tmp_path / "m", 16, layers=1)
    (tmp_path / "t.txt").write_text(PROSE * 2, encoding="utf-8")
    states = hidden_states(str(folder), tmp_path / "t.txt", 10_000, 0, lambda count: None)
    assert list(states.layers) == ["layer 0", "layer 1"]
    language = load_language_model(folder, "m")
    ids = torch.tensor(language.tokenizer(PROSE * 2)["input_ids"])
    with torch.no_grad():
        truth = language.model(input_ids=ids[None, :62], output_hidden_states=True).hidden_states[0][0]
    np.testing.assert_allclose(states.layers["layer 0"][:62], truth, atol=1e-5)
    assert states.ids is not None
    np.testing.assert_array_equal(states.ids, ids)
    assert states.counts is not None
    np.testing.assert_array_equal(states.counts, np.bincount(ids)[ids])
    report = survey_states("m", states, 128, 0)
    assert [row.name for row in report.rows] == list(states.layers)
    assert set(report.extra["frequency"]) == set(states.layers)
    words = ["audit", str(folder), "--activations", str(tmp_path / "t.txt"), "--rows", "128"]
    assert main([*words, "--out", str(tmp_path / "o")]) == 0
    assert "token frequency" in capsys.readouterr().out
    with pytest.raises(DataError, match="no such file"):
        hidden_states(str(folder), tmp_path / "none.txt", 64, 0, lambda count: None)


def test_hidden_states_of_images(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for at in range(3):
        image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(tmp_path / f"{at}.png")
    states = hidden_states("timm:resnet10t@random", tmp_path, 200, 0, lambda count: None)
    assert states.ids is None
    assert len(states.layers) >= 4
    assert all(np.isfinite(rows).all() for rows in states.layers.values())


# radius by level


def tree() -> Taxonomy:
    edges = [
        ("animal", None),
        ("plant", "animal"),
        ("dog", "animal"),
        ("cat", "animal"),
        ("poodle", "dog"),
        ("tabby", "cat"),
    ]
    return Taxonomy.from_edges(edges)


def test_radius_that_grows_with_depth_is_said_to() -> None:
    names = [f"n{i}" for i in range(63)]
    edges = [(names[i], names[(i - 1) // 2] if i else None) for i in range(63)]
    taxonomy = Taxonomy.from_edges(edges)
    depth = np.floor(np.log2(np.arange(63) + 1))
    noise = 0.2 * np.random.default_rng(0).random(63)
    found = radius_by_level(depth + noise, [f"Ġ{name}" for name in names], taxonomy)
    assert found.rho > 0.9
    assert found.ordered == 1.0
    assert found.verdict == "specific rows lie farther out"
    assert {at: count for at, (count, _) in found.levels.items()} == {at: 2**at for at in range(6)}
    assert radius_by_level(-depth - noise, names, taxonomy).verdict == "specific rows lie nearer"
    flat = radius_by_level(np.random.default_rng(1).random(63), names, taxonomy)
    assert flat.verdict == "radius does not tell general from specific"
    assert set(radius_by_level(depth, names, taxonomy, below=3).levels) == {3, 4, 5}
    with pytest.raises(DataError, match="0 of its 63 nodes are names of rows"):
        radius_by_level(depth, ["x"] * 63, taxonomy)


def test_rows_of_a_vocabulary_are_compared_with_a_taxonomy(tmp_path: Path, capsys) -> None:
    from safetensors.torch import save_file

    taxonomy = tree()
    names = list(taxonomy.names)
    depth = torch.tensor(taxonomy.depth, dtype=torch.float32)
    rows = torch.randn(len(names), 8, generator=torch.Generator().manual_seed(0))
    rows = rows / rows.norm(dim=1, keepdim=True) * (1 + depth)[:, None]
    save_file({"wte.weight": rows}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "vocab_size": len(names)}))
    vocabulary = {name: at for at, name in enumerate(names)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    found = named_radii(str(tmp_path), None, taxonomy, None)["wte.weight"]
    assert found.ordered == 1.0
    assert found.rho > 0.9  # ranks of equal depths are shared, those of lengths are not
    taxonomy.save(tmp_path / "t.csv")
    words = ["audit", str(tmp_path), "--quick", "--by", "depth", "--taxonomy", str(tmp_path / "t.csv")]
    assert main([*words, "--out", str(tmp_path / "o")]) == 0
    assert "radius by depth" in capsys.readouterr().out
    assert main(["audit", str(tmp_path), "--by", "depth"]) == 2
    assert "--by must be given together with --taxonomy" in capsys.readouterr().err
