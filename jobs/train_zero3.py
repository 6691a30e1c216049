"""`train_zero3`: ZeRO-3 in Ray Train as a script, for `ray job submit` and checkouts that are not installed."""

import sys
from pathlib import Path

if __name__ == "__main__":  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elastic_ring.cli.zero3 import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
