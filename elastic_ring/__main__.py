"""`python -m elastic_ring`, the same as `elastic-ring`."""

import sys

from elastic_ring.cli import main

if __name__ == "__main__":
    sys.exit(main())
