"""The cluster mixer against a plain float64 account of its definition, and the faults of the published code."""

import math

import numpy as np
import pytest
import torch
from scipy.interpolate import RegularGridInterpolator
from torch.utils._python_dispatch import TorchDispatchMode

from leafward.errors import UsageError
from leafward.systems.hcformer.mixer import (
    ClusterMixer,
    CosineSimilarity,
    Layout,
    LorentzSimilarity,
    OffsetBias,
    Windows,
    exchange,
)

DIM, HEADS, HEAD_DIM = 6, 2, 3
COMBINATIONS = [("euclidean", "euclidean"), ("lorentz", "lorentz"), ("lorentz", "euclidean")]


def mixer(geometry="lorentz", patch_geometry="euclidean", **changes) -> ClusterMixer:
    torch.manual_seed(0)
    settings = {"windows": Windows(side=4), "centres": 2, "global_centres": 2, "curvature": 0.7} | changes
    return ClusterMixer(DIM, HEADS, HEAD_DIM, geometry=geometry, patch_geometry=patch_geometry, **settings).double()


def apply(module: ClusterMixer, x: torch.Tensor) -> torch.Tensor:
    return module(x, module.layout(x.shape[1], x.shape[2], x.device))


class PlainAccount:
    """One image through a mixer, token by token, in numpy; padding does not exist here at all."""

    def __init__(self, module: ClusterMixer):
        self.module = module
        self.p = {name: value.detach().numpy() for name, value in module.state_dict().items()}

    def __call__(self, x: np.ndarray) -> np.ndarray:
        height, width, _ = x.shape
        rows, columns = (self.starts(length) for length in (height, width))
        fine = np.zeros((height, width, HEADS * HEAD_DIM))
        places, means = [], []
        for r, p in rows:
            for c, q in columns:
                rs, cs = range(max(r, 0), min(r + p, height)), range(max(c, 0), min(c + q, width))
                inside = [(i, j) for i in rs for j in cs]
                tokens = np.array([x[i, j] for i, j in inside])
                regions = self.regions(inside, (r, c), (p, q), self.module.centres)
                members = [region for region, _ in regions if region]
                centres = np.array([np.mean([x[i, j] for i, j in region], axis=0) for region in members])
                middles = [middle for region, middle in regions if region]
                offsets = np.array([[((i + 0.5 - m) / p, (j + 0.5 - n) / q) for m, n in middles] for i, j in inside])
                kept = [m for m, (region, _) in enumerate(regions) if region]
                table = self.table("patch_level", inside, (height, width))[:, :, kept]
                for place, out in zip(
                    inside, self.cluster("patch_level", tokens, centres, offsets, table), strict=True
                ):
                    fine[place] = out
                places.append(((r + p / 2, c + q / 2), inside))
                means.append(tokens.mean(axis=0))
        mixed = fine
        if self.module.window_level is not None:
            coarse = np.zeros_like(fine)
            everything = [(i, j) for i in range(height) for j in range(width)]
            regions = self.regions(everything, (0, 0), (height, width), self.module.global_centres)
            centres = np.array([np.mean([x[place] for place in region], axis=0) for region, _ in regions])
            offsets = np.array([[((r - m) / height, (c - n) / width) for _, (m, n) in regions] for (r, c), _ in places])
            grid = [(i, j) for i in range(len(rows)) for j in range(len(columns))]
            table = self.table("window_level", grid, (len(rows), len(columns)))
            for (_, inside), out in zip(
                places, self.cluster("window_level", np.array(means), centres, offsets, table), strict=True
            ):
                for place in inside:
                    coarse[place] = out
            mixed = np.concatenate([coarse, fine], axis=-1)
        mixed = (mixed - mixed.mean(-1, keepdims=True)) / np.sqrt(mixed.var(-1, keepdims=True) + 1e-5)
        mixed = mixed * self.p["norm.weight"] + self.p["norm.bias"]
        return mixed @ self.p["proj.weight"].T + self.p["proj.bias"]

    def starts(self, length: int) -> list[tuple[int, int]]:
        side = self.module.windows.side or math.ceil(length / self.module.windows.count)
        moved = self.module.windows.shifted and self.module.windows.count != 1
        return [(start, side) for start in range(-(side // 2) if moved else 0, length, side)]

    def table(self, level, places, size):
        """(heads, places, centres): the entries of a table of places at (i, j) of a map of `size`, corners aligned."""
        tables = self.p.get(f"{level}.bias.places")
        if tables is None:
            return np.zeros((HEADS, len(places), 100))
        side = np.arange(tables.shape[-1])
        steps = [(tables.shape[-1] - 1) / max(length - 1, 1) for length in size]
        where = np.array([[i * steps[0], j * steps[1]] for i, j in places]).clip(0, side[-1])
        return np.array(
            [
                np.stack([RegularGridInterpolator((side, side), each)(where) for each in head], axis=-1)
                for head in tables
            ]
        )

    @staticmethod
    def regions(inside, corner, sides, count):
        """Tokens and middle of each of count × count regions of a window."""
        spans = [[(side * k // count, -(-side * (k + 1) // count)) for k in range(count)] for side in sides]
        return [
            (
                [(i, j) for i, j in inside if a <= i - corner[0] < b and c <= j - corner[1] < d],
                (corner[0] + (a + b) / 2, corner[1] + (c + d) / 2),
            )
            for a, b in spans[0]
            for c, d in spans[1]
        ]

    def cluster(self, level, tokens, centres, offsets, table):
        p = {name.removeprefix(level + "."): value for name, value in self.p.items() if name.startswith(level)}
        self.c = getattr(getattr(self.module, level).similarity, "fixed_curvature", None)
        bias = table.transpose(1, 2, 0)[:, : len(centres)]
        if "bias.inner.weight" in p:
            knots = np.linspace(-1, 1, 17)
            grid = np.stack(np.meshgrid(knots, knots, indexing="ij"), axis=-1)
            hidden = np.maximum(grid @ p["bias.inner.weight"].T + p["bias.inner.bias"], 0.0)
            bias = RegularGridInterpolator((knots, knots), hidden @ p["bias.outer.weight"].T)(offsets.clip(-1, 1))
        embed = p.get("embed.weight", self.p["patch_level.embed.weight"])
        t, c = (z @ embed.T for z in (tokens, centres))
        outs = []
        for head in range(HEADS):
            part = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            ft, fc = t[:, part], c[:, part]
            vt, vc = t[:, HEADS * HEAD_DIM :][:, part], c[:, HEADS * HEAD_DIM :][:, part]
            alpha = np.exp(p["similarity.log_alpha"][head])
            if "similarity.log_scale" in p:
                scale = np.exp(p["similarity.log_scale"][head])
                x, y = ([self.point(scale * row) for row in rows] for rows in (ft, fc))
                similarity = [[-alpha * self.distance(a, b) for b in y] for a in x]
            else:
                similarity = [[alpha * a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for b in fc] for a in ft]
            logits = np.array(similarity) + bias[:, :, head]
            a = np.exp(logits - logits.max(-1, keepdims=True))
            a /= a.sum(-1, keepdims=True)
            if self.module.patch_level.hard:
                a = np.eye(a.shape[1])[a.argmax(-1)]
            gathered = np.array(
                [(vc[m] + sum(a[n, m] * vt[n] for n in range(len(vt)))) / (1 + a[:, m].sum()) for m in range(len(vc))]
            )
            outs.append(a @ gathered)
        return np.concatenate(outs, axis=-1)

    def point(self, v):
        """exp₀: the full point [t; x] of the hyperboloid −t² + |x|² = −1/c, from all channels of v."""
        c, r = self.c, np.linalg.norm(v)
        return np.concatenate([[np.cosh(c**0.5 * r)], np.sinh(c**0.5 * r) * v / r]) / c**0.5

    def distance(self, x, y):
        return np.arccosh(max(1.0, self.c * (x[0] * y[0] - x[1:] @ y[1:]))) / self.c**0.5


@pytest.mark.parametrize(("geometry", "patch_geometry"), COMBINATIONS)
@pytest.mark.parametrize("size", [(8, 8), (5, 9), (3, 2)], ids=str)
def test_equals_its_definition(geometry, patch_geometry, size):
    module = mixer(geometry, patch_geometry)
    x = torch.randn(2, *size, DIM, dtype=torch.float64)
    expected = np.stack([PlainAccount(module)(image.numpy()) for image in x])
    np.testing.assert_allclose(apply(module, x).detach().numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("changes", [{"global_centres": 0}, {"windows": Windows(count=2), "centres": 3}])
def test_other_shapes_equal_the_definition(changes):
    module = mixer(**changes)
    x = torch.randn(1, 7, 6, DIM, dtype=torch.float64)
    np.testing.assert_allclose(
        apply(module, x)[0].detach().numpy(), PlainAccount(module)(x[0].numpy()), rtol=1e-6, atol=1e-7
    )


FORMS = {
    "shifted": {"windows": Windows(side=4, shifted=True)},
    "shifted halves": {"windows": Windows(count=2, shifted=True)},
    "one window": {"windows": Windows(count=1, shifted=True), "centres": 5, "global_centres": 0},
    "table": {"bias": "table", "table_side": 8},
    "table of another size": {"bias": "table", "table_side": 3, "windows": Windows(side=4, shifted=True)},
    "no bias": {"bias": "none"},
    "hard": {"assignment": "hard"},
    "shared": {"shared": True, "centres": 3},
    "curvatures": {"patch_geometry": "lorentz", "curvature": 2.0, "patch_curvature": 0.3},
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_equals_its_definition(name):
    module = mixer(**FORMS[name])
    with torch.no_grad():
        for level in (module.patch_level, module.window_level):
            if FORMS[name].get("bias") == "table" and level is not None:
                level.bias.places.normal_()
    x = torch.randn(1, 7, 9, DIM, dtype=torch.float64)
    expected = PlainAccount(module)(x[0].numpy())
    np.testing.assert_allclose(apply(module, x)[0].detach().numpy(), expected, rtol=1e-6, atol=1e-7)


def test_hard_assignments_are_whole_and_learn():
    module = mixer(assignment="hard")
    x = torch.randn(1, 8, 8, DIM, dtype=torch.float64)
    out, assigned = module.mix(x, module.layout(8, 8, x.device))
    for weights in assigned.values():
        torch.testing.assert_close(weights.sort(dim=-1).values[..., -1], torch.ones(weights.shape[:-1]).double())
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]).double())
    out.square().sum().backward()
    assert module.patch_level.similarity.log_alpha.grad.abs().min() > 0


def test_shifted_windows_join_what_others_part():
    """A change in one window reaches its neighbour in a shifted layout, and not in one that is not."""
    moved, still = (
        mixer(windows=Windows(side=4, shifted=shifted), global_centres=0, bias="none") for shifted in (True, False)
    )
    x = torch.randn(1, 8, 8, DIM, dtype=torch.float64)
    changed = x.clone()
    changed[:, :, 3] += 1.0  # the last column of the left windows
    reached = [(apply(m, changed) - apply(m, x)).abs().amax(dim=(0, 1, 3)) > 1e-9 for m in (moved, still)]
    assert reached[0].tolist() == [False] * 2 + [True] * 4 + [False] * 2
    assert reached[1].tolist() == [True] * 4 + [False] * 4


def test_assignments_give_the_output_exactly():
    module = mixer()
    x = torch.randn(2, 6, 9, DIM, dtype=torch.float64)
    layout = module.layout(6, 9, x.device)
    out, assigned = module.mix(x, layout)
    tokens = layout.partition(x)

    def values(level, items):  # (B, G, n, C) -> (B, G, h, n, d)
        return level.embed(items)[..., HEADS * HEAD_DIM :].unflatten(-1, (HEADS, HEAD_DIM)).transpose(2, 3)

    centres = layout.pool.double() @ tokens
    fine = exchange(
        assigned["patch"], values(module.patch_level, tokens), values(module.patch_level, centres)
    ).transpose(2, 3)
    windows = (layout.mean.double() @ tokens).transpose(1, 2)
    centres = layout.global_pool(x).unsqueeze(1)
    coarse = exchange(
        assigned["window"].unsqueeze(1), values(module.window_level, windows), values(module.window_level, centres)
    ).permute(0, 3, 1, 2, 4)
    mixed = torch.cat([coarse.flatten(3).expand(-1, -1, tokens.shape[2], -1), fine.flatten(3)], dim=-1)
    torch.testing.assert_close(layout.merge(module.proj(module.norm(mixed))), out, rtol=1e-12, atol=1e-13)
    # Every token is shared out completely, and every padded place not at all.
    shares = assigned["patch"].sum(dim=-1)
    torch.testing.assert_close(shares, layout.valid[:, None, :].expand_as(shares).double())


def test_pads_only_where_needed():
    """The published code pads divisible maps by a whole further window: 56 tokens became 63."""
    whole = Layout.of(56, 56, Windows(side=8), 4, 4, torch.device("cpu"))
    assert whole.valid is None
    assert (whole.grid, whole.side) == ((7, 7), (8, 8))
    part = Layout.of(57, 56, Windows(side=8), 4, 4, torch.device("cpu"))
    assert part.grid == (8, 7)
    assert int(part.valid.sum()) == 57 * 56
    x = torch.randn(2, 57, 56, 5)
    assert torch.equal(part.merge(part.partition(x)), x)


def test_distance_uses_every_channel():
    """The published code gives the first channel away as a time coordinate: its sign had no effect."""
    similarity = LorentzSimilarity(DIM, HEADS, HEAD_DIM, 0.7, False).double()
    tokens, centres = (torch.randn(1, HEADS, n, HEAD_DIM, dtype=torch.float64) for n in (5, 4))
    before = similarity(tokens, centres)
    for channel in range(HEAD_DIM):
        flipped = tokens.clone()
        flipped[..., channel] *= -1
        assert (similarity(flipped, centres) - before).abs().min() > 1e-6


def test_space_is_clearly_curved_at_the_start():
    """At the published radius of 1 orthogonal points are 7 % farther apart than in flat space; here over 15 %."""
    torch.manual_seed(0)
    dim, d = 64, 16
    similarity = LorentzSimilarity(dim, 1, d, 1.0, False)
    vectors = torch.randn(256, dim) @ (0.02 * torch.randn(dim, d))
    distance = -similarity(vectors[None, None], vectors[None, None])[0, 0] / similarity.log_alpha.exp()
    flat = torch.cdist(vectors, vectors) * similarity.log_scale.exp()
    off = ~torch.eye(256, dtype=torch.bool)
    assert (distance[off] / flat[off]).mean() > 1.15


@pytest.mark.parametrize(("geometry", "patch_geometry"), COMBINATIONS)
def test_assignments_do_not_start_uniform(geometry, patch_geometry):
    torch.manual_seed(0)
    module = ClusterMixer(32, 4, 16, Windows(side=8), 4, 4, geometry, patch_geometry)
    for level in (module.patch_level, module.window_level):
        torch.nn.init.normal_(level.embed.weight, std=0.02)
        torch.nn.init.normal_(level.bias.outer.weight, std=0.02)
    x = torch.randn(1, 7, 7, 32).repeat_interleave(8, 1).repeat_interleave(8, 2) + torch.randn(1, 56, 56, 32)
    _, assigned = module.mix(x, module.layout(56, 56, x.device))
    for weights in assigned.values():
        assert weights.amax(dim=-1).mean() > 2 / 16


@pytest.mark.parametrize("similarity", [CosineSimilarity(1), LorentzSimilarity(4, 1, 3, 1.0, True)])
def test_gradient_is_finite_at_zero_and_at_equal_points(similarity):
    """The published clip divides by the norm: a zero vector gave NaN."""
    same = torch.randn(3)
    tokens = torch.stack([torch.zeros(3), same, torch.zeros(3)])[None, None].requires_grad_()
    centres = torch.stack([torch.zeros(3), same])[None, None].requires_grad_()
    similarity(tokens, centres).sum().backward()
    for tensor in (tokens, centres, *similarity.parameters()):
        assert tensor.grad.isfinite().all()


def test_no_tensor_of_all_products():
    """The published aggregation holds M × N × C numbers for every window."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    module = ClusterMixer(32, 4, 16, Windows(side=8), 4)
    x = torch.randn(16, 24, 24, 32, requires_grad=True)
    layout = module.layout(24, 24, x.device)
    with Largest() as largest:
        module(x, layout).sum().backward()
    windows, n, m, width = 16 * 9, 64, 16, 64
    assert largest.numel <= windows * (n + m) * 2 * width < windows * n * m * width / 4


def test_bias_is_a_function_of_the_offset():
    """The published bias is a table of places, resized to every new size."""
    bias = OffsetBias(3)
    small, large = (Layout.of(size, size, Windows(side=8), 4, 4, torch.device("cpu")) for size in (16, 40))
    assert torch.equal(bias(small.offsets), bias(large.offsets))
    values = bias(small.offsets).unflatten(1, (8, 8)).unflatten(3, (4, 4))  # (h, row, column, centre row, column)
    torch.testing.assert_close(values[:, 2:, 2:, 1:, 1:], values[:, :-2, :-2, :-1, :-1])
    assert values.std() > 0


@pytest.mark.parametrize(("geometry", "patch_geometry"), COMBINATIONS)
def test_half_precision_follows(geometry, patch_geometry):
    module = mixer(geometry, patch_geometry, learn_curvature=True).float()
    x = torch.randn(2, 10, 8, DIM)
    exact = apply(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = apply(module, x)
    pure = apply(module.bfloat16(), x.bfloat16())
    for rough in (mixed, pure):
        assert rough.dtype == torch.bfloat16
        assert (rough.float() - exact).norm() < 0.04 * exact.norm()


def test_twins_differ_in_the_similarity_alone():
    curved, flat = mixer("lorentz"), mixer("euclidean")
    names = set(curved.state_dict()) ^ set(flat.state_dict())
    assert names == {"window_level.similarity.log_scale"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_centres": 1}, "one centre tells nothing apart"),
        ({"geometry": "lorenz"}, "did you mean 'lorentz'"),
        ({"patch_geometry": "flat"}, "patch_geometry is 'flat'"),
        ({"curvature": -1.0}, "curvature must be a positive"),
        ({"windows": Windows()}, "a side or a count"),
        ({"windows": Windows(count=3)}, "must be 1 or 2, got 3"),
        ({"centres": 0}, "centres must be a positive whole number"),
        ({"bias": "tabel"}, "bias is 'tabel'; did you mean 'table'"),
        ({"assignment": "firm"}, "assignment is 'firm'"),
        ({"patch_curvature": 0.0}, "patch_curvature must be a positive"),
    ],
)
def test_bad_settings_are_named(changes, words):
    with pytest.raises(UsageError, match=words):
        mixer(**changes)


def test_offset_bias_is_made_where_its_weights_are(monkeypatch):
    """transformers replaces torch.linspace while it loads a model; torch.device may know only that one from then on."""
    original = torch.linspace
    monkeypatch.setattr(torch, "linspace", lambda *sizes, **options: original(*sizes, **{"device": "cpu"} | options))
    with torch.device("meta"):
        assert OffsetBias(2).knots.device.type == "meta"
