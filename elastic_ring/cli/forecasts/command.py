"""`elastic-ring forecast`: memory, time, goodput, money and probability before anything is rented.

    elastic-ring forecast --preset 8b --dp 64 --global-batch 64 --fleet h100-80 --tokens 1T --deadline 90d --budget 1M

Takes the settings of `elastic-ring train`, and its own options. Imports neither torch nor Ray. Exits 2 for wrong input,
1 for a run whose records are damaged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_ring.cli.settings import parse
from elastic_ring.errors import ElasticRingError


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastic-ring forecast",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
        exit_on_error=False,
    )
    add = parser.add_argument
    add("--fleet", default="h100-80", help="a TOML file, or a GPU type (h100-80)")
    add("--tokens", default="1T", help="to train on: 300B, 1T (1T)")
    add("--machine", type=Path, help="rates of elastic-ring calibrate")
    add("--measured-step", type=float, metavar="S", help="seconds of a step, in place of the model of step time")
    add("--failures", default="published", help="a prior's name, or a TOML file (published)")
    add("--prices", help="a TOML file of dated rows")
    add("--price", default="on demand", choices=["on demand", "reserved", "spot", "owned"], help="which (on demand)")
    add("--deadline", help="90d, 36h, 6w, or a date")
    add("--budget", help="dollars: 12M")
    add("--search", action="store_true", help="other meshes, offload, spares, GPU types: the front of cost and time")
    add("--stages", metavar="FILE", help="a TOML file of [[stage]] tables: each stage and the chance that all pass")
    add("--from-run", type=Path, metavar="RUN", help="a run's folder: its step and failures correct it")
    add("--score", type=Path, nargs="+", metavar="RUN", help="how wrong the forecast was of runs that have ended")
    add("--plot", type=Path, metavar="DIR", help="write five pictures there; needs matplotlib")
    add("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(options().format_help())
        parse(["--help"])  # exits
    from elastic_ring.cli.forecasts.answer import run  # imports numpy

    try:
        return run(*options().parse_known_args(words))
    except (ValueError, argparse.ArgumentError) as error:
        print(f"elastic-ring forecast: {error}", file=sys.stderr)
        return 2
    except ElasticRingError as error:  # of a run that is read
        print(f"elastic-ring forecast: {error}", file=sys.stderr)
        return 1
