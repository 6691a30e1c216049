"""Durable checkpoints and final weights: writing, reading, retention, other layouts."""
