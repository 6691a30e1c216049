"""The measurements of `elastic-ring calibrate`: all ranks of this host at the same time, each in its own process."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from elastic_ring.attention.autolayout.choice import Sizes
from elastic_ring.config import environment
from elastic_ring.errors import ElasticRingError
from elastic_ring.tuning.calibrate import Calibration, calibrate
from elastic_ring.tuning.timed_cases import TimingBudget

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
        lines.append(
            f"{len(bad)} of the measurements that were not fitted are told wrong by more than {BAD_FIT:.0%}:"
            " do not plan by these figures; measure again on an idle host"
        )
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
        "nccl",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        device_id=device,
        pg_options=nccl,
    )
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


def run(options: argparse.Namespace) -> int:
    """Measure and print; returns the command's exit status: 2 for settings that do not fit this host."""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    options.ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else CPU_RANKS)
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
