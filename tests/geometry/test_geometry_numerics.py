"""Finite everywhere: gradients at the singular places, extreme input, half types, compile, export, modules."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from leafward.geometry import (
    Curvature,
    Euclidean,
    Lorentz,
    PoincareBall,
    Product,
    cones,
    euclidean,
    lorentz,
    pairs,
    poincare,
)
from leafward.geometry.scalars import norm, tame, wide

HALF = [torch.bfloat16, torch.float16]
ALL = [torch.float32, *HALF]


def _grads(function, *inputs):
    inputs = [i.detach().clone().requires_grad_() for i in inputs]
    value = function(*inputs)
    return value, torch.autograd.grad(value.float().sum(), inputs)


# -- gradients at the singular places ---------------------------------------------------------------------------


def test_gradient_at_the_origin_is_the_unit_vector_towards_the_other_point():
    y = lorentz.expmap0(torch.tensor([[0.6, -0.8, 0.0]]) * 3.0, 1.0)
    for tiny in (0.0, 1e-30, 1e-17, 1e-12, 1e-6):
        x = torch.full_like(y, tiny)
        value, (gx, _) = _grads(lambda a, b: lorentz.dist(a, b, 1.0), x, y)
        assert float(value) == pytest.approx(3.0, rel=1e-5)
        # at the origin the space coordinates are orthonormal, so the gradient has length one
        torch.testing.assert_close(gx, -y / y.norm(), rtol=1e-4, atol=2e-5)


def test_gradient_of_the_radius_at_the_origin_is_finite():
    for tiny in (0.0, 1e-38, 1e-20, 1e-12):
        for function in (lambda x: lorentz.dist0(x, 1.0), lambda x: poincare.dist0(x, 1.0), euclidean.dist0):
            value, (g,) = _grads(function, torch.full((2, 3), tiny))
            assert bool(torch.isfinite(value).all())
            assert bool(torch.isfinite(g).all())


@pytest.mark.parametrize("radius", [0.0, 1e-12, 1e-3, 1.0, 10.0, 30.0])
def test_equal_points_have_distance_zero_and_gradient_zero(radius):
    v = torch.tensor([[0.36, 0.48, 0.8]]) * radius
    for dist, x in (
        (lambda a, b: lorentz.dist(a, b, 1.0), lorentz.expmap0(v, 1.0)),
        (lambda a, b: poincare.dist(a, b, 1.0), poincare.expmap0(v / 2, 1.0)),
        (euclidean.dist, v),
    ):
        value, grads = _grads(dist, x, x)
        assert float(value) == 0.0
        assert all(bool((g == 0).all()) for g in grads)


@pytest.mark.parametrize("radius", [1e-12, 1e-6, 0.1, 1.0, 5.0, 10.0])
def test_gradients_match_float64(radius):
    """float32 gradients of dist ∘ expmap0, against float64, relative to the gradient's own size."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(50, 6, generator=generator)
    v = torch.randn(50, 6, generator=generator)
    u, v = radius * u / u.norm(dim=-1, keepdim=True), 0.8 * radius * v / v.norm(dim=-1, keepdim=True)
    if radius <= 5.0:  # farther out, two float32 points of one ray no longer lie on one
        v[:10] = 0.9 * u[:10]
    run = lambda a, b: lorentz.dist(lorentz.expmap0(a, 1.0), lorentz.expmap0(b, 1.0), 1.0)  # noqa: E731
    _, single = _grads(run, u, v)
    _, double = _grads(run, u.double(), v.double())
    for s, d in zip(single, double, strict=True):
        assert float(((s - d).norm(dim=-1) / d.norm(dim=-1)).max()) < (1e-3 if radius == 5.0 else 1e-5)


def test_first_and_second_derivatives_are_right():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: (torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.25).requires_grad_()  # noqa: E731
    x, y, w = draw(3, 4), draw(3, 4), draw(3, 4)
    many, weights = draw(2, 3, 4), torch.rand(2, 3, generator=generator, dtype=torch.float64)
    cases = [
        (lambda x, y: lorentz.dist(x, y, 0.7), (x, y)),
        (lambda x: lorentz.expmap0(x, 0.7), (x,)),
        (lambda x: lorentz.logmap0(x, 0.7), (x,)),
        (lambda x, y: lorentz.logmap(x, y, 0.7), (x, y)),
        (lambda x, y: lorentz.expmap(x, y, 0.7), (x, y)),
        (lambda x, y, w: lorentz.transport(x, y, w, 0.7), (x, y, w)),
        (lambda x, y: cones.exterior_angle(x, y, 0.7), (x, y)),
        (lambda x: cones.half_aperture(x, 0.7), (x,)),
        (lambda x, y: lorentz.residual(x, y, 0.5, 0.7), (x, y)),
        (lambda m: lorentz.centroid(m, weights, 0.7), (many,)),
        (lambda m: lorentz.centroid_of_sum(m, 3.0 + m.norm(dim=-1, keepdim=True), 0.7), (many,)),
        (lambda x, y: pairs.distances(x, y, 0.7), (x, y)),
        (lambda x, y: pairs.distances(x, y, None), (x, y)),
        (lambda x, y: pairs.ball_distances(x, y, 0.7), (x, y)),
        (lambda x, y: pairs.tangent_distances(x, y, 0.7), (x, y)),
        (lambda x, y: pairs.tangent_distances(x, y, None), (x, y)),
        (lambda x, y: pairs.exterior_angles(x, y, 0.7), (x, y)),
        (lambda x, y: pairs.exterior_angles(x, y, None), (x, y)),
        (lambda x, y: poincare.dist(x, y, 0.7), (x, y)),
        (lambda x, y: lorentz.tangent_dist(x, y, 0.7), (x, y)),
        (lambda x, y: lorentz.tangent_dist(x, x + 0.1 * y, 0.7), (x, y)),
        (lambda x, y: poincare.mobius_add(x, y, 0.7), (x, y)),
        (lambda x, y: poincare.logmap(x, y, 0.7), (x, y)),
        (lambda m: poincare.centroid(m, weights, 0.7), (many,)),
        (lambda x, y, w: cones.flat_exterior_angle(x, y, w), (x, y, w)),
    ]
    for function, inputs in cases:
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs, atol=1e-4)


def test_gradient_reaches_the_curvature():
    curvature = Curvature(0.8, low=0.1, high=5.0).double()
    space = Lorentz(curvature)
    u, v = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    space.dist(space.expmap0(u), space.expmap0(v)).sum().backward()
    step = 1e-6
    values = []
    for sign in (1, -1):
        moved = copy.deepcopy(space)
        with torch.no_grad():
            moved._c.theta += sign * step
            values.append(moved.dist(moved.expmap0(u), moved.expmap0(v)).sum())
    assert float(curvature.theta.grad) == pytest.approx(float(values[0] - values[1]) / (2 * step), rel=1e-5)


def test_functional_transforms_work():
    x, y = torch.randn(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distance = lambda a: lorentz.dist(a, y, 1.0)  # noqa: E731
    backward = torch.func.jacrev(distance)(x)
    forward = torch.func.jacfwd(distance)(x)
    torch.testing.assert_close(backward, forward)
    batch = torch.stack([x, y, x + y])
    torch.testing.assert_close(torch.func.vmap(distance)(batch), lorentz.dist(batch, y.expand(3, 4), 1.0))


def test_exterior_angle_about_a_root_has_finite_gradients_where_points_meet():
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 1.0], [3.0, 0.0]])
    y = torch.tensor([[1.0, 2.0], [1.0, 0.0], [2.0, 2.0], [1.0, 0.0]])  # y = x; x = root; straight on; straight back
    value, grads = _grads(lambda a, b: cones.flat_exterior_angle(a, b, torch.zeros(2)), x, y)
    assert bool(torch.isfinite(value).all())
    assert all(bool(torch.isfinite(g).all()) for g in grads)
    assert float(value[2]) == pytest.approx(0.0, abs=1e-6)
    assert float(value[3]) == pytest.approx(torch.pi, abs=1e-6)


# -- no NaN for any finite input ------------------------------------------------------------------------------


def _full(x: torch.Tensor) -> torch.Tensor:
    """A time coordinate before x, which no method of Lorentz but the ambient product reads."""
    return torch.cat([x[..., :1], x], dim=-1)


def _half_sum(x: torch.Tensor, y: torch.Tensor, c: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The centroid of two points from half their sum, in float32 or better."""
    half = 0.5 * (lorentz.lift(lorentz.wide(x), c) + lorentz.lift(lorentz.wide(y), c))
    return lorentz.centroid_of_sum(half[..., 1:], half[..., :1], c)


def of_cosines(x, y, c):
    """All pairs by their cosines and lengths."""
    lengths = [norm(wide(tame(z))) for z in (x, y)]
    u, v = (wide(tame(z)) / length.clamp_min(1e-6) for z, length in zip((x, y), lengths, strict=True))
    return pairs.distances_of_cosines((u @ v.mT).to(x.dtype), *lengths, c)


BINARY = {
    "lorentz.dist": lorentz.dist,
    "lorentz.dist_precise": lambda x, y, c: lorentz.dist(x, y, c, precise=True),
    "lorentz.tangent_dist": lorentz.tangent_dist,
    "lorentz.expmap": lorentz.expmap,
    "lorentz.logmap": lorentz.logmap,
    "lorentz.residual": lambda x, y, c: lorentz.residual(x, y, 0.5, c),
    "lorentz.geodesic": lambda x, y, c: lorentz.geodesic(x, y, 0.3, c),
    "lorentz.transport": lambda x, y, c: lorentz.transport(x, y, torch.ones_like(x), c),
    "lorentz.centroid_of_sum": lambda x, y, c: _half_sum(x, y, c)[0].to(x.dtype),
    "lorentz.centroid_of_sum_time": lambda x, y, c: _half_sum(x, y, c)[1].to(x.dtype),
    "cones.exterior_angle": cones.exterior_angle,
    "cones.exterior_angle_flat": lambda x, y, c: cones.exterior_angle(x, y, None),
    "cones.flat_exterior_angle": lambda x, y, c: cones.flat_exterior_angle(x, y),
    "pairs.distances": pairs.distances,
    "pairs.distances_fast": lambda x, y, c: pairs.distances(x, y, c, precise=False),
    "pairs.distances_flat": lambda x, y, c: pairs.distances(x, y, None),
    "pairs.ball_distances": pairs.ball_distances,
    "pairs.tangent_distances": pairs.tangent_distances,
    "pairs.tangent_distances_fast": lambda x, y, c: pairs.tangent_distances(x, y, c, precise=False),
    "pairs.tangent_distances_flat": lambda x, y, c: pairs.tangent_distances(x, y, None),
    "pairs.distances_of_cosines": lambda x, y, c: of_cosines(x, y, c),
    "pairs.distances_of_cosines_flat": lambda x, y, c: of_cosines(x, y, None),
    "pairs.exterior_angles": pairs.exterior_angles,
    "pairs.exterior_angles_flat": lambda x, y, c: pairs.exterior_angles(x, y, None),
    "lorentz.centroid": lambda x, y, c: lorentz.centroid(torch.stack([x, y], -2), None, c),
    "lorentz.inner": lambda x, y, c: lorentz.inner(x, y, torch.ones_like(x), c),
    "poincare.dist": poincare.dist,
    "poincare.dist_precise": lambda x, y, c: poincare.dist(x, y, c, precise=True),
    "poincare.length": poincare.length,
    "poincare.mobius_add": poincare.mobius_add,
    "poincare.expmap": poincare.expmap,
    "poincare.logmap": poincare.logmap,
    "poincare.geodesic": lambda x, y, c: poincare.geodesic(x, y, 0.3, c),
    "poincare.transport": lambda x, y, c: poincare.transport(x, y, torch.ones_like(x), c),
    "poincare.centroid": lambda x, y, c: poincare.centroid(torch.stack([x, y], -2), None, c),
    "lorentz.length": lorentz.length,
    "lorentz.transport0": lorentz.transport0,
    "poincare.inner": lambda x, y, c: poincare.inner(x, y, torch.ones_like(x), c),
    "poincare.inner_itself": lambda x, y, c: poincare.inner(x, y, y, c),
    "poincare.transport0": poincare.transport0,
    "poincare.gyration": lambda x, y, c: poincare.gyration(x, y, torch.ones_like(x), c),
    "poincare.gyration_of": lambda x, y, c: poincare.gyration(y, torch.full_like(x, 0.1), x, c),
    "poincare.mobius_matvec": lambda x, y, c: poincare.mobius_matvec(x[:3], y, c),
    "euclidean.dist": lambda x, y, c: euclidean.dist(x, y),
    "euclidean.centroid": lambda x, y, c: euclidean.centroid(torch.stack([x, y], -2)),
    "Lorentz.minkowski": lambda x, y, c: Lorentz(c).minkowski(_full(x), _full(y)),
    "Lorentz.inner": lambda x, y, c: Lorentz(c).inner(_full(x), _full(y), _full(y)),
    "Lorentz.norm": lambda x, y, c: Lorentz(c).norm(_full(x), _full(y)),
    "Lorentz.expmap": lambda x, y, c: Lorentz(c).expmap(_full(x), _full(y)),
    "Lorentz.logmap": lambda x, y, c: Lorentz(c).logmap(_full(x), _full(y)),
    "Lorentz.transport": lambda x, y, c: Lorentz(c).transport(_full(x), _full(y), torch.ones_like(_full(x))),
    "Lorentz.transport0": lambda x, y, c: Lorentz(c).transport0(_full(x), y),
    "PoincareBall.norm": lambda x, y, c: PoincareBall(c).norm(x, y),
    "Euclidean.inner": lambda x, y, c: Euclidean().inner(x, x, y),
    "Euclidean.norm": lambda x, y, c: Euclidean().norm(x, 0.5 * x - 0.5 * y),
    "Lorentz.exterior_angle": lambda x, y, c: Lorentz(c).exterior_angle(_full(x), _full(y)),
    "PoincareBall.exterior_angle": lambda x, y, c: PoincareBall(c).exterior_angle(x, y),
}
UNARY = {
    "lorentz.time": lorentz.time,
    "lorentz.rescale": lambda x, c: lorentz.rescale(x, c, 2.0),
    "poincare.mobius_scale": lambda x, c: poincare.mobius_scale(0.7, x, c),
    "euclidean.dist0": lambda x, c: euclidean.dist0(x),
    "cones.half_aperture_flat": lambda x, c: cones.half_aperture(x, None),
    "lorentz.expmap0": lorentz.expmap0,
    "lorentz.expmap0_lifted": lorentz.expmap0_lifted,
    "lorentz.logmap0": lorentz.logmap0,
    "lorentz.lift": lorentz.lift,
    "lorentz.dist0": lorentz.dist0,
    "lorentz.to_poincare": lorentz.to_poincare,
    "lorentz.time_of_norm": lambda x, c: lorentz.time_of_norm(lorentz.tame(x).norm(dim=-1, keepdim=True), c).to(
        x.dtype
    ),
    "cones.half_aperture": cones.half_aperture,
    "poincare.expmap0": poincare.expmap0,
    "poincare.logmap0": poincare.logmap0,
    "poincare.dist0": poincare.dist0,
    "poincare.project": poincare.project,
    "poincare.conformal": poincare.conformal,
    "poincare.to_lorentz": poincare.to_lorentz,
    "PoincareBall.half_aperture": lambda x, c: PoincareBall(c).half_aperture(x),
}
SHAPES = [(1, 200), (2, 100), (7, 80), (64, 60), (1024, 20)]


def _wild(rows: int, n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of every size the type can hold, zeros, equal rows and one-hot rows among them."""
    generator = torch.Generator().manual_seed(seed)
    limit = torch.finfo(dtype).max
    low = -44.0 if dtype != torch.float16 else -7.0
    high = torch.tensor(limit, dtype=torch.float64).log10()
    size = 10 ** (low + (high - low) * torch.rand(rows, 1, generator=generator, dtype=torch.float64))
    x = torch.randn(rows, n, generator=generator, dtype=torch.float64) * size
    x[:3] = 0.0
    x[3:6] = 0.0
    x[3:6, 0] = limit
    x[6:9] = limit
    return x.clamp(-limit, limit).to(dtype)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("c", [1e-3, 1.0, 1e2])
@pytest.mark.parametrize("name", [*BINARY, *UNARY])
def test_no_nan_for_any_finite_input(name, c, dtype):
    """Together more than 100,000 random rows, forward and backward."""
    for seed, (n, rows) in enumerate(SHAPES):
        rows = rows if "pairs." not in name else rows // 4
        x, y = _wild(rows, n, dtype, seed), _wild(rows, n, dtype, seed + 50)
        y[rows // 2 : rows // 2 + 20] = x[rows // 2 : rows // 2 + 20]
        inputs = (x, y) if name in BINARY else (x,)
        function = BINARY.get(name) or UNARY[name]
        value, grads = _grads(lambda *a, f=function: f(*a, c), *inputs)
        assert value.dtype == dtype
        assert not bool(value.isnan().any())
        assert not any(bool(g.isnan().any()) for g in grads)


@pytest.mark.parametrize("module", [lorentz, poincare, euclidean, cones, pairs])
def test_every_public_function_is_in_the_tables(module):
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    name = module.__name__.rpartition(".")[2]
    assert {f"{name}.{each}" for each in own - {"edge"} if not each.startswith("_")} <= {*BINARY, *UNARY}


def test_float16_tangents_saturate_instead_of_overflowing():
    x = lorentz.expmap0(torch.tensor([[8.0, 8.0], [11.0, -3.0]], dtype=torch.float16), 1.0)
    u = torch.full_like(x, 2e4)
    for moved in (lorentz.transport0(x, u, 1.0), lorentz.logmap(x, -x, 1.0), lorentz.rescale(x, 1.0, 1e-4)):
        assert bool(torch.isfinite(moved).all())
    exact = lorentz.transport0(x.double(), u.double(), 1.0)
    torch.testing.assert_close(
        torch.nn.functional.normalize(lorentz.transport0(x, u, 1.0).double()),
        torch.nn.functional.normalize(exact),
        rtol=1e-3,
        atol=1e-3,
    )


def test_far_points_saturate_along_their_ray():
    v = torch.tensor([[3.0, 4.0]]) * torch.tensor([[1.0], [1e3], [1e30], [6e37]])
    x = lorentz.expmap0(v, 1.0)
    torch.testing.assert_close(x / x.norm(dim=-1, keepdim=True), torch.tensor([[0.6, 0.8]]).expand(4, 2))
    radius = lorentz.dist0(x, 1.0)
    assert float(radius[0]) == pytest.approx(5.0, rel=1e-6)
    torch.testing.assert_close(radius[1:], radius[1:2].expand(3), rtol=1e-5, atol=0)
    half = lorentz.lift(lorentz.expmap0(v[:2].half(), 1.0), 1.0)
    assert bool(torch.isfinite(half).all())


@pytest.mark.parametrize("dtype", HALF)
def test_half_types_are_computed_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, 100, 32, generator=generator).to(dtype) * 0.3
    x, y = lorentz.expmap0(u, 1.0), lorentz.expmap0(v, 1.0)
    exact = lorentz.dist(x.double(), y.double(), 1.0)
    got = lorentz.dist(x, y, 1.0)
    assert got.dtype == dtype
    assert float(((got.double() - exact) / exact).abs().max()) < torch.finfo(dtype).eps


def test_autocast_does_not_reach_the_geometry():
    x, y = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0))
    plain = pairs.distances(x, y, 1.0, precise=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(pairs.distances(x, y, 1.0, precise=False), plain)


# -- compile and export ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in (*BINARY, *UNARY) if name[0].islower()])
def test_public_functions_compile_as_one_graph(name):
    function = BINARY.get(name) or UNARY[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(5, 8, generator=generator) * 0.1 for _ in range(2 if name in BINARY else 1)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: function(*a, 0.7), fullgraph=True, backend="aot_eager")
    expected, expected_grads = _grads(lambda *a: function(*a, 0.7), *inputs)
    value, grads = _grads(compiled, *inputs)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    for g, e in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [Lorentz, PoincareBall, lambda c: Euclidean()])
def test_manifold_methods_compile_as_one_graph(make):
    space = make(Curvature(1.0))

    def run(u, v, weights):
        x, y = space.expmap0(u), space.expmap0(v)
        moved = space.expmap(x, space.transport(y, x, space.logmap(y, space.geodesic(x, y, 0.5))))
        return space.dist(moved, y).sum() + space.dist0(space.centroid(x, weights)) + space.cdist(x, y).mean()

    _same_compiled(run, "aot_eager")


def test_generated_code_computes_the_same():
    space = Lorentz(Curvature(1.0))
    _same_compiled(lambda u, v, weights: space.dist(space.expmap0(u), space.expmap0(v)) @ weights, "inductor")


def _same_compiled(run, backend):
    generator = torch.Generator().manual_seed(0)
    inputs = (*torch.randn(2, 6, 9, generator=generator) * 0.2, torch.rand(6, generator=generator))
    torch._dynamo.reset()
    value, grads = _grads(torch.compile(run, fullgraph=True, backend=backend), *inputs)
    expected, expected_grads = _grads(run, *inputs)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    for g, e in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


def test_expmap0_and_dist_export_to_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")

    class Distances(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.space = Lorentz(Curvature(0.7))

        def forward(self, u, v):
            return self.space.dist(self.space.expmap0(u), self.space.expmap0(v))

    model = Distances().eval()
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, 4, 16, generator=generator)
    path = tmp_path / "dist.onnx"
    batch = torch.export.Dim("batch")
    torch.onnx.export(model, (u, v), str(path), dynamo=True, dynamic_shapes=({0: batch}, {0: batch}), verbose=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for rows, scale in ((4, 1.0), (9, 1e-3), (3, 2.0)):
        u, v = torch.randn(2, rows, 16, generator=generator) * scale
        feeds = dict(zip([i.name for i in session.get_inputs()], (u.numpy(), v.numpy()), strict=True))
        (got,) = session.run(None, feeds)
        torch.testing.assert_close(torch.from_numpy(got), model(u, v).detach(), rtol=1e-5, atol=1e-7)


# -- modules -----------------------------------------------------------------------------------------------------


def test_dtype_follows_the_input():
    for space in (Lorentz(0.5), PoincareBall(0.5), Euclidean(), Lorentz(Curvature(0.5)).double()):
        for dtype in (torch.float64, *ALL):
            x = space.expmap0(torch.randn(3, 4).to(dtype) * 0.1)
            assert x.dtype == dtype
            assert space.dist(x, x).dtype == dtype
            assert space.centroid(x).dtype == dtype


def test_curvature_survives_casts_copies_and_files():
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), Lorentz(Curvature(1.7, low=0.5, high=3.0)))
    space = layer[1]
    assert float(space.c) == pytest.approx(1.7, rel=1e-6)
    assert layer.half()[1].c.dtype == torch.float32
    assert layer.bfloat16()[1].c.dtype == torch.float32
    assert float(space.c) == pytest.approx(1.7, rel=1e-6)
    assert layer.double()[1].c.dtype == torch.float64
    for other in (copy.deepcopy(space), pickle.loads(pickle.dumps(space))):
        assert torch.equal(other.c, space.c)
    fresh = Lorentz(Curvature(1.0, low=0.5, high=3.0))
    buffer = io.BytesIO()
    torch.save(space.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert float(fresh.c) == pytest.approx(1.7, rel=1e-6)
    assert [name for name, _ in fresh.named_parameters()] == ["_c.theta"]


def test_curvature_cannot_leave_its_bounds_nor_get_stuck():
    curvature = Curvature(1.0, low=0.2, high=4.0)
    optimiser = torch.optim.Adam(curvature.parameters(), lr=0.1)
    for sign in (1, -1):
        for _ in range(300):
            optimiser.zero_grad()
            (sign * curvature()).backward()
            optimiser.step()
        assert 0.2 <= float(curvature()) <= 4.0
        edge = 0.2 if sign > 0 else 4.0
        assert float(curvature()) == pytest.approx(edge, rel=0.1)  # it came back from the other edge


@pytest.mark.parametrize("space", [Lorentz(1.0), PoincareBall(1.0), Euclidean()])
def test_an_empty_batch_is_a_batch(space):
    x = space.expmap0(torch.zeros(0, 4))
    assert space.dist(x, x).shape == (0,)
    assert space.cdist(x, x).shape == (0, 0)


def test_half_precision_products_do_not_overflow():
    space = Product((Euclidean(), 2), (Euclidean(), 2))
    x = torch.tensor([[1000.0, 0, 0, 0], [1e-4, 0, 0, 0]], dtype=torch.float16)
    torch.testing.assert_close(space.dist(x, torch.zeros_like(x)), x[:, 0])
    torch.testing.assert_close(Euclidean().norm(x, x), x[:, 0])


def test_per_row_curvature():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 5, generator=generator)
    c = torch.tensor([[0.5], [1.0], [2.0]])
    rows = lorentz.dist(lorentz.expmap0(x, c), lorentz.expmap0(y, c), c)
    for i, value in enumerate((0.5, 1.0, 2.0)):
        alone = lorentz.dist(lorentz.expmap0(x[i], value), lorentz.expmap0(y[i], value), value)
        torch.testing.assert_close(rows[i], alone)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), "1", True, torch.tensor(1.0)])
def test_a_curvature_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="c must be a positive finite number"):
        Lorentz(bad)


def test_bad_bounds_radius_and_factors_are_refused():
    with pytest.raises(ValueError, match="low < high"):
        Curvature(1.0, low=2.0, high=1.0)
    with pytest.raises(ValueError, match="value must lie strictly between"):
        Curvature(20.0)
    with pytest.raises(ValueError, match="radius must be positive"):
        Lorentz(1.0).random_uniform(3, 2, radius=0.0)
    with pytest.raises(ValueError, match="shape must end in"):
        Lorentz(1.0).random_uniform(radius=1.0)
    with pytest.raises(ValueError, match="at least one"):
        Product()
    with pytest.raises(ValueError, match="each factor"):
        Product((Lorentz(1.0), 0))
