"""Which sequences each step uses: pure functions of (seed, step)."""
