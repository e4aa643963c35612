"""What a compiler sees of the kernels, as a program: traced for a device that need not be there.

python kernels_traced_check.py
"""

from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
import triton
from absent_device import Absent, pretend
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_module
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._library.triton import triton_ops_to_kernels
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.compiler import ASTSource
from triton.runtime import Autotuner, JITFunction

import leafward.systems.hcformer.model  # noqa: F401  (registers the models)
from leafward.nn import Visible, kernels
from leafward.systems.helm import HelmConfig, HelmForCausalLM

SEQUENCES = {"residual", "swiglu", "heads"}
EXPERTS = {"residual", "swiglu", "latents", "experts"}
DECODING = {"residual", "latent_decode", "experts"}
IMAGES = {"norm", "mlp", "patches", "windows", "pool"}


class Loss(nn.Module):
    """The loss of a model under autocast."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor) -> tuple[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return (self.loss(self.model, x),)


def shapes_alone(model: nn.Module, mode: FakeTensorMode) -> None:
    """Leave a model no values, so that nothing is run while it is traced."""
    for part in model.modules():
        for name, weight in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(mode.from_tensor(weight.detach()), weight.requires_grad))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, mode.from_tensor(buffer))


ON_CPU = "grouped_"
"""Operators that serve the CPU alone, on which this program traces."""


def launches(step: Loss, x: Tensor, back: bool) -> Iterator[tuple[JITFunction, torch.fx.Node]]:
    """Every launch of a kernel of ours, forward and back, with the kernel, in the graph that is compiled."""
    how = {"trace_joint": True, "output_loss_index": 0} if back else {"trace_joint": False}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(back):
        shapes_alone(step, mode)
        traced, _ = aot_export_module(step, (mode.from_tensor(x),), **how)
    for node in traced.graph.nodes:
        own = "leafward" in str(node.target) and not any(name in str(node.target) for name in ("segment_sums", ON_CPU))
        assert not own, f"{node.target} is opaque"
        if "triton_kernel_wrapper" in str(node.target):
            kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            yield kernel.fn if isinstance(kernel, Autotuner) else kernel, node  # that keeps the options of a launch


def compiles(kernel: JITFunction, given: dict[str, Any]) -> None:
    """Compile a kernel as a compiled graph has it: with its numbers in float64."""
    kinds = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
    signature, constants = {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[place,] = "constexpr", value
        elif isinstance(value, torch.fx.Node):
            signature[parameter.name] = "*" + kinds[value.meta["val"].dtype]
        else:
            signature[parameter.name] = "fp64" if isinstance(value, float) else "i32"
    triton.compile(ASTSource(kernel, signature, constants), target=Absent.get_current_target())


def check(name: str, step: Loss, x: Tensor, expected: set[str], back: bool = True) -> None:
    """No operator is left whole; kernels compile, and write into fresh memory alone: all else would be copied.

    Compiled are those with numbers in float64, and those for large images and for decoding, which only Triton's
    interpreter runs elsewhere.
    """
    seen, compiled = set(), set()
    for kernel, node in launches(step, x, back):
        module = kernel.fn.__module__.rsplit(".", 1)[1]
        seen.add(module)
        constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
        given = {**constants, **node.kwargs["kwargs"]}
        wanted = any(isinstance(value, float) for value in given.values()) or "parts" in kernel.fn.__name__ or not back
        if wanted and kernel not in compiled:
            compiles(kernel, given)
            compiled.add(kernel)
        for written in node.kwargs["tensors_to_clone"]:
            source = node.kwargs["kwargs"][written]
            assert "empty" in str(source.target), f"{module} writes {written}, which is {source.target}"
    assert seen == expected, (name, seen)
    assert "large" not in name or any("parts" in kernel.fn.__name__ for kernel in compiled), "no large windows"
    print(name, "ok", flush=True)


def decoded(model: nn.Module, x: Tensor) -> Tensor:
    """The last layer for one token, behind a memory of four."""
    trunk, rule = model.model, Visible(positions=torch.full((1,), 4))

    def store(*new: Tensor) -> list[Tensor]:
        return [torch.cat([row.new_zeros(row.shape).expand(-1, -1, 4, -1), row], dim=2) for row in new]

    return trunk.layers[-1](trunk.embed(x), trunk.hope.table(rule.positions), rule, store)[0].float().sum()


def main() -> None:
    pretend()
    kernels.use("triton")
    blind = [name for name, found in triton_ops_to_kernels.items() if not found]
    assert not blind, f"{blind}: PyTorch finds no kernels, so its cache would not notice a change of them"
    kernels.serve = lambda x: x.dtype in (torch.float32, torch.bfloat16)  # no device is needed to trace
    for preset, expected in (("helm-d-tiny", SEQUENCES), ("helm-mice-tiny", EXPERTS)):
        model = HelmForCausalLM(HelmConfig.preset(preset, num_hidden_layers=2))
        ids = torch.zeros(2, 16, dtype=torch.long)
        check(preset, Loss(model, lambda model, x: model(input_ids=x, labels=x).loss), ids, expected)
    for geometry, expected in (("lorentz", DECODING), ("euclidean", {"latent_decode"})):
        model = HelmForCausalLM(HelmConfig.preset("helm-mice-tiny", num_hidden_layers=2, geometry=geometry)).eval()
        check(f"{geometry} token", Loss(model, decoded), ids[:, :1], expected, back=False)
    model = timm.create_model("hcformer_nano", depths=(1, 1, 1, 1), drop_path_rate=0.1)
    images = torch.zeros(2, 3, 224, 224)
    total = Loss(model, lambda model, x: model(x).float().sum())
    check("hcformer_nano", total, images, IMAGES)
    large = torch.zeros(1, 3, 896, 896)
    check("hcformer_nano, large", total.eval(), large, IMAGES, back=False)


if __name__ == "__main__":
    main()
