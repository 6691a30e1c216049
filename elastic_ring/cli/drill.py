"""Drills: break a run on this machine as the world would, and show that it goes on.

    elastic-ring drill --list
    elastic-ring drill power-cut --cuts 1
    elastic-ring drill power-cut --steps 20 -- --preset 100m --dp 2 --cp 2      what stands after -- goes to the run

Exit status: 0 when the run ended as the undisturbed one did, 1 when not, 2 for a wrong setting.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

DRILLS = {"power-cut": "kill every process of a run at once, Ray's too, and submit it again"}


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:end])
    options.train = given[end + 1 :] or ["--preset", "laptop"]
    if options.list or not options.name:
        print("\n".join(f"{name:<12}{says}" for name, says in DRILLS.items()))
        return 0
    if options.name not in DRILLS:
        print(f"elastic-ring drill: there is no drill {options.name!r}: {', '.join(DRILLS)}", file=sys.stderr)
        return 2
    from elastic_ring.cli.power_cut import power_cut

    return power_cut(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastic-ring drill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="the drills and what they do")
    parser.add_argument("--cuts", type=int, default=1, help="how many power cuts in one run (1)")
    parser.add_argument("--steps", type=int, default=30, help="steps of the run (30)")
    parser.add_argument("--every", type=int, default=5, metavar="STEPS", help="steps between checkpoints (5)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the cuts (0)")
    parser.add_argument("--storage-path", default="runs", help="where the runs' folders are made (runs)")
    return parser
