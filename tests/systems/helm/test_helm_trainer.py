"""HELM in transformers' own Trainer: evaluation during and after a training, with and without metrics of logits."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import EvalPrediction, Trainer, TrainingArguments

from leafward.engine.optim import parameter_groups
from leafward.nn import Gate
from leafward.systems.helm import HelmConfig, HelmForCausalLM

PRESETS = ("helm-d-tiny", "helm-mice-tiny")


def model_of(preset: str) -> HelmForCausalLM:
    torch.manual_seed(0)
    return HelmForCausalLM(HelmConfig.preset(preset, vocab_size=40, max_position_embeddings=16))


def rows(count: int, seed: int) -> Any:
    """Random texts as the Trainer takes them, a list of mappings."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(40, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer_of(model: HelmForCausalLM, folder: Path, **given: Any) -> Trainer:
    metrics = given.pop("compute_metrics", None)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=given.pop("max_steps", 2),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=3,  # two full batches of the six rows
        report_to=[],
        save_strategy=given.pop("save_strategy", "no"),
        disable_tqdm=True,
        **given,
    )
    return Trainer(
        model,
        arguments,
        train_dataset=rows(8, 1),
        eval_dataset=rows(6, 2),
        compute_metrics=metrics,
    )


@torch.no_grad()
def loss_by_hand(model: HelmForCausalLM) -> tuple[float, float]:
    """Mean nats per token of the rows for evaluation, and the share of tokens that are predicted."""
    tokens = torch.stack([row["input_ids"] for row in rows(6, 2)])
    scores = model.eval()(input_ids=tokens).logits[:, :-1].double().log_softmax(-1)
    goal = tokens[:, 1:]
    nats = -scores.gather(-1, goal[..., None])
    return float(nats.mean()), float((scores.argmax(-1) == goal).double().mean())


@pytest.mark.parametrize("preset", PRESETS)
def test_evaluate_gives_the_models_loss(preset: str, tmp_path: Path) -> None:
    model = model_of(preset)
    found = trainer_of(model, tmp_path).evaluate()
    assert found["eval_loss"] == pytest.approx(loss_by_hand(model)[0], rel=1e-5)


def test_metrics_see_the_logits_alone(tmp_path: Path) -> None:
    """The cache, which the model returns beside them, is left out."""
    model = model_of("helm-d-tiny")

    def share(given: EvalPrediction) -> dict[str, float]:
        logits, labels = given.predictions, given.label_ids
        assert isinstance(logits, np.ndarray)
        assert isinstance(labels, np.ndarray)
        assert logits.shape == (6, 12, 40)
        return {"share": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean())}

    found = trainer_of(model, tmp_path, compute_metrics=share).evaluate()
    assert found["eval_share"] == pytest.approx(loss_by_hand(model)[1])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_training_evaluates_every_step(preset: str, tmp_path: Path) -> None:
    model = model_of(preset)
    before = loss_by_hand(model)[0]
    trainer = trainer_of(model, tmp_path, eval_strategy="steps", eval_steps=1, learning_rate=1e-2)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2
    after = loss_by_hand(model)[0]
    assert losses[-1] == pytest.approx(after, rel=1e-5)
    assert after != pytest.approx(before, rel=1e-3), "the model has learned something"


@pytest.mark.parametrize("preset", PRESETS)
def test_the_trainer_decays_what_our_loop_decays(preset: str, tmp_path: Path) -> None:
    latent = {"query_latent": 8, "learn_curvatures": True} if "mice" in preset else {}
    model = HelmForCausalLM(HelmConfig.preset(preset, head="distance", **latent))
    optimiser = trainer_of(model, tmp_path, weight_decay=0.1).create_optimizer()
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def decayed(groups: Any) -> set[str]:
        return {names[id(each)] for group in groups if group["weight_decay"] > 0 for each in group["params"]}

    assert decayed(optimiser.param_groups) == decayed(parameter_groups(model, 0.1))
    assert sum(len(group["params"]) for group in optimiser.param_groups) == sum(
        parameter.requires_grad for parameter in model.parameters()
    )


def test_gates_are_rebalanced_without_being_asked(tmp_path: Path) -> None:
    """As our own loop does it, once per update, by the loads of all its parts; a frozen gate stays as it is."""
    model = model_of("helm-mice-tiny")
    trainer_of(model, tmp_path, max_steps=3, gradient_accumulation_steps=2).train()
    for gate in (module for module in model.modules() if isinstance(module, Gate)):
        steps = gate.bias / model.balance_rate
        assert torch.allclose(steps, steps.round(), atol=1e-3)
        assert 1 <= steps.abs().max() <= 3.01
        assert not gate.load.any()
    by_hand = model_of("helm-mice-tiny")
    by_hand.balance_rate = None
    frozen = model_of("helm-mice-tiny")
    for gate in (module for module in frozen.modules() if isinstance(module, Gate)):
        gate.weight.requires_grad_(False)
    for other in (by_hand, frozen):
        trainer_of(other, tmp_path, max_steps=1).train()
        assert not any(module.bias.any() for module in other.modules() if isinstance(module, Gate))


LOADED = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
import torch
folder, again = sys.argv[1:]
assert "leafward" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert type(AutoConfig.from_pretrained(folder, trust_remote_code=True)).__name__ == "HelmConfig"
x = torch.arange(9)[None]
print(float(model.eval()(x).logits.double().sum()))
model.save_pretrained(again)
model = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
print(float(model.eval()(x).logits.double().sum()))
"""


def test_folders_load_where_nobody_imports_leafward(tmp_path: Path) -> None:
    """A checkpoint of the Trainer; and what such a program saves loads again."""
    model = model_of("helm-mice-tiny")
    trainer_of(model, tmp_path / "run", save_strategy="steps", save_steps=2).train()
    checkpoint = tmp_path / "run/checkpoint-2"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    with torch.no_grad():
        wanted = float(model.eval()(torch.arange(9)[None]).logits.double().sum())
    command = [sys.executable, "-c", LOADED, str(checkpoint), str(tmp_path / "again")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == pytest.approx([wanted, wanted], rel=1e-6)
    assert {path.name for path in (tmp_path / "again").glob("*.py")} == {"modeling_leafward.py"}


def test_push_to_hub_uploads_such_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: set[str] = set()

    def upload(self: Any, folder: Any, repo_id: str, *args: Any, **kwargs: Any) -> None:
        uploaded.update(path.name for path in Path(folder).iterdir())

    api = Mock(**{"create_repo.return_value.repo_id": "somebody/helm"})
    monkeypatch.setattr("transformers.utils.hub.hf_api", lambda: api)
    monkeypatch.setattr("transformers.PreTrainedModel._upload_modified_files", upload)
    model_of("helm-d-tiny").push_to_hub("somebody/helm")
    assert uploaded >= {"config.json", "model.safetensors", "modeling_leafward.py"}
