"""What a trained toy model looks like: norms, represented features, overlaps, and the references beside them."""

from __future__ import annotations

import math

import torch

from leafward.measure.theory import etf_overlap, random_overlap, welch_bound
from leafward.systems.superposition.theory import weak_loss, weak_loss_leading

GRAM_ROWS = 1024  # rows of the Gram matrix held at once


def describe(weights: torch.Tensor, p: torch.Tensor) -> dict[str, float]:
    """Geometry of W (n, m) trained at feature probabilities p (n,), with closed-form references.

    φ_½ and φ_1 are the fractions of rows with norm above ½ (represented) and above 1 (strongly represented).
    """
    n, m = weights.shape
    norms = torch.linalg.vector_norm(weights.double(), dim=1)
    represented = int((norms > 0.5).sum())
    mean, variance = squared_overlap(weights)
    strong = norms > 1
    strong_mean, strong_variance = squared_overlap(weights[strong])
    random_mean, random_variance = random_overlap(m)
    return {
        "phi_half": represented / n,
        "phi_one": float(strong.double().mean()),
        "norm_mean": float(norms.mean()),
        "norm_std": float(norms.std(correction=0)),
        "norm_min": float(norms.min()),
        "norm_max": float(norms.max()),
        "overlap_mean": mean,
        "overlap_variance": variance,
        "strong_overlap_mean": strong_mean,
        "strong_overlap_variance": strong_variance,
        "random_overlap_mean": random_mean,
        "random_overlap_variance": random_variance,
        "welch_bound": welch_bound(n, m),
        "strong_welch_bound": welch_bound(int(strong.sum()), m),
        "etf_overlap": etf_overlap(n, m),
        "weak_loss": weak_loss(p, represented),
        "weak_loss_leading": weak_loss_leading(p, represented),
        "ambiguity": ambiguity(weights),
    }


def squared_overlap(vectors: torch.Tensor) -> tuple[float, float]:
    """Mean and variance of (û_i·û_j)² over pairs i < j of the rows (ν, m), normalised; NaN for fewer than two.

    The mean is exact from the m×m frame operator S = Σ û ûᵀ, (‖S‖² − ν)/(ν(ν−1)); the fourth moment takes the Gram
    matrix, a slice of rows at a time. Rows of norm zero have no direction and are left out.
    """
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    alive = norms.squeeze(1) > 0
    units = (vectors[alive] / norms[alive]).double()
    count = len(units)
    if count < 2:
        return math.nan, math.nan
    pairs = count * (count - 1)
    frame = units.t() @ units
    mean = (float(frame.square().sum()) - count) / pairs
    # Fourth powers are taken in the input's precision: their relative error is far below the spread measured.
    coarse = units.to(vectors.dtype)
    fourth = torch.zeros((), dtype=torch.float64, device=units.device)
    for start in range(0, count, GRAM_ROWS):
        fourth += (coarse[start : start + GRAM_ROWS] @ coarse.t()).square_().square_().sum(dtype=torch.float64)
    diagonal = coarse.double().square().sum(1).square().square().sum()
    return mean, max(0.0, float(fourth - diagonal) / pairs - mean**2)


def ambiguity(weights: torch.Tensor) -> float:
    """‖W Wᵀ − (I_m ⊕ 0)‖₂: distance from representing exactly the m most frequent features, which come first.

    With A = [W|E], E the first m unit vectors, and A = QR, the matrix is Q R diag(1, −1) Rᵀ Qᵀ, so that its spectral
    norm is found among the eigenvalues of a matrix of size 2m instead of n.
    """
    n, m = weights.shape
    stacked = torch.cat([weights.double(), torch.eye(n, m, dtype=torch.float64, device=weights.device)], dim=1)
    triangle = torch.linalg.qr(stacked, mode="r").R
    signs = torch.ones(2 * m, dtype=torch.float64, device=weights.device)
    signs[m:] = -1
    return float(torch.linalg.eigvalsh((triangle * signs) @ triangle.t()).abs().max())
