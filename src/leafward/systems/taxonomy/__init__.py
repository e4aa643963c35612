"""Embedding a taxonomy, searching it, and scoring predictions against it."""
