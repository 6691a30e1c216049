"""Print the mesh, generation, step, spares and last recoveries of a live or ended run.

    python jobs/status.py RUN [--watch [SECONDS]]

RUN is a run folder. Reads its files only, so it works while the run trains, after it, and without Ray.
Exit status: 0, or 2 with the reason when RUN is not the folder of a run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run from a checkout, where the package may not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from elastic_ring.errors import ElasticRingError
from elastic_ring.monitor.report import render_status

_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="elastic-ring status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run (its --run-dir)")
    parser.add_argument(
        "--watch", nargs="?", const=1.0, type=_positive, metavar="SECONDS",
        help="show again every SECONDS (1 if left out) until Ctrl-C",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        while True:
            text = render_status(options.run)
            if options.watch and sys.stdout.isatty():
                text = _CLEAR_SCREEN + text
            print(text, end="", flush=True)
            if not options.watch:
                return 0
            time.sleep(options.watch)
    except (ValueError, ElasticRingError) as error:
        print(f"elastic-ring status: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 seconds")
    return value


if __name__ == "__main__":
    sys.exit(main())
