"""`elastic-ring plan`: what a run needs of memory, printed before anything is started; a laptop can plan 1 T."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from elastic_ring.cli import train


def main(argv: Sequence[str] | None = None) -> int:
    """What `elastic-ring train --plan` prints for the same settings."""
    return train.main(["--plan", *(sys.argv[1:] if argv is None else argv)])
