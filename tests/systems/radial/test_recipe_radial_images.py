"""The evaluations with pictures, by the command, on a tiny CLIP; and chains from captions by tiny language models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from leafward.cli.dispatch import main
from leafward.data.captions import Captions, write_captions
from leafward.encoders.encoder import load_encoder

sys.path.insert(0, str(Path(__file__).parents[2] / "adapters"))
from radial_toys import make, tokenizer

COLOURS = {"dog": "brown", "cat": "grey", "car": "red", "bus": "yellow"}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny CLIP, pictures in folders by class and in one folder by name, chains that describe them."""
    folder = tmp_path_factory.mktemp("images")
    make("clip", folder)
    rng = np.random.default_rng(0)
    chains = []
    for name, colour in COLOURS.items():
        for k in range(2):
            noise = rng.integers(0, 60, (20, 20, 3), dtype=np.uint8)
            picture = Image.blend(Image.new("RGB", (20, 20), colour), Image.fromarray(noise), 0.4)
            for path in (folder / "classes" / name / f"{k}.png", folder / "flat" / f"{name}{k}.png"):
                path.parent.mkdir(parents=True, exist_ok=True)
                picture.save(path)
            top = "animal" if name in ("dog", "cat") else "vehicle"
            chains.append(Captions.chain([top, name, f"a small {name}"], image=f"http://x/{name}{k}.png"))
    write_captions(folder / "chains.jsonl", chains)
    return folder


def evaluate(task: str, *words: object) -> dict:
    out = Path(str(words[-1]))
    assert main(["evaluate", "--task", task, "--device", "cpu", *map(str, words[:-1]), "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_zero_shot_with_templates_and_taxonomy(base, tmp_path):
    (tmp_path / "templates.txt").write_text("a photo of a {}\na small {}\n")
    (tmp_path / "tax.csv").write_text("dog,animal\ncat,animal\ncar,vehicle\nbus,vehicle\nanimal,thing\nvehicle,thing\n")
    common = [base / "clip", "--data", base / "classes", "--templates", tmp_path / "templates.txt"]
    found = evaluate("zeroshot", *common, "--taxonomy", tmp_path / "tax.csv", tmp_path / "z.json")
    encoder = load_encoder(base / "clip")
    names = sorted(COLOURS)
    hits = []
    for name in names:
        for k in range(2):
            image = encoder.encode_image([base / "classes" / name / f"{k}.png"])[0]
            near = []
            for other in names:
                prompts = encoder.encode_text([f"a photo of a {other}", f"a small {other}"]).mean(dim=0)
                near.append(float(image @ prompts / prompts.norm()))
            hits.append(names[int(np.argmax(near))] == name)
    assert found["top1"] == pytest.approx(np.mean(hits))
    assert found["hierarchical"]["accuracy"] == found["top1"]
    assert found["images"] == 8


def test_zero_shot_by_features_with_names(base, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "f.npz", image=rng.normal(size=(9, 5)), text=rng.normal(size=(2, 5)), label=np.arange(9) % 2)
    (tmp_path / "tax.csv").write_text("dog,animal\ncat,animal\n")
    (tmp_path / "names.txt").write_text("dog\ncat\n")
    words = ["--features", tmp_path / "f.npz", "--taxonomy", tmp_path / "tax.csv", "--classes", tmp_path / "names.txt"]
    assert evaluate("zeroshot", *words, tmp_path / "z.json")["hierarchical"]["count"] == 9
    assert main(["evaluate", "--task", "zeroshot", *map(str, words[:4])]) == 2


def test_retrieval_from_a_folder_and_from_a_parquet_file(base, tmp_path):
    found = evaluate(
        "retrieval", base / "clip", "--data", base / "chains.jsonl", "--images", base / "flat", tmp_path / "r.json"
    )
    assert (found["images"], found["texts"]) == (8, 8)
    rows = [json.loads(line) for line in (base / "chains.jsonl").read_text().splitlines()]
    columns = {
        "captions": [row["positive"] for row in rows],
        "image_url": [row["image_url"] for row in rows],
        "jpeg": [(base / "flat" / row["image_url"].rpartition("/")[2]).read_bytes() for row in rows],
    }
    pq.write_table(pa.table(columns), tmp_path / "c.parquet")
    assert evaluate("retrieval", base / "clip", "--data", tmp_path / "c.parquet", tmp_path / "p.json") == found
    scores = [
        evaluate("hierarcaps", base / "clip", *words, tmp_path / "h.json")
        for words in (["--data", tmp_path / "c.parquet"], ["--data", base / "chains.jsonl", "--images", base / "flat"])
    ]
    assert scores[0] == scores[1]
    assert scores[0]["images"] == 8


def test_missing_pictures_are_named(base, tmp_path, capsys):
    words = [str(base / "clip"), "--data", str(base / "chains.jsonl"), "--images", str(tmp_path)]
    assert main(["evaluate", "--task", "hierarcaps", *words]) == 1
    assert "8 images are missing" in capsys.readouterr().err


def test_breeds_with_pictures_and_with_names(base, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "class_hierarchy.txt").write_text("r a\nr v\na dog\na cat\nv car\nv bus\n")
    (tree / "node_names.txt").write_text("r\tthing\na\tanimal\nv\tvehicle\ndog\tdog\ncat\tcat\ncar\tcar\nbus\tbus\n")
    (tree / "dataset_class_info.json").write_text(json.dumps([[i, name, name] for i, name in enumerate(COLOURS)]))
    pictures = evaluate("breeds", base / "clip", "--tree", tree, "--data", base / "classes", tmp_path / "b.json")
    assert pictures["queries"] == 8
    assert set(pictures["accuracy_by_depth"]) == {"1", "2"}
    names = evaluate("breeds", base / "clip", "--tree", tree, tmp_path / "n.json")
    assert names["queries"] == 4
    assert set(names["accuracy_by_depth"]) == {"1"}


def test_chains_from_captions_by_the_command(base, tmp_path, capsys):
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = len(tokenizer())
    causal = GPT2Config(vocab_size=size, n_positions=256, n_embd=16, n_layer=1, n_head=2, eos_token_id=3)
    GPT2LMHeadModel(causal).save_pretrained(tmp_path / "lm")
    labels = {0: "contradiction", 1: "entailment"}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    nli = BertConfig(vocab_size=size, **sizes, id2label=labels, label2id={"contradiction": 0, "entailment": 1})
    BertForSequenceClassification(nli).save_pretrained(tmp_path / "nli")
    for name in ("lm", "nli"):
        tokenizer(256).save_pretrained(tmp_path / name)
    (tmp_path / "captions.txt").write_text("a small red dog on the grass\na photo of a red car\n")
    words = ["data", "chains", "--captions", str(tmp_path / "captions.txt"), "--out", str(tmp_path / "c.csv")]
    assert main(words) == 2
    assert "--generator" in capsys.readouterr().err
    models = ["--generator", str(tmp_path / "lm"), "--nli", str(tmp_path / "nli"), "--device", "cpu"]
    # A random model writes no arrows, so no chain can hold, and the command must say so.
    assert main([*words, *models]) == 2
    assert "no chain was made" in capsys.readouterr().err
    assert not (tmp_path / "c.csv").exists()
