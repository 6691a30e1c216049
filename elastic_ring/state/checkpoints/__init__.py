"""Durable checkpoints and final weights: writing, reading, retention, other layouts."""

FOLDER = "checkpoints"
"""Of a run's folder or store. Here, so that who looks for it imports no torch."""
