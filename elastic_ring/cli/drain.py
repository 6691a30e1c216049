"""`elastic-ring drain`: tell Ray that a node leaves, and wait until no run has a worker on it.

Members hand their place over at the end of the step under way, spares leave at once. Exit status: 0 when all have left,
1 when some are still there at the deadline (the run then loses them as it loses any other) or when Ray refuses, 2 for
the head and for a node that Ray does not know.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from elastic_ring.errors import ElasticRingError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="elastic-ring drain", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--node-id", metavar="ID", help="Ray's id of the node (the one that this runs on)")
    parser.add_argument("--deadline-s", type=positive, default=100.0, metavar="S", help="when the node goes (100)")
    options = parser.parse_args(arguments)
    from elastic_ring.runtime.driver.drain import drain

    try:
        left = drain(options.node_id, options.deadline_s)
    except (ElasticRingError, ConnectionError, ValueError) as error:
        print(f"elastic-ring drain: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if left:
        print(f"elastic-ring drain: still here after {options.deadline_s:g} s: {', '.join(left)}", file=sys.stderr)
        return 1
    print(
        "no run has a worker on this node" if options.node_id is None else f"no run has a worker on {options.node_id}"
    )
    return 0


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 seconds")
    return value
