"""What must hold for every layer: gradients, both geometries, compilation, half types, plain state."""

import copy

import pytest
import torch
from torch import nn

from leafward.errors import UsageError
from leafward.geometry import lorentz
from leafward.nn import (
    Attention,
    Embedding,
    FeedForward,
    Head,
    HoPE,
    LatentAttention,
    Linear,
    MiCE,
    Residual,
    RMSNorm,
    Space,
    Stretch,
    visible,
)

WIDTH, LENGTH = 128, 12
LATENT = {"latent": 32, "nope_width": 16, "rope_width": 8, "value_width": 16}
TABLE = HoPE(8).table(torch.arange(LENGTH))
PACKED = visible(documents=torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [-1] * 3]))
LAYERS = {
    "linear": lambda space: Linear(WIDTH, 64, space=space),
    "rms_norm": lambda space: RMSNorm(WIDTH),
    "residual": lambda space: Residual(space=space),
    "feed_forward": lambda space: FeedForward(WIDTH, 256, space=space),
    "attention": lambda space: Attention(WIDTH, heads=4, space=space),
    "attention_grouped": lambda space: Attention(WIDTH, heads=4, kv_heads=2, space=space),
    "attention_packed": lambda space: Attention(WIDTH, heads=4, space=space),
    "latent_attention": lambda space: LatentAttention(WIDTH, heads=4, **LATENT, space=space),
    "latent_queries": lambda space: LatentAttention(WIDTH, heads=4, **LATENT, query_latent=48, space=space),
    "mice": lambda space: MiCE(WIDTH, 96, experts=4, active=2, shared=1, space=space),
    "mice_learned": lambda space: MiCE(WIDTH, 96, experts=4, active=2, learn_curvatures=True, space=space),
    "head": lambda space: Head(WIDTH, 50, space=space),
    "head_distance": lambda space: Head(WIDTH, 50, kind="distance", space=space),
}
SPACES = [Space("lorentz", 1.0), Space("lorentz", 0.37), Space("euclidean")]


class Called(nn.Module):
    """A layer as a function of one tensor, with what else it needs, as one number per coordinate."""

    def __init__(self, name: str, space: Space) -> None:
        super().__init__()
        self.name, self.layer = name, LAYERS[name](space)

    def forward(self, s):
        if self.name == "residual":
            return self.layer(s, s.flip(1) * 0.3)
        if self.name.startswith("latent"):
            return self.layer(s, TABLE)
        if self.name == "attention_packed":
            return self.layer(s, TABLE, PACKED)
        if self.name.startswith("attention"):
            return self.layer(s, TABLE)
        out = self.layer(s)
        return out[0] if isinstance(out, tuple) else out


def stirred(name: str, space: Space) -> Called:
    """The layer with every parameter moved off its start, so that none is dead."""
    module = Called(name, space)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return module


everywhere = pytest.mark.parametrize("space", SPACES, ids=str)
every_layer = pytest.mark.parametrize("name", LAYERS)


@every_layer
@everywhere
def test_every_parameter_gets_a_finite_gradient(name, space):
    module = stirred(name, space).double()
    s = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    out = module(s)
    out.square().mean().backward()
    assert out.dtype == torch.float64
    assert s.grad is not None
    assert s.grad.isfinite().all()
    assert s.grad.abs().max() > 0
    for key, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key
            assert parameter.grad.abs().max() > 0, key


def outcome(call, module, s):
    """Output and gradients of one step."""
    module.zero_grad()
    out = call(s)
    out.square().mean().backward()
    return out.detach(), [p.grad.clone() for p in module.parameters() if p.grad is not None]


COMPILED = [(name, SPACES[1]) for name in LAYERS if name not in ("attention_grouped", "latent_queries", "mice")]


@pytest.mark.parametrize(("name", "space"), [*COMPILED, ("attention", SPACES[2]), ("mice", SPACES[2])], ids=str)
def test_compiles_without_a_break(name, space):
    module = stirred(name, space)
    s = torch.randn(2, LENGTH, WIDTH)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled, module, s), outcome(module, module, s), rtol=1e-3, atol=1e-5)


@every_layer
@everywhere
@pytest.mark.parametrize("cast", [False, True], ids=["autocast", "bfloat16"])
def test_half_type_is_close_to_float32(name, space, cast):
    module = stirred(name, space).eval()
    # A gate may choose another expert for a rounded token, which is no error: leave no choice.
    if name.startswith("mice"):
        module.layer.gate.active = module.layer.gate.experts
    s = torch.randn(2, LENGTH, WIDTH).bfloat16().float()
    exact = module(s)
    if cast:
        out = copy.deepcopy(module).bfloat16()(s.bfloat16()).float()
    else:
        with torch.autocast("cpu", torch.bfloat16):
            out = module(s)
        out.float().square().mean().backward()
        assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)
    error = ((out.float() - exact).norm() / exact.norm()).item()
    # The norm of a centroid is a difference of squares, so attention is allowed more than the rest.
    assert error < (0.03 if name.startswith(("attention", "latent")) and space.curved else 0.01), error


# At the widths of real models; a time column is one in `width`, which is more than 1 % below a hundred.
REAL = {
    "linear": lambda space: Linear(768, 2048, space=space),
    "feed_forward": lambda space: FeedForward(768, 2048, space=space),
    "attention": lambda space: Attention(768, heads=12, space=space),
    "latent_attention": lambda space: LatentAttention(
        768, 12, latent=256, nope_width=64, rope_width=32, value_width=64, query_latent=512, space=space
    ),
    "mice": lambda space: MiCE(768, 512, experts=4, active=2, shared=1, learn_curvatures=True, space=space),
    "head": lambda space: Head(768, 1000, space=space),
    "head_distance": lambda space: Head(768, 1000, kind="distance", space=space),
    "residual": lambda space: Residual(space=space),
    "embedding": lambda space: Embedding(1000, 768, space=space),
}


@pytest.mark.parametrize("name", REAL)
def test_twins_have_equal_parameters(name):
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in REAL[name](Space(geometry)).parameters()) for geometry in ("lorentz", "euclidean")
        ]
    assert abs(sizes[0] - sizes[1]) <= 0.01 * sizes[1]


@every_layer
def test_state_is_small_and_shardable(name):
    module = LAYERS[name](Space())
    state = module.state_dict()
    parameters = dict(module.named_parameters())
    # The authors keep dozens of copies of a curvature, a T × T mask and complex tables; here only the gate's bias.
    assert set(state) - set(parameters) <= {"gate.bias"}
    assert all(value.ndim > 0 for value in parameters.values()), "fully_shard refuses parameters without dimensions"
    other = LAYERS[name](Space())
    other.load_state_dict(state)
    for key, value in other.state_dict().items():
        assert torch.equal(value, state[key])


@pytest.mark.parametrize("c", [0.37, 1.0, 4.0])
@pytest.mark.parametrize("length", [0.0, 1e-3, 1.0, 80.0, 400.0])
def test_hot_forms_equal_the_geometry(c, length):
    x = torch.randn(64, 16)
    x = length * x / x.norm(dim=-1, keepdim=True)
    y = x.flip(0) + 0.01 * torch.randn_like(x)
    torch.testing.assert_close(Space(c=c).time(x), lorentz.time(x, c))
    for weight in (0.5, 1.0, 2.0):
        layer = Residual(space=Space(c=c))
        layer.log_weight.data.fill_(weight).log_()
        torch.testing.assert_close(layer(x, y), lorentz.residual(x, y, weight, c), rtol=1e-4, atol=1e-6)


def test_embedding_starts_at_the_chosen_radius_and_trains():
    for c in (0.37, 1.0, 4.0):
        layer = Embedding(30, 16, radius=1.5, space=Space(c=c))
        torch.testing.assert_close(lorentz.dist0(layer.weight, c), torch.full((30,), 1.5))
    assert layer(torch.tensor([[1, 2]])).shape == (1, 2, 16)
    assert type(layer.weight) is nn.Parameter, "a parameter subclass is dropped by optimiser filters and by sharding"
    before = layer.weight.detach().clone()
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.0)
    layer(torch.tensor([3])).sum().backward()
    optimiser.step()
    moved = (layer.weight != before).any(dim=-1)
    assert moved.tolist() == [row == 3 for row in range(30)]
    assert Embedding(4, 8, padding_idx=0).weight[0].abs().max() == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Space("lorenz"), "did you mean 'lorentz'"),
        (lambda: Space(c=-1.0), "c must be a positive"),
        (lambda: Linear(0, 3), "in_features must be a positive"),
        (lambda: Linear(10, 3, points=4), "points=4"),
        (lambda: Residual(scale=0.0), "scale must be"),
        (lambda: Attention(10, heads=3), "give head_width"),
        (lambda: Attention(12, heads=4, kv_heads=3), "kv_heads=3"),
        (lambda: MiCE(8, 8, experts=2, active=3), "active=3"),
        (lambda: MiCE(8, 8, experts=2, active=1, curvatures=(2.0, 1.0)), "low < high"),
        (lambda: Head(8, 8, kind="linaer"), "did you mean 'linear'"),
        (lambda: HoPE(7), "dim must be even"),
        (lambda: Embedding(8, 8, radius=-1.0), "radius must be"),
        (lambda: Embedding(8, 8, radius=1000.0), "radius must be below 40"),
        (lambda: RMSNorm(8, eps=-1.0), "eps must be"),
        (lambda: HoPE(8, stretch=Stretch(float("inf"), 10)), "factor must be"),
        (lambda: HoPE(8, stretch=Stretch(2.0, 0)), "trained must be"),
        (lambda: visible(window=0), "window must be at least 1"),
        (lambda: visible(documents=torch.zeros(3)), "(batch, length)"),
    ],
)
def test_bad_arguments_are_named(make, words):
    with pytest.raises((UsageError, ValueError)) as error:
        make()
    assert words in str(error.value)
