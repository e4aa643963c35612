"""HELM on a CUDA device: compiled whole, documents by block masks, kernels, half types, a cache of fixed size."""

import copy

import pytest
import torch
from transformers import StaticCache

from leafward.nn import kernels
from leafward.systems.helm import HelmConfig, HelmForCausalLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def stirred(preset: str, **changes) -> HelmForCausalLM:
    torch.manual_seed(0)
    model = HelmForCausalLM(HelmConfig.preset(preset, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=["torch", "triton"])
def _kernels(request):
    torch._dynamo.reset()
    kernels.use(request.param)
    yield
    kernels.use("auto")


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("preset", ["helm-d-tiny", "helm-mice-tiny"])
def test_compiled_on_packed_documents_equals_eager_on_the_cpu(preset):
    model = stirred(preset, head_dim=16).train()
    ids = torch.randint(512, (3, 512))  # several blocks, of which some are wholly seen
    documents = (torch.arange(512) // torch.tensor([[100], [300], [512]])).contiguous()
    there = copy.deepcopy(model).cuda()
    step = torch.compile(lambda x, d: there(input_ids=x, labels=x, documents=d).loss, fullgraph=True)
    # Float32 all through: the gate must choose the same experts on both sides.
    loss = step(ids.cuda(), documents.cuda())
    expected = model(ids, labels=ids, documents=documents).loss
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-3, atol=1e-3)
    with torch.no_grad():  # another graph, which orders its tensors differently
        torch.testing.assert_close(step(ids.cuda(), documents.cuda()).cpu(), expected, rtol=1e-3, atol=1e-3)
    loss.backward()
    expected.backward()
    for (name, ours), theirs in zip(there.named_parameters(), model.parameters(), strict=True):
        if theirs.grad is not None:
            error = (ours.grad.cpu() - theirs.grad).norm() / (theirs.grad.norm() + 1e-3)
            assert error < 0.05, (name, error)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("preset", ["helm-d-tiny", "helm-mice-tiny"])
@pytest.mark.parametrize("geometry", ["lorentz", "euclidean"])
def test_learns_in_bfloat16(preset, geometry):
    model = HelmForCausalLM(HelmConfig.preset(preset, geometry=geometry, head_dim=12)).cuda().train()
    ids = torch.randint(512, (4, 64), device="cuda")
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True)
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0], losses


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("preset", ["helm-d-tiny", "helm-mice-tiny"])
def test_cache_of_fixed_size(preset):
    model = stirred(preset).cuda().eval()
    ids = torch.randint(512, (2, 12), device="cuda")
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        whole = model(ids).logits
        parts = [
            model(part, past_key_values=cache, use_cache=True).logits
            for part in (ids[:, :7], *ids[:, 7:].split(1, dim=1))
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-3, atol=1e-3)
