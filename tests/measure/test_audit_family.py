"""Families of models and the table of their losses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from leafward.errors import DataError, UsageError
from leafward.measure.audit_family import audit_family, read_losses
from leafward.measure.audit_matrix import audit
from leafward.measure.audit_report import AuditReport

TABLE = """model,corpus,m,loss,params
small,wiki,8,4.5,1e6
small,books,8,4.75,1e6
large,wiki,16,3.5,4e6
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "losses.csv"
    path.write_text(text, encoding="utf-8")
    return path


def report(folder: Path, name: str, width: int, shift: float = 0.0, hidden: int | None = None) -> AuditReport:
    (folder / name).mkdir()
    x = torch.randn(80, width, generator=torch.Generator().manual_seed(width)) + shift
    save_file({"lm_head.weight": x}, folder / name / "model.safetensors")
    config = {"hidden_size": hidden or width, "tie_word_embeddings": False, "vocab_size": 80}
    (folder / name / "config.json").write_text(json.dumps(config))
    return audit(folder / name)


def test_losses_are_read_by_column(tmp_path: Path) -> None:
    table = read_losses(written(tmp_path, TABLE))
    assert table.model == ("small", "small", "large")
    assert table.corpus == ("wiki", "books", "wiki")
    np.testing.assert_array_equal(table.width, [8, 8, 16])
    np.testing.assert_array_equal(table.loss, [4.5, 4.75, 3.5])
    assert table.params is not None
    np.testing.assert_array_equal(table.params, [1e6, 1e6, 4e6])
    assert table.depth is None
    assert table.tokens is None


def test_a_byte_order_mark_spaces_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    table = read_losses(written(tmp_path, "\ufeffmodel, corpus, m, loss\n\na, wiki, 8, 4\n\n"))
    assert (table.model, table.corpus, table.loss.tolist()) == (("a",), ("wiki",), [4.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"lacks the column\(s\) model, corpus, m, loss"),
        ("model,corpus,loss\na,w,1\n", r"lacks the column\(s\) m"),
        ("model,corpus,m,loss,parms\na,w,8,1,2\n", "unknown column 'parms'; did you mean 'params'"),
        ("model,corpus,m,loss,loss\na,w,8,1,2\n", "names a column twice"),
        ("model,corpus,m,loss\n", "no rows"),
        ("model,corpus,m,loss\na,w,8,1\nb,w,8,high\n", "line 3: loss must be a positive number, got 'high'"),
        ("model,corpus,m,loss\na,w,-8,1\n", "line 2: m must be a positive number, got '-8'"),
        ("model,corpus,m,loss\na,w,8,nan\n", "line 2: loss must be a positive number, got 'nan'"),
        ("model,corpus,m,loss\na,w,8\n", "line 2: expected 4 fields"),
        ("model,corpus,m,loss\na,w,8,1,9\n", "line 2: expected 4 fields"),
        ("model,corpus,m,loss\n,w,8,1\n", "line 2: model and corpus must not be empty"),
        ("model,corpus,m,loss\na,w,8,1\na,w,8,2\n", "line 3: a on w is already on line 2"),
        ("model,corpus,m,loss\na,w,8,1\na,v,9,2\n", "line 3: a has m = 9 here and 8 above"),
    ],
)
def test_wrong_tables_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_losses(written(tmp_path, text))


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*absent\.csv"):
        read_losses(tmp_path / "absent.csv")


def test_a_family_is_ordered_by_width(tmp_path: Path) -> None:
    large, small = report(tmp_path, "large", 16, shift=1.0), report(tmp_path, "small", 8)
    family = audit_family(large, small, losses=written(tmp_path, TABLE))
    assert family.names == ("small", "large")
    np.testing.assert_array_equal(family.width, [8, 16])
    np.testing.assert_allclose(family.scaled_overlap, [small.scaled_overlap, large.scaled_overlap])
    assert family.scaled_overlap[1] > 3 > 2 > family.centred_scaled_overlap[1]
    assert family.losses is not None
    assert family.losses.loss[-1] == 3.5


def test_a_width_that_the_rows_do_not_have_is_refused(tmp_path: Path) -> None:
    # As with OPT-350m: hidden size 1024 in the fit, embedding 512 wide in the overlaps.
    small, large = report(tmp_path, "small", 8), report(tmp_path, "large", 12, hidden=16)
    with pytest.raises(DataError, match=r"large has m = 16 .* 12 wide \(a projected embedding\); put m = 12"):
        audit_family(small, large, losses=written(tmp_path, TABLE))


def test_families_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    small, other = report(tmp_path, "small", 8), report(tmp_path, "other", 16)
    with pytest.raises(UsageError, match="at least two reports"):
        audit_family(small)
    with pytest.raises(UsageError, match="2 different names"):
        audit_family(small, other, names=("a", "a"))
    with pytest.raises(DataError, match=r"no row is about x; models there: large, small"):
        audit_family(small, other, names=("x", "y"), losses=written(tmp_path, TABLE))
