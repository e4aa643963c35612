"""Random numbers of a training step that do not depend on how its batch is split over ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode


class BatchDraws(TorchFunctionMode):
    """Inside, a draw for the samples of a micro-batch is its rows of the draw for the whole batch.

    `places` are the micro-batch's samples among the `batch` ones of the step. Every layout must come here with the
    same state of the generator; then noise, dropout and stochastic depth are the same in all of them, and those of one
    rank that takes the batch whole. A tensor of n·k rows is taken to hold k rows of each of the n samples, one sample
    after the other; a draw with no dimension for the samples is the same everywhere. The price is that every rank draws
    the numbers of all. What a fused kernel draws inside, as attention with dropout does, is not seen here, nor are
    permutations.
    """

    def __init__(self, places: Sequence[int], batch: int) -> None:
        super().__init__()
        self.places, self.batch = torch.tensor(places), batch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.backward:
            return self.backward(*args, **(kwargs or {}))
        draw = _DRAWS.get(func)
        return func(*args, **(kwargs or {})) if draw is None else draw(self, func, *args, **(kwargs or {}))

    def backward(self, tensor: Tensor, gradient: Tensor | None = None, **options: Any) -> None:
        """`Tensor.backward` with the mode on, which it is not in here, for blocks that are computed once more."""
        gradient = torch.ones_like(tensor) if gradient is None else gradient
        with self:  # from the edge, because what is given a tensor dispatches once more
            torch.autograd.backward(get_gradient_edge(tensor), gradient, **options)

    def whole(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The shape (n·k, …) of a micro-batch's tensor as that of the whole batch's, (batch·k, …); None if it has no
        dimension for the samples."""
        if not shape or shape[0] % len(self.places):
            return None
        return (shape[0] // len(self.places) * self.batch, *shape[1:])

    def rows(self, drawn: Tensor) -> Tensor:
        """The micro-batch's part of what was drawn for the whole batch."""
        own = drawn.unflatten(0, (self.batch, -1))[self.places.to(drawn.device)]
        return own.flatten(0, 1)


def _filled(draws: BatchDraws, func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A method that fills a tensor, such as `bernoulli_`; a probability that is a tensor stays with its own draw."""
    shape = draws.whole(tensor.shape)
    if shape is None or any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return func(tensor, *args, **kwargs)
    with torch.no_grad():
        tensor.copy_(draws.rows(func(tensor.new_empty(shape), *args, **kwargs)))
    return tensor


def _made(draws: BatchDraws, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """A function of a shape, `rand` or `randn`, given as numbers or as one sequence."""
    size = kwargs.pop("size") if "size" in kwargs else args[0] if len(args) == 1 and _is_shape(args[0]) else args
    shape = draws.whole(tuple(size))
    if shape is None:
        return func(tuple(size), **kwargs)
    graded = bool(kwargs.pop("requires_grad", False))
    return draws.rows(func(shape, **kwargs)).requires_grad_(graded)


def _like(draws: BatchDraws, func: Callable[..., Any], tensor: Tensor, **kwargs: Any) -> Tensor:
    shape = draws.whole(tensor.shape)
    if shape is None:
        return func(tensor, **kwargs)
    return draws.rows(func(tensor.new_empty(shape), **kwargs))


def _chosen(draws: BatchDraws, func: Callable[..., Any], chances: Tensor, **kwargs: Any) -> Tensor:
    """`torch.bernoulli` of a tensor of probabilities."""
    shape = draws.whole(chances.shape)
    if shape is None:
        return func(chances, **kwargs)
    every = chances.detach().new_zeros(shape)
    every.unflatten(0, (draws.batch, -1))[draws.places.to(chances.device)] = chances.detach().unflatten(
        0, (len(draws.places), -1)
    )
    return draws.rows(func(every, **kwargs))


def _dropped(
    draws: BatchDraws,
    func: Callable[..., Any],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Dropout of elements or channels: the input times the factors that ones become."""
    shape = draws.whole(input.shape)
    if not training or p == 0.0 or shape is None:
        return func(input, p, training, inplace)
    factors = draws.rows(func(input.detach().new_ones(shape), p, True))
    return input.mul_(factors) if inplace else input * factors


def _is_shape(value: Any) -> bool:
    return isinstance(value, Sequence)


_DRAWS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.rand, torch.randn), _made),
    **dict.fromkeys((torch.rand_like, torch.randn_like), _like),
    **dict.fromkeys((Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_, Tensor.exponential_), _filled),
    torch.bernoulli: _chosen,
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), _dropped),
}
