"""`elastic-ring metrics --table`: the metrics that a run exports, as a Markdown table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from elastic_ring.runtime.coordinator.folds.metrics_table import markdown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="elastic-ring metrics", description=__doc__)
    parser.add_argument("--table", action="store_true", required=True, help="print name, type, unit, labels, meaning")
    parser.parse_args(arguments)
    print(markdown(), end="")
    return 0
