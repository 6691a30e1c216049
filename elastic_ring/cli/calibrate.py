"""Measure the cost model of this host: messages between its ranks, and its attention kernels.

    python jobs/calibrate.py --out machine.json                 all GPUs, or two CPU processes over gloo
    python jobs/calibrate.py --ranks 4 --heads 16:4 --head-dim 128 --limit-s 60 --out machine.json

All ranks measure at the same time, each in its own process; the figures are the slowest rank's. Prints the figures, and
each measurement next to its prediction; `not fitted` ones were left out of the fit, so a large error there means a bad
fit. The file is for `--machine` of jobs/train_1t.py and benchmarks/attention/check_prices.py, and for
`attention.cost_model.CostModel.read`. Nothing else should run on the host meanwhile.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":  # run from a checkout, where the package may not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from elastic_ring.attention.calibrate import Calibration, calibrate
from elastic_ring.attention.choice import Sizes
from elastic_ring.attention.timed_cases import TimingBudget
from elastic_ring.config import environment
from elastic_ring.errors import ElasticRingError

CPU_RANKS = 2
BAD_FIT = 0.5


def report(found: Calibration) -> str:
    """The text of a calibration: one line per figure and measurement."""
    about, cost_model = found.about, found.cost_model
    lines = [
        f"{about['ranks']} ranks on {about['device']}, {about['dtype']}, {about['num_heads']}:{about['num_kv_heads']}"
        f" heads of {about['head_dim']}, torch {about['torch']}, {about['date']}"
    ]
    lines += [
        f"{name:<18} {value if isinstance(value, bool) else format(value, '.4g')}"
        for name, value in asdict(cost_model).items()
    ]
    lines.append(f"{'':<34} {'measured ms':>12} {'by the fit':>12} {'error':>8}")
    for check in found.checks:
        lines.append(
            f"{check.name:<34} {1e3 * check.measured_s:>12.4f} {1e3 * check.predicted_s:>12.4f} {check.error:>+8.1%}"
            f"{'' if check.fitted else '  not fitted'}"
        )
    bad = [check for check in found.checks if not check.fitted and abs(check.error) > BAD_FIT]
    if bad:
        lines.append(f"{len(bad)} of the measurements that were not fitted are told wrong by more than {BAD_FIT:.0%}:"
                     " do not plan by these figures; measure again on an idle host")  # fmt: skip
    return "\n".join(lines)


def join(rank: int, num_ranks: int, store: str, on_gpus: bool) -> torch.device:
    """Initialise the process group over all ranks of this host; returns this rank's device."""
    torch.set_num_threads(1)
    if not on_gpus:
        dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks, device_id=device,
        pg_options=nccl,
    )  # fmt: skip
    return device


def _rank(rank: int, num_ranks: int, store: str, options: argparse.Namespace) -> None:
    device = join(rank, num_ranks, store, options.device == "cuda")
    dtype = getattr(torch, options.dtype)
    sizes = Sizes(options.heads[0], options.heads[1], options.head_dim, dtype.itemsize)
    effort = TimingBudget(options.limit_s, options.repeats, options.most_mib << 20)
    found = calibrate(dist.group.WORLD, device, sizes, dtype=dtype, deterministic=not options.fast, effort=effort)
    if rank == 0:
        print(report(found), flush=True)
        if options.out is not None:
            found.write(options.out)
    dist.destroy_process_group()


def heads(text: str) -> tuple[int, int]:
    query, _, keys = text.partition(":")
    return int(query), int(keys or query)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="elastic-ring calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--ranks", type=int, default=0, help=f"processes; 0: one for each GPU, {CPU_RANKS} on CPUs (0)")
    parser.add_argument("--heads", default="8:2", type=heads, help="query:K/V heads (8:2)")
    parser.add_argument("--head-dim", default=64, type=int, help="(64)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on GPUs, float32 on CPUs")
    parser.add_argument("--fast", action="store_true", help="kernels whose gradients need not repeat bit for bit")
    parser.add_argument("--limit-s", default=60.0, type=float, help="seconds after which nothing is repeated (60)")
    parser.add_argument("--repeats", default=7, type=int, help="of every case; the median counts (7)")
    parser.add_argument("--most-mib", default=64, type=int, help="the longest message, MiB (64)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write figures and measurements there, as JSON")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    options.ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else CPU_RANKS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    options = parse(arguments)
    try:
        TimingBudget(options.limit_s, options.repeats, options.most_mib << 20)
        if options.device == "cuda" and options.ranks > torch.cuda.device_count():
            raise ValueError(f"--ranks {options.ranks}: there are {torch.cuda.device_count()} GPUs; ask for no more")
    except ValueError as error:
        print(f"elastic-ring calibrate: {error}", file=sys.stderr)
        return 2
    # NVLink multicast is not measured, and on shared hosts it may have to stay off.
    environment().setdefault("NCCL_NVLS_ENABLE", "0")
    try:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, args=(options.ranks, f"{folder}/store", options), nprocs=options.ranks)
    except (mp.ProcessRaisedException, ElasticRingError) as error:
        print(f"elastic-ring calibrate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
