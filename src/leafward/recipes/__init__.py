"""Recipes: the place where a system is put together and run, one module for each.

Every recipe module has a dataclass `Config`, a dictionary `PRESETS` of functions that return one, a line `SUMMARY`,
and `run(config, out, *, resume, overwrite)`. Importing it costs nothing: what is heavy is imported by `run`.
"""

from __future__ import annotations

RECIPES: dict[str, str] = {"superposition": "leafward.recipes.superposition"}
"""Name on the command line -> module."""
