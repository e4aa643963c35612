"""Sixty templates for the names of classes: as many as PromptSRC averages its frozen texts over. Imports no torch."""

from __future__ import annotations

KINDS = ("photo", "picture", "close-up photo", "drawing", "painting", "rendering")
QUALITIES = ("", "good ", "bad ", "blurry ", "bright ", "dark ", "cropped ", "small ", "large ", "black and white ")

DIVERSE = tuple(f"a {quality}{kind} of a {{}}." for quality in QUALITIES for kind in KINDS)
"""Six kinds of pictures in ten qualities."""
