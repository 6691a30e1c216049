"""Durable checkpoints and final weights: writing, reading, retention, other layouts."""

FOLDER = "checkpoints"
"""In a run's folder or store. Here, so that looking for it imports no torch."""
