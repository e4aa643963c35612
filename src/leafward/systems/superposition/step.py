"""Loss and gradient of many toy models on one sparse batch.

Model: y = ReLU(W Wᵀ x + b) with W (n, m), b (n,). Models are packed along columns, P = [W_1|b_1|W_2|b_2|…] (n, C),
so that encoding and the optimiser are single calls and the bias rides in the matrix product. Legend: n features,
m width, R non-empty rows, T rows of a tile, K models of equal width (adjacent in P), N active cells, C columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding_bag

from leafward.systems.superposition.sampler import Batch

# Bytes of the pre-activation Z held at once: on a CPU what its caches keep, on a GPU only a bound on memory.
TILE_BYTES = {"cpu": 3 << 20, "cuda": 1 << 30}


@dataclass(frozen=True, slots=True)
class Block:
    """K adjacent models of width m, each `stride` columns wide (m weights, the bias, zeros for alignment)."""

    models: slice
    columns: slice
    width: int
    stride: int

    @property
    def count(self) -> int:
        """K."""
        return self.models.stop - self.models.start

    def view(self, packed: torch.Tensor) -> torch.Tensor:
        """The block's columns of `packed` (rows, C) as a batch of matrices (K, rows, stride), without a copy."""
        return packed[:, self.columns].unflatten(1, (-1, self.stride)).transpose(0, 1)

    def view_t(self, packed_t: torch.Tensor) -> torch.Tensor:
        """The block's rows of a transposed matrix (C, rows) as a contiguous batch (K, stride, rows)."""
        return packed_t[self.columns].unflatten(0, (-1, self.stride))

    def weights(self, packed: torch.Tensor) -> torch.Tensor:
        """The W of each model of the block, (K, n, m)."""
        return self.view(packed)[..., : self.width]


class Layout:
    """Where each of the models (in order of width) lives in the packed matrix."""

    def __init__(self, widths: Sequence[int], device: torch.device, *, grouped: bool | None = None):
        """`grouped` puts equal widths in one block with aligned columns; by default so on a GPU."""
        assert list(widths) == sorted(widths)
        grouped = device.type == "cuda" if grouped is None else grouped
        align = 4 if grouped else 1  # tensor cores want rows that begin on 16 bytes
        self.blocks: list[Block] = []
        self.models = len(widths)
        self.columns = 0
        bias = []
        first = 0
        while first < len(widths):
            width = widths[first]
            # A GPU wants all models of a width in one call; a CPU core one model at a time, to keep Z in its cache.
            last = first + (list(widths).count(width) if grouped else 1)
            stride = -(-(width + 1) // align) * align
            end = self.columns + (last - first) * stride
            self.blocks.append(Block(slice(first, last), slice(self.columns, end), width, stride))
            bias += range(self.columns + width, end, stride)
            first, self.columns = last, end
        self.largest = max(block.count for block in self.blocks)  # models in one block
        self.bias = torch.tensor(bias, device=device)  # (models,) the bias column of each model

    def model_columns(self) -> list[slice]:
        """The columns [W|b] of each model."""
        places = [(b.columns.start + i * b.stride, b.width) for b in self.blocks for i in range(b.count)]
        return [slice(start, start + width + 1) for start, width in places]

    def norms(self, packed: torch.Tensor) -> torch.Tensor:
        """Row norms ‖W_i‖ of every model, (n, models)."""
        out = packed.new_empty(packed.shape[0], self.models)
        for block in self.blocks:
            torch.linalg.vector_norm(block.weights(packed).transpose(0, 1), dim=2, out=out[:, block.models])
        return out

    def scale_rows(self, packed: torch.Tensor, factor: torch.Tensor) -> None:
        """Multiply row i of each W by factor (n, models), in place."""
        for block in self.blocks:
            block.weights(packed).mul_(factor[:, block.models].t().unsqueeze(-1))


class Objective:
    """Loss and gradient of a pack; the dense x never exists.

    ``mse``: L = ⟨‖y−x‖²⟩ over the batch; the training loss is `loss_scale`/n times that (the mean over B·n entries).
    With r = relu(z), dL/dz is 2r everywhere but in the active cells, so the dense part is a tied network without
    data, and the active cells are O(N) corrections. Rows without active features have z = b: they need no product.

    ``ce``: the ReLU is replaced by a softmax, and the target is x divided by its row sum (one active feature: a
    one-hot target). L = −⟨Σ_i t_i ln softmax(z)_i⟩ over the rows with an active feature; rows without one have no
    target and are left out. The training loss is `loss_scale` times L.
    """

    def __init__(self, layout: Layout, features: int, loss: str, loss_scale: float):
        self.layout, self.features, self.loss, self.scale = layout, features, loss, loss_scale

    def gradient(self, packed: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradient of the training loss by P, (n, C), and the loss L of each model, (models,)."""
        hidden = self._encode(packed, batch)
        hidden_grad = torch.empty_like(hidden)
        # Kept transposed: the product that fills it is then wide and short, which BLAS does faster.
        grad_t = packed.new_zeros(packed.shape[::-1])
        found = packed.new_empty(self.layout.models, batch.cells.numel())
        finish = _mse_tile if self.loss == "mse" else _ce_tile
        for tile in self._tiles(batch, packed):
            for block in self.layout.blocks:
                weights, h = block.view(packed), block.view(hidden)[:, tile.rows]
                z = torch.bmm(h, weights.transpose(1, 2), out=tile.buffer(len(h)))
                finish(z, tile, found[block.models, tile.cells])
                torch.bmm(z, weights, out=block.view(hidden_grad)[:, tile.rows])
                block.view_t(grad_t).baddbmm_(h.transpose(1, 2), z)
        if self.loss == "mse":
            loss = self._mse_loss(packed, hidden, hidden_grad, found, batch)
            unit = 2 * self.scale / (self.features * (batch.rows + batch.empty))
        else:
            loss = -(found * batch.shares).sum(1)
            unit = self.scale
        if not batch.rows:
            grad = torch.zeros_like(packed)
        else:
            hidden_grad.index_fill_(1, self.layout.bias, 0.0)
            grad = _bags(hidden_grad, batch.rows_by_column, batch.column_offsets, batch.values_by_column)
            grad += grad_t.t()
        if self.loss == "mse":
            grad.index_add_(1, self.layout.bias, self._resting(packed), alpha=batch.empty)
        return grad.mul_(unit), loss

    def _resting(self, packed: torch.Tensor) -> torch.Tensor:
        """relu(b): the output for a row without active features, (n, models)."""
        return packed.index_select(1, self.layout.bias).relu_()

    def _mse_loss(
        self,
        packed: torch.Tensor,
        hidden: torch.Tensor,
        hidden_grad: torch.Tensor,
        found: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        """L without another pass over Z, from the products that the gradient needs anyway.

        With G = dL/dz / 2, ⟨G, Z⟩ = ⟨G P, H⟩, and Σ(y−x)² exceeds it by −Σ x(y−x) over the active cells.
        """
        total = batch.empty * self._resting(packed).square_().sum(0) - (found * batch.values).sum(1)
        by_column = (hidden * hidden_grad).sum(0)
        for block in self.layout.blocks:
            total[block.models] += by_column[block.columns].view(-1, block.stride).sum(1)
        return total / (batch.rows + batch.empty)

    def evaluate(self, packed: torch.Tensor, batch: Batch) -> torch.Tensor:
        """L of each model on a batch, (models,) in float64, summed directly."""
        hidden = self._encode(packed, batch)
        total = torch.zeros(self.layout.models, dtype=torch.float64, device=packed.device)
        found = packed.new_empty(self.layout.models, batch.cells.numel())
        for tile in self._tiles(batch, packed):
            for block in self.layout.blocks:
                h = block.view(hidden)[:, tile.rows]
                z = torch.bmm(h, block.view(packed).transpose(1, 2), out=tile.buffer(len(h)))
                if self.loss == "mse":
                    z.relu_().view(len(z), -1).index_add_(1, tile.where, tile.values.neg().expand(len(z), -1))
                    total[block.models] += torch.linalg.vector_norm(z, dim=(1, 2)).double().square()
                else:
                    _ce_tile(z, tile, found[block.models, tile.cells])
        if self.loss == "ce":
            return -(found * batch.shares).double().sum(1)
        resting = self._resting(packed).double().square_().sum(0)
        return (total + batch.empty * resting) / (batch.rows + batch.empty)

    def _encode(self, packed: torch.Tensor, batch: Batch) -> torch.Tensor:
        """H = x P over the non-empty rows, (R, C), with ones in the bias columns."""
        if not batch.rows:
            return packed.new_empty(0, packed.shape[1])
        hidden = _bags(packed, batch.columns, batch.row_offsets, batch.values)
        return hidden.index_fill_(1, self.layout.bias, 1.0)

    def tile_count(self, batch: Batch, packed: torch.Tensor) -> int:
        """Tiles of rows such that the largest block's Z stays within TILE_BYTES."""
        budget = TILE_BYTES[packed.device.type] // packed.element_size()
        return -(-batch.rows // max(1, budget // (self.layout.largest * self.features)))

    def _tiles(self, batch: Batch, packed: torch.Tensor) -> Iterator[Tile]:
        """The listed rows in tiles of equal size."""
        count, most = self.tile_count(batch, packed), self.layout.largest
        if not count:
            return
        bounds = [batch.rows * i // count for i in range(count + 1)]
        storage = packed.new_empty(most * -(-batch.rows // count), self.features)
        for first, last in itertools.pairwise(bounds):
            # The last tile also takes the spare cells of a padded batch.
            end = len(batch.cells) if last == batch.rows else int(batch.offsets[last])
            cells = slice(int(batch.offsets[first]), end)
            where = batch.cells[cells] - first * self.features
            rows = slice(first, last)
            yield Tile(rows, cells, where, batch.values[cells], batch.shares[cells], batch.row_shares[rows], storage)


@dataclass(frozen=True, slots=True)
class Tile:
    """Some rows of a batch: their active cells, and room for Z."""

    rows: slice
    cells: slice
    where: torch.Tensor  # (N,) positions of the active cells in the flattened (T·n) matrix
    values: torch.Tensor  # (N,)
    shares: torch.Tensor  # (N,)
    row_shares: torch.Tensor  # (T,)
    storage: torch.Tensor  # at least (K·T, n)

    def buffer(self, models: int) -> torch.Tensor:
        """Uninitialised (K, T, n)."""
        rows = self.rows.stop - self.rows.start
        return self.storage[: models * rows].view(models, rows, -1)


def _mse_tile(z: torch.Tensor, tile: Tile, found: torch.Tensor) -> None:
    """Turn Z (K, T, n) into G = (relu(z) − x)[z > 0]; put y − x of the active cells into found (K, N)."""
    flat = z.relu_().view(len(z), -1)
    y = flat.index_select(1, tile.where)
    torch.sub(y, tile.values, out=found)
    flat.index_copy_(1, tile.where, y.sign_().mul_(found))  # y ≥ 0, so sign is [z > 0]


def _ce_tile(z: torch.Tensor, tile: Tile, found: torch.Tensor) -> None:
    """Turn Z (K, T, n) into G = (softmax(z) − t)/active rows; put ln softmax(z) of the active cells into found."""
    z -= torch.logsumexp(z, dim=2, keepdim=True)
    flat = z.view(len(z), -1)
    found.copy_(flat.index_select(1, tile.where))
    z.exp_().mul_(tile.row_shares[:, None])  # 0 for the rows without a target
    flat.index_add_(1, tile.where, tile.shares.neg().expand(len(z), -1))


def _bags(table: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sparse times dense: row j of the result is Σ weights·table[index] over the entries offsets[j]…offsets[j+1]−1."""
    return embedding_bag(index, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)
