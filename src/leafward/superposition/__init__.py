"""Superposition: fleets of toy models, their theory, and an audit of any checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.superposition.audit_matrix import audit
    from leafward.superposition.audit_report import AuditReport
    from leafward.superposition.fleet import Fleet, FleetOptions, ModelSpec, log_steps, width_scaled_rates
    from leafward.superposition.laws import frequencies
    from leafward.superposition.theory import etf_limit, etf_overlap, random_overlap, weak_loss, welch_bound

_HOME = {
    "audit_matrix": ("audit",),
    "audit_report": ("AuditReport",),
    "fleet": ("Fleet", "FleetOptions", "ModelSpec", "log_steps", "width_scaled_rates"),
    "laws": ("frequencies",),
    "theory": ("etf_limit", "etf_overlap", "random_overlap", "weak_loss", "welch_bound"),
}

__all__ = [
    "AuditReport",
    "Fleet",
    "FleetOptions",
    "ModelSpec",
    "audit",
    "etf_limit",
    "etf_overlap",
    "frequencies",
    "log_steps",
    "random_overlap",
    "weak_loss",
    "welch_bound",
    "width_scaled_rates",
]


__getattr__, __dir__ = lazy(__name__, _HOME)
