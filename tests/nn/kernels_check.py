"""The kernels against float64, as a program: on the CPU Triton's interpreter must be chosen before it is imported.

TRITON_INTERPRET=1 python kernels_check.py cpu
"""

import functools
import sys

import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

from leafward.nn import FeedForward, HoPE, MiCE, Residual, RMSNorm, Space, kernels, rotate
from leafward.systems.helm import HelmConfig, HelmForCausalLM

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"


def error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def pairs(layer, call, inputs, seeds):
    """Outputs and gradients by the kernels in float32, and by plain torch in float64."""
    results = []
    for which, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        kernels.use(which)
        layer.to(dtype).zero_grad()
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        outputs = call(*leaves)
        sum((out * seed.to(out.dtype)).sum() for out, seed in zip(outputs, seeds, strict=True)).backward()
        results.append([*outputs, *(x.grad for x in leaves), *(p.grad for p in layer.parameters())])
    return list(zip(*results, strict=True))


def residual_norm() -> None:
    for width, c, reach in ((24, 1.0, 1.0), (40, 0.37, 30.0), (64, 2.0, 300.0)):
        layer = torch.nn.ModuleList([Residual(scale=3.0, space=Space(c=c)), RMSNorm(width)]).to(DEVICE)
        with torch.no_grad():
            layer[0].log_weight.fill_(0.3)
            layer[1].weight.add_(0.2 * torch.randn_like(layer[1].weight))
        x = reach * torch.randn(2, 9, width, device=DEVICE)
        y = 0.5 * x.flip(0) + torch.randn_like(x)
        x[0, 0] = 0.0
        y[0, 1] = 0.0
        seeds = torch.randn_like(x), torch.randn_like(x), torch.randn(2, 9, 1, device=DEVICE)
        for ours, exact in pairs(layer, lambda x, y, layer=layer: layer[0].normed(x, y, layer[1]), (x, y), seeds):
            assert error(ours, exact) < 2e-5, (width, error(ours, exact))


def swiglu() -> None:
    for width, hidden, c in ((16, 24, 1.0), (24, 72, 0.37)):
        layer = FeedForward(width, hidden, Space(c=c)).to(DEVICE)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        s = torch.randn(2, 9, width, device=DEVICE)
        seeds = (torch.randn_like(s),)
        for ours, exact in pairs(layer, lambda s, layer=layer: (layer(s, layer.up.space.time(s)),), (s,), seeds):
            assert error(ours, exact) < 1e-5, (width, error(ours, exact))


def head_lanes() -> None:
    for heads, kv_heads, d, dim, c in ((3, 3, 12, 12, 1.0), (4, 2, 14, 8, 0.37)):
        total, batch, length = heads + 2 * kv_heads, 2, 5
        half = torch.float16  # the interpreter has no bfloat16
        product = torch.randn(batch, length, total * d, device=DEVICE).to(half)
        bias, w = torch.randn(total * d, device=DEVICE), 0.3 * torch.randn(total * d, 1, device=DEVICE)
        t, scale = 1.0 + torch.rand(batch, length, 1, device=DEVICE), torch.tensor([0.7], device=DEVICE)
        positions = torch.arange(length, device=DEVICE)
        table = HoPE(dim).table(positions if dim == d else positions + 3 * torch.arange(batch, device=DEVICE)[:, None])
        kernels.use("triton")
        leaves = [x.clone().requires_grad_() for x in (product, bias, t, w, scale)]
        ours = kernels.head_lanes(*leaves[:4], table, leaves[4], heads, kv_heads, c)
        exact_leaves = [x.detach().double().requires_grad_() for x in (product, bias, t, w, scale)]
        p64, b64, t64, w64, s64 = exact_leaves
        points = (p64 + b64 + t64 * w64.T).unflatten(-1, (total, d)).transpose(1, 2)
        q, k, v = points.split([heads, kv_heads, kv_heads], dim=1)
        wide = tuple(x.double() for x in table)
        q, k = rotate(q, wide), rotate(k, wide)
        space = Space(c=c)
        exact = [(q * s64, -s64 * space.time(q)), (k, space.time(k)), (v, space.time(v))]
        compare_lanes(ours, leaves, exact, exact_leaves)


def latent_lanes() -> None:
    for heads, nope, rope, e, dim, c in ((3, 4, 8, 12, 8, 1.0), (4, 6, 8, 9, 4, 0.37), (2, 2, 6, 21, 6, 1.0)):
        batch, length, half = 2, 5, torch.float16
        widths = heads * (nope + rope), heads * (nope + e)
        leaves = []
        for width in widths:  # product, bias, time, time column
            leaves += [torch.randn(batch, length, width, device=DEVICE).to(half), torch.randn(width, device=DEVICE)]
            leaves += [1.0 + torch.rand(batch, length, 1, device=DEVICE), 0.3 * torch.randn(width, 1, device=DEVICE)]
        leaves += [torch.randn(batch, length, rope, device=DEVICE).to(half), torch.tensor([0.7], device=DEVICE)]
        positions = torch.arange(length, device=DEVICE)
        rows = positions + 3 * torch.arange(batch, device=DEVICE)[:, None]
        # Of all sequences, of each, and one row for all.
        table = HoPE(dim).table({3: positions, 4: rows, 2: rows[:1]}[heads])
        kernels.use("triton")
        leaves = [x.requires_grad_() for x in leaves]
        ours = kernels.latent_lanes(tuple(leaves[:4]), tuple(leaves[4:8]), leaves[8], table, leaves[9], heads, c)

        exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
        q, both = (
            (p + b + t * w.T).unflatten(-1, (heads, -1)).transpose(1, 2)
            for p, b, t, w in (exact_leaves[:4], exact_leaves[4:8])
        )
        shared, s64 = exact_leaves[8].unsqueeze(1).expand(-1, heads, -1, -1), exact_leaves[9]
        q = torch.cat([q[..., :nope], rotate(q[..., nope:], tuple(x.double() for x in table))], dim=-1)
        k, v, space = torch.cat([both[..., :nope], shared], dim=-1), both[..., nope:], Space(c=c)
        exact = [(q * s64, -s64 * space.time(q)), (k, space.time(k)), (v, space.time(v))]
        compare_lanes(ours, leaves, exact, exact_leaves)


def compare_lanes(ours, leaves, exact, exact_leaves) -> None:
    """Lanes of queries, keys and values against (space part, time) of each in float64, and the gradients."""
    # The time: lanes that add up to it, lanes that carry its gradient, and how exact it is in float16.
    parts = [((0, 1), (0, 2), 1e-6), ((0, 2), (0, 1), 1e-6), ((0, 1), (0,), 2e-4)]
    # Not random alone: the gradient of the scale, one sum over all lanes, would be a small rest of large terms.
    seeds = [x.detach() + torch.randn_like(x) for x in ours]
    sum((x * seed).sum() for x, seed in zip(ours, seeds, strict=True)).backward()
    loss = 0.0
    for x, seed, (s, time), (adds_up, carries, bound) in zip(ours, seeds, exact, parts, strict=True):
        d = s.shape[-1]
        assert error(x[..., :d], s) < 1e-3
        assert error(sum(x[..., d + i : d + i + 1].double() for i in adds_up), time) < bound
        assert not x[..., d + 3 :].any()
        loss = loss + (s * seed[..., :d]).sum() + (time * sum(seed[..., d + i : d + i + 1] for i in carries)).sum()
    d = exact[0][0].shape[-1]
    copies = [(0, 0, 2), (1, 0, 1)]  # the head of a time stands in two lanes of queries and of keys
    for which, one, two in copies:
        assert torch.equal(ours[which][..., d + one], ours[which][..., d + two])
    loss.backward()
    for x, y in zip(leaves, exact_leaves, strict=True):
        assert error(x.grad, y.grad) < 2e-3, error(x.grad, y.grad)


def experts() -> None:
    for active, shared, c, reach in ((2, 1, 1.0, 1.0), (3, 0, 0.37, 20.0), (2, 2, 2.0, 1.0)):
        layer = MiCE(16, 24, 5, active, shared, learn_curvatures=True, space=Space(c=c)).to(DEVICE)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        s = reach * torch.randn(2, 9, 16, device=DEVICE)
        seeds = (torch.randn_like(s),)
        for ours, exact in pairs(layer, lambda s, layer=layer: (layer(s)[0],), (s,), seeds):
            assert error(ours, exact) < 5e-5, (active, shared, error(ours, exact))


def noted(graph: torch.fx.GraphModule, inputs: list[Tensor], graphs: list[str]):
    """A backend that keeps what it is given to compile."""
    graphs.append(str(graph.graph))
    return lookup_backend("aot_eager")(graph, inputs)


def model() -> None:
    """A whole model, in float16 autocast: the same loss and gradients with kernels and without, compiled too."""
    config = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 40, "vocab_size": 64, "head_dim": 12}
    config |= {"num_hidden_layers": 1, "num_dense_layers": 0}
    for preset in ("helm-d-tiny", "helm-mice-tiny"):
        torch.manual_seed(0)
        net = HelmForCausalLM(HelmConfig.preset(preset, **config)).to(DEVICE).train()
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if "time_weight" in name:
                    parameter.normal_(std=0.05)
        ids = torch.randint(64, (1, 4), device=DEVICE)

        def loss(x: Tensor, net=net) -> Tensor:
            with torch.autocast(DEVICE, torch.float16):
                return net(input_ids=x, labels=x).loss

        outcomes = []
        for which in ("torch", "triton", "compiled"):
            kernels.use("torch" if which == "torch" else "triton")
            torch._dynamo.reset()
            graphs: list[str] = []
            backend = functools.partial(noted, graphs=graphs)
            call = torch.compile(loss, fullgraph=True, backend=backend) if which == "compiled" else loss
            value = call(ids)
            assert all("leafward.residual_norm" in graph for graph in graphs), "kernels must serve compiled models too"
            assert len(graphs) == (which == "compiled")
            grads = torch.autograd.grad(value, [p for p in net.parameters() if p.requires_grad], allow_unused=True)
            outcomes.append((value, torch.cat([g.flatten() for g in grads if g is not None])))
        for value, grads in outcomes[1:]:
            assert error(value, outcomes[0][0].double()) < 2e-3
            assert error(grads, outcomes[0][1].double()) < 2e-2, error(grads, outcomes[0][1].double())


if __name__ == "__main__":
    for check in (residual_norm, swiglu, head_lanes, latent_lanes, experts, model):
        torch.manual_seed(0)
        check()
        print(check.__name__, "ok", flush=True)
