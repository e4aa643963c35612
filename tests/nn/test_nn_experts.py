"""MiCE against a float64 loop over the paper's formula, and what the routing must and must not do."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leafward.errors import UsageError
from leafward.geometry import lorentz
from leafward.nn import Curvatures, Gate, MiCE, Space
from leafward.nn.experts import ExpertBank
from leafward.nn.grouped import grouped_matmul, segment_bmm

WIDTH, HIDDEN = 16, 24


def stirred(**options) -> MiCE:
    layer = MiCE(WIDTH, HIDDEN, **{"experts": 5, "active": 2, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def lift(s: Tensor, c: float) -> Tensor:
    return torch.cat([(1 / c + s.square().sum()).sqrt().reshape(1), s])


def expert(bank: ExpertBank, e: int, s: Tensor, c: float) -> Tensor:
    """Expert e on one full point of the main hyperboloid, as the paper has it -> full point there."""

    def linear(layer, x: Tensor) -> Tensor:
        return torch.cat([layer.time_weight[e], layer.weight[e]]).T @ x + layer.bias[e, 0]

    assert bank.curvature is not None
    own = bank.curvature()[e].item()
    x = (c / own) ** 0.5 * lift(s, c)  # √(K/K_i) x lies on the expert's hyperboloid
    gate, value = linear(bank.up, x).chunk(2)
    out = lift(linear(bank.down, lift(torch.nn.functional.silu(gate) * value, own)), own)
    return (own / c) ** 0.5 * out


def brute(layer: MiCE, s: Tensor) -> Tensor:
    c, out = layer.space.c, []
    for x in s.flatten(0, 1):
        p = (layer.gate.weight @ x).softmax(0)
        best = sorted(range(len(p)), key=lambda e: -(p[e] + layer.gate.bias[e]).item())[: layer.gate.active]
        total = sum(p[e] / sum(p[j] for j in best) * expert(layer.routed, e, x, c) for e in best)
        if layer.shared is not None:
            for e in range(layer.shared.up.weight.shape[0]):
                total = total + expert(layer.shared, e, x, c)
        length = (total[0] ** 2 - total[1:].square().sum()).sqrt()
        out.append(total[1:] / (c**0.5 * length))
    return torch.stack(out).view_as(s)


@pytest.mark.parametrize("space", [Space(), Space(c=0.37)], ids=str)
@pytest.mark.parametrize(("active", "shared"), list(itertools.product((1, 2, 3), (0, 1, 2))))
def test_equals_the_papers_formula(space, active, shared):
    layer = stirred(active=active, shared=shared, learn_curvatures=True, space=space)
    layer.gate.bias.copy_(0.1 * torch.randn(5))
    s = torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    ours, expected = layer(s)[0], brute(layer, s)
    torch.testing.assert_close(ours, expected)
    weight = torch.randn_like(ours)
    parameters = [s, *(p for name, p in layer.named_parameters() if "theta" not in name)]
    if active == 1:  # a single weight is one, whatever the gate says
        parameters = [p for p in parameters if p is not layer.gate.weight]
    grads = [torch.autograd.grad((y * weight).sum(), parameters) for y in (ours, expected)]
    torch.testing.assert_close(*grads)


def test_gradient_of_learned_curvatures():
    layer = stirred(shared=1, learn_curvatures=True)
    s = torch.randn(1, 4, WIDTH, dtype=torch.float64)
    assert layer.routed.curvature is not None
    theta = layer.routed.curvature.theta
    layer(s)[0].square().sum().backward()
    step, slope = 1e-5, []
    for e in range(5):
        values = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                theta[e] += sign * step
                values.append(layer(s)[0].square().sum())
                theta[e] -= sign * step
        slope.append((values[0] - values[1]) / (2 * step))
    torch.testing.assert_close(theta.grad, torch.stack(slope), rtol=1e-6, atol=1e-9)


def test_order_of_experts_does_not_matter():
    """The authors fold experts in one by one, each time normalising: swapping two changes the sum by a fifth."""
    layer = stirred(experts=2, active=2)
    s = torch.randn(1, 6, WIDTH, dtype=torch.float64)
    before = layer(s)[0]
    swapped = stirred(experts=2, active=2)
    state = layer.state_dict()
    swapped.load_state_dict({key: value.flip(0) if value.shape[:1] == (2,) else value for key, value in state.items()})
    torch.testing.assert_close(swapped(s)[0], before)

    points = [torch.stack([expert(layer.routed, e, x, 1.0)[1:] for x in s[0]]) for e in (0, 1)]
    origin = torch.zeros_like(points[0])

    def folded(order: tuple[int, int]) -> Tensor:
        total = origin
        for e in order:
            total = 2 * lorentz.residual(total, points[e], 0.5, 1.0)
        return total

    one, other = folded((0, 1)), folded((1, 0))
    assert (one - other).norm() / one.norm() > 0.05


def test_euclidean_twin_is_the_plain_sum():
    layer = stirred(shared=1, space=Space("euclidean"))
    s = torch.randn(1, 6, WIDTH, dtype=torch.float64)

    def plain(bank: ExpertBank, e: int, x: Tensor) -> Tensor:
        gate, value = (x @ bank.up.weight[e] + bank.up.bias[e, 0]).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * value @ bank.down.weight[e] + bank.down.bias[e, 0]

    chosen, weights, _ = layer.gate(s)
    assert layer.shared is not None
    expected = torch.stack(
        [
            sum(w * plain(layer.routed, e, x) for w, e in zip(ws, es, strict=True)) + plain(layer.shared, 0, x)
            for x, ws, es in zip(s[0], weights[0], chosen[0].tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(layer(s)[0][0], expected)


@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 7], [7, 0, 0], [1, 1, 1], [0, 1, 0], [40, 1, 2]])
def test_grouped_product(sizes):
    x = torch.randn(sum(sizes), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 6, 5, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor(sizes).cumsum(0).int()
    expected = torch.cat([part @ w for part, w in zip(x.split(sizes), weight, strict=True)])
    torch.testing.assert_close(segment_bmm(x, weight, ends), expected)
    torch.testing.assert_close(grouped_matmul(x, weight, ends), expected)
    seed = torch.randn_like(expected)
    for ours in (segment_bmm, grouped_matmul):
        found, wanted = ours(x, weight, ends), torch.cat([a @ w for a, w in zip(x.split(sizes), weight, strict=True)])
        grads = [torch.autograd.grad((y * seed).sum(), (x, weight), create_graph=True) for y in (found, wanted)]
        torch.testing.assert_close(*grads)
        again = [torch.autograd.grad(sum(g.square().sum() for g in each), (x, weight)) for each in grads]
        torch.testing.assert_close(*again)


def test_grouped_product_is_an_operator_as_pytorch_wants_it():
    x, weight = torch.randn(7, 6, requires_grad=True), torch.randn(3, 6, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.leafward.grouped_product, (x, weight, torch.tensor([3, 3, 7]).int()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the grouped GEMM kernel runs on CUDA")
@pytest.mark.parametrize("sizes", [[100, 0, 28, 1], [0, 0, 0, 2], [8192, 1, 5000, 3191]])
def test_grouped_product_on_cuda(sizes):
    x = torch.randn(sum(sizes), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    ours, plain = grouped_matmul(x, weight, ends), segment_bmm(x.float(), weight.float(), ends)
    seed = torch.randn_like(ours)
    grads = [torch.autograd.grad((y * seed).sum(), (x, weight)) for y in (ours, plain)]
    for a, b in zip((ours, *grads[0]), (plain, *grads[1]), strict=True):
        assert a.isfinite().all()
        assert (a.float() - b.float()).norm() <= 1e-2 * b.float().norm()


class NoWaiting(TorchDispatchMode):
    """Refuses whatever would make the host wait for the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in func.name() for name in self.WAITS), func
        return func(*args, **(kwargs or {}))


def test_no_wait_for_the_device(monkeypatch):
    # Taming looks at a value on the CPU, where that is free, but never elsewhere; take the path of elsewhere.
    monkeypatch.setattr("leafward.geometry.scalars._traced", lambda x: True)
    layer = MiCE(WIDTH, HIDDEN, experts=8, active=3, shared=1, learn_curvatures=True)
    s = torch.randn(2, 64, WIDTH, requires_grad=True)
    with NoWaiting():
        y, balance = layer(s)
        (y.sum() + balance.mean()).backward()
        layer.gate.rebalance()
    with pytest.raises(AssertionError), NoWaiting():
        torch.ones(3).sum().item()


def test_no_token_is_dropped_when_all_want_one_expert():
    layer = stirred(active=1)
    layer.gate.bias[3] = 100.0
    s = torch.randn(2, 50, WIDTH, dtype=torch.float64)
    expected = torch.stack([expert(layer.routed, 3, x, 1.0)[1:] for x in s.flatten(0, 1)]).view_as(s)
    torch.testing.assert_close(layer(s)[0], expected)


def test_gate_weights_are_renormalised_and_bias_only_steers():
    gate = Gate(WIDTH, experts=6, active=2)
    s = torch.randn(2, 30, WIDTH)
    chosen, weights, balance = gate(s)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 30))
    p = (s @ gate.weight.T).softmax(-1)
    assert p.gather(-1, chosen).sum(-1).max() < 0.99, "the weights as the authors leave them do not sum to one"
    gate.bias[4] = 2.0
    steered, weights, _ = gate(s)
    assert (steered == 4).any(-1).all()
    kept = p.gather(-1, steered)
    torch.testing.assert_close(weights, kept / kept.sum(-1, keepdim=True))
    assert balance.mean() > 0.9


def test_balance_loss_is_one_when_even_and_more_when_not():
    gate = Gate(WIDTH, experts=4, active=1).double()
    gate.weight.data = 50.0 * torch.eye(4, WIDTH, dtype=torch.float64)
    even = torch.eye(4, WIDTH, dtype=torch.float64).repeat(3, 1).unsqueeze(0)
    torch.testing.assert_close(gate(even)[2].item(), 1.0)
    uneven = even.clone()
    uneven[0, :6] = even[0, 0]
    loss = gate(uneven)[2]
    counts = (7, 1, 2, 2)  # and the gate is nearly certain, so P is the share of choices
    torch.testing.assert_close(loss.item(), 4 * sum((n / 12) ** 2 for n in counts), rtol=1e-6, atol=0)


def test_rebalancing_evens_the_load():
    gate = Gate(WIDTH, experts=4, active=1).train()
    gate.weight.data[2] += 1.0
    s = torch.randn(4, 256, WIDTH) + 0.3

    def share() -> Tensor:
        return torch.bincount(gate(s)[0].flatten(), minlength=4) / 1024

    before = share()
    gate.load.zero_()
    for _ in range(300):
        gate(s)
        gate.rebalance(rate=3e-3)
    after = share()
    assert before.max() > 0.5
    assert after.max() < 0.3
    assert after.min() > 0.2


def test_load_counts_choices_in_training_only():
    gate = Gate(WIDTH, experts=4, active=2)
    s = torch.randn(2, 10, WIDTH)
    gate.eval()
    gate(s)
    assert gate.load.sum() == 0
    gate.train()
    chosen = gate(s)[0]
    assert torch.equal(gate.load, torch.bincount(chosen.flatten(), minlength=4))


def test_every_expert_gets_tokens_at_the_start():
    for seed in range(5):
        torch.manual_seed(seed)
        layer = MiCE(256, 64, experts=8, active=2)
        layer(torch.randn(2, 2048, 256))
        assert layer.gate.load.min() > 200


def test_bounds_that_are_one_number_make_it_the_curvature_of_all():
    """The paper's ablation, MiCE-Const."""
    layer = stirred(shared=1, curvatures=(0.7, 0.7))
    assert layer.routed.curvature is not None
    torch.testing.assert_close(layer.routed.curvature(), torch.full((5,), 0.7, dtype=torch.float64))
    s = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(s)[0], brute(layer, s))
    with pytest.raises(UsageError, match="low = high where they are not learned"):
        Curvatures(4, 0.7, 0.7, trainable=True)


def test_curvatures_are_spread_bounded_and_stay_wide():
    curvature = Curvatures(4, 0.2, 5.0, trainable=True)
    c = curvature().detach()
    torch.testing.assert_close(c.log().diff(), torch.full((3,), (25.0**0.25)).log())
    torch.testing.assert_close(c[0] * c[3], torch.tensor(1.0))
    optimiser = torch.optim.SGD(curvature.parameters(), lr=1e3)
    for _ in range(50):  # a raw scalar would be negative after one step, and the next square root NaN
        optimiser.zero_grad()
        curvature().sum().backward()
        optimiser.step()
    assert (curvature() >= 0.2).all()
    assert curvature().isfinite().all()
    layer = MiCE(WIDTH, HIDDEN, experts=4, active=2, learn_curvatures=True).bfloat16()
    assert layer.routed.curvature is not None
    assert layer.routed.curvature.theta.dtype == torch.float32
    assert layer.gate.bias.dtype == layer.gate.weight.dtype == torch.float32
    assert layer.routed.up.weight.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in Curvatures(4, 0.2, 5.0).parameters())


@pytest.mark.parametrize("shape", [(0, 5, WIDTH), (2, 0, WIDTH)])
@pytest.mark.parametrize("space", [Space(), Space("euclidean")], ids=str)
def test_a_batch_of_nothing_gives_nothing(shape, space):
    layer = stirred(space=space, shared=1).train()
    s = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    out, balance = layer(s)
    assert out.shape == s.shape
    assert torch.equal(balance, torch.zeros(shape[0], dtype=torch.float64))
    (out.sum() + balance.sum()).backward()
    assert s.grad is not None
