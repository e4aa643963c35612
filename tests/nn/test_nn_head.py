"""Heads and the chunked cross-entropy."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from leafward.data.text.shards import IGNORED
from leafward.geometry import lorentz, pairs
from leafward.nn import Head, Space, chunked_cross_entropy


@pytest.mark.parametrize("c", [0.37, 1.0])
def test_distance_head_scores_the_squared_distance(c):
    head = Head(6, 9, kind="distance", space=Space(c=c)).double()
    assert head.log_scale is not None
    head.log_scale.data.fill_(0.3)
    s = torch.randn(5, 6, dtype=torch.float64)
    # |x - p|_L² = 4/c sinh²(√c d/2), minus it is 2/c + 2⟨x,p⟩_L, and the head leaves out the constant
    d = pairs.distances(s, head.linear.weight, c)
    squared = 4.0 / c * torch.sinh(0.5 * c**0.5 * d) ** 2
    scale = torch.exp(head.log_scale)
    torch.testing.assert_close(head(s) + 2.0 * scale / c, -scale * squared)
    assert torch.equal(head(s).argmax(-1), d.argmin(-1))


def test_linear_head_is_a_map_of_the_full_point():
    head = Head(6, 9, space=Space(c=2.0)).double()
    assert head.time_weight is not None
    head.time_weight.data.normal_()
    s = torch.randn(4, 3, 6, dtype=torch.float64)
    full = torch.cat([head.time_weight, head.linear.weight], dim=-1)
    torch.testing.assert_close(head(s), lorentz.lift(s, 2.0) @ full.T)
    torch.testing.assert_close(head(s[0, 0]), head(s)[0, 0])


def test_labels_that_the_text_pipeline_leaves_out_do_not_count():
    """Without being told which they are: data and layers know nothing of each other."""
    head = Head(6, 9).double()
    s, targets = torch.randn(5, 6, dtype=torch.float64), torch.tensor([3, IGNORED, 0, IGNORED, 8])
    kept = targets >= 0
    torch.testing.assert_close(head.loss(s, targets), F.cross_entropy(head(s[kept]), targets[kept]))
    torch.testing.assert_close(F.cross_entropy(head(s), targets), F.cross_entropy(head(s[kept]), targets[kept]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", [0, 5, 23])
def test_chunked_equals_plain(monkeypatch, dtype, ignored):
    monkeypatch.setattr("leafward.nn.head.CHUNK", 4 * 31)  # four rows at a time
    features = torch.randn(23, 8).to(dtype).requires_grad_()
    matrix = torch.randn(31, 8).to(dtype).requires_grad_()
    targets = torch.randint(31, (23,))
    targets[:ignored] = -100
    ours = chunked_cross_entropy(features, matrix, targets)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    plain = F.cross_entropy((features @ matrix.T).to(wide), targets)
    plain = torch.where(torch.tensor(ignored < 23), plain, 0.0)  # the mean of nothing is NaN there, zero here
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(ours, plain, **tolerance)
    grads = [torch.autograd.grad(3.0 * loss, (features, matrix)) for loss in (ours, plain)]
    if ignored < 23:
        torch.testing.assert_close(*grads, **tolerance)
    else:
        assert all(grad.abs().max() == 0 for grad in grads[0])


class Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_logits_are_never_all_there(monkeypatch):
    monkeypatch.setattr("leafward.nn.head.CHUNK", 10_000)
    head = Head(16, 1000)
    s = torch.randn(4, 64, 16, requires_grad=True)
    with Largest() as largest:
        head.loss(s, torch.randint(1000, (4, 64))).backward()
    assert largest.numel <= 1000 * 24  # the matrix with its lanes; all logits would be 256,000


def test_loss_compiles_and_follows_the_gradient():
    head = Head(16, 40)
    s, targets = torch.randn(2, 30, 16), torch.randint(40, (2, 30))
    torch._dynamo.reset()
    compiled = torch.compile(head.loss, fullgraph=True, backend="aot_eager")
    plain = F.cross_entropy(head(s).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(compiled(s, targets), plain)
    grads = [torch.autograd.grad(loss, list(head.parameters())) for loss in (compiled(s, targets), plain)]
    torch.testing.assert_close(*grads)
