"""Small real data shipped with the package; README.md beside this file says where each piece comes from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def embedded(name: str) -> Path:
    """Path of an embedded file."""
    return Path(str(files(__name__) / name))
