"""GPUs by name and processes of their own that hold them, for tests; there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_ring.runtime.chips import Chip
from tests.holding import holding

FOUR = tuple(Chip(index, f"GPU-{letter}") for index, letter in enumerate("abcd"))

HOLD = """
import sys, time
from pathlib import Path
from elastic_ring.runtime.chips import Chip, Claim, strike
claim = Claim("run", Path(sys.argv[1]))
chip = claim.seize([Chip(0, sys.argv[2])], int(sys.argv[3]), 10.0, lambda: None)
if sys.argv[4:]:
    strike(claim.folder, chip, sys.argv[4])
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def holder(folder: Path, chip: Chip, place: int, *failure: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that holds a GPU for a place."""
    command = [sys.executable, "-c", HOLD, str(folder), chip.name, str(place), *failure]
    with holding(command) as process:
        yield process


def fail_elsewhere(folder: Path, chip: Chip, why: str) -> None:
    """A strike by another process, which ends."""
    with holder(folder, chip, 0, why):
        pass


def go_on() -> None:
    pass
