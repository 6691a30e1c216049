"""Sparse ring attention on the GPUs of this host: one process each, against the same sparse work on one of them.

    python benchmarks/attention/bench_sparse_ring.py --tokens 256K,1M --densities 0.1,0.03 --out runs/sparse-ring.json
    python benchmarks/attention/bench_sparse_ring.py --patterns mixed@0.1,window@0.01,longnet --layouts zigzag

bf16, forward and backward, through autograd. Patterns: `mixed@d`, half a window and half random blocks of density d;
`window@d`; `longnet`, dilated by whole blocks, each query's own block and the one before beside it. *Efficiency* is
the time of all the sparse work on one GPU, shared out evenly, over the ring's; work max/mean says how uneven the
layout leaves it, which bounds it. *Of ideal* is the speed-up over the dense ring (zigzag, the dense kernel's best, same
exchange), over 1/density. Repeats are interleaved in a new order each; a time is the slowest rank's, every figure the
median over repeats. Block tables are made outside the clock; their time is printed, with the number of stages in which
keys are fetched, the largest rank's buffers, and how many of the keys are kept for backward.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.arguments import IN_A_ROW, at_least_one, bench_parser, list_of, num_heads, num_tokens

_KEEP = {"auto": None, "yes": True, "no": False}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", default="256K,1M", type=list_of(num_tokens), help="(256K,1M)")
    parser.add_argument("--heads", default="8:8", type=num_heads, help="query:K/V heads (8:8)")
    parser.add_argument("--head-dim", default=128, type=int, help="(128)")
    parser.add_argument("--densities", default="0.1,0.03", help="of `mixed` patterns (0.1,0.03)")
    parser.add_argument("--patterns", help="instead: names as above (mixed@ each density, window@0.01, longnet)")
    parser.add_argument("--layouts", default="contiguous,zigzag", type=list_of(str))
    parser.add_argument("--repeats", default=5, type=int)
    parser.add_argument("--dense-repeats", default=2, type=int, help="of the dense ring, once a length; 0: without it")
    parser.add_argument("--warm-ups", default=2, type=int)
    parser.add_argument("--watched", default=2, type=int, help="more passes, in which bytes and waits are taken")
    parser.add_argument("--in-a-row", default=1, type=at_least_one, metavar="N", help=IN_A_ROW)
    parser.add_argument("--no-single", dest="single", action="store_false", help="without the same work on one GPU")
    parser.add_argument("--ranks", default=0, type=int, help="GPUs to use; 0: all of this host")
    parser.add_argument("--kernel", default=None, help="pin the sparse kernel")
    parser.add_argument("--deterministic", action="store_true", help="kernels whose gradients repeat bit for bit")
    parser.add_argument("--partials", choices=["fp32"], help="dK and dV travel in fp32, not in the kernel's type")
    parser.add_argument("--stage-bytes", default=None, type=int, help="memory of a stage's keys (as in training)")
    parser.add_argument("--keep-keys", choices=list(_KEEP), default="auto", help="for backward (auto: where few)")
    parser.add_argument("--out", default=None, type=Path)
    options = parser.parse_args(arguments)
    options.keep_keys = _KEEP[options.keep_keys]
    named = [f"mixed@{density}" for density in options.densities.split(",")] + ["window@0.01", "longnet"]
    options.patterns = options.patterns.split(",") if options.patterns else named
    return options


def main() -> None:
    options = parse()
    from benchmarks.attention.sparse_ring_rank import run_rank
    from benchmarks.harness.gpu_ranks import run_ranks

    run_ranks("bench_sparse_ring", run_rank, options)


if __name__ == "__main__":
    main()
