"""Distances by hyperbolix, in an environment of its own: it needs JAX and Python 3.12 or newer.

This file runs there as a worker (it must import nothing of ours): a line of JSON with two .npy files of tangent vectors
comes in, one with the .npy file of their distances goes out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

NAMES = {"hyperbolix Lorentz": "lorentz", "hyperbolix Poincaré": "poincare"}


def contenders(python: Path) -> dict[str, Callable]:
    """What `geometry_accuracy.peers` wants, from a worker under another Python."""
    import numpy as np
    import torch

    folder = Path(tempfile.mkdtemp(prefix="hyperbolix-"))
    worker = subprocess.Popen([python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={})
    tasks, answers = worker.stdin, worker.stdout
    assert tasks is not None
    assert answers is not None

    def measured(space: str, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for name, tensor in (("u", u), ("v", v)):
            np.save(folder / f"{name}.npy", tensor.detach().numpy())
        print(json.dumps({"space": space, "folder": str(folder)}), file=tasks, flush=True)
        if not answers.readline():
            raise RuntimeError(f"{python} cannot run hyperbolix")
        return torch.from_numpy(np.load(folder / "d.npy"))

    return {name: lambda u, v, space=space: measured(space, u, v) for name, space in NAMES.items()}


def work() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from hyperbolix.manifolds import Hyperboloid, Poincare

    jax.config.update("jax_platforms", "cpu")
    flat, ball = Hyperboloid(dtype=jnp.float32), Poincare(dtype=jnp.float32)

    def lorentz(u, v):
        x, y = (flat.expmap_0(jnp.concatenate([jnp.zeros(1, u.dtype), w]), 1.0) for w in (u, v))
        return flat.dist(x, y, 1.0)

    def poincare(u, v):  # a coordinate vector at the ball's origin is twice as long as its norm says
        return ball.dist(ball.expmap_0(u / 2, 1.0), ball.expmap_0(v / 2, 1.0), 1.0)

    each = {"lorentz": jax.jit(jax.vmap(lorentz)), "poincare": jax.jit(jax.vmap(poincare))}
    for line in sys.stdin:
        task = json.loads(line)
        folder = Path(task["folder"])
        np.save(folder / "d.npy", np.asarray(each[task["space"]](np.load(folder / "u.npy"), np.load(folder / "v.npy"))))
        print("done", flush=True)


if __name__ == "__main__":
    work()
