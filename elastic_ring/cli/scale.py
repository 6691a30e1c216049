"""`elastic-ring scale`: give a run that trains fewer or more rings and spares from now on.

Surplus workers leave at the end of the step under way, whole nodes first; an autoscaler may then remove the nodes. The
run asks for missing workers. Exit status: 0 on success, 1 when there is no such run, 2 for impossible numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from elastic_ring.errors import ElasticRingError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="elastic-ring scale", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("run", metavar="NAME", help="name of the run")
    parser.add_argument("--max-dp", type=int, metavar="N", help="at most so many rings")
    parser.add_argument("--spares", type=int, metavar="N", help="so many spares")
    options = parser.parse_args(arguments)
    if options.max_dp is None and options.spares is None:
        print("elastic-ring scale: give --max-dp or --spares", file=sys.stderr)
        return 2
    from elastic_ring.runtime.driver.attach import scale

    try:
        scale(options.run, options.max_dp, options.spares)
    except ValueError as error:
        print(f"elastic-ring scale: {error}", file=sys.stderr)
        return 2
    except (ElasticRingError, ConnectionError) as error:
        print(f"elastic-ring scale: {error}", file=sys.stderr)
        return 1
    return 0
