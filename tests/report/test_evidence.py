"""The claims and their records: the page is what they give, and tolerances were set before results."""

from __future__ import annotations

from pathlib import Path

from leafward.report.claims import render

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "evidence"


def test_the_page_is_what_the_claims_and_records_give() -> None:
    assert (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8") == render(EVIDENCE), (
        "docs/evidence.md is made: run leafward evidence render"
    )
