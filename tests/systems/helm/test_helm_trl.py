"""TRL's trainers on HELM: their loss is the model's own, packed and without padding, on answers alone, with LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helm_toys import error, toy
from torch import nn

from leafward import register
from leafward.data.text.tokenizer import train_tokenizer
from leafward.nn import Gate
from leafward.systems.helm import HelmForCausalLM
from leafward.systems.helm.hub import save_model

trl = pytest.importorskip("trl")

TEXTS = ["one two three", "four five six seven", "eight", "nine ten eleven"] * 3
QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "bf16": False,
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "gradient_checkpointing": False,
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As `save_model` leaves it, with its chat template."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    save_model(toy("HELM-D", vocab_size=512), train_tokenizer(TEXTS, 300), folder)
    return AutoTokenizer.from_pretrained(folder)


def model_of(name: str) -> HelmForCausalLM:
    return toy(name, vocab_size=512, max_position_embeddings=64).float()


def own_loss(model: HelmForCausalLM, batch: dict[str, torch.Tensor]) -> float:
    """From the model's own logits, document by document, in training mode, where gates balance nothing."""
    nats = count = 0.0
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        starts = [0]
        if "position_ids" in batch:
            starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        for first, last in zip(starts, [*starts[1:], len(ids)], strict=True):
            row, goal = ids[first:last], labels[first:last]
            logits = model(row[None]).logits[0, :-1]
            nats += float(nn.functional.cross_entropy(logits, goal[1:], reduction="sum"))
            count += int((goal[1:] != -100).sum())
    return nats / count


@pytest.mark.parametrize("name", ["HELM-D", "HELM-MiCE", "HELM-D twin"])
@pytest.mark.parametrize("how", ["padded", "padding-free", "packed"])
def test_supervised_fine_tuning(name: str, how: str, tokenizer: Any, tmp_path: Path) -> None:
    ways = {
        "padded": {},
        "padding-free": {"padding_free": True, "max_length": None},
        "packed": {"packing": True, "max_length": 24},
    }
    model = model_of(name)
    settings = trl.SFTConfig(output_dir=str(tmp_path), **QUIET, **ways[how])
    data = Dataset.from_dict({"text": TEXTS})
    trainer = trl.SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        found = float(trainer.compute_loss(model.eval(), dict(batch)))
        if how == "padded":
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            wanted = float(nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()))
        else:
            assert "position_ids" in batch
            wanted = own_loss(model, batch)
    assert found == pytest.approx(wanted, rel=1e-4)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    assert all(gate.bias.any() for gate in gates), "rebalanced"


def test_answers_alone_and_adapters(tokenizer: Any, tmp_path: Path) -> None:
    """Chats by the template that a trained tokenizer gets: what the assistant says is learned, by LoRA."""
    peft = pytest.importorskip("peft")
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}] for text in TEXTS]
    model = model_of("HELM-D")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = trl.SFTConfig(output_dir=str(tmp_path), assistant_only_loss=True, **QUIET)
    trainer = trl.SFTTrainer(
        model,
        settings,
        train_dataset=Dataset.from_dict({"messages": chats}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(target_modules="all-linear", r=2),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    kept = batch["labels"][0] != -100
    assert tokenizer.decode(batch["labels"][0][kept]).removesuffix(tokenizer.eos_token) in {t[::-1] for t in TEXTS}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[1] < losses[0]
    merged = trainer.model.merge_and_unload().state_dict()
    moved = {name for name, value in before.items() if not torch.equal(merged[name], value)}
    assert moved == {name for name in before if name.endswith("linear.weight")}


def test_direct_preference_optimisation(tokenizer: Any, tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": TEXTS, "chosen": [" yes"] * len(TEXTS), "rejected": [" no"] * len(TEXTS)})
    register("transformers")
    model_of("HELM-MiCE").save_pretrained(tmp_path / "model")
    settings = trl.DPOConfig(output_dir=str(tmp_path), beta=1.0, **QUIET)
    trainer = trl.DPOTrainer(str(tmp_path / "model"), args=settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "the model and its reference begin alike"
    assert logs[1]["loss"] < logs[0]["loss"]


@torch.no_grad()
def test_what_such_trainers_multiply_are_the_logits() -> None:
    for name, changes in (("HELM-D", {}), ("HELM-MiCE", {"head": "distance"}), ("HELM-D twin", {})):
        model = toy(name, **changes)
        x = torch.arange(1, 9)[None]
        head = model.get_output_embeddings()
        assert head.bias is None
        assert error(model.base_model(x).last_hidden_state @ head.weight.T, model(x).logits) < 1e-13
