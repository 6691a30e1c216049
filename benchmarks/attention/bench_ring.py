"""Ring attention against its peers, on the GPUs of this host: one process each, all systems in one run.

    python benchmarks/attention/bench_ring.py --heads 8:8 --tokens 128K,512K --out runs/ring.json
    python benchmarks/attention/bench_ring.py --tokens 10M --heads 1:1 --systems ours-nccl --repeats 1 --warm-ups 0
    python benchmarks/attention/bench_ring.py --check --heads 8:8,10:2 --tokens 8K

Causal, bf16, forward and backward. Each peer is driven as its own documentation does, with everything that it prepares
outside a training step prepared before the clock starts. Repeats are interleaved in a new order each, so that a GPU
that warms up slows all systems alike; a time is the slowest rank's, and every figure the median over repeats. Ratios
are of our ring through NCCL (`ours-nccl`), which training uses. The ceiling is the ring's own kernel on one rank's
tokens alone, without autograd; all others run through autograd, as in a model.
"elsewhere" is what a peer reached outside this bench. A system that cannot run a problem is named with its reason.

Systems: ours-nccl, ours-nccl-hops, ours-nccl-gather, ceiling, ulysses-fa4, ulysses-cudnn, torch-cp-alltoall,
torch-cp-allgather, torch-cp (both), ring-flash-attn.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.arguments import IN_A_ROW, at_least_one, bench_parser, list_of, num_heads, num_tokens

DEFAULT_SYSTEMS = "ours-nccl,ceiling,ulysses-fa4,ulysses-cudnn,torch-cp,ring-flash-attn"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", default="32K,128K", type=list_of(num_tokens), help="(32K,128K)")
    parser.add_argument("--heads", default="8:8", type=list_of(num_heads), help="query:K/V heads, by comma (8:8)")
    parser.add_argument("--head-dims", default="128", type=list_of(int), help="(128)")
    parser.add_argument("--systems", default=DEFAULT_SYSTEMS, type=list_of(str), help=f"({DEFAULT_SYSTEMS})")
    parser.add_argument("--repeats", default=5, type=int, help="(5)")
    parser.add_argument("--in-a-row", default=1, type=at_least_one, metavar="N", help=IN_A_ROW)
    parser.add_argument("--warm-ups", default=2, type=int, help="(2)")
    parser.add_argument("--watched", default=3, type=int, help="further passes of ours, whose hops are timed (3)")
    parser.add_argument("--ranks", default=0, type=int, help="GPUs to use; 0: all of this host (0)")
    parser.add_argument("--kernel", default=None, help="pin our ring's backend")
    parser.add_argument("--deterministic", action="store_true", help="kernels whose gradients repeat bit for bit")
    parser.add_argument("--lean", action="store_true", help="free cached memory between systems (slower, truer peaks)")
    parser.add_argument("--check", action="store_true", help="errors against fp64 instead of times")
    parser.add_argument("--out", default=None, type=Path, metavar="FILE", help="write every time there, as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    from benchmarks.attention.ring_rank import run_rank
    from benchmarks.harness.gpu_ranks import run_ranks

    run_ranks("bench_ring", run_rank, options)


if __name__ == "__main__":
    main()
