"""Intervals over seeds and samples, and power-law fits."""
