"""The HELM recipe from text to report: one model, twins, resuming, ranks, evaluation, samples, refusals."""

import dataclasses
import io
import json
import os
import signal
from pathlib import Path

import pytest
import tokenizers
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import leafward
from leafward.cli import data_tokens as tokenise
from leafward.cli.evaluate import parse as choose
from leafward.cli.train import parse
from leafward.config import checked, replace
from leafward.data.text import train_tokenizer
from leafward.engine import Interrupted, LoopConfig, OptimConfig
from leafward.errors import DataError, UsageError
from leafward.systems.helm import LanguageTask, evaluate_sample
from leafward.systems.helm import config as helm
from leafward.systems.helm import evaluate as evaluate_language
from leafward.systems.helm import train as train_helm
from ranks import together

LOOP = LoopConfig(steps=6, batch_size=4, eval_every=3, checkpoint_every=2, log_every=1, device="cpu")
# A large eps: with the usual one a gradient that is zero but for rounding moves a weight by the whole learning rate.
OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.01, warmup_steps=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "fables.jsonl"
    texts = [f"The {a} met the {b}. The {b} asked the {a} for {n} leaves.\n" * 3 for n, (a, b) in enumerate(_pairs())]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _pairs():
    animals = ("fox", "owl", "hare", "wren", "mole")
    return [(a, b) for a in animals for b in animals if a != b]


def config(data, **changes):
    settings = {"data": data, "vocab_size": 320, "context": 32, "validation": 0.2, "loop": LOOP, "optim": OPTIM}
    return replace(helm.Config(), **settings | changes)


def kept(out):
    """Metrics without times, and weights."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("time", None)
    return lines, load_file(out / "model" / "model.safetensors")


def assert_same(out, reference):
    (lines, weights), (expected_lines, expected) = kept(out), kept(reference)
    assert lines == expected_lines
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, train_helm.run(config(data, model="helm-mice-tiny", prompt="The fox"), out)


def test_a_run_leaves_a_model_its_numbers_and_a_page(finished):
    out, result = finished
    numbers = {number["name"]: number for number in result["headline"]}
    assert list(numbers)[:3] == ["held-out loss", "perplexity", "bits per byte"]
    low, high = numbers["held-out loss"]["interval"]
    assert low < numbers["held-out loss"]["value"] < high
    assert numbers["tokens per second"]["value"] > 0
    evaluated = [line["eval/loss"] for line in kept(out)[0] if "eval/loss" in line]
    assert numbers["held-out loss"]["value"] == pytest.approx(evaluated[-1], rel=1e-5)
    leafward.register("transformers")
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert sum(p.numel() for p in model.parameters()) == result["members"][0]["parameters"]
    logged = kept(out)[0][-2]
    for name in ("radius_mean", "curvature_min", "load_min", "lr"):
        assert f"train/{name}" in logged
    page = (out / "report.html").read_text()
    for words in ("held-out loss", "never, in 6 steps", "How it was run", "goes on from", "fables.jsonl", "<svg"):
        assert words in page
    assert json.loads((out / "result.json").read_text())["headline"] == result["headline"]


def test_a_stopped_run_goes_on_bit_for_bit(data, finished, tmp_path, monkeypatch):
    steps = 0
    whole = LanguageTask.loss

    def stopping(self, model, batch):
        nonlocal steps
        steps += 1
        if steps == 5:  # after the checkpoint of step 4, in the middle of step 5
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, model, batch)

    monkeypatch.setattr(LanguageTask, "loss", stopping)
    same = config(data, model="helm-mice-tiny", prompt="The fox")
    with pytest.raises(Interrupted):
        train_helm.run(same, tmp_path / "run")
    monkeypatch.setattr(LanguageTask, "loss", whole)
    with pytest.raises(UsageError, match="unfinished run; use --resume"):
        train_helm.run(same, tmp_path / "run")
    with pytest.raises(UsageError, match=r"optim\.lr"):
        train_helm.run(replace(same, optim=replace(OPTIM, lr=1e-3)), tmp_path / "run", resume=True)
    train_helm.run(same, tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", finished[0])
    with pytest.raises(UsageError, match="finished run"):
        train_helm.run(same, tmp_path / "run", resume=True)
    (tmp_path / "run" / "report.html").unlink()  # as a kill after result.json leaves it
    again = train_helm.run(same, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "report.html").is_file()
    assert again["headline"][:3] == finished[1]["headline"][:3]
    assert_same(tmp_path / "run", finished[0])
    assert not (tmp_path / "run" / "lock.json").exists()


def test_changed_data_is_refused_on_resume(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("The fox met the owl. " * 40)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_helm, "train_loop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_helm.run(config(tmp_path / "a.txt"), tmp_path / "run")
    (tmp_path / "a.txt").write_text("The hare met the owl. " * 40)
    with pytest.raises(UsageError, match=r"data\.source: .*a\.txt has changed since .*--data-changed"):
        train_helm.run(config(tmp_path / "a.txt"), tmp_path / "run", resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(train_helm, "train_loop", interrupted)
        with pytest.raises(KeyboardInterrupt):  # it comes to its training
            train_helm.run(config(tmp_path / "a.txt"), tmp_path / "run", resume="data-changed")


def test_twins_see_the_same_data_in_the_same_order(data, tmp_path, monkeypatch):
    seen: dict[int, tuple[str, list[list[int]]]] = {}
    models = []  # kept alive, so that no two have the same id
    whole = LanguageTask.loss

    def watching(self, model, batch):
        models.append(model)
        seen.setdefault(id(model), (model.config.geometry, []))[1].append(batch["input_ids"].flatten().tolist())
        return whole(self, model, batch)

    monkeypatch.setattr(LanguageTask, "loss", watching)
    result = train_helm.run(config(data, twin=True, seeds=2, loop=replace(LOOP, steps=3)), tmp_path / "run")
    runs = list(seen.values())
    assert [geometry for geometry, _ in runs] == ["lorentz", "lorentz", "euclidean", "euclidean"]
    assert runs[0][1] == runs[2][1]
    assert runs[1][1] == runs[3][1]
    assert runs[0][1] != runs[1][1]
    numbers = {number["name"]: number for number in result["headline"]}
    losses = [member["loss"]["value"] for member in result["members"]]
    difference = numbers["difference in held-out loss"]
    assert difference["value"] == pytest.approx((losses[0] - losses[2] + losses[1] - losses[3]) / 2)
    assert difference["over"] == {"seeds": 2}
    low, high = difference["interval"]
    assert high - low == pytest.approx(12.7062047 * abs(losses[0] - losses[2] - losses[1] + losses[3]), rel=1e-5)
    sizes = [member["parameters"] for member in result["members"]]
    assert sizes[0] == pytest.approx(sizes[2], rel=0.03)  # a tiny model's time columns are not below 1 %
    assert numbers["held-out loss"]["twin"] == pytest.approx((losses[2] + losses[3]) / 2)
    for member in result["members"]:
        assert (tmp_path / "run" / member["model"] / "config.json").is_file()
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert {"lorentz-0/train/loss", "euclidean-1/train/loss"} <= first.keys()
    done = evaluate(tmp_path / "run")
    again = {number["name"]: number for number in done["headline"]}
    assert again["difference in held-out loss"]["value"] == pytest.approx(difference["value"], abs=1e-6)


def test_a_twin_run_goes_on_with_the_members_that_are_left(data, tmp_path, monkeypatch):
    whole, calls = LanguageTask.loss, []

    def stopping(self, model, batch):
        calls.append(model.config.geometry)
        if len(calls) == 9:  # in the second member
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, model, batch)

    monkeypatch.setattr(LanguageTask, "loss", stopping)
    with pytest.raises(Interrupted):
        train_helm.run(config(data, twin=True), tmp_path / "run")
    result = train_helm.run(config(data, twin=True), tmp_path / "run", resume=True)
    assert len(result["members"]) == 2
    assert calls.count("lorentz") == 6  # the first member was not trained again
    assert result["headline"][3]["name"] == "difference in held-out loss"


def evaluate(target, **flags):
    return evaluate_language.run(evaluate_language.Args(target, device="cpu", **flags), Console(file=io.StringIO()))


def test_evaluation_of_a_run_and_of_a_model(finished, data, tmp_path):
    out, result = finished
    found = evaluate(out)
    assert found["headline"][0]["value"] == pytest.approx(result["headline"][0]["value"], rel=1e-6)
    assert json.loads((out / "evaluation" / "evaluation.json").read_text())["headline"] == found["headline"]
    assert "held-out loss" in (out / "evaluation" / "report.html").read_text()
    (tmp_path / "new.txt").write_text("The fox met the owl. " * 20)
    other = evaluate(out / "model", data=tmp_path / "new.txt", out=tmp_path / "scores")
    assert other["models"]["model"]["unit"] == "windows"
    assert choose([str(out / "model")]).module is evaluate_language  # its configuration says what it is
    assert (tmp_path / "scores" / "report.html").is_file()
    with pytest.raises(UsageError, match="is a model, not a run: give --data"):
        evaluate(out / "model")
    with pytest.raises(UsageError, match="neither the directory of a finished run nor a folder with a model"):
        evaluate(tmp_path)
    with pytest.raises(DataError, match=r"missing.txt does not exist; allowed"):
        evaluate(out, data=tmp_path / "missing.txt")


def test_an_unknown_task_is_refused_before_the_scoring(finished, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    (tmp_path / "tasks").mkdir()
    monkeypatch.setattr("leafward.systems.helm.score", lambda *_, **__: pytest.fail("scored first"))
    with pytest.raises(UsageError, match="holds no YAML file"):
        evaluate(finished[0], task_folder=tmp_path / "tasks")


def test_a_run_that_was_moved_keeps_its_held_out_text(finished, tmp_path):
    moved = tmp_path / "elsewhere"
    os.rename(finished[0], moved)
    try:
        assert evaluate(moved)["headline"][0]["value"] == pytest.approx(finished[1]["headline"][0]["value"], rel=1e-6)
    finally:
        os.rename(moved, finished[0])


def test_sampling(finished):
    file = io.StringIO()
    args = evaluate_sample.Args(finished[0], prompt="The [fox] ", tokens=5, seed=1, device="cpu")
    found = evaluate_sample.run(args, Console(file=file, width=200))
    assert file.getvalue().startswith("The [fox] " + found["text"][:1])
    with pytest.raises(UsageError, match="context is 32"):
        evaluate_sample.run(dataclasses.replace(args, tokens=40), Console(file=file))
    assert evaluate_sample.run(dataclasses.replace(args, tokens=None), Console(file=file))["text"], (
        "as many as there is room for"
    )


def test_refusals_leave_nothing_behind(data, tmp_path):
    train_tokenizer(["some words"], 300).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "latin.txt").write_bytes(b"Gr\xf6\xdfe")
    cases = [
        (config(None), UsageError, "--data must name the text"),
        (config(tmp_path / "latin.txt"), DataError, "latin.txt, line 1: byte 0xf6"),
        (config(data, prompt="The fox met " * 20), UsageError, "leaves no room in the context of 32"),
        (
            config(data, tokenizer=str(tmp_path / "tokenizer"), vocab_size=256),
            UsageError,
            "the tokenizer has 2.. tokens, more than the model's vocab_size of 256",
        ),
        (config(data, vocab_size=100), UsageError, "vocab_size must be at least 257"),
        (config(data, field="body"), DataError, "fables.jsonl, line 1: there is no field 'body'"),
    ]
    for wrong, kind, words in cases:
        with pytest.raises(kind, match=words):
            train_helm.run(wrong, tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("field", "value"), [("context", 1), ("validation", 1.0), ("seeds", 0), ("balance_rate", -0.1), ("eval_tokens", 1)]
)
def test_wrong_settings_are_named(field, value):
    with pytest.raises(UsageError, match=f"{field} must be"):
        checked(helm.Config, {field: value})


def test_the_vocabulary_follows_the_tokenizer_and_overwrite_replaces(data, tmp_path):
    train_tokenizer(["some words, and many more of them"], 280).save_pretrained(tmp_path / "tokenizer")
    sized = config(data, tokenizer=str(tmp_path / "tokenizer"), vocab_size=None, loop=replace(LOOP, steps=1))
    train_helm.run(sized, tmp_path / "run")
    leafward.register("transformers")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").config.vocab_size == 320
    with pytest.raises(UsageError, match="finished run; use --overwrite"):
        train_helm.run(replace(sized, geometry="euclidean"), tmp_path / "run")
    train_helm.run(replace(sized, geometry="euclidean"), tmp_path / "run", overwrite=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").config.geometry == "euclidean"


def test_a_single_held_out_window_has_no_interval(tmp_path):
    (tmp_path / "a.txt").write_text("The fox met the owl. " * 10)
    result = train_helm.run(config(tmp_path / "a.txt", loop=replace(LOOP, steps=1)), tmp_path / "run")
    assert result["headline"][0]["interval"] is None
    assert result["headline"][0]["note"] == "no interval: too few held-out windows"


def test_gaps_in_the_numbers_of_a_tokenizer_have_rows_too(data, tmp_path):
    words = {"The": 0, "fox": 1, "</s>": 2, ".": 900}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="fox"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "gaps.json"))
    given = config(data, tokenizer=str(tmp_path / "gaps.json"), vocab_size=None, loop=replace(LOOP, steps=1))
    train_helm.run(given, tmp_path / "run")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").config.vocab_size == 960


def test_patience_publishes_the_best_weights(data, tmp_path):
    loop = replace(LOOP, steps=6, eval_every=1, patience=2, checkpoint_every=100)
    result = train_helm.run(config(data, loop=loop, optim=OptimConfig(lr=0.3)), tmp_path / "run")
    evaluated = [line["eval/loss"] for line in kept(tmp_path / "run")[0] if "eval/loss" in line]
    assert result["headline"][0]["value"] == pytest.approx(min(evaluated), rel=1e-5)


def test_tokens_can_be_made_beforehand(data, tmp_path, monkeypatch):
    args = tokenise.Args(data, tmp_path / "cache", vocab_size=320, validation=0.2)
    made = tokenise.run(args, Console(file=io.StringIO()))
    monkeypatch.setattr("leafward.data.text.corpus._build", lambda *_: pytest.fail("tokenised twice"))
    loop = replace(LOOP, steps=1)
    train_helm.run(config(data, cache=tmp_path / "cache", loop=loop), tmp_path / "run")
    assert not (tmp_path / "run" / "tokens").exists()
    assert json.loads((tmp_path / "run" / "data.json").read_text())["folder"] == made["folder"]


def test_the_command_line_knows_presets_and_engine_flags():
    args = parse(["helm", "--preset", "helm-mice-120m", "--data", "a.txt", "--loop.steps", "7", "--twin"])
    assert args.config.model == "helm-mice-120m"
    assert (args.config.loop.steps, args.config.loop.compile, args.config.arms.twin) == (7, True, True)
    assert args.config.data.source == Path("a.txt")
    assert set(helm.PRESETS) == {make().model for make in helm.PRESETS.values()}


@pytest.mark.slow
def test_two_ranks_equal_one(data, finished, tmp_path):
    """By FSDP2: metrics and weights."""
    sharded = config(data, model="helm-mice-tiny", prompt="The fox", loop=replace(LOOP, strategy="fsdp"))
    together(2, train_helm.run, sharded, tmp_path / "run")
    (lines, weights), (expected_lines, expected) = kept(tmp_path / "run"), kept(finished[0])
    assert len(lines) == len(expected_lines)
    for line, expected_line in zip(lines, expected_lines, strict=True):
        assert line == pytest.approx(expected_line, rel=1e-5, abs=1e-5)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5)
