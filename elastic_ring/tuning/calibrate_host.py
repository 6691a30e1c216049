"""The measurements of `elastic-ring calibrate`: all ranks of a host, or of several, at the same time, each in its own
process."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from elastic_ring.attention.autolayout import Sizes
from elastic_ring.config import environment
from elastic_ring.errors import ElasticRingError, RunFailed
from elastic_ring.tuning.calibrate import Calibration, Stopwatch, calibrate
from elastic_ring.tuning.machine_rates import Host, lines, measure
from elastic_ring.tuning.timed_cases import TimingBudget

CPU_RANKS = 2
MEET_S = 300.0
"""Limit, in seconds, within which all hosts must have begun."""
BAD_FIT = 0.5


def report(calibration: Calibration) -> str:
    """The text of a calibration: one line per figure and measurement."""
    about, cost_model = calibration.about, calibration.cost_model
    lines = [
        f"{about['ranks']} ranks on {about['device']}, {about['dtype']}, {about['num_heads']}:{about['num_kv_heads']}"
        f" heads of {about['head_dim']}, torch {about['torch']}, {about['date']}"
    ]
    lines += [
        f"{name:<18} {value if isinstance(value, bool) else format(value, '.4g')}"
        for name, value in asdict(cost_model).items()
    ]
    lines.append(f"{'':<34} {'measured ms':>12} {'by the fit':>12} {'error':>8}")
    for check in calibration.checks:
        lines.append(
            f"{check.name:<34} {1e3 * check.measured_s:>12.4f} {1e3 * check.predicted_s:>12.4f} {check.error:>+8.1%}"
            f"{'' if check.fitted else '  not fitted'}"
        )
    bad = [check for check in calibration.checks if not check.fitted and abs(check.error) > BAD_FIT]
    if bad:
        lines.append(
            f"the fit misses {len(bad)} of the measurements that it did not use by more than {BAD_FIT:.0%}:"
            " do not plan by these figures; measure again on an idle host"
        )
    return "\n".join(lines)


def join(rank: int, num_ranks: int, store: str, on_gpus: bool, host: int = 0, num_hosts: int = 1) -> torch.device:
    """Initialise the process group over the ranks of all hosts, `rank` of `num_ranks` on this one; returns this rank's
    device. `store`: a file, or ADDRESS:PORT where there are several hosts."""
    torch.set_num_threads(1)
    local, rank, num_ranks = rank, host * num_ranks + rank, num_hosts * num_ranks
    if num_hosts > 1:
        address, port = store.rsplit(":", 1)
        common: dist.Store = dist.TCPStore(address, int(port), num_ranks, rank == 0, timedelta(seconds=MEET_S))
    else:
        common = dist.FileStore(store, num_ranks)
    if not on_gpus:
        dist.init_process_group("gloo", store=common, rank=rank, world_size=num_ranks)
        return torch.device("cpu")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group("nccl", store=common, rank=rank, world_size=num_ranks, device_id=device, pg_options=nccl)
    return device


def _rank(rank: int, num_ranks: int, store: str, options: argparse.Namespace) -> None:
    device = join(rank, num_ranks, store, options.device == "cuda", options.host, options.hosts)
    dtype = getattr(torch, options.dtype)
    sizes = Sizes(options.heads[0], options.heads[1], options.head_dim, dtype.itemsize)
    effort = TimingBudget(options.limit_s, options.repeats, options.most_mib << 20)
    world, deterministic = dist.group.WORLD, not options.fast
    calibration = calibrate(world, device, sizes, dtype=dtype, deterministic=deterministic, effort=effort)
    host = Host(num_ranks, options.hosts, options.storage)
    rates = measure(Stopwatch(world, device, effort), device, dtype, host)
    if dist.get_rank() == 0:
        print("\n".join([report(calibration), *lines(rates)]), flush=True)
        if options.out is not None:
            plain = {name: value for name, value in asdict(rates).items() if value is not None}
            calibration.write(options.out, plain)
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
        if options.hosts < 1 or (options.hosts == 1 and options.host):
            raise ValueError(f"--hosts {options.hosts}, --host {options.host}: give the number of hosts, from 1 on")
        meets = options.hosts == 1 or re.fullmatch(r".+:\d+", options.meet or "")
        if not meets or not 0 <= options.host < options.hosts:
            raise ValueError(
                f"--hosts {options.hosts}: each host needs --host, from 0 to {options.hosts - 1}, and one and the same "
                "--meet ADDRESS:PORT of host 0"
            )
        if options.storage is not None and not options.storage.is_dir():
            raise ValueError(f"--storage {options.storage}: is no folder; name one of the storage that checkpoints use")
    except ValueError as error:
        print(f"elastic-ring calibrate: {error}", file=sys.stderr)
        return 2
    # NVLink multicast is not measured, and on shared hosts it may have to stay off.
    environment().setdefault("NCCL_NVLS_ENABLE", "0")
    try:
        with tempfile.TemporaryDirectory() as folder:
            store = options.meet if options.hosts > 1 else f"{folder}/store"
            mp.spawn(_rank, args=(options.ranks, store, options), nprocs=options.ranks)
    except (mp.ProcessRaisedException, ElasticRingError) as error:
        # The message of a rank that could not measure, without its traceback.
        print(f"elastic-ring calibrate: {str(error).rpartition(f'{RunFailed.__name__}: ')[2].strip()}", file=sys.stderr)
        return 1
    return 0
