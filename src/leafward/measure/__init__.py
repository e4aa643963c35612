"""Measures of any matrix: overlaps, spectra, superposition; readers of checkpoints; the theory beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.measure.audit_matrix import audit
    from leafward.measure.audit_report import AuditReport
    from leafward.measure.survey_matrices import survey
    from leafward.measure.survey_report import Survey
    from leafward.measure.theory import etf_limit, etf_overlap, random_overlap, welch_bound

_HOME = {
    "audit_matrix": ("audit",),
    "audit_report": ("AuditReport",),
    "survey_matrices": ("survey",),
    "survey_report": ("Survey",),
    "theory": ("etf_limit", "etf_overlap", "random_overlap", "welch_bound"),
}

__all__ = [
    "AuditReport",
    "Survey",
    "audit",
    "etf_limit",
    "etf_overlap",
    "random_overlap",
    "survey",
    "welch_bound",
]

__getattr__, __dir__ = lazy(__name__, _HOME)
