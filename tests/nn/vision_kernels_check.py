"""The kernels of the vision layers against float64, as a program (see kernels_check.py).

TRITON_INTERPRET=1 python vision_kernels_check.py cpu
"""

import sys

import torch
from timm.layers import DropPath
from torch import Tensor

from leafward.nn.kernels import use
from leafward.systems.hcformer import kernels
from leafward.systems.hcformer.mixer import ClusterMixer, Windows
from leafward.systems.hcformer.model import Block, HCFormer, ImageNorm

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16


def error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


def gradients(call, tensors: list[Tensor], seed: Tensor) -> list[Tensor]:
    """What `call` gives, and the gradients of (call · seed)."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = call(*leaves)
    return [out, *torch.autograd.grad(out, leaves, seed.to(out.dtype))]


def moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    flat = x.flatten(1)
    return flat.mean(dim=1), (flat.var(dim=1, correction=0) + eps).rsqrt()


def exact_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    mean, rate = (part.view(-1, 1, 1, 1) for part in moments(x, eps))
    return (x - mean) * rate * w + b


def image_norm() -> None:
    """Odd maps, a channel count that is no power of two, and a mean far from zero: float32 sums would lose it."""
    for size, width, shift in (((5, 7), 24, 0.0), ((9, 11), 16, 1000.0), ((3, 30), 200, -3.0)):
        x = torch.randn(3, *size, width, device=DEVICE) + shift
        w, b = torch.randn(width, device=DEVICE), torch.randn(width, device=DEVICE)
        mean, rate = moments(x.double(), 1e-5)
        found = kernels.image_moments(x, 1e-5)
        assert error(found[:, 0], mean) < 1e-6, error(found[:, 0], mean)
        assert error(found[:, 1], rate) < 1e-5, error(found[:, 1], rate)

        def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return kernels.image_norm(x, kernels.image_moments(x, 1e-5), w, b, torch.float32)[0]

        seed = torch.randn_like(x)
        found = gradients(ours, [x, w, b], seed)
        exact = gradients(lambda *t: exact_norm(*t, 1e-5), [t.double() for t in (x, w, b)], seed)
        for one, two in zip(found, exact, strict=True):
            assert error(one, two) < (1e-5 if shift < 100 else 1e-3), (width, error(one, two))
        assert kernels.image_norm(x, kernels.image_moments(x, 1e-5), w, b, HALF)[0].dtype == HALF


def beside() -> None:
    """The gradient of a residual sum that reaches x by way of the norm, for float32 and half x, and of either alone."""
    shape, width, eps = (2, 12, 12, 24), 24, 1e-5
    w, b, gamma = (torch.randn(width, device=DEVICE) for _ in range(3))
    seed = torch.randn(*shape, device=DEVICE)
    x = torch.randn(*shape, device=DEVICE)

    def ours(x: Tensor, w: Tensor, b: Tensor, gamma: Tensor) -> Tensor:
        h, stead = kernels.image_norm(x, kernels.image_moments(x, eps), w, b, torch.float32)
        assert stead.untyped_storage().nbytes() == 4  # no map of it
        return kernels.scaled_add(x, h, gamma, None, eps, stead)[0]

    exact = gradients(lambda x, w, b, g: x + g * exact_norm(x, w, b, eps), [t.double() for t in (x, w, b, gamma)], seed)
    for dtype, bound in ((torch.float32, 1e-5), (HALF, 1e-2)):
        found = gradients(ours, [x.to(dtype), w, b, gamma], seed)
        assert found[1].dtype == dtype
        for one, two in zip(found, exact, strict=True):
            assert error(one, two) < bound, (dtype, error(one, two))

    def without_norm(x: Tensor) -> Tensor:
        _, stead = kernels.image_norm(x, kernels.image_moments(x, eps), w, b, torch.float32)
        return kernels.scaled_add(x, torch.zeros_like(x), gamma, None, eps, stead)[0]

    assert torch.equal(gradients(without_norm, [x], seed)[1], seed)


def scaled_add() -> None:
    for width, dropped in ((24, False), (200, True)):
        x, y = torch.randn(2, 5, 9, width, device=DEVICE), torch.randn(2, 5, 9, width, device=DEVICE)
        gamma = torch.randn(width, device=DEVICE)
        keep = torch.tensor([0.0, 1.25], device=DEVICE) if dropped else None
        seed = torch.randn_like(x)
        found = gradients(lambda *t, keep=keep: kernels.scaled_add(*t, keep, 1e-5)[0], [x, y, gamma], seed)

        def exact_sum(x: Tensor, y: Tensor, gamma: Tensor, keep: Tensor | None = keep) -> Tensor:
            return x + y * gamma * (1.0 if keep is None else keep.view(-1, 1, 1, 1))

        for one, two in zip(found, gradients(exact_sum, [x, y, gamma], seed), strict=True):
            assert error(one, two) < 1e-5
        z, parts = kernels.scaled_add(x.to(HALF), y.to(HALF), gamma, keep, 1e-5)
        assert z.dtype == torch.float32
        assert error(parts, torch.stack(moments(z, 1e-5), dim=1)) < 1e-5


def normed_mlp() -> None:
    for width, hidden, dropped, dtype, spread, bound in (
        (16, 128, False, torch.float32, 1.0, 2e-5),
        (16, 128, False, torch.float32, 8.0, 2e-5),  # most units where GELU is u or 0
        (32, 64, True, torch.float32, 1.0, 2e-5),
        (32, 256, True, HALF, 1.0, 2e-2 if HALF is torch.bfloat16 else 4e-3),
        (64, 128, False, torch.float16, 1.0, 4e-3),
    ):
        shapes = [(width,), (width,), (hidden, width), (hidden,), (width, hidden), (width,), (width,)]
        weights = [
            torch.randn(*shape, device=DEVICE) * (shape[-1] ** -0.5 if len(shape) > 1 else 1) for shape in shapes
        ]
        weights[2] *= spread
        x = 2.0 * torch.randn(3, 5, 9, width, device=DEVICE) + 0.5  # 45 places: tiles reach over images
        keep = torch.tensor([2.0, 0.0, 1.0], device=DEVICE) if dropped else None
        seed = torch.randn_like(x)

        def ours(x: Tensor, *weights: Tensor, keep=keep, dtype=dtype) -> Tensor:
            parts = kernels.image_moments(x, 1e-5)
            pairs = [(weights[i], weights[i + 1]) for i in (0, 2, 4)]
            return kernels.normed_mlp(x, parts, *pairs, weights[6], keep, dtype)

        def exact(x: Tensor, nw, nb, w1, b1, w2, b2, gamma, keep=keep) -> Tensor:
            hidden = torch.nn.functional.gelu(exact_norm(x, nw, nb, 1e-5) @ w1.T + b1)
            return x + gamma * (hidden @ w2.T + b2) * (1.0 if keep is None else keep.double().view(-1, 1, 1, 1))

        found = gradients(ours, [x, *weights], seed)
        for index, (one, two) in enumerate(
            zip(found, gradients(exact, [t.double() for t in (x, *weights)], seed), strict=True)
        ):
            assert one.shape == two.shape
            assert error(one, two) < bound, (width, index, error(one, two))


def block() -> None:
    """A whole block by kernels, eager and compiled, against plain torch; with dropped paths and in a half type."""
    for width, ratio in ((32, 8.0), (24, 4.0)):
        torch.manual_seed(1)
        layer = Block(ClusterMixer(width, 2, 16, Windows(side=4), 2, 2), width, ratio, 0.0, 0.5).to(DEVICE)
        x = torch.randn(2, 8, 8, width, device=DEVICE)
        layout = layer.mixer.layout(8, 8, x.device)
        seed = torch.randn_like(x)
        results = []
        for how in ("torch", "triton", "compiled"):
            use("torch" if how == "torch" else "triton")
            torch._dynamo.reset()
            call = torch.compile(layer, fullgraph=True, backend="aot_eager") if how == "compiled" else layer
            leaf = x.clone().requires_grad_()
            out = call(leaf, layout)
            results.append([out, *torch.autograd.grad(out, [leaf, *layer.parameters()], seed)])
        for found in results[1:]:
            for one, two in zip(found, results[0], strict=True):
                assert error(one, two) < (1e-3 if DEVICE == "cpu" else 5e-3), (width, error(one, two))
        use("triton")
        with torch.autocast(DEVICE, HALF):
            half = layer(x, layout)
        assert half.dtype == torch.float32, "the residual stream stays in float32"
        assert error(half, results[0][0]) < 2e-2
        layer.drop_path = DropPath(1.0)
        assert torch.equal(layer.train()(x, layout), x), "all paths are dropped"


def edges() -> None:
    """Maps that lie otherwise in memory, of one place, and no images at all."""
    layer = Block(ClusterMixer(32, 2, 16, Windows(side=4), 2, 2), 32, 8.0, 0.0, 0.5).to(DEVICE)
    x, layout = torch.randn(2, 8, 8, 32, device=DEVICE), layer.mixer.layout(8, 8, torch.device(DEVICE))
    seed = torch.randn_like(x)
    apart = [t.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1) for t in (x, seed)]
    found, exact = (gradients(lambda x: layer(x, layout), [x], seed) for x, seed in (apart, (x, seed)))
    for one, two in zip(found, exact, strict=True):
        assert error(one, two) < 1e-6
    layer.zero_grad()
    leaf = x[:0].clone().requires_grad_()
    out = layer(leaf, layout)
    out.sum().backward()
    assert out.shape == leaf.grad.shape == (0, 8, 8, 32)
    assert all(not p.grad.any() for p in layer.parameters())
    w, b = torch.randn(32, device=DEVICE), torch.randn(32, device=DEVICE)
    place = torch.randn(3, 1, 1, 32, device=DEVICE)
    ours, _ = kernels.image_norm(place, kernels.image_moments(place, 1e-5), w, b, torch.float32)
    assert error(ours, exact_norm(place.double(), w, b, 1e-5)) < 1e-5


def model() -> None:
    """A small model in a half type: norms hand on the half type, loss and gradients are those of plain torch."""
    torch.manual_seed(2)
    net = HCFormer(num_classes=5, depths=(1, 1, 1, 1), dims=(16, 32, 24, 40), heads=(2, 2, 2, 2), init_values=0.3)
    net = net.to(DEVICE).train()
    x = torch.randn(2, 3, 64, 64, device=DEVICE)
    outcomes = []
    for which in ("torch", "triton"):
        use(which)
        kinds = []
        norms = [m for m in net.modules() if isinstance(m, ImageNorm)]
        handles = [m.register_forward_hook(lambda _m, _i, out, kinds=kinds: kinds.append(out.dtype)) for m in norms]
        with torch.autocast(DEVICE, HALF):
            loss = net(x).float().square().mean()
        grads = torch.autograd.grad(loss, list(net.parameters()))
        for handle in handles:
            handle.remove()
        assert set(kinds) == {HALF}
        outcomes.append((loss, torch.cat([g.flatten() for g in grads])))
    assert error(outcomes[1][0], outcomes[0][0]) < 1e-2
    assert error(outcomes[1][1], outcomes[0][1]) < 5e-2, error(outcomes[1][1], outcomes[0][1])


def kept_bytes(layer: Block, x: Tensor) -> int:
    """What autograd keeps for the way back through the MLP's half of a block, its weights and x apart."""
    layer.mixer = torch.nn.Identity()  # another's half
    layer.mixer.forward = lambda x, layout: x
    spared = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), x)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in spared:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast(DEVICE, HALF):
        layer(x.requires_grad_(), None)
    return sum(kept.values())


def memory() -> None:
    """Of the MLP nothing but its input is kept where it is narrow, and one hidden layer where it is wide."""
    for width, hidden, narrow in ((32, 256, True), (24, 96, False)):
        rows = 2 * 16 * 16
        layer = Block(ClusterMixer(width, 2, 16, Windows(side=4), 2, 2), width, hidden / width, 0.0, 0.5).to(DEVICE)
        spent = kept_bytes(layer, torch.randn(2, 16, 16, width, device=DEVICE))
        # The normed x that the first half passes on as y, and z in float32; then either nothing, or the norm's result,
        # the units before GELU and the MLP's result, all in the half type. Moments and cast weights are small.
        exact = rows * (6 * width + (0 if narrow else 2 * width + 2 * hidden + 2 * width))
        small = 4 * hidden * width + 4096
        assert exact <= spent <= exact + small, (width, spent, exact)


if __name__ == "__main__":
    for check in (image_norm, beside, scaled_add, normed_mlp, block, edges, model, memory):
        torch.manual_seed(0)
        use("triton")
        check()
        print(check.__name__, "ok", flush=True)
