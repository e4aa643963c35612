"""What geoopt does in float32 where we do better: its own code, run beside ours."""

from __future__ import annotations

import pytest
import torch

import hyperbolic_reference as reference
from leafward.geometry import Curvature, Lorentz, PoincareBall

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.jit.script, which geoopt uses, is deprecated
geoopt = pytest.importorskip("geoopt")


def test_geoopt_is_not_finite_on_one_ray_and_ours_is() -> None:
    u = reference.directions(20, 16, 6) * 9.0
    v = u * (10.0 / 9.0)
    theirs, ours, time = geoopt.Lorentz(), Lorentz(1.0), torch.zeros(20, 1)
    points = [theirs.expmap0(torch.cat([time, w], dim=-1)) for w in (u, v)]
    assert not theirs.dist(*points).isfinite().all()
    assert reference.worst(ours.dist(ours.expmap0(u), ours.expmap0(v)), reference.distance(u, v)) <= 1e-4


def test_geoopts_ball_is_far_off_at_radius_eight() -> None:
    """geoopt's tangent vectors at the origin are half as long as the distance they stand for."""
    u, v = reference.directions(20, 16, 6) * 8.0, reference.directions(20, 16, 7) * 8.0
    ball, ours = geoopt.PoincareBall(), Lorentz(1.0)
    assert reference.worst(ball.dist(ball.expmap0(u / 2), ball.expmap0(v / 2)), reference.distance(u, v)) > 0.15
    assert reference.worst(ours.dist(ours.expmap0(u), ours.expmap0(v)), reference.distance(u, v)) <= 1e-5


def test_geoopts_curvature_on_a_parameter_does_not_follow_a_cast() -> None:
    layer = torch.nn.Module()
    layer.point = geoopt.ManifoldParameter(torch.zeros(3), manifold=geoopt.Lorentz())
    layer.double()
    assert layer.point.dtype == torch.float64
    assert layer.point.manifold.k.dtype == torch.float32
    assert torch.nn.Sequential(Lorentz(Curvature(1.0, low=0.5, high=2.0))).double()[0].c.dtype == torch.float64


def test_geoopts_ball_does_not_compile_as_one_graph() -> None:
    x, y = 0.1 * torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(geoopt.PoincareBall().dist, fullgraph=True, backend="eager")(x, y)
    ours = PoincareBall(1.0)
    torch._dynamo.reset()
    compiled = torch.compile(ours.dist, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, y), ours.dist(x, y))
