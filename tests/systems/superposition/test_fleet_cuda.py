"""The same fleet on a GPU: same numbers, same resume, no waiting for the device."""

from typing import Any

import pytest
import torch

from leafward.systems.superposition import Fleet, ModelSpec, step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MODELS = [ModelSpec(m, g, law=law) for law in ("power:1", "power:2") for g in (-0.5, 0.5, 0.0) for m in (5, 5, 12)]
SETTINGS: dict[str, Any] = {"features": 100, "batch": 256, "steps": 60}


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize("optimiser", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("tile_bytes", [1 << 14, 1 << 30])  # several tiles, step by step; one tile, as a CUDA graph
def test_gpu_equals_cpu(monkeypatch, loss, optimiser, tile_bytes):
    monkeypatch.setitem(step.TILE_BYTES, "cuda", tile_bytes)
    settings = SETTINGS | {"loss": loss, "optimiser": optimiser, "precision": "float64"}
    here, there = (Fleet(MODELS, device=device, **settings) for device in ("cpu", "cuda"))
    here.run()
    there.run()
    assert all((pack._replay is not None) == (tile_bytes > 1 << 20) for pack in there._packs)
    for index in range(len(MODELS)):
        for one, other in zip(here.weights(index), there.weights(index), strict=True):
            torch.testing.assert_close(one, other.cpu(), rtol=1e-7, atol=1e-9)
    for one, other in zip(here.measure(512), there.measure(512), strict=True):
        assert one.pop("law") == other.pop("law")
        assert one == pytest.approx(other, rel=1e-6, nan_ok=True)


def test_resume_is_bit_for_bit_on_a_gpu():
    whole, first, second = (Fleet(MODELS, device="cuda", **SETTINGS) for _ in range(3))
    whole.run()
    first.run(21)
    second.load_state_dict(first.state_dict())
    second.run()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_training_never_waits_for_the_device():
    fleet = Fleet(MODELS, device="cuda", **SETTINGS)
    fleet.run(10)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fleet.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
