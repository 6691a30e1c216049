"""Single decisions of a recovery, each a pure function."""
