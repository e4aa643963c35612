"""Where float32 ends: points far out behind one another, near pairs far out, vectors next to nothing, empty sets."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import geometry_accuracy
import hyperbolic_reference as reference
from leafward.geometry import Euclidean, Lorentz, PoincareBall, Product, lorentz, pairs

SPACES = {
    "lorentz": Lorentz(1.0),
    "poincare": PoincareBall(1.0),
    "euclidean": Euclidean(),
    "product": Product((Lorentz(1.0), 1), (Euclidean(), 1)),
}


def _ray(radius: float) -> tuple[Tensor, Tensor]:
    """Float32 points at `radius` and one less, one behind the other: space parts (50, 8)."""
    direction = reference.directions(50, 8, 0)
    return lorentz.expmap0(radius * direction, 1.0), lorentz.expmap0((radius - 1.0) * direction, 1.0)


@pytest.mark.parametrize("radius", [15.0, 16.0])
def test_precise_distances_of_far_points_are_those_of_the_points_as_they_are(radius):
    x, y = _ray(radius)
    exact = lorentz.dist(x.double(), y.double(), 1.0)
    found = lorentz.dist(x, y, 1.0, precise=True)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    full = Lorentz(1.0)
    torch.testing.assert_close(full.dist(full.lift(x), full.lift(y), precise=True), found)
    torch.testing.assert_close(pairs.distances(x, y, 1.0).diagonal(), found, rtol=2e-3, atol=0)
    assert (lorentz.dist(x, y, 1.0) / found - 1).abs().max() > 0.01  # what the docs say of the plain form


@pytest.mark.parametrize("name", SPACES)
def test_every_space_takes_precise(name):
    space = SPACES[name]
    u = 0.3 * torch.randn(2, 20, 2, generator=torch.Generator().manual_seed(0))
    x, y = (space.expmap0(z) for z in u)
    torch.testing.assert_close(space.dist(x, y, precise=True), space.dist(x, y))


@pytest.mark.parametrize("name", ["lorentz", "poincare"])
@pytest.mark.parametrize("radius", [0.1, 1.0, 3.0, 5.0, 8.0])
def test_near_tangents_keep_their_distance_far_out(name, radius):
    """Points of float32 that far out are 3e-3 apart at best; their tangent vectors are not."""
    u, v = (z.float() for z in geometry_accuracy.near_pair(radius))
    space = SPACES[name]
    half = 1.0 / space.origin_scale  # powers of two: exact
    found = space.tangent_dist(half * u, half * v)
    assert torch.equal(found, space.tangent_dist(half * v, half * u))
    exact = reference.distance(u, v)
    assert reference.worst(found, exact) < 2e-5
    if radius <= 5.0:
        all_pairs = space.tangent_cdist(half * u, half * v).diagonal()
        assert reference.worst(all_pairs, exact) < 2e-5


@pytest.mark.parametrize("c", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("ratio", [0.0, 1e-6, 0.3, 0.59, 0.61, 1.0, 1.7, 30.0])
def test_tangent_distances_of_any_two_lengths(c, ratio):
    """Both forms of the lateral square, and where one takes over from the other."""
    for radius in (1e-4, 1.0, 6.0) if ratio < 30 else (1e-4, 0.5):
        u = reference.directions(8, 6, 1) * (radius / c**0.5)
        v = reference.directions(8, 6, 2) * (ratio * radius / c**0.5)
        assert reference.worst(lorentz.tangent_dist(u, v, c), reference.distance(u, v, c)) < 1e-6


def test_tangent_distances_have_the_gradients_of_the_points():
    generator = torch.Generator().manual_seed(3)
    u = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    v = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    u[0], v[1], v[2] = 0.0, 0.0, u[2]
    v[3:20] = u[3:20] + 0.1 * v[3:20]
    inputs = [u.requires_grad_(), v.requires_grad_()]
    by_points = lorentz.dist(lorentz.expmap0(u, 0.7), lorentz.expmap0(v, 0.7), 0.7)
    found = lorentz.tangent_dist(u, v, 0.7)
    torch.testing.assert_close(found, by_points, rtol=1e-9, atol=1e-12)
    expected = torch.autograd.grad(by_points.sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), inputs), expected, rtol=1e-6, atol=1e-9)


PLACES = ((1e-20, 0.0), (40.0, 0.0), (0.0, 40.0), (1e-30, 1e-30), (0.0, 0.0), (5.0, 1.0), (-40.0, 3.0))


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_second_derivatives_are_not_nan(name, dtype):
    space = SPACES[name]
    functions = {
        "dist": lambda a, b: space.dist(space.expmap0(a), space.expmap0(b)),
        "cdist": lambda a, b: space.cdist(space.expmap0(a), space.expmap0(b)),
        "cdist, fast": lambda a, b: space.cdist(space.expmap0(a), space.expmap0(b), precise=False),
        "transport": lambda a, b: space.transport(space.expmap0(a), space.expmap0(b), space.expmap0(b)),
        "logmap": lambda a, b: space.logmap(space.expmap0(a), space.expmap0(b)),
        "norm": lambda a, b: space.norm(space.expmap0(a), space.transport0(space.expmap0(a), b)),
    }
    if name != "product":
        functions["tangent_dist"] = space.tangent_dist
        functions["exterior_angles"] = lambda a, b: space.exterior_angles(space.expmap0(a), space.expmap0(b))
    for (kind, function), (first, second) in itertools.product(functions.items(), itertools.product(PLACES, PLACES)):
        leaves = [torch.tensor([place], dtype=dtype, requires_grad=True) for place in (first, second)]
        slopes = torch.autograd.grad(function(*leaves).sum(), leaves, create_graph=True, materialize_grads=True)
        assert all(bool(torch.isfinite(slope).all()) for slope in slopes), (kind, first, second)
        mixed = sum((slope * torch.tensor([0.7, -0.3], dtype=dtype)).sum() for slope in slopes)
        if mixed.requires_grad:
            bends = torch.autograd.grad(mixed, leaves, allow_unused=True)
            assert not any(bool(torch.isnan(bend).any()) for bend in bends if bend is not None), (kind, first, second)


@pytest.mark.parametrize("name", SPACES)
def test_no_points_have_no_centroid(name):
    space = SPACES[name]
    with pytest.raises(ValueError, match="at least one point, got shape"):
        space.centroid(space.expmap0(torch.zeros(3, 0, 2)))


@pytest.mark.parametrize("name", ["lorentz", "poincare", "euclidean"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_what_is_no_real_number_is_refused(name, dtype):
    space = SPACES[name]
    x = torch.ones(4, space.ambient(2), dtype=dtype)
    for function in (space.dist0, lambda z: space.dist(z, z), lambda z: space.cdist(z, z), space.centroid):
        with pytest.raises(TypeError, match=f"real floating-point numbers, got a tensor of {dtype}"):
            function(x)


@pytest.mark.parametrize("name", SPACES)
def test_inner_products_in_float16_end_at_its_largest_number(name):
    space = SPACES[name]
    x = space.expmap0(torch.zeros(1, 2, dtype=torch.float16))
    u = space.transport0(x, torch.full((1, 2), 2e4, dtype=torch.float16))
    for sign in (1.0, -1.0):
        found = space.inner(x, u, sign * u)
        assert found.dtype == torch.float16
        assert float(found) == sign * torch.finfo(torch.float16).max


class _Passes(TorchDispatchMode):
    """Counts the operations whose result is as large as the set of pairs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.new = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        in_place = function.__name__.split(".")[0].endswith("_")
        if isinstance(result, Tensor) and result.numel() == self.size and not in_place and not result._is_view():
            self.new += 1
        return result


def test_all_pairs_take_few_tensors_of_their_size():
    """A training step of a taxonomy embedding is bound by these passes; it took 26 when the slope was not in place."""
    points = (0.3 * torch.randn(70, 3, generator=torch.Generator().manual_seed(5))).requires_grad_()
    upstream = torch.ones(40, 70)
    with _Passes(40 * 70) as passes:
        pairs.ball_distances(points[:40], points, 1.0).backward(upstream)
    assert passes.new <= 14


class _NoFloat64(TorchDispatchMode):
    """A device that has no float64, as mps."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.device.type == "mps":
            assert result.dtype != torch.float64, function
        return result


def test_on_a_device_without_float64():
    """All but what is float64 by definition runs there; and that says so. No Mac is needed."""
    with FakeTensorMode(), _NoFloat64():
        u = torch.empty(5, 2, device="mps")
        ball = PoincareBall(1.0)
        for found in (
            *(
                f(u, u, 1.0)
                for f in (lorentz.dist, lorentz.tangent_dist, lorentz.logmap, lorentz.expmap, lorentz.length)
            ),
            *(f(u, 1.0) for f in (lorentz.expmap0, lorentz.logmap0, lorentz.lift, lorentz.dist0, lorentz.to_poincare)),
            *(f(u, u) for f in (ball.dist, ball.logmap, ball.expmap, ball.exterior_angle, ball.norm, ball.mobius_add)),
            *(lorentz.transport(u, u, u, 1.0), lorentz.inner(u, u, u, 1.0)),
            *(ball.cdist(u, u, precise=False), pairs.distances(u, u, 1.0, precise=False), ball.centroid(u)),
        ):
            assert found.device.type == "mps"
            assert found.dtype == torch.float32
        for refused in (
            lambda: pairs.distances(u, u, 1.0),
            lambda: pairs.tangent_distances(u, u, 1.0),
            lambda: pairs.exterior_angles(u, u, 1.0),
            lambda: lorentz.dist(u, u, 1.0, precise=True),
            lambda: ball.dist(u, u, precise=True),
        ):
            with pytest.raises(ValueError, match="float64, which the device mps does not have"):
                refused()
