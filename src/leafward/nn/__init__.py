"""Layers on the hyperboloid, and their Euclidean twins through the same code.

    from leafward.nn import Attention, HoPE, Space
    layer = Attention(768, heads=12, space=Space("lorentz"))     # or Space("euclidean")
    y = layer(s, HoPE(64).table(torch.arange(s.shape[1])))       # (B, T, 768) -> (B, T, 768)

All layers take and give the space parts of points; see `Space`.
"""

from leafward.nn.attention import Attention, LatentAttention
from leafward.nn.embedding import Embedding
from leafward.nn.experts import Curvatures, Gate, MiCE
from leafward.nn.feedforward import FeedForward
from leafward.nn.head import Head, chunked_cross_entropy
from leafward.nn.lanes import Visible, attend, visible
from leafward.nn.linear import Linear
from leafward.nn.norm import RMSNorm
from leafward.nn.residual import Residual
from leafward.nn.rotary import HoPE, Stretch, rotate
from leafward.nn.space import Space

__all__ = [
    "Attention",
    "Curvatures",
    "Embedding",
    "FeedForward",
    "Gate",
    "Head",
    "HoPE",
    "LatentAttention",
    "Linear",
    "MiCE",
    "RMSNorm",
    "Residual",
    "Space",
    "Stretch",
    "Visible",
    "attend",
    "chunked_cross_entropy",
    "rotate",
    "visible",
]
