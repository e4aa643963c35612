"""The task, its scores, samples and files."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import leafward
from leafward.data.text import prepare
from leafward.engine import LoopConfig, OptimConfig, RunDirectory, parameter_groups, train_loop
from leafward.errors import DataError, LeafwardError, UsageError
from leafward.nn import Gate
from leafward.stats.estimate import Estimate
from leafward.stats.intervals import mean_interval
from leafward.systems.helm import (
    HelmConfig,
    HelmForCausalLM,
    LanguageTask,
    load_model,
    run_tasks,
    sample,
    save_model,
    score,
)
from leafward.systems.helm.scoring import Scores, paired, ratio
from leafward.systems.helm.throughput import MeteredRun, flops_per_token, speed

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    texts = [" ".join(WORDS[n % 8 :] * 6) + f" end {n}.\n" for n in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return prepare(folder / "data.jsonl", folder / "cache", vocab_size=300, validation=0.2)


def build(corpus, preset="helm-d-tiny", context=32, **changes):
    torch.manual_seed(0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), corpus.tokenizer.eos_token_id)
    size = {"vocab_size": 320, "max_position_embeddings": context}
    return HelmForCausalLM(HelmConfig.preset(preset, **size, **ends, **changes))


def train(corpus, model, path, steps=60, **loop):
    task = LanguageTask(corpus, 32)
    settings = LoopConfig(steps=steps, batch_size=8, log_every=10, device="cpu", **loop)
    run = RunDirectory.create(path, settings)
    with task.balancing(model, 1e-2):
        result = train_loop(model, task, settings, OptimConfig(lr=5e-3), run)
    return result, run


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    model = build(corpus)
    result, run = train(corpus, model, tmp_path_factory.mktemp("run") / "run")
    return model, result, run


def test_a_tiny_model_learns_a_repetitive_text(trained):
    _, result, run = trained
    first, last = run.metrics()[0], run.metrics()[-2]
    assert first["train/loss"] > 0.5 * math.log(320)
    assert result.metrics["loss"] < 0.2 * math.log(320)
    assert last["train/loss"] < 0.2 * math.log(320)
    assert last["train/radius_mean"] > 0.0


def test_experts_are_watched_and_balanced(corpus, tmp_path):
    model = build(corpus, "helm-mice-tiny", learn_curvatures=True)
    _, run = train(corpus, model, tmp_path / "run", steps=3)
    last = run.metrics()[-2]
    assert 0.0 <= last["train/load_min"] <= 1.0 <= last["train/load_max"] <= 4.0
    assert 0.2 < last["train/curvature_min"] < last["train/curvature_max"] < 5.0
    biases = torch.stack([module.bias for module in model.modules() if isinstance(module, Gate)])
    steps = biases / 1e-2
    assert torch.allclose(steps, steps.round(), atol=1e-3)
    assert 1 <= steps.abs().max() <= 3.01  # at most one step of the rate for each update
    assert all((module.load == 0).all() for module in model.modules() if isinstance(module, Gate))


def test_recomputed_activations_change_nothing(corpus, tmp_path):
    """The biases move after the backward pass, so that the second forward pass chooses as the first did."""
    kept = []
    for again in (False, True):
        model = build(corpus, "helm-mice-tiny")
        _, run = train(corpus, model, tmp_path / f"{again}", steps=2, checkpoint_activations=again)
        kept.append([record["train/loss"] for record in run.metrics() if "train/loss" in record])
    assert kept[0] == pytest.approx(kept[1], rel=1e-6)


def test_weight_decay_spares_biases_and_time_columns(corpus):
    model = build(corpus, "helm-mice-tiny")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = ({names[id(p)] for p in group["params"]} for group in parameter_groups(model, 0.1))
    assert "model.layers.1.ffn.routed.up.weight" in decayed
    assert "model.layers.1.ffn.gate.weight" in decayed
    for spared in ("ffn.routed.up.bias", "ffn.routed.down.time_weight", "attention.out.time_weight", "ffn_norm.weight"):
        assert f"model.layers.1.{spared}" in plain
    assert "lm_head.time_weight" in plain
    assert not any("bias" in name or "time" in name for name in decayed)


def test_layers_do_not_drown_the_tokens_of_the_flat_twin(corpus):
    """At the start the stream still says which token it is, as it does in the Lorentz model whatever the radius."""

    def kept(radius):
        model = build(corpus, geometry="euclidean", embedding_radius=radius)
        with torch.no_grad():
            states = model.model(torch.arange(300)[None], output_hidden_states=True).hidden_states
        return torch.cosine_similarity(states[0], states[-1], dim=-1).mean()

    assert kept(None) > max(0.3, 2.0 * kept(1.0))


def test_evaluation_is_the_mean_over_all_tokens(corpus):
    """However windows are grouped into batches, and as a plain sum over documents says."""
    model = build(corpus).eval()
    expected = score(model, corpus.held_out, 32).loss.value
    for rows in (1, 3, 100):
        task = LanguageTask(corpus, 32, eval_batch=rows)
        with torch.no_grad():
            assert task.evaluate(model)["loss"] == pytest.approx(expected, rel=1e-6)


def test_evaluation_during_training_may_read_less(corpus):
    task = LanguageTask(corpus, 32, eval_tokens=70)
    assert len(task.held_out.shard.tokens) == 70
    assert len(task.held_out) == math.ceil(69 / 31)
    with torch.no_grad():
        assert math.isfinite(task.evaluate(build(corpus).eval())["loss"])


@pytest.mark.parametrize("preset", ["helm-d-tiny", "helm-mice-tiny"])
def test_scores_equal_a_hand_computation(corpus, preset):
    """Each document alone through the model; nats from a plain log-softmax; bytes from the text."""
    model, shard = build(corpus, preset, context=256).double().eval(), corpus.held_out
    found = score(model, shard, 256)
    nats, count, size = [], 0, 0
    for index in range(len(shard.starts)):
        tokens = torch.from_numpy(shard.document(index).astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        chosen = logits.double().log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
        nats.append(-chosen.sum().item())
        count += len(tokens) - 1
        size += len(corpus.tokenizer.decode(tokens[1:-1]).encode())
    values = {name: each.value for name, each in found.headline().items()}
    assert found.nats == pytest.approx(nats, rel=1e-5)
    assert values["loss"] == pytest.approx(sum(nats) / count, rel=1e-5)
    assert values["perplexity"] == pytest.approx(math.exp(sum(nats) / count), rel=1e-4)
    assert values["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / size, rel=1e-5)
    assert found.unit == "documents"


@pytest.mark.parametrize("alone", [False, True])
def test_batches_have_one_shape_and_what_fills_the_last_does_not_count(corpus, alone):
    shard, model, seen = corpus.held_out, build(corpus).double().eval(), []
    if alone:
        shard = type(shard)(shard.tokens[: int(shard.starts[1])], shard.starts[:1], shard.sizes[:1])
    model.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    one, three = (score(model, shard, 16, batch_size=size) for size in (1, 3))
    assert len(set(seen)) == 2
    assert seen.count((1, 16)) % 3, "the last batch of three is not full"
    np.testing.assert_array_equal(three.tokens, one.tokens)
    np.testing.assert_allclose(three.nats, one.nats, rtol=1e-9)


def test_one_document_is_scored_by_windows(corpus):
    shard = corpus.held_out
    end = int(shard.starts[1])
    one = type(shard)(shard.tokens[:end], shard.starts[:1], shard.sizes[:1])
    found = score(build(corpus).eval(), one, 16)
    assert found.unit == "windows"
    assert found.tokens.sum() == end - 1
    assert found.bytes.sum() == pytest.approx(shard.sizes[0])
    assert found.headline()["bits_per_byte"].interval is not None


def test_intervals():
    values = [2.1, 1.9, 2.4, 2.0]
    centre, (low, high) = mean_interval(values)
    reach = 3.182446305 * np.std(values, ddof=1) / 2  # t(0.975, 3) from a table
    assert (centre, low, high) == pytest.approx((2.1, 2.1 - reach, 2.1 + reach))
    found = ratio(np.array(values), np.ones(4))
    assert (found.value, found.interval) == (pytest.approx(2.1), pytest.approx((low, high)))
    assert mean_interval([1.0]) == (1.0, None)
    assert ratio(np.array([3.0]), np.array([2])) == Estimate(1.5)


def test_the_interval_over_documents_covers():
    """95 % intervals of a ratio of sums, over documents of very different length whose tokens go together."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        sizes = generator.integers(5, 200, 40)
        totals = sizes * (3.0 + 0.5 * generator.standard_normal(40)) + np.sqrt(sizes) * generator.standard_normal(40)
        covered += 3.0 in ratio(totals, sizes).interval
    assert 0.91 <= covered / 400 <= 0.985


def test_differences_are_paired():
    """What the two have in common, over documents or seeds, drops out of the interval."""
    generator = np.random.default_rng(0)
    tokens, noise = np.full(30, 100), 50 * generator.standard_normal(30)
    make = lambda shift: Scores(300 + noise + 100 * shift, tokens, tokens.astype(float), "documents")  # noqa: E731
    found = paired([make(0.0)], [make(0.1)])
    assert found.value == pytest.approx(-0.1)
    assert found.interval is None or found.interval.high - found.interval.low < 1e-6
    found = paired([make(0.0), make(0.3), make(0.5)], [make(0.1), make(0.42), make(0.58)])
    assert (found.value, str(found.over)) == (pytest.approx(-0.1), "3 seeds")
    assert found.interval == pytest.approx((-0.1 - 4.302653 * 0.02 / 3**0.5, -0.1 + 4.302653 * 0.02 / 3**0.5), rel=1e-4)


def test_samples_follow_their_seed_and_fit_the_context(corpus, trained):
    model, tokenizer = trained[0].eval(), corpus.tokenizer
    text = sample(model, tokenizer, "one two three", tokens=6, temperature=0.0)
    assert text.startswith(" four")
    drawn = {seed: sample(model, tokenizer, tokens=20, temperature=1.5, seed=seed) for seed in (0, 1, 0)}
    assert drawn[0] == sample(model, tokenizer, tokens=20, temperature=1.5, seed=0)
    assert drawn[0] != drawn[1]
    state = torch.get_rng_state()
    sample(model, tokenizer, tokens=2)
    assert (torch.get_rng_state() == state).all()
    with pytest.raises(UsageError, match=r"the prompt has \d+ tokens .* context is 32; shorten"):
        sample(model, tokenizer, "one two " * 30, tokens=5)
    for wrong in ({"tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            sample(model, tokenizer, **wrong)


def test_a_saved_model_is_a_hugging_face_folder(corpus, trained, tmp_path):
    model = trained[0]
    for _ in range(2):  # the second replaces the first
        save_model(model, corpus.tokenizer, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    leafward.register()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert type(loaded) is HelmForCausalLM
    ids = tokenizer("one two", return_tensors="pt").input_ids
    assert ids[0, 0] == tokenizer.bos_token_id
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
    assert torch.equal(load_model(tmp_path / "model")[0](ids).logits, model(ids).logits)
    texts = ["one", "one two three four"]
    batch = loaded.generate(**tokenizer(texts, return_tensors="pt", padding=True), max_new_tokens=4, do_sample=False)
    for text, row in zip(texts, batch, strict=True):
        alone = loaded.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=4, do_sample=False)
        assert torch.equal(row[-4:], alone[0, -4:]), "padded on the right, a short text would go on from its padding"
    with pytest.raises(DataError, match="does not hold a model"):
        load_model(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DataError, match="holds a model of type 'llama', not 'helm'"):
        load_model(tmp_path / "other")
    with pytest.raises(DataError, match=r"model\.safetensors is damaged: its hash is"):
        load_model(tmp_path / "model")
    (tmp_path / "model" / "SHA256SUMS").unlink()
    with pytest.raises(DataError, match="cannot load the model in"):
        load_model(tmp_path / "model")


def test_a_folder_whose_parts_do_not_fit_is_refused(corpus, trained, tmp_path):
    """transformers would go on with random weights for what is missing."""
    save_model(trained[0], corpus.tokenizer, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    settings = json.loads(file.read_text())
    for layers, words in ((3, r"misses 'model\.layers\.2"), (1, r"has too much, for instance 'model\.layers\.1")):
        file.write_text(json.dumps({**settings, "num_hidden_layers": layers}))
        with pytest.raises(DataError, match=words):
            load_model(tmp_path / "model")
    file.write_text(json.dumps(settings))
    words = {f"<{n}>": n for n in range(2000)} | {"</s>": 2000}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<0>")).save(
        str(tmp_path / "model" / "tokenizer.json")
    )
    with pytest.raises(DataError, match="has 2002 tokens, more than the model's"):
        load_model(tmp_path / "model")


def task_folder(folder):
    """Two tasks as files: which number comes next, and the perplexity of a text."""
    folder.mkdir()
    rows = [{"question": " ".join(WORDS[n : n + 3]), "right": WORDS[n + 3], "wrong": WORDS[n]} for n in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "next.yaml").write_text(
        f"""task: next_number
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder / "rows.jsonl"}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: 0
doc_to_choice: "{{{{[right, wrong]}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    return folder


def test_lm_eval_scores_a_saved_model(corpus, trained, tmp_path):
    pytest.importorskip("lm_eval")
    save_model(trained[0], corpus.tokenizer, tmp_path / "model")
    model, tokenizer = load_model(tmp_path / "model")
    folder = task_folder(tmp_path / "tasks")
    rows = run_tasks(model, tokenizer, folder=folder)
    assert [(row["task"], row["metric"], row["examples"]) for row in rows] == [("next_number", "acc", 5)]
    assert rows[0]["value"] == 1.0
    assert run_tasks(model, tokenizer, ["next_number"], folder=folder, limit=2)[0]["examples"] == 2
    with pytest.raises(UsageError, match="--task-folder must be a folder"):
        run_tasks(model, tokenizer, folder=tmp_path / "missing")
    (tmp_path / "tasks" / "rows.jsonl").unlink()
    with pytest.raises(LeafwardError, match="lm-eval cannot run the task 'next_number'"):
        run_tasks(model, tokenizer, folder=folder)


def test_lm_eval_gives_the_standard_error_of_a_share(corpus, trained, tmp_path):
    """The model knows every next number (above); the key is wrong for 4 of 13 questions."""
    pytest.importorskip("lm_eval")
    folder = task_folder(tmp_path / "tasks")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    keyed = [{**rows[n % 5], "key": int(n in (2, 3, 7, 11))} for n in range(13)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in keyed))
    task = folder / "next.yaml"
    task.write_text(task.read_text().replace("doc_to_target: 0", "doc_to_target: key"))
    (row,) = run_tasks(trained[0], corpus.tokenizer, folder=folder)
    share = 9 / 13
    assert row["value"] == pytest.approx(share)
    assert row["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 12))
    (alone,) = run_tasks(trained[0], corpus.tokenizer, folder=folder, limit=1)
    assert alone["stderr"] is None, "one example has no spread"


def test_lm_eval_gives_the_standard_error_of_a_perplexity(corpus, trained, tmp_path, capsys, monkeypatch):
    """By the bootstrap, against the delta method on log-likelihoods of our own; what it prints stays off stdout."""
    pytest.importorskip("lm_eval")
    monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
    folder = task_folder(tmp_path / "tasks")
    rows = [{"question": " ".join(WORDS[n : n + k]), "right": WORDS[n + k]} for k in (1, 2, 3, 4) for n in range(8 - k)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = (folder / "next.yaml").read_text().splitlines()
    lines = [line for line in lines if not line.startswith(("doc_to_choice", "doc_to_target", "metric_list", "output"))]
    lines += ["output_type: loglikelihood", 'doc_to_target: " {{right}}"']
    lines += ["metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]"]
    (folder / "next.yaml").write_text("\n".join(lines))
    (row,) = run_tasks(trained[0], corpus.tokenizer, folder=folder)
    likelihoods = np.array([log_likelihood(trained[0], corpus.tokenizer, each) for each in rows])
    perplexity = math.exp(-likelihoods.mean())
    assert row["value"] == pytest.approx(perplexity, rel=1e-4)
    spread = perplexity * likelihoods.std(ddof=1) / math.sqrt(len(rows))
    assert row["stderr"] == pytest.approx(spread, rel=0.3)
    assert capsys.readouterr().out == ""
    assert "DISABLE_MULTIPROC" not in os.environ


def log_likelihood(model, tokenizer, row):
    """Of the answer after a space, given the question."""
    given = len(tokenizer(row["question"]).input_ids)
    tokens = torch.tensor([tokenizer(f"{row['question']} {row['right']}").input_ids])
    with torch.no_grad():
        scores = model(input_ids=tokens).logits[0].double().log_softmax(-1)
    return float(sum(scores[i - 1, tokens[0, i]] for i in range(given, tokens.shape[1])))


@pytest.mark.slow
def test_the_command_lm_eval_scores_a_saved_model(corpus, trained, tmp_path):
    """It imports nothing of ours; the folder says where its classes are."""
    pytest.importorskip("lm_eval")
    save_model(trained[0], corpus.tokenizer, tmp_path / "model")
    folder = task_folder(tmp_path / "tasks")
    arguments = f"--model hf --model_args pretrained={tmp_path / 'model'},trust_remote_code=True --device cpu"
    command = [sys.executable, "-m", "lm_eval", *arguments.split(), "--tasks", "next_number", "--include_path", folder]
    command += ["--output_path", str(tmp_path / "scores.json")]
    subprocess.run(command, env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}, check=True, timeout=300)
    (scores,) = tmp_path.rglob("scores*.json")
    assert json.loads(scores.read_text())["results"]["next_number"]["acc,none"] == 1.0


def test_flops_of_a_token(corpus):
    """6 per weight that the token meets, and attention: all but the embedding, and two of four experts."""
    dense = build(corpus)
    weights = sum(p.numel() for name, p in dense.named_parameters() if "embed" not in name)
    assert flops_per_token(dense, 32) == 6 * weights + 12 * 2 * 64 * 32
    sparse = build(corpus, "helm-mice-tiny", geometry="euclidean")
    idle = sum(p.numel() for name, p in sparse.named_parameters() if ".routed." in name) / 2
    weights = sum(p.numel() for name, p in sparse.named_parameters() if "embed" not in name) - idle
    assert flops_per_token(sparse, 32) == 6 * weights + 12 * 3 * 4 * 20 * 32


def test_a_metered_run_logs_tokens_per_second(corpus, tmp_path):
    run = MeteredRun(tmp_path, {})
    run.meter(build(corpus), 32, torch.device("cpu"), 1)
    for rate in (1.0, 10.0, 30.0, 20.0):
        run.log(1, {"train/loss": 1.0}, {"seconds": 1.0, "samples_per_second": rate})
    run.log(1, {"eval/loss": 1.0})
    assert run.metrics()[1]["time"]["tokens_per_second"] == 320.0
    assert speed(run.metrics()) == {"tokens_per_second": 640.0, "mfu": None}
    run.peak = 1e9
    run.log(2, {}, {"seconds": 1.0, "samples_per_second": 1.0})
    assert run.metrics()[-1]["time"]["mfu"] == pytest.approx(32 * flops_per_token(build(corpus), 32) / 1e9)
