"""Weights that were saved before layers held a plain `nn.Linear` load as they are, and give the logits that they gave.

`tests/data/helm_former_names.safetensors` was written by the version before: state dicts, configurations, logits.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from leafward.systems.helm import HelmConfig, HelmForCausalLM

DATA = Path(__file__).resolve().parents[2] / "data" / "helm_former_names.safetensors"


@pytest.fixture(params=["mice", "dense"])
def former(request):
    """Configuration, state dict and logits of tokens 0 … 9."""
    with safe_open(DATA, "pt") as file:
        config = HelmConfig(**json.loads(file.metadata()[request.param]))
    of = {k.removeprefix(f"{request.param}/"): v for k, v in load_file(DATA).items() if k.startswith(request.param)}
    return config, {k.removeprefix("state/"): v for k, v in of.items() if k != "logits"}, of["logits"]


def test_state_dicts(former):
    config, state, logits = former
    assert not any("linear" in name for name in state)
    model = HelmForCausalLM(config).eval()
    model.load_state_dict(state)
    assert torch.allclose(model(torch.arange(10)[None]).logits, logits, rtol=1e-6, atol=1e-6)


def test_folders(former, tmp_path):
    config, state, logits = former
    config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, found = HelmForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.allclose(model.eval()(torch.arange(10)[None]).logits, logits, rtol=1e-6, atol=1e-6)
    model.save_pretrained(tmp_path / "again")  # under the names of now
    assert load_file(tmp_path / "again/model.safetensors").keys() == model.state_dict().keys()
