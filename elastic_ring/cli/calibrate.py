"""Measure this host: messages between its ranks, its kernels, groups, collectives, copies and storage.

    elastic-ring calibrate --out machine.json                 all GPUs, or two CPU processes over gloo
    elastic-ring calibrate --ranks 4 --heads 16:4 --head-dim 128 --limit-s 60 --out machine.json
    elastic-ring calibrate --hosts 2 --host 0 --meet 10.0.0.1:29400 --storage /checkpoints --out machine.json

All ranks measure at the same time, each in its own process; the figures are the slowest rank's. Prints the figures, and
each measurement next to its prediction; `not fitted` ones were left out of the fit, so a large error there means a bad
fit. The file is for `--machine` of `elastic-ring train` and `elastic-ring forecast`. Nothing else should run meanwhile.
With `--hosts` run it on each of them, so that collectives over the network are measured, too.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path


def heads(text: str) -> tuple[int, int]:
    query, _, keys = text.partition(":")
    return int(query), int(keys or query)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="elastic-ring calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--ranks", type=int, default=0, help="processes; 0: one for each GPU, 2 on CPUs (0)")
    parser.add_argument("--heads", default="8:2", type=heads, help="query:K/V heads (8:2)")
    parser.add_argument("--head-dim", default=64, type=int, help="(64)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--fast", action="store_true", help="kernels whose gradients need not repeat bit for bit")
    parser.add_argument("--limit-s", default=60.0, type=float, help="seconds after which nothing is repeated (60)")
    parser.add_argument("--repeats", default=7, type=int, help="of every case; the median counts (7)")
    parser.add_argument("--most-mib", default=64, type=int, help="the longest message, MiB (64)")
    parser.add_argument("--hosts", default=1, type=int, help="that measure together (1)")
    parser.add_argument("--host", default=0, type=int, help="which of them this is, from 0 (0)")
    parser.add_argument("--meet", metavar="ADDRESS:PORT", help="of host 0, where there are several")
    parser.add_argument("--storage", type=Path, metavar="DIR", help="where checkpoints go: how fast files are written")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write figures and measurements there, as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    options = parse(arguments)
    from elastic_ring.tuning.calibrate_host import run

    return run(options)
