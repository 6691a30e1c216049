"""`elastic-ring calibrate` as a script, for `ray job submit` and checkouts that are not installed."""

import sys
from pathlib import Path

if __name__ == "__main__":  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elastic_ring.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "calibrate")
    sys.exit(main())
