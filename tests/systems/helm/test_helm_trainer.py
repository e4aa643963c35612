"""HELM in transformers' own Trainer: evaluation during and after a training, with and without metrics of logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction, Trainer, TrainingArguments

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
        max_steps=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=3,  # two full batches of the six rows
        report_to=[],
        save_strategy="no",
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
