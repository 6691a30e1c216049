"""Sums over tensors on the device that holds them: digests and squares."""
