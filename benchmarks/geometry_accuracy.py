"""How accurate hyperbolic distances are, against mpmath at 50 digits and more.

    python benchmarks/geometry_accuracy.py              # one JSON object
    python benchmarks/geometry_accuracy.py --markdown   # the tables of docs/conventions.md

Every figure is end to end: tangent vectors at the origin are rounded to the type, mapped to points and measured in
it; the reference takes the same rounded vectors. Dimension 16, curvature -1. geoopt is left out where not installed;
hyperbolix has its own environment (python3.12 -m venv peers; peers/bin/pip install hyperbolix) and is named to the
benchmark by --hyperbolix peers/bin/python.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import mpmath as mp
import torch
from torch import Tensor

import _hyperbolix
import hyperbolic_reference as reference
from _timing import markdown
from leafward.geometry import Lorentz, PoincareBall

Distance = Callable[[Tensor, Tensor], Tensor]
"""Tangent vectors at the origin, whose lengths are radii, (rows, n), (rows, n) -> distances (rows,)."""

DIMENSION, ROWS = 16, 24
RANDOM_RADII = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 3.0, 8.0, 14.0, 20.0)
RAY_RADII = (1e-2, 0.1, 1.0, 5.0, 8.0, 10.0, 12.0, 15.0)
NEAR_RADII = (0.1, 1.0, 3.0, 5.0)
TYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCES = (1e-2, 1e-1)


def ours() -> dict[str, Distance]:
    space, ball = Lorentz(1.0), PoincareBall(1.0)
    return {
        "Lorentz dist": lambda u, v: space.dist(space.expmap0(u), space.expmap0(v)),
        "Lorentz dist, precise": lambda u, v: space.dist(space.expmap0(u), space.expmap0(v), precise=True),
        "Lorentz tangent_dist": space.tangent_dist,
        "Lorentz cdist": lambda u, v: space.cdist(space.expmap0(u), space.expmap0(v)).diagonal(),
        "Lorentz cdist fast": lambda u, v: space.cdist(space.expmap0(u), space.expmap0(v), precise=False).diagonal(),
        # a coordinate vector at the ball's origin is twice as long as its norm says
        "Poincaré dist": lambda u, v: ball.dist(ball.expmap0(u / 2), ball.expmap0(v / 2)),
    }


def textbook(u: Tensor, v: Tensor) -> Tensor:
    """acosh(-⟨x,y⟩_L) with the customary clamp at 1 + 1e-8, which in float32 is a clamp at 1."""
    lengths = (w.norm(dim=-1, keepdim=True).clamp(min=1e-8) for w in (u, v))
    x, y = (torch.sinh(r) / r * w for r, w in zip(lengths, (u, v), strict=True))
    times = torch.sqrt(1 + (x * x).sum(dim=-1)) * torch.sqrt(1 + (y * y).sum(dim=-1))
    return torch.acosh((times - (x * y).sum(dim=-1)).clamp(min=1 + 1e-8))


def peers() -> dict[str, Distance]:
    found: dict[str, Distance] = {"acosh": textbook}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it still uses torch.jit.script
            import geoopt
    except ImportError:
        return found
    space, ball = geoopt.Lorentz(1.0), geoopt.PoincareBall(1.0)

    def on_hyperboloid(u: Tensor, v: Tensor) -> Tensor:
        x, y = (space.expmap0(torch.nn.functional.pad(w, (1, 0))) for w in (u, v))
        return space.dist(x, y)

    return found | {
        "geoopt Lorentz": on_hyperboloid,
        "geoopt Poincaré": lambda u, v: ball.dist(ball.expmap0(u / 2), ball.expmap0(v / 2)),
    }


def random_pair(radius: float, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return tuple(reference.directions(rows, DIMENSION, seed).double() * radius for seed in (1, 2))  # pyright: ignore


def ray_pair(radius: float, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    u = reference.directions(rows, DIMENSION, 3).double() * radius
    return u, 1.1 * u


def near_pair(radius: float) -> tuple[Tensor, Tensor]:
    """Points 1e-3 apart: a lateral step in the tangent space grows by sinh(r)/r under the map, a radial one not."""
    ray = reference.directions(ROWS, DIMENSION, 4).double()
    step = reference.directions(ROWS, DIMENSION, 5).double()
    radial = (step * ray).sum(dim=-1, keepdim=True) * ray
    return radius * ray, radius * ray + 1e-3 * (radial + (step - radial) * radius / math.sinh(radius))


def error(distance: Distance, u: Tensor, v: Tensor) -> float | None:
    """Largest relative error; None where a distance is not finite."""
    got = distance(u, v)
    if not bool(torch.isfinite(got).all()):
        return None
    # cosh² of the radius is what the reference's arcosh loses
    with mp.workdps(50 + int(2 * float(torch.maximum(u.norm(dim=-1).max(), v.norm(dim=-1).max())))):
        return reference.worst(got, reference.distance(u, v))


def accuracy(contenders: dict[str, Distance]) -> list[dict[str, object]]:
    """Largest relative errors in float32, one row a case."""
    cases = [(f"random pair, r = {r:g}", random_pair(r)) for r in RANDOM_RADII]
    cases += [(f"same ray, r and 1.1 r, r = {r:g}", ray_pair(r)) for r in RAY_RADII]
    cases += [(f"1e-3 apart, r = {r:g}", near_pair(r)) for r in NEAR_RADII]
    return [
        {"case": name, **{who: error(distance, u.float(), v.float()) for who, distance in contenders.items()}}
        for name, (u, v) in cases
    ]


def radii(end: float) -> Iterator[float]:
    """0.25, 0.5, … to 30, then whole numbers."""
    radius = 0.0
    while (radius := radius + (0.25 if radius < 30.0 else 1.0)) <= end:
        yield radius


def trust_radius(distance: Distance, dtype: torch.dtype, pair: Callable, tolerance: float, end: float) -> float:
    """The largest radius up to which the error stays within `tolerance`; zero if it never does."""
    trusted = 0.0
    for radius in radii(end):
        u, v = (w.to(dtype) for w in pair(radius, rows=8))
        found = error(distance, u, v)
        if found is None or found > tolerance:
            break
        trusted = radius
    return trusted


def trust() -> list[dict[str, object]]:
    """Saturation and trust radii for each type, on both models."""
    rows: list[dict[str, object]] = []
    for space, name in ((Lorentz(1.0), "Lorentz dist"), (PoincareBall(1.0), "Poincaré dist")):
        for kind, dtype in TYPES.items():
            far = torch.zeros(DIMENSION, dtype=dtype).index_fill(0, torch.tensor(0), 1e4)
            end = float(space.dist0(space.expmap0(far)))
            row: dict[str, object] = {"function": name, "dtype": kind, "saturation": end}
            for tolerance in TOLERANCES:
                for label, pair in (("random pair", random_pair), ("same ray", ray_pair)):
                    row[f"{label} ≤ {tolerance:g}"] = trust_radius(ours()[name], dtype, pair, tolerance, end)
            rows.append(row)
    return rows


def gradients(contenders: dict[str, Distance]) -> list[dict[str, object]]:
    """Length of the gradient of a float32 distance by its first tangent vector, the largest of 24; None where one of
    them is not finite."""
    ray = reference.directions(ROWS, DIMENSION, 6)
    zero = torch.zeros_like(ray)
    cases = {
        "x = y, radius 1": (ray, ray),
        "x = y = origin": (zero, zero),
        "x = origin, y at radius 1": (zero, ray),
        "x at radius 1e-12, y = origin": (1e-12 * ray, zero),
        "x at radius 1e-12, y at radius 1": (1e-12 * ray, ray),
        "x at radius 1000, y at radius 1": (1000.0 * ray, ray),
    }
    rows: list[dict[str, object]] = []
    for name, (u, v) in cases.items():
        row: dict[str, object] = {"case": name}
        for who, distance in contenders.items():
            start = u.clone().requires_grad_()
            (slope,) = torch.autograd.grad(distance(start, v).sum(), start)
            length = float(slope.norm(dim=-1).max())
            row[who] = length if math.isfinite(length) else None
        rows.append(row)
    return rows


def table(rows: list[dict[str, object]], form: str) -> str:
    def cell(value: object) -> str:
        if isinstance(value, str):
            return value
        return "non-finite" if value is None else format(value, form)

    return markdown(list(rows[0]), [[cell(value) for value in row.values()] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print tables instead of JSON")
    parser.add_argument(
        "--hyperbolix", type=Path, help="a Python (3.12 or newer) that has hyperbolix, to compare with it"
    )
    arguments = parser.parse_args()
    # Its gradients stay in JAX, so it has no column in the third table.
    apart = {} if arguments.hyperbolix is None else _hyperbolix.contenders(arguments.hyperbolix)
    contenders = ours() | peers()
    result = {
        "accuracy": accuracy(contenders | apart),
        "trust_radius": trust(),
        "gradient_length": gradients(contenders),
    }
    if not arguments.markdown:
        print(json.dumps(result, indent=2, ensure_ascii=False))
        return
    print(table(result["accuracy"], ".0e"), table(result["trust_radius"], "g"), sep="\n\n", end="\n\n")
    print(table(result["gradient_length"], ".3g"))


if __name__ == "__main__":
    main()
