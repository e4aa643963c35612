"""Superposition: fleets of toy models, their theory, and an audit of any checkpoint."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leafward.superposition.audit_matrix import audit
    from leafward.superposition.audit_report import AuditReport
    from leafward.superposition.fleet import Fleet, FleetOptions, ModelSpec, log_steps, width_scaled_rates
    from leafward.superposition.laws import frequencies
    from leafward.superposition.theory import etf_limit, etf_overlap, random_overlap, weak_loss, welch_bound

_HOME = {
    "audit": "audit_matrix",
    "AuditReport": "audit_report",
    "Fleet": "fleet",
    "FleetOptions": "fleet",
    "ModelSpec": "fleet",
    "log_steps": "fleet",
    "width_scaled_rates": "fleet",
    "frequencies": "laws",
    "etf_limit": "theory",
    "etf_overlap": "theory",
    "random_overlap": "theory",
    "weak_loss": "theory",
    "welch_bound": "theory",
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


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
