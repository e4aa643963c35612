"""How fast the geometry is: forward and backward, eager and compiled, beside geoopt and HypLL.

    python benchmarks/geometry.py --device cpu      # one thread; --markdown for the tables of docs/conventions.md
    python benchmarks/geometry.py --device cuda     # also: compiled kernels against the time their bytes need

Batches are 8192×512 float32. `dist` includes `expmap0` of both sides, `centroid` is of 256 sets of 32 points, `cdist`
is of 256 against 256 points (the peers hold all differences at once) and of 4096 against 4096 (only ours can).
"space parts" are the functions of `leafward.geometry.lorentz`, which carry no time coordinate, with `precise=False`
for `cdist`. On the CPU the figure to quote is process time. Libraries that are not installed are left out, with a note.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from _timing import Call, cuda_ms, first_line, interleaved, markdown
from leafward.geometry import Lorentz, PoincareBall, lorentz, pairs

Function = Callable[..., Tensor]

ROWS, WIDTH, SET = 8192, 512, 32
FEW, MANY = 256, 4096
NOT_OFFERED = "not offered"


@dataclass
class Contender:
    """One library's way to do each operation; None where it has none."""

    expmap0: Function
    dist: Function
    cdist: Function
    centroid: Function | None = None
    leaf: Callable[[Tensor], Tensor] = Tensor.clone  # what its expmap0 takes, from the free coordinates (..., n)
    broadcasts: bool = False  # whether cdist holds an (N, M, n) tensor


def ours() -> dict[str, Contender]:
    space, ball = Lorentz(1.0), PoincareBall(1.0)
    return {
        "leafward Lorentz": Contender(space.expmap0, space.dist, space.cdist, space.centroid),
        "leafward space parts": Contender(
            lambda v: lorentz.expmap0(v, 1.0),
            lambda x, y: lorentz.dist(x, y, 1.0),
            lambda x, y: pairs.distances(x, y, 1.0, precise=False),
            lambda x: lorentz.centroid(x, None, 1.0),
        ),
        "leafward Poincaré": Contender(ball.expmap0, ball.dist, ball.cdist, ball.centroid),
    }


def geoopt_contenders(device: str) -> dict[str, Contender]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it still uses torch.jit.script
        import geoopt
    space, ball = geoopt.Lorentz(1.0).to(device), geoopt.PoincareBall(1.0).to(device)
    return {
        "geoopt Lorentz": Contender(
            space.expmap0,
            space.dist,
            lambda x, y: space.dist(x[:, None], y[None]),
            leaf=lambda v: torch.nn.functional.pad(v, (1, 0)),
            broadcasts=True,
        ),
        "geoopt Poincaré": Contender(
            ball.expmap0,
            ball.dist,
            lambda x, y: ball.dist(x[:, None], y[None]),
            lambda x: ball.weighted_midpoint(x, reducedim=[-2]),
            broadcasts=True,
        ),
    }


def hypll_contenders(device: str) -> dict[str, Contender]:
    from hypll.manifolds.poincare_ball import Curvature
    from hypll.manifolds.poincare_ball import PoincareBall as Ball
    from hypll.tensors import ManifoldTensor, TangentTensor

    ball = Ball(Curvature(1.0, constraining_strategy=torch.abs).to(device))

    def point(x: Tensor) -> ManifoldTensor:
        return ManifoldTensor(x, ball)

    return {
        "HypLL Poincaré": Contender(
            lambda v: ball.expmap(TangentTensor(v, manifold=ball)).tensor,
            lambda x, y: ball.dist(point(x), point(y)),
            lambda x, y: ball.cdist(point(x[None]), point(y[None]))[0],
            lambda x: ball.midpoint(point(x), batch_dim=1).tensor,
            broadcasts=True,
        )
    }


def contenders(device: str) -> tuple[dict[str, Contender], list[str]]:
    """All that are installed, and a note for each that is not."""
    found, notes = ours(), []
    for make in (geoopt_contenders, hypll_contenders):
        try:
            found |= make(device)
        except ImportError as missing:
            notes.append(f"left out: {first_line(missing)}")
    return found, notes


def problem(operation: str, who: Contender, device: str) -> tuple[Function, list[Tensor]] | str:
    """The function to time and its inputs, or why there is none."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(ROWS, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(2))
    a, b = who.leaf(u).to(device), who.leaf(v).to(device)
    if operation == "expmap0":
        return who.expmap0, [a]
    if operation == "dist":
        return lambda a, b: who.dist(who.expmap0(a), who.expmap0(b)), [a, b]
    if operation == "centroid":
        if who.centroid is None:
            return NOT_OFFERED
        return who.centroid, [who.expmap0(a).detach().unflatten(0, (-1, SET))]
    count = int(operation.removeprefix("cdist "))
    if who.broadcasts and count > FEW:
        return f"needs {4 * count**2 * WIDTH / 1e9:.0f} GB for one tensor"
    return who.cdist, [who.expmap0(a[:count]).detach(), who.expmap0(b[:count]).detach()]


OPERATIONS = ("expmap0", "dist", "centroid", f"cdist {FEW}", f"cdist {MANY}")


def forward_backward(function: Function, inputs: list[Tensor]) -> Call:
    """A call of the function and of its gradient by all inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    upstream = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, upstream)


def compare(operation: str, mode: str, found: dict[str, Contender], device: str, rounds: int) -> dict[str, object]:
    """Times of one operation for all contenders: {name: {"cpu_ms", "wall_ms"} or {"cuda_ms"} or the reason why not}."""
    results: dict[str, object] = {}
    calls: dict[str, Call] = {}
    torch.compiler.reset()
    for name, who in found.items():
        task = problem(operation, who, device)
        if isinstance(task, str):
            results[name] = task
            continue
        function, inputs = task
        try:
            run = torch.compile(function, fullgraph=True) if mode == "compiled" else function
            calls[name] = forward_backward(run, inputs)
            calls[name]()
        except Exception as error:  # a peer may fail in any way; the table says how
            calls.pop(name, None)
            results[name] = f"{'compile ' if mode == 'compiled' else ''}fails ({first_line(error)})"
    if device == "cpu":
        results |= interleaved(calls, rounds)
    else:
        results |= {name: {"cuda_ms": cuda_ms(call, rounds)} for name, call in calls.items()}
    return {name: results[name] for name in found}


def copy_bandwidth() -> float:
    """Bytes a second of a device-to-device copy, read and written ones together."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").zero_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (cuda_ms(lambda: target.copy_(source), 20) / 1e3)


KERNELS: dict[str, tuple[int, Function]] = {
    "expmap0": (1, lambda v: lorentz.expmap0(v, 1.0)),
    "logmap0": (1, lambda x: lorentz.logmap0(x, 1.0)),
    "lift": (1, lambda x: lorentz.lift(x, 1.0)),
    "dist": (2, lambda x, y: lorentz.dist(x, y, 1.0)),
    "residual": (2, lambda x, y: lorentz.residual(x, y, 1.0, 1.0)),
}
"""Elementwise operations: how many inputs, and the function, on space parts."""

COLD_BYTES = 2**30  # inputs in rotation, far more than any cache holds


def kernel_time(name: str, rows: int, bandwidth: float, rounds: int) -> dict[str, object]:
    """Milliseconds of a compiled operation and how many times longer that is than its bytes need.

    The fewest bytes: forward reads the inputs and writes the output; backward reads the inputs and the output's
    gradient and writes the inputs' gradients. Backward alone is the difference of the two measurements.
    """
    count, function = KERNELS[name]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True)
    sets = max(2, math.ceil(COLD_BYTES / (4 * rows * WIDTH * count)))
    batches = [
        [(torch.randn(rows, WIDTH, device="cuda") / WIDTH**0.5).requires_grad_() for _ in range(count)]
        for _ in range(sets)
    ]
    output = compiled(*batches[0])
    upstream = torch.randn_like(output)
    inward, outward = 4 * rows * WIDTH * count, output.numel() * 4
    need = {"forward": inward + outward, "backward": 2 * inward + outward}
    need["both"] = need["forward"] + need["backward"]

    def forward() -> None:
        for batch in batches:
            compiled(*batch)

    def both() -> None:
        for batch in batches:
            torch.autograd.grad(compiled(*batch), batch, upstream)

    ms = {"forward": cuda_ms(forward, rounds) / sets, "both": cuda_ms(both, rounds) / sets}
    ms["backward"] = ms["both"] - ms["forward"]
    parts = {part: {"ms": ms[part], "times_byte_time": ms[part] / (1e3 * need[part] / bandwidth)} for part in need}
    return {"operation": name, "rows": rows, **parts}


def table(times: dict[str, dict[str, dict[str, object]]], key: str) -> str:
    """One row for each operation and mode, one column for each contender, in milliseconds."""
    names = list(next(iter(next(iter(times.values())).values())))

    def cell(value: object) -> str:
        if isinstance(value, dict):
            return f"{value[key]:.1f}"
        return str(value).split(" (")[0]

    rows = [
        [f"{operation}, {mode}", *(cell(result[name]) for name in names)]
        for operation, modes in times.items()
        for mode, result in modes.items()
    ]
    return markdown(["ms", *names], rows)


RIVALS = (
    ("leafward Lorentz", "geoopt Lorentz"),
    ("leafward space parts", "geoopt Lorentz"),
    ("leafward Poincaré", "geoopt Poincaré"),
    ("leafward Poincaré", "HypLL Poincaré"),
)


def speed_ups(times: dict[str, dict[str, dict[str, object]]], key: str) -> list[dict[str, object]]:
    """How many times less each of ours takes than the same model of a peer; None where one of them does not run."""
    rows: list[dict[str, object]] = []
    for operation, modes in times.items():
        for mode, result in modes.items():
            row: dict[str, object] = {"times faster": f"{operation}, {mode}"}
            for mine, peer in RIVALS:
                own, theirs = result.get(mine), result.get(peer)
                ran = isinstance(own, dict) and isinstance(theirs, dict)
                row[f"{mine} than {peer}"] = theirs[key] / own[key] if ran else None  # pyright: ignore
            rows.append(row)
    return rows


def speed_up_table(rows: list[dict[str, object]]) -> str:
    def cell(value: object) -> str:
        return "" if value is None else value if isinstance(value, str) else f"{value:.1f}"

    return markdown(list(rows[0]), [[cell(value) for value in row.values()] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each contender")
    parser.add_argument("--markdown", action="store_true", help="print tables instead of JSON")
    arguments = parser.parse_args()
    device, rounds = arguments.device, arguments.rounds
    torch.set_num_threads(1)
    found, notes = contenders(device)
    times = {
        operation: {mode: compare(operation, mode, found, device, rounds) for mode in ("eager", "compiled")}
        for operation in OPERATIONS
    }
    key = "cpu_ms" if device == "cpu" else "cuda_ms"
    if arguments.markdown:
        print(table(times, key), speed_up_table(speed_ups(times, key)), sep="\n\n")
        return
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "notes": notes,
        "times": times,
        "speed_ups": speed_ups(times, key),
    }
    if device == "cuda":
        bandwidth = copy_bandwidth()
        result["copy_gigabytes_per_second"] = bandwidth / 1e9
        result["kernels"] = [
            kernel_time(name, rows, bandwidth, rounds)
            for rows in (ROWS, 16 * ROWS, 64 * ROWS)  # the smallest is bound by launching, not by bytes
            for name in KERNELS
        ]
    print(json.dumps(result, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
