"""One process for each GPU of this host: starting them, and timing what they do together."""

from __future__ import annotations

import os
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.peers.attention_systems import one_backward_thread

T = TypeVar("T")
Body = Callable[[int, int, Namespace], None]
"""cp_rank, cp, the command line's options. A module's own function, so that spawned processes find it."""


def run_ranks(bench: str, body: Body, options: Namespace) -> None:
    """Call `body` in one process a GPU, inside an NCCL group of them all.

    `options.ranks` is the number of GPUs, 0 for all of this host. Raises SystemExit where there is none.
    """
    cp = options.ranks or torch.cuda.device_count()
    if not cp:
        raise SystemExit(f"{bench} needs at least one CUDA device")
    # One host: NVLink multicast is not what is measured, and where hosts are shared it may have to stay off.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(cp, f"{folder}/store", body, options), nprocs=cp)


def _rank(cp_rank: int, cp: int, store: str, body: Body, options: Namespace) -> None:
    device = torch.device("cuda", cp_rank)
    torch.cuda.set_device(device)
    one_backward_thread()
    # Hops must get multiprocessors while a long kernel is running: its blocks end at different times.
    nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, cp), rank=cp_rank, world_size=cp, device_id=device, pg_options=nccl
    )
    body(cp_rank, cp, options)
    dist.destroy_process_group()


def maximum(value: float) -> float:
    """The largest value of all ranks."""
    most = torch.tensor([value], device="cuda", dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most.item())


def timed_s(run: Callable[[], object], num_passes: int = 1) -> float:
    """Seconds of one pass on the slowest rank, of `num_passes` that start together and follow each other."""
    maximum(0.0)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(num_passes):
        run()
    end.record()
    torch.cuda.synchronize()
    return maximum(begin.elapsed_time(end) / 1e3 / num_passes)


def host_s(run: Callable[[], object]) -> float:
    """Seconds that the host of the slowest rank works on one pass."""
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    run()
    return maximum(time.perf_counter() - begun_s)


def interleaved(systems: Sequence[T], repeats: int) -> Iterator[T]:
    """All systems `repeats` times, in a new order each time: after a light pass a GPU has power to spare for the next.
    The same order on every rank."""
    for repeat in range(repeats):
        yield from random.Random(repeat).sample(list(systems), len(systems))
