"""Two thousand steps in bfloat16 at the published learning rate: nothing becomes NaN, and the loss falls."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from leafward.systems.helm import HelmConfig, HelmForCausalLM

PUBLISHED_RATE = 4e-4
STEPS = 2000


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["helm-d-tiny", "helm-mice-tiny"])
def test_no_nan_in_two_thousand_steps(preset):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    model = HelmForCausalLM(HelmConfig.preset(preset, learn_curvatures=True, **sizes)).train()
    follows = torch.randperm(32)  # a language: each token has one successor, missed one time in ten
    optimiser = torch.optim.AdamW(model.parameters(), lr=PUBLISHED_RATE, weight_decay=0.01, fused=True)
    losses, finite = [], torch.tensor(True)
    for _ in range(STEPS):
        x = [torch.randint(32, (4,))]
        for _ in range(7):
            x.append(torch.where(torch.rand(4) < 0.1, torch.randint(32, (4,)), follows[x[-1]]))
        batch = torch.stack(x, dim=1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        model.rebalance()
        finite &= loss.isfinite() & norm.isfinite()
        losses.append(loss.detach())
    assert finite
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert torch.stack(losses[-100:]).mean() < 0.6 * torch.stack(losses[:20]).mean()
