"""Shortcuts of the published analysis of checkpoints, written out, beside the audit."""

from __future__ import annotations

import pytest
import torch

from leafward.measure import audit


def test_overlaps_in_the_checkpoints_own_type_are_rounded() -> None:
    """Published: rows are normalised and multiplied in the type of the file; here in float32 with sums in float64."""
    rows = (torch.randn(400, 64, generator=torch.Generator().manual_seed(0)) + 0.5).bfloat16()
    off = ~torch.eye(400, dtype=torch.bool)
    unit = torch.nn.functional.normalize(rows.double(), dim=-1)
    exact = float((unit @ unit.T)[off].square().mean())
    rough = rows / rows.norm(dim=-1, keepdim=True)
    published = float((rough @ rough.T)[off].double().square().mean())
    assert audit(rows).mean_squared_overlap == pytest.approx(exact, rel=1e-6)
    assert abs(published / exact - 1) > 1e-4


def test_rows_that_are_not_quite_zero_are_not_represented() -> None:
    """Published: every row has a norm above zero and n ≫ m, hence strong superposition."""
    rows = torch.nn.functional.normalize(torch.randn(400, 32, generator=torch.Generator().manual_seed(0)), dim=-1)
    rows[30:] *= 1e-3
    assert rows.norm(dim=-1).min() > 0
    assert len(rows) > 10 * rows.shape[1]
    assert audit(rows).verdict.label == "weak superposition"
