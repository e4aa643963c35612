"""The radial recipe from end to end on tiny encoders: it learns, resumes, and its commands understand one another."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from leafward.adapters import adapters
from leafward.cli.dispatch import main
from leafward.config import checked, replace
from leafward.data.captions import Captions, write_captions
from leafward.encoders.encoder import load_encoder
from leafward.engine import Interrupted
from leafward.errors import DataError, UsageError
from leafward.systems.radial import train as training
from leafward.systems.radial.config import ABLATIONS, PRESETS, Config
from leafward.systems.radial.loss import RadialModel, Triples, radial_loss
from leafward.systems.radial.objective import RadialConfig
from leafward.systems.radial.roots import load_roots
from leafward.systems.radial.task import CaptionData, RadialTask
from leafward.systems.radial.train import run

sys.path.insert(0, str(Path(__file__).parents[2] / "adapters"))
from radial_toys import CHAINS, make

CAPTIONS = [Captions.chain(*chain) for chain in CHAINS]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with tiny encoders, captions to learn from, test chains, and second captions of their images."""
    folder = tmp_path_factory.mktemp("radial")
    make("sentence", folder)
    make("clip", folder)
    write_captions(folder / "train.jsonl", CAPTIONS)
    test = [
        Captions.chain(["animal", "dog", "a small dog"], image="10.jpg"),
        Captions.chain(["food", "pizza", "a small pizza on the table"], image="11.jpg"),
    ]
    write_captions(folder / "test.jsonl", test)
    others = [
        Captions.chain(["animal", "puppy", "a dog on the grass"], image="x/10.jpg"),
        Captions.chain(["food", "pizza", "pizza on the table"], image="x/11.jpg"),
    ]
    write_captions(folder / "others.jsonl", others)
    lines = ["dog animal N hyp 5.9", "animal dog N r-hyp 1.0", "car vehicle N hyp 5.5", "dog car N no-rel 0.1"]
    (folder / "hyperlex.txt").write_text("WORD1 WORD2 POS TYPE AVG_SCORE\n" + "\n".join(lines) + "\n")
    return folder


def config_for(base: Path, **changed) -> Config:
    settings = {
        "model": str(base / "sentence"),
        "data": base / "train.jsonl",
        "test": base / "test.jsonl",
        "second": base / "others.jsonl",
        "hyperlex": base / "hyperlex.txt",
        "batch_size": 3,
        "epochs": 20.0,
        "lr": 1e-3,
        "device": "cpu",
    }
    return replace(Config(), **settings | changed)


def test_loss_of_a_batch_is_that_of_its_chains_one_by_one(base):
    """The batch encodes each distinct text once; the definition takes every text of every chain by itself."""
    encoder = load_encoder(base / "sentence")
    data, config = CaptionData(CAPTIONS, encoder), RadialConfig()
    model = RadialModel(encoder, config)
    batch = data.collate([data[i] for i in range(len(data))])
    assert len(batch.frozen) < len(batch.texts)
    loss = RadialTask(data, config).loss(model, batch)
    rows = [(c.texts[i], c.texts[i + 1], c.negatives[i]) for c in CAPTIONS for i in range(2)]
    texts = [text for c in CAPTIONS for text in (*c.texts, *c.negatives)]
    root = encoder.encode_text([""]).expand(len(rows), -1)
    triples = Triples(*(encoder.encode_text(column) for column in zip(*rows, strict=True)), root=root)
    now = encoder.encode_text(texts)
    expected = radial_loss(triples, now, now, config)
    assert float(loss.total) / loss.count == pytest.approx(float(expected.total), abs=1e-5)


def test_the_gradient_flows_through_the_root(base):
    encoder = load_encoder(base / "sentence")
    data = CaptionData(CAPTIONS, encoder)
    batch = data.collate([data[0], data[1]])
    encoder.requires_grad_(True)
    task = RadialTask(data, RadialConfig())

    def gradient(model: RadialModel) -> torch.Tensor:
        encoder.zero_grad()
        task.loss(model, batch).total.backward()
        return encoder.model.embeddings.word_embeddings.weight.grad.clone()

    by_text = gradient(RadialModel(encoder, RadialConfig()))
    learned = RadialModel(encoder, RadialConfig(root="learned"))
    by_vector = gradient(learned)
    assert not torch.allclose(by_text, by_vector, atol=1e-7)  # same values, but the text's part is missing
    assert learned.free_roots.grad.abs().sum() > 0


def test_trees_and_several_roots_make_the_triples_they_should(base):
    encoder = load_encoder(base / "sentence")
    tree = Captions(("animal", "dog", "cat"), (-1, 0, 0), ("car", None, None), root="a photo of")
    bare = Captions.chain(["food", "pizza"], ["bus", None])
    data = CaptionData([tree, bare], encoder)
    assert data.root_texts == ("a photo of", "")
    batch = data.collate([data[0], data[1]])
    names = [data.texts[i] for i in np.unique(np.concatenate([[0, 1], data[0].texts, data[1].texts]))]

    def words(rows) -> list[str]:
        return [names[i] for i in rows]

    found = list(zip(words(batch.general), words(batch.specific), words(batch.negative), strict=True))
    assert found == [("animal", "dog", "car"), ("animal", "cat", "car"), ("food", "pizza", "bus")]
    assert batch.root.tolist() == [0, 0, 1]
    assert words(batch.root_rows) == ["a photo of", ""]


def test_captions_without_a_triple_are_left_out(base):
    encoder = load_encoder(base / "sentence")
    bare = Captions.chain(["animal", "dog"])
    top = Captions.chain(["animal"], ["car"])
    assert len(CaptionData([bare, CAPTIONS[0], top], encoder)) == 1
    with pytest.raises(DataError, match="no triple"):
        CaptionData([bare, top], encoder)


def test_learned_roots_do_not_outlive_a_run_that_is_replaced(base, tmp_path):
    learned = config_for(base, epochs=1.0, objective=RadialConfig(root="learned"))
    run(learned, tmp_path / "run")
    assert list(load_roots(tmp_path / "run")) == [""]
    run(config_for(base, epochs=1.0), tmp_path / "run", overwrite=True)
    assert load_roots(tmp_path / "run") is None


@pytest.mark.parametrize("objective", [{}, {"loss": "cone"}, {"geometry": "lorentz"}, {"root": "learned"}])
def test_training_lowers_its_objective_and_can_be_evaluated(base, tmp_path, objective):
    config = config_for(base, objective=RadialConfig(**objective))
    result = run(config, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0] - 0.05
    assert result["captions"] == {"learned": 6, "validation": 0}
    assert {"tau", "precision", "recall", "hyperlex_all"} <= result["after"].keys() == result["before"].keys()
    assert (tmp_path / "run" / "report.html").read_text().count("Before and after") == 1
    # What is saved is what was scored, also with a learned root, also by the command.
    command = ["evaluate", str(tmp_path / "run"), "--data", str(base / "test.jsonl"), "--device", "cpu"]
    command += ["--second", str(base / "others.jsonl"), "--out", str(tmp_path / "scores.json")]
    assert main(command) == 0
    found = json.loads((tmp_path / "scores.json").read_text())
    assert [found[name] for name in ("tau", "precision", "recall")] == pytest.approx(
        [result["after"][name] for name in ("tau", "precision", "recall")], abs=1e-6
    )


def test_the_twin_learns_in_the_other_geometry_from_the_same_start(base, tmp_path):
    config = config_for(base, epochs=4.0, twin=True)
    result = run(config, tmp_path / "run")
    twin = json.loads((tmp_path / "run" / "members" / "lorentz-0" / "result.json").read_text())
    assert result["twin"] == pytest.approx(twin["after"])
    assert result["parameters"] == twin["parameters"]
    alone = run(replace(config, twin=False, objective={"geometry": "lorentz"}), tmp_path / "alone")
    assert [number["twin"] for number in result["headline"]] == [number["value"] for number in alone["headline"]]
    assert {number["twin_name"] for number in result["headline"]} == {"hyperbolic twin"}
    plain = run(replace(config, twin=False), tmp_path / "plain")
    assert plain["after"] == result["after"]
    other = replace(config, twin=False, objective=RadialConfig(geometry="lorentz"))
    assert run(other, tmp_path / "other")["after"] == pytest.approx(twin["after"])


def test_a_root_that_would_not_be_learned_is_refused_before_training(base, tmp_path):
    write_captions(tmp_path / "c.jsonl", [dataclasses.replace(each, root="a photo of") for each in CAPTIONS])
    with pytest.raises(DataError, match="needs the root ''"):
        run(config_for(base, data=tmp_path / "c.jsonl", objective=RadialConfig(root="learned")), tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_tau_of_validation_captions_counts_branches_as_edges(base):
    encoder = load_encoder(base / "sentence")
    tree = Captions(("animal", "dog", "a small dog on the grass", "cat"), (-1, 0, 1, 0), (None,) * 4)
    chain = Captions.chain(["food", "pizza", "pizza on the table"], root="a photo of")
    radii = {
        (text, each.root): float((encoder.encode_text([text]) - encoder.encode_text([each.root])).norm())
        for each in (tree, chain)
        for text in each.texts
    }

    def tau(root, *texts):
        values = [radii[text, root] for text in texts]
        pairs = [(i, j) for j in range(len(values)) for i in range(j)]
        return np.mean([1.0 if values[i] <= values[j] else -1.0 for i, j in pairs])

    edges = [tau("", "animal", "dog"), tau("", "dog", "a small dog on the grass"), tau("", "animal", "cat")]
    expected = np.mean([*edges, tau("a photo of", *chain.texts)])
    assert np.mean(training.chain_taus([tree, chain], encoder, None)) == pytest.approx(expected)


def test_without_a_test_the_captions_kept_from_training_are_scored(base, tmp_path, capsys):
    command = ["train", "radial", "--model", str(base / "sentence"), "--data", str(base / "train.jsonl")]
    assert main([*command, "--lr", "1e-3", "--device", "cpu", "--json", "--out", str(tmp_path / "run")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["captions"] == {"learned": 5, "validation": 1}
    (number,) = result["headline"]
    assert number["name"] == "τ_d of the captions kept from training"
    learned, (kept,) = training.split(CAPTIONS, 0.05, seed=0)
    assert kept not in learned
    for folder, found in ((base / "sentence", result["before"]), (tmp_path / "run", result["after"])):
        vectors = load_encoder(folder).encode_text(["", *kept.texts])
        radii = (vectors[1:] - vectors[0]).norm(dim=1).tolist()
        pairs = [(i, j) for j in range(len(radii)) for i in range(j)]
        tau = np.mean([1.0 if radii[i] <= radii[j] else -1.0 for i, j in pairs])
        assert found == {"validation_tau": pytest.approx(tau)}
    assert "1 captions were kept from training" in (tmp_path / "run" / "report.html").read_text()


def test_the_split_keeps_images_together_and_every_root_in_training():
    rows = [Captions.chain(["animal", "dog"], image=f"{i // 2}.jpg", root="" if i < 18 else "rare") for i in range(20)]
    for seed in range(20):
        learned, watched = training.split(rows, 0.3, seed)
        assert len(learned) + len(watched) == 20
        assert not {each.image for each in learned} & {each.image for each in watched}
        assert {each.root for each in learned} == {"", "rare"}
        assert len(watched) in (4, 6)
    assert training.split(rows, 0.0, 0) == (rows, [])
    assert training.split(rows[:8], 0.05, 0) == (rows[:8], [])  # of four images none can be spared
    assert len(training.split(rows[:10], 0.05, 0)[1]) == 2
    with pytest.raises(DataError, match="leaves no caption"):
        training.split(rows[:4], 0.99, 0)


def test_only_the_text_side_of_clip_changes(base, tmp_path):
    config = config_for(base, model=str(base / "clip"), second=None, hyperlex=None, test=None, epochs=2.0)
    run(config, tmp_path / "run")
    before, after = (load_file(folder / "model.safetensors") for folder in (base / "clip", tmp_path / "run" / "model"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith(("text_model.", "text_projection.")) for name in changed)


@pytest.mark.parametrize("train", ["lora", "blocks"])
def test_adapters_are_merged_into_the_saved_model(base, tmp_path, train):
    config = config_for(base, train=train, rank=2, block_size=8, epochs=10.0, lr=1e-2)
    result = run(config, tmp_path / "run")
    assert result["parameters"]["trained"] < result["parameters"]["all"] / 2
    plain = load_encoder(base / "sentence").model.state_dict().keys()
    merged = load_encoder(tmp_path / "run")
    assert merged.model.state_dict().keys() == plain
    adapted, texts = load_encoder(tmp_path / "run" / "adapter"), ["a small dog", "food"]
    assert adapters(adapted.model)
    torch.testing.assert_close(adapted.encode_text(texts), merged.encode_text(texts), atol=1e-5, rtol=0)
    assert not torch.allclose(load_encoder(base / "sentence").encode_text(texts), merged.encode_text(texts), atol=1e-3)
    run(config_for(base), tmp_path / "run", overwrite=True)
    assert not (tmp_path / "run" / "adapter").exists()


def test_validation_does_not_disturb_training(base, tmp_path):
    """A defect of the authors' loop: after a validation pass it trained on the last validation batch."""
    quiet = run(config_for(base, validation=0.34, epochs=3.0), tmp_path / "quiet")
    watched = run(config_for(base, validation=0.34, epochs=3.0, eval_every=1), tmp_path / "watched")
    assert quiet["captions"] == {"learned": 4, "validation": 2}
    assert quiet["after"] == watched["after"]
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("quiet", "watched")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_stopped_run_continues_bit_for_bit(base, tmp_path, monkeypatch):
    config = config_for(base, epochs=4.0, checkpoint_every=2, train="lora")
    whole = run(config, tmp_path / "whole")
    steps = []

    def stop_after_five(self, model, batch):
        steps.append(1)
        if len(steps) == 6:
            raise Interrupted(15, 5, tmp_path)
        return plain(self, model, batch)

    plain = RadialTask.loss
    monkeypatch.setattr(RadialTask, "loss", stop_after_five)
    with pytest.raises(Interrupted):
        run(config, tmp_path / "parts")
    monkeypatch.undo()
    assert run(config, tmp_path / "parts", resume=True)["after"] == whole["after"]


def test_captions_of_test_images_are_not_learned(base, tmp_path):
    write_captions(tmp_path / "all.jsonl", [*CAPTIONS, Captions.chain(["animal", "cat"], ["car", None], "z/10.jpg")])
    config = config_for(base, data=tmp_path / "all.jsonl")
    assert len(training.captions_of(config)) == len(CAPTIONS)


def test_presets_and_bad_settings():
    for preset in PRESETS.values():
        assert isinstance(preset(), Config)
    authors = PRESETS["authors"]()
    assert (authors.loop.batch_size, authors.loop.epochs) == (8, 1.0)
    assert (authors.optim.lr, authors.optim.weight_decay, authors.optim.clip_norm) == (1e-7, 0.01, None)
    assert [getattr(authors.objective, name) for name in ("pull", "contrast", "hardest")] == [10.0, 1.0, 1.0]
    with pytest.raises(UsageError, match="lr"):
        checked(Config, {"lr": 0.0})
    with pytest.raises(UsageError, match="--model"):
        run(Config(), Path("nowhere"))


def test_chains_from_a_taxonomy_by_the_command(tmp_path, base):
    (tmp_path / "t.csv").write_text("child,parent\nthing,\nanimal,thing\nvehicle,thing\ndog,animal\ncar,vehicle\n")
    out = tmp_path / "chains.csv"
    assert main(["data", "chains", "--taxonomy", str(tmp_path / "t.csv"), "--out", str(out)]) == 0
    assert out.read_text().splitlines() == [
        "positive,negative,image_url,root",
        "animal => dog,vehicle => car,,",
        "vehicle => car,animal => dog,,",
    ]
    result = run(config_for(base, data=out, test=None, second=None, epochs=2.0), tmp_path / "run")
    assert result["captions"]["learned"] == 2


def test_other_evaluations_by_the_command(base, tmp_path, capsys):
    assert main(["evaluate", str(base / "sentence"), "--task", "hyperlex", "--data", str(base / "hyperlex.txt")]) == 0
    pair = np.random.default_rng(0).normal(size=(2, 20, 6)).astype(np.float32)
    np.save(tmp_path / "pair.npy", pair)
    out = tmp_path / "r.json"
    assert main(["evaluate", "--task", "retrieval", "--features", str(tmp_path / "pair.npy"), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["images"] == 20
    assert main(["evaluate", str(base / "sentence"), "--task", "retrieval", "--features", str(out)]) == 2
    assert "either TARGET" in capsys.readouterr().err


def test_features_give_the_scores_of_their_model(base, tmp_path):
    """--features on hierarcaps: one row for each caption, equal captions repeated."""
    from leafward.data.captions import read_captions, second_captions

    chains = read_captions(base / "test.jsonl")
    second = second_captions(chains, read_captions(base / "others.jsonl"))
    encoder = load_encoder(base / "sentence")
    np.savez(
        tmp_path / "f.npz",
        text=encoder.encode_text([text for each in chains for text in each.texts]).numpy(),
        root=encoder.encode_text([""])[0].numpy(),
        image=encoder.encode_text(list(second.values())).numpy(),
    )
    common = ["evaluate", "--task", "hierarcaps", "--data", str(base / "test.jsonl")]
    assert main([*common, "--features", str(tmp_path / "f.npz"), "--out", str(tmp_path / "1.json")]) == 0
    by_model = [str(base / "sentence"), "--second", str(base / "others.jsonl"), "--out", str(tmp_path / "2.json")]
    assert main([*common, *by_model]) == 0
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("1.json", "2.json"))
    numbers = [[number["value"] for number in found.pop("headline")] for found in (one, two)]
    assert numbers[0] == pytest.approx(numbers[1])
    assert one.pop("notes") == two.pop("notes") == []
    assert one == pytest.approx(two)


def test_several_seeds_have_intervals_over_seeds_and_a_paired_difference(base, tmp_path):
    result = run(config_for(base, epochs=3.0, seeds=3, seed=4, twin=True), tmp_path / "run")
    names = [f"{geometry}-{seed}" for geometry in ("euclidean", "lorentz") for seed in (4, 5, 6)]
    assert [each["name"] for each in result["members"]] == names
    assert sorted(path.name for path in (tmp_path / "run" / "members").iterdir()) == names
    alone = run(config_for(base, epochs=3.0, seed=5), tmp_path / "alone")
    after = {each["name"]: each["after"] for each in result["members"]}
    assert after["euclidean-5"] == alone["after"]
    # Student's t with two degrees of freedom, by hand.
    flat, curved = (
        [after[f"{geometry}-{seed}"]["recall"] for seed in (4, 5, 6)] for geometry in ("euclidean", "lorentz")
    )
    half = 4.302652729911275 / 3**0.5
    by_name = {number["name"]: number for number in result["headline"]}
    number = by_name["path recall"]
    assert (number["value"], number["twin"]) == pytest.approx((np.mean(flat), np.mean(curved)))
    spread = half * np.std(flat, ddof=1)
    ends = [max(0.0, np.mean(flat) - spread), min(1.0, np.mean(flat) + spread)]
    assert number["interval"] == (pytest.approx(ends) if spread else None)  # the same with every seed: none
    assert number["over"] == ({"seeds": 3} if spread else None)
    gaps = np.subtract(curved, flat)
    spread = half * np.std(gaps, ddof=1)
    difference = by_name["difference in path recall"]
    ends = [gaps.mean() - spread, gaps.mean() + spread]
    assert difference["interval"] == (pytest.approx(ends) if spread else None)
    assert result["notes"] == []
    assert alone["notes"] == ["One seed: intervals are over the test's items, not over seeds."]
    assert "lorentz-6" in (tmp_path / "run" / "report.html").read_text()


def test_an_ablation_and_a_grid_by_the_command(base, tmp_path):
    words = ["train", "radial", "--model", str(base / "sentence"), "--data", str(base / "train.jsonl")]
    words += ["--test", str(base / "test.jsonl"), "--second", str(base / "others.jsonl"), "--device", "cpu"]
    words += ["--ablate", "geometry", "--grid", "lr=1e-4,1e-3", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    cells = {each["cell"]: each["settings"] for each in result["cells"]}
    assert cells == {
        f"{geometry},lr={lr}": {"objective.geometry": geometry, "optim.lr": float(lr)}
        for geometry in ("euclidean", "lorentz")
        for lr in ("1e-4", "1e-3")
    }
    for each in result["cells"]:
        assert (tmp_path / "run" / each["run"] / "model").is_dir()


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_are_settings(name):
    variants = [replace(Config(), **changes) for changes in ABLATIONS[name].values()]
    assert len({repr(each) for each in variants}) == len(variants) > 1


def test_the_whole_loop_is_there(base, tmp_path):
    options = {"precision": "bfloat16", "ema": 0.5, "patience": 1, "eval_every": 1, "checkpoint_activations": True}
    result = run(config_for(base, validation=0.34, epochs=10.0, **options), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    watched = [line["eval/tau"] for line in lines if "eval/tau" in line]
    assert result["steps"] == len(watched) < 20  # patience ends it
    assert result["after"]["validation_tau"] == pytest.approx(max(watched))  # what is published is the best
    with pytest.raises(UsageError, match="patience must be None where validation keeps no captions"):
        config_for(base, patience=1)
    for options, name in (({"micro_batch": 1}, "micro_batch"), ({"strategy": "fsdp"}, "strategy")):
        with pytest.raises(UsageError, match=f"loop.{name} must be"):
            config_for(base, **options)


def test_the_compiled_encoder_learns_the_same(base, tmp_path, monkeypatch):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain = run(config_for(base, epochs=1.0), tmp_path / "plain")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    found = run(config_for(base, epochs=1.0, compile=True), tmp_path / "compiled")
    assert graphs
    assert found["after"] == pytest.approx(plain["after"], abs=1e-5)
