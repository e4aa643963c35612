"""Attention by lanes against the definition, for every rule of visibility; what it must never allocate."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from leafward.geometry.lorentz import centroid_of_sum
from leafward.nn import Attention, HoPE, LatentAttention, Space, Stretch, Visible, attend, rotate, visible
from leafward.nn.lanes import BLOCK, FLEX_BLOCK, _seen_blocks, block_mask, dispatch, score_lanes

B, H, S = 2, 4, 11


def brute(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor, space: Space) -> Tensor:
    """softmax(-scale/2 · squared distance) over what is seen (B,T,S), then the centroid; full points in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if not space.curved:
        scores = scale * q @ k.mT
        return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v
    q, k, v = (torch.cat([(1 / space.c + x.square().sum(-1, keepdim=True)).sqrt(), x], dim=-1) for x in (q, k, v))
    gap = q.unsqueeze(3) - k.unsqueeze(2)
    squared = gap[..., 1:].square().sum(-1) - gap[..., 0] ** 2
    o = (-0.5 * scale * squared).masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v
    norm = (o[..., :1] ** 2 - o[..., 1:].square().sum(-1, keepdim=True)).sqrt()
    return o[..., 1:] / (space.c**0.5 * norm)


def seen_by(causal: bool, window: int | None, documents: Tensor | None, queries: int, keys: int) -> Tensor:
    """The rule spelled out position by position."""
    seen = torch.zeros(B, queries, keys, dtype=torch.bool)
    for b in range(B):
        for i in range(queries):
            for j in range(keys):
                here = keys - queries + i
                allowed = j <= here or not causal
                near = window is None or abs(here - j) < window
                same = documents is None or bool(documents[b, here] == documents[b, j])
                seen[b, i, j] = allowed and near and same
    return seen


DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [-1] * 3 + [5] * 6 + [2] * 2])


@pytest.mark.parametrize("space", [Space(), Space(c=0.37), Space("euclidean")], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("queries", [S, 3, 1])
@pytest.mark.parametrize(
    ("causal", "window", "documents"),
    [
        (True, None, None),
        (False, None, None),
        (True, 3, None),
        (False, 3, None),
        (True, None, DOCUMENTS),
        (False, None, DOCUMENTS),
        (True, 2, DOCUMENTS),
    ],
)
def test_equals_the_definition(monkeypatch, space, kv_heads, queries, causal, window, documents):
    monkeypatch.setattr("leafward.nn.lanes.BLOCK", 4)  # so that eleven queries take several blocks
    q, k, v = (
        torch.randn(B, h, t, d, dtype=torch.float64, requires_grad=True)
        for h, t, d in ((H, queries, 6), (kv_heads, S, 6), (kv_heads, S, 5))
    )
    rule = visible(causal, window, documents)
    ours, times = attend(q, k, v, torch.tensor([0.7], dtype=torch.float64), rule, space)
    expected = brute(q, k, v, 0.7, seen_by(causal, window, documents, queries, S), space)
    torch.testing.assert_close(ours, expected)
    if space.curved:
        torch.testing.assert_close(times, space.time(expected))
    weight = torch.randn_like(expected)
    grads = [torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (ours, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="block masks are compiled for CUDA only")
@pytest.mark.parametrize("kv_heads", [12, 4])
def test_block_masks_on_cuda(kv_heads):
    documents = (torch.arange(1024, device="cuda") // 300).expand(2, -1).contiguous()
    q = torch.randn(2, 12, 1024, 72, device="cuda", requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 1024, 72, device="cuda") for _ in range(2))
    rule = visible(window=200, documents=documents, length=1024)
    assert rule.blocks is not None
    fast, plain = dispatch(q, k, v, rule), dispatch(q, k, v, Visible(True, 200, documents))
    torch.testing.assert_close(fast, plain, rtol=1e-2, atol=1e-2)
    grads = [torch.autograd.grad(out.square().sum(), q)[0] for out in (fast, plain)]
    torch.testing.assert_close(*grads, rtol=5e-2, atol=5e-2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 130, 300])
@pytest.mark.parametrize("ids", [None, "ascending", "padded", "mixed"])
def test_blocks_of_the_fused_kernel(causal, window, ids):
    """Nothing seen is skipped, of ascending documents nothing else is kept, and no list of whole blocks is given."""
    length, blocks = 520, 5
    documents = {
        None: None,
        "ascending": torch.stack([torch.arange(length) // 150, torch.arange(length) // 400]),
        "padded": (torch.arange(length) < torch.tensor([[300], [520]])).long() - 1,
        "mixed": torch.randint(3, (2, length)),
    }[ids]
    rule = Visible(causal, window, documents)
    mask = block_mask(rule, length, torch.device("cpu"))
    assert mask.full_kv_num_blocks is None
    place = torch.arange(length)
    seen = torch.zeros(2, blocks * FLEX_BLOCK, blocks * FLEX_BLOCK, dtype=torch.bool)
    seen[:, :length, :length] = rule.mask(2, place, place)[:, 0]
    needed = seen.unflatten(1, (blocks, -1)).unflatten(3, (blocks, -1)).any(dim=(2, 4))
    kept = mask.to_dense()[:, 0].bool().expand(2, -1, -1)
    assert not (needed & ~kept).any()
    if ids in (None, "ascending"):
        # A pair of blocks can pass each rule by other tokens; few do.
        assert (kept & ~needed).sum() <= (0 if ids is None else 4)
    q, k, v = (torch.randn(2, 2, length, 8) for _ in range(3))
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask, scale=1.0), dispatch(q, k, v, rule))


def test_block_lists_keep_their_layout_in_compiled_models():
    """The fused kernel takes them for contiguous; lists laid out by the compiler made it read beyond their end."""
    documents = torch.arange(520).expand(3, -1) // 200
    torch.library.opcheck(_seen_blocks, (documents, True, None))  # strides too
    assert all(part.is_contiguous() for part in _seen_blocks(documents, True, 100))
    graphs = []

    def note(graph, inputs):
        graphs.append(str(graph.graph))
        return graph

    rule = torch.compile(lambda d: block_mask(Visible(documents=d), 520, d.device).q_indices, backend=note)
    assert torch.equal(rule(documents), _seen_blocks(documents, True, None)[3])
    assert "seen_blocks" in graphs[0]
    assert "sort" not in graphs[0]


class Sizes(TorchDispatchMode):
    """Notes the shapes of everything that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.shapes.add(tuple(x.shape))
        return out


@pytest.mark.parametrize("rule", [visible(), visible(window=100), visible(documents=torch.zeros(1, 600))], ids=str)
@pytest.mark.parametrize("kind", ["plain", "grouped", "latent"])
def test_no_tensor_of_length_by_length(rule, kind):
    length = 600
    assert length > 2 * BLOCK
    layer = (
        LatentAttention(32, 2, latent=16, nope_width=8, rope_width=8, value_width=16)
        if kind == "latent"
        else Attention(32, 2, kv_heads=1 if kind == "grouped" else 2)
    )
    s = torch.randn(1, length, 32, requires_grad=True)
    with Sizes() as sizes:
        layer(s, HoPE(8).table(torch.arange(length)), rule).sum().backward()
    assert len(sizes.shapes) > 20
    assert not [shape for shape in sizes.shapes if shape.count(length) > 1]


def test_documents_do_not_see_each_other():
    layer = Attention(32, heads=4)
    s = torch.randn(2, S, 32)
    table = HoPE(8).table(torch.arange(S))
    packed = layer(s, table, visible(documents=DOCUMENTS))
    alone = layer(s[1:, 3:9], tuple(x[:6] for x in table))  # rotary positions are relative
    torch.testing.assert_close(packed[1:, 3:9], alone)
    other = s.clone()
    other[0, :4] = torch.randn(4, 32)
    assert torch.equal(layer(other, table, visible(documents=DOCUMENTS))[0, 4:], packed[0, 4:])


@pytest.mark.parametrize("norm", [6.0, 9.0, 12.0])
def test_centroid_of_one_point_in_bfloat16(norm):
    """A document's first token attends to itself only: the centroid is the value. t² − |s|² of rounded sums is not."""
    space = Space()
    v = torch.randn(1, 1, 400, 64)
    v = (norm * v / v.norm(dim=-1, keepdim=True)).bfloat16()
    rule = visible(documents=torch.arange(400).unsqueeze(0))  # every token its own document
    ours, _ = attend(v, v, v, torch.tensor([0.1]), rule, space)
    error = ((ours - v).float().norm(dim=-1) / v.float().norm(dim=-1)).flatten()
    t = space.time(v).bfloat16().float()
    squared = (t**2 - v.float().square().sum(-1, keepdim=True)).abs().clamp_min(1e-6)
    theirs = (squared.rsqrt() - 1.0).abs().flatten()
    assert error.median() < 0.01
    assert error.max() < 0.05
    assert theirs.median() > 3 * error.median()
    assert theirs.max() > 0.1


def test_centroid_keeps_the_exact_bound():
    """Sums whose squared length came out too small, or negative, are taken at the bound 1/c."""
    for c in (0.5, 1.0, 2.0):
        o, t = torch.tensor([[3.0, 4.0]]), torch.tensor([[4.9]])
        point, time = centroid_of_sum(o, t, c)
        torch.testing.assert_close(point, o)
        torch.testing.assert_close(time, Space(c=c).time(o))


def test_head_and_tail_lanes_save_the_time_product():
    q, k = (8.0 * torch.nn.functional.normalize(torch.randn(200, 64), dim=-1).bfloat16() for _ in range(2))
    space, scale = Space(), torch.ones(1)
    exact = q.double() @ k.double().T - space.time(q.double()) @ space.time(k.double()).T
    query, key = score_lanes(q, k, scale, space)
    assert query.dtype == torch.bfloat16
    assert query.shape[-1] == 72
    ours = (query.double() @ key.double().T - exact).abs().mean()
    one_lane = q.double() @ k.double().T - space.time(q).bfloat16().double() @ space.time(k).bfloat16().double().T
    assert ours < 0.02 * (one_lane - exact).abs().mean()


def test_hope_is_relative_and_survives_casts():
    table = HoPE(16).table(torch.arange(40), torch.float64)
    q, k = torch.randn(2, 16, dtype=torch.float64)
    turned_q, turned_k = (rotate(x.expand(40, 16), table) for x in (q, k))
    scores = turned_q @ turned_k.T
    torch.testing.assert_close(scores.diagonal(5), scores[0, 5].expand(35))
    assert (scores.diagonal(5)[0] - scores.diagonal(0)[0]).abs() > 1e-3
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(40))
    # A cast of the authors' model drops the imaginary part of a complex buffer; here there is none to damage.
    layer = Attention(32, heads=2)
    s = torch.randn(1, 40, 32)
    before = layer(s, HoPE(16).table(torch.arange(40)))
    assert torch.equal(layer.to(torch.float32)(s, HoPE(16).table(torch.arange(40))), before)
    real_part_only = (table[0].float(), torch.zeros(40, 8))
    assert (layer(s, real_part_only) - before).abs().max() > 1e-3


def test_partial_hope_leaves_the_rest():
    x = torch.randn(1, 2, 7, 12)
    out = rotate(x, HoPE(4).table(torch.arange(7)))
    assert torch.equal(out[..., 4:], x[..., 4:])
    assert torch.equal(out[:, :, 0], x[:, :, 0])
    assert (out[:, :, 1:, :4] - x[:, :, 1:, :4]).abs().min() > 0
    by_row = rotate(x, HoPE(4).table(torch.arange(7).expand(1, 7)))
    assert torch.equal(by_row, out)


def test_stretch_reaches_beyond_the_trained_length():
    plain, trained, factor = HoPE(32), 64, 8.0
    linear = HoPE(32, stretch=Stretch(factor, trained, kind="linear"))
    torch.testing.assert_close(linear.frequencies(), plain.frequencies() / factor)
    assert linear.sharpness == 1.0
    yarn = HoPE(32, stretch=Stretch(factor, trained, fast=4.0, slow=1.0))
    ratio = plain.frequencies() / yarn.frequencies()
    turns = trained * plain.frequencies() / (2 * math.pi)
    torch.testing.assert_close(ratio[turns > 6.0], torch.ones_like(ratio[turns > 6.0]))  # fast pairs are left alone
    torch.testing.assert_close(ratio[turns < 0.5], torch.full_like(ratio[turns < 0.5], factor))
    assert (ratio.diff() >= 0).all()
    torch.testing.assert_close(yarn.sharpness, (0.1 * math.log(factor) + 1) ** 2)
    # The factor on scores is a number of the layer, so tau stays a parameter and the layer runs.
    layer = Attention(64, heads=2, sharpness=yarn.sharpness)
    length = int(factor * trained)
    layer(torch.randn(1, length, 64), yarn.table(torch.arange(length))).sum().backward()
    assert layer.log_scale.grad is not None
    assert layer.log_scale.grad.abs() > 0


@pytest.mark.parametrize("space", [Space(), Space(c=0.37), Space("euclidean")], ids=str)
@pytest.mark.parametrize("kind", ["full", "latent", "latent queries"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS[1:]])
def test_step_by_step_equals_all_at_once(space, kind, documents, monkeypatch):
    monkeypatch.setattr("leafward.nn.attention.BLOCK", 8)  # two queries of four heads: chunks take several blocks
    latent = {"latent": 12, "nope_width": 6, "rope_width": 4, "value_width": 5}
    layer = (
        Attention(32, heads=4, kv_heads=2, space=space)
        if kind == "full"
        else LatentAttention(32, 4, **latent, query_latent=9 if "queries" in kind else None, space=space)
    ).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    s = torch.randn(1, S, 32, dtype=torch.float64)
    table = HoPE(4).table(torch.arange(S), torch.float64)
    whole = layer(s, table, visible(documents=documents))
    kept: list[Tensor] = []

    def store(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kept[:] = [torch.cat([old, new], dim=2) for old, new in zip(kept, (k, v), strict=True)] if kept else [k, v]
        return kept[0], kept[1]

    out, at = [], 0
    for stop in (4, 5, 6, 9, S):  # a prompt, single steps and chunks
        part = tuple(x[at:stop] for x in table)
        rule = visible(documents=None if documents is None else documents[:, :stop])
        out.append(layer(s[:, at:stop], part, rule, store))
        at = stop
    torch.testing.assert_close(torch.cat(out, dim=1), whole)
    if kind != "full":
        numbers = sum(x.shape[1] * x.shape[3] for x in kept)
        assert numbers == (12 + 1 + 4 + 2 * 4 if space.curved else 12 + 4)
