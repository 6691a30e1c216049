"""Search sparse patterns for the best trade between quality, time and bytes, with Ray Tune and Optuna.

    python tune/search_patterns.py --out runs/search [--trials 24] [--cpus-per-trial 0.5]
    ray job submit --working-dir . -- python tune/search_patterns.py --address auto --out /shared/search

Every trial evaluates one pattern at rising fidelities (`tuning.fidelity`); one that is dominated by two fronts of the
others is stopped early. The same command continues a killed search: finished trials are kept. Writes to `--out`:
front.md (the table), front.png, pattern-1.json ... for `jobs/train_1t.py --pattern`, trials.jsonl (every fidelity that
was measured), baseline.json. Gaps are to dense after the same steps from the same seed; "step" is CPU time of one
attention call relative to dense, times the busiest rank's work over the mean; "bytes" are relative to the dense ring.
Every trained pattern counts in each layout of `LAYOUTS`. `--for-gpus` proposes only patterns that keep whole blocks of
128 tokens at `--pattern-len`. Exits with 1 when no trial reached the last fidelity.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from elastic_ring.train.guard_table import TUNER, reason
from elastic_ring.tuning.climb import NUM_LAYERS, Climb


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    defaults = Climb()
    parser = argparse.ArgumentParser(
        prog="elastic-ring tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the search; the same one goes on")
    parser.add_argument("--trials", type=int, default=24, help="(24)")
    parser.add_argument("--concurrent", type=int, default=2, help="trials at a time (2)")
    parser.add_argument("--cpus-per-trial", type=float, default=0.5, help="(0.5)")
    parser.add_argument("--address", default="local", help="of Ray: local starts one, auto attaches (local)")
    parser.add_argument("--seed", type=int, default=0, help="of the search (0)")
    parser.add_argument("--short-steps", type=int, default=defaults.short_steps, help=f"({defaults.short_steps})")
    parser.add_argument("--long-steps", type=int, default=defaults.long_steps, help=f"({defaults.long_steps})")
    parser.add_argument("--seq-len", type=int, default=defaults.seq_len, help=f"tokens trained on ({defaults.seq_len})")
    parser.add_argument("--cost-len", type=int, default=defaults.cost_len, help=f"tokens timed ({defaults.cost_len})")
    parser.add_argument("--pattern-len", type=int, default=8192, help="tokens that the JSON patterns are for (8192)")
    parser.add_argument("--pattern-layers", type=int, default=NUM_LAYERS, help=f"and layers ({NUM_LAYERS})")
    parser.add_argument("--for-gpus", action="store_true", help="propose whole blocks of 128 tokens only")
    options, others = parser.parse_known_args(arguments)
    for word in others:  # argparse names them all at once, and no reason
        setting = word.partition("=")[0].rpartition(".")[2].removeprefix("--").replace("-", "_")
        if why := reason(TUNER, setting):
            parser.error(f"{word}: a search has no such guard: {why}")
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    options.out = options.out.absolute()  # trials run in their own folders
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from elastic_ring.tuning.search import run

    return run(options)
