"""The kernels of the cluster mixer against plain torch in float64, as a program: on the CPU Triton's interpreter must
be chosen before it is imported.

TRITON_INTERPRET=1 python cluster_kernels_check.py cpu
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import timm
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

import leafward.systems.hcformer.model  # noqa: F401  (registers the models)
from leafward.nn.kernels import use
from leafward.systems.hcformer import kernels
from leafward.systems.hcformer.mixer import ClusterMixer, Layout, Windows

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
HALVES = (torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float16,)  # the interpreter has no bfloat16
STAGES = (  # windows, centres, global centres, size of the map: as in HCFormer's four stages, and what they leave out
    (Windows(side=8), 4, 4, (8, 16)),  # N = 64, M = 16
    (Windows(side=4), 2, 4, (12, 4)),  # N = 16, M = 4: four windows to a tile, over the end of an image
    (Windows(count=2), 4, 4, (14, 14)),  # N = 49: padded tile, centres that overlap, global regions too
    (Windows(count=1), 4, 0, (7, 7)),  # no window level
    (Windows(count=2), 3, 2, (10, 6)),  # windows that are not square, M = 9: padded centres
)


def error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def mixer(stage: int, geometry: str = "lorentz", heads: int = 2, head_dim: int = 6, **changes) -> ClusterMixer:
    windows, centres, global_centres, _ = STAGES[stage]
    module = ClusterMixer(20, heads, head_dim, windows, centres, global_centres, geometry, **changes).to(DEVICE)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def results(module: ClusterMixer, x: Tensor, seed: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    module.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    out = module(leaf, module.layout(*x.shape[1:3], x.device))
    (out * seed.to(out.dtype)).sum().backward()
    grads = [leaf.grad, *(parameter.grad for parameter in module.parameters())]
    return [out.detach(), *(grad.clone() for grad in grads)]


def served() -> int:
    """Calls of the kernels until now."""
    return len(_CALLS)


_CALLS: list[None] = []
_patches = kernels.cluster_patches


def _counted(*arguments) -> tuple[Tensor, Tensor]:
    _CALLS.append(None)
    return _patches(*arguments)


kernels.cluster_patches = _counted


def layers() -> None:
    """Every stage, both geometries, in float32 against float64, forward and backward."""
    for stage, (*_, size) in enumerate(STAGES):
        for geometry in ("lorentz", "euclidean"):
            module = mixer(stage, geometry, curvature=0.7, learn_curvature=True)
            x = torch.randn(2, *size, 20, device=DEVICE)
            seed = torch.randn_like(x)
            use("triton")
            before = served()
            ours = results(module, x, seed)
            assert served() == before + 1
            use("torch")
            plain = results(module, x, seed)
            exact = results(module.double(), x.double(), seed)
            assert served() == before + 1
            names = ["out", "x", *(name for name, _ in module.named_parameters())]
            # Some gradients are small rests of large terms, in plain float32 too; a GPU's exponentials are less exact.
            factor, least = (5.0, 2e-6) if DEVICE == "cpu" else (20.0, 5e-5)
            for name, one, two, true in zip(names, ours, plain, exact, strict=True):
                found, alone = (error(one, true), error(two, true)), true.numel() <= 2
                assert found[0] < factor * found[1] + (5e-5 if alone else least), (stage, geometry, name, found)


def pooled() -> None:
    """Means of windows and of global regions, also where those overlap, and where a program has some windows only."""
    for windows, centres, size in (
        (Windows(side=8), 4, (24, 32)),  # a window to a tile, six to a program
        (Windows(side=2), 3, (6, 22)),  # sixteen to a tile
        (Windows(count=2), 4, (14, 30)),
        (Windows(side=1), 4, (2, 3)),  # fewer tokens than centres: those of a token are many
    ):
        layout = Layout.of(*size, windows, 2, centres, torch.device(DEVICE))
        for dtype, bound in ((torch.float32, 1e-6), (HALVES[0], 1e-2)):
            x = torch.randn(2, *size, 40, device=DEVICE).to(dtype).requires_grad_()
            ours, exact = kernels.cluster_pool(x, layout.side, centres), layout.pooled(x.double())
            assert (ours.dtype, ours.shape) == (dtype, exact.shape)
            seed = torch.randn_like(ours)
            grads = [torch.autograd.grad(out, x, seed.to(out.dtype))[0] for out in (ours, exact)]
            assert error(ours, exact) < bound, (windows, dtype, error(ours, exact))
            assert error(grads[0], grads[1].double()) < bound, (windows, dtype, error(grads[0], grads[1].double()))


def close_points() -> None:
    """Windows that nearly agree: angles of 1e-4, where 1 − cos θ has no digits left in float32. And zero vectors."""
    module = mixer(0)
    base = torch.randn(20, device=DEVICE)
    x = (base + 1e-4 * torch.randn(1, 8, 16, 20, device=DEVICE)).contiguous()
    seed = torch.randn_like(x)
    use("triton")
    ours = results(module, x, seed)
    flat = results(module, torch.zeros_like(x), seed)
    assert all(tensor.isfinite().all() for tensor in flat)
    use("torch")
    exact = results(module.double(), x.double(), seed)
    assert error(ours[0], exact[0]) < 1e-4, error(ours[0], exact[0])


def far_points() -> None:
    """Radii at their bound, where sinh⁴ has no place in float32: the directions have their gradients still."""
    module = mixer(0)
    with torch.no_grad():
        module.window_level.similarity.log_scale += 5.0
        module.window_level.similarity.log_alpha -= 2.0
    x = torch.randn(2, 8, 16, 20, device=DEVICE)
    seed = torch.randn_like(x)
    found = []
    for which in ("triton", "torch"):
        use(which)
        found.append(results(module, x, seed))
    names = ["out", "x", *(name for name, _ in module.named_parameters())]
    for name, ours, plain in zip(names, *found, strict=True):
        if name.endswith("log_scale"):  # plain torch has rounding errors of zero
            assert not ours.any()
            assert plain.abs().max() < 1e-5
        else:
            assert error(ours, plain.double()) < 1e-4, (name, error(ours, plain.double()))


def many_windows() -> None:
    """More windows than a kernel holds, as a large image has: the patches go by kernels all the same."""
    module = mixer(1)
    x = torch.randn(2, 24, 16, 20, device=DEVICE)  # 24 windows of 16 tokens
    seed = torch.randn_like(x)
    use("triton")
    whole, before = results(module, x, seed), served()
    with at_most(16):
        parted = results(module, x, seed)
    assert served() == before + 1
    for one, two in zip(parted, whole, strict=True):
        assert error(one, two.double()) < 1e-4, error(one, two.double())


@contextmanager
def at_most(tokens: int) -> Iterator[None]:
    """As if a kernel held no more tokens at once."""
    most, kernels.MOST_TOKENS = kernels.MOST_TOKENS, tokens
    try:
        yield
    finally:
        kernels.MOST_TOKENS = most


def parts() -> None:
    """Large windows tile after tile without gradients; with gradients in plain torch."""
    for windows, centres, size, width in (
        (Windows(count=2), 4, (24, 28), 20),  # 168 tokens, in two tiles of which the second is not full
        (Windows(count=1), 3, (17, 16), 8),
    ):
        for geometry in ("lorentz", "euclidean"):
            module = ClusterMixer(width, 2, 6, windows, centres, 4, geometry).to(DEVICE)
            x = torch.randn(2, *size, width, device=DEVICE)
            layout = module.layout(*size, x.device)
            use("triton")
            before = served()
            with at_most(64), torch.no_grad():
                ours = module(x, layout)
            assert served() == before + 1
            use("torch")
            exact = module.double()(x.double(), layout)
            assert error(ours, exact) < 2e-5, (windows, geometry, error(ours, exact))
    module, x = mixer(2).requires_grad_(), torch.randn(1, 14, 14, 20, device=DEVICE)
    use("triton")
    before = served()
    with at_most(16):
        results(module, x, torch.ones_like(x))
    assert served() == before


def half() -> None:
    """Autocast: output in the half type, as near to float64 as plain torch is."""
    for dtype in HALVES:
        for stage in range(4):
            autocast(stage, dtype)


def autocast(stage: int, dtype: torch.dtype) -> None:
    module = mixer(stage, heads=3, head_dim=24)
    x = torch.randn(1, *STAGES[stage][-1], 20, device=DEVICE)
    seed = torch.randn_like(x)
    found = []
    for which in ("triton", "torch"):
        use(which)
        with torch.autocast(DEVICE, dtype):
            found.append(results(module, x, seed))
        assert found[-1][0].dtype == dtype
    exact = results(module.double(), x.double(), seed)
    for name, ours, plain, true in zip(range(len(exact)), *found, exact, strict=True):
        # Gradients of one number a head are small rests of large terms, and in half types near chance.
        bound = 1.0 if true.numel() <= 3 else 1.5 * error(plain, true) + 2e-3
        assert error(ours, true) < bound, (stage, dtype, name, error(ours, true))


def compiled() -> None:
    """In a whole graph and under gradient checkpointing: what the kernels give as they are."""
    use("triton")
    compiler = lookup_backend("inductor" if DEVICE == "cuda" else "aot_eager")
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append(str(graph.graph))
        return compiler(graph, inputs)

    for stage in (0, 3):
        module = mixer(stage)
        x = torch.randn(1, *STAGES[stage][-1], 20, device=DEVICE)
        seed = torch.randn_like(x)
        torch._dynamo.reset()
        plain, forward = results(module, x, seed), module.forward
        for call in (
            torch.compile(forward, fullgraph=True, backend=backend),
            lambda x, layout, forward=forward: checkpoint(forward, x, layout, use_reentrant=False),
        ):
            module.forward = call
            for one, two in zip(results(module, x, seed), plain, strict=True):
                assert error(one, two.double()) < 1e-5, (stage, error(one, two.double()))
    assert len(graphs) == 2
    assert all("leafward.cluster_patches" in graph for graph in graphs), "kernels must serve compiled models too"


def model() -> None:
    """A whole model at its real size, compiled, in bfloat16: the same loss and gradients with kernels and without."""
    net = timm.create_model("hcformer_tiny", depths=(1, 1, 1, 1), num_classes=5, init_values=0.5).to(DEVICE).train()
    x = torch.randn(4, 3, 224, 224, device=DEVICE)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return net(x).float().square().sum()

    outcomes = []
    for which in ("torch", "triton", "compiled"):
        use("torch" if which == "torch" else "triton")
        torch._dynamo.reset()
        value = (torch.compile(loss, fullgraph=True) if which == "compiled" else loss)(x)
        grads = torch.autograd.grad(value, list(net.parameters()))
        outcomes.append((value, torch.cat([g.flatten() for g in grads])))
    for value, grads in outcomes[1:]:
        assert error(value, outcomes[0][0].double()) < 2e-2
        assert error(grads, outcomes[0][1].double()) < 5e-2, error(grads, outcomes[0][1].double())


if __name__ == "__main__":
    for check in (
        layers,
        pooled,
        close_points,
        far_points,
        many_windows,
        parts,
        half,
        compiled,
        *((model,) if DEVICE == "cuda" else ()),
    ):
        torch.manual_seed(0)
        check()
        print(check.__name__, "ok", flush=True)
