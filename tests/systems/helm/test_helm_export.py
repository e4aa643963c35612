"""HELM quantised by torchao, exported by torch.export with open sizes, and as ONNX."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helm_toys import MODELS, VOCABULARY, error, tokens, toy
from torch import Tensor, nn

from leafward.errors import UsageError
from leafward.systems.helm import HelmForCausalLM

BATCH, LENGTH = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=256)
SIZES = ((2, 12), (1, 5), (5, 33))


class Logits(nn.Module):
    """Tokens (B,T) to logits (B,T,V), and nothing else."""

    def __init__(self, model: HelmForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, use_cache=False).logits


def exported(model: HelmForCausalLM) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(Logits(model), (tokens(2, 12),), dynamic_shapes=({0: BATCH, 1: LENGTH},))


@pytest.mark.parametrize("name", ["HELM-D", "HELM-MiCE"])
@torch.no_grad()
def test_exported_with_open_batch_and_length(name: str) -> None:
    model = toy(name)
    program = exported(model).module()
    for size in SIZES:
        x = tokens(*size)
        assert error(program(x), model(x).logits) < 1e-13


@pytest.mark.full
@torch.no_grad()
def test_onnx(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = toy("HELM-D").float()
    path = tmp_path / "helm.onnx"
    torch.onnx.export(exported(model), f=str(path), verbose=False)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    for size in SIZES:
        x = tokens(*size)
        (found,) = session.run(None, {given.name: x.numpy()})
        assert error(torch.from_numpy(found), model(x).logits) < 1e-5


def trained(name: str) -> tuple[HelmForCausalLM, Tensor]:
    """A float32 model that knows a text of 8 × 24 tokens better than chance, and the text."""
    model, text = toy(name, num_hidden_layers=2, expert_size=32).float().train(), tokens(8, 24)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(60):
        model(text, labels=text).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model.eval(), text


@pytest.mark.parametrize("name", MODELS)
def test_quantised(name: str) -> None:
    """Weights in 8 and 4 bits: every linear map is quantised, the loss hardly moves, a cache gives the same logits."""
    quantisation = pytest.importorskip("torchao.quantization")
    granularity = pytest.importorskip("torchao.quantization.granularity")
    model, text = trained(name)
    ways: dict[str, tuple[Any, float]] = {
        "8 bits": (quantisation.Int8WeightOnlyConfig(), 0.005),
        "8 bits, activations too": (quantisation.Int8DynamicActivationInt8WeightConfig(), 0.02),
        "4 bits": (quantisation.IntxWeightOnlyConfig(torch.int4, granularity.PerGroup(8)), 0.15),
    }
    with torch.no_grad():
        exact = float(model(text, labels=text).loss)
        assert exact < 0.8 * torch.tensor(float(VOCABULARY)).log()
        for way, (config, allowed) in ways.items():
            small = copy.deepcopy(model)
            quantisation.quantize_(small, config)
            linears = [module for module in small.modules() if isinstance(module, nn.Linear)]
            assert all(type(module.weight) is not nn.Parameter for module in linears), way
            out = small(text, labels=text)
            assert abs(float(out.loss) - exact) < allowed, way
            cache = small(text[:, :20], use_cache=True).past_key_values
            last = small(text[:, 20:], past_key_values=cache).logits
            assert error(last, out.logits[:, 20:]) < (0.05 if "activations" in way else 1e-5), way


def test_a_quantised_model_is_not_trained_but_an_adapter_on_it() -> None:
    quantisation = pytest.importorskip("torchao.quantization")
    peft = pytest.importorskip("peft")
    model, x = toy("HELM-D").float(), tokens(2, 12)
    quantisation.quantize_(model, quantisation.Int8WeightOnlyConfig())
    with pytest.raises(UsageError, match=r"the model is quantised \(model\.layers.*\) and cannot be trained"):
        model.train()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2)).train()
    adapted(input_ids=x, labels=x).loss.backward()
    grads = [p.grad for name, p in adapted.named_parameters() if "lora_B" in name]
    assert grads
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads)
