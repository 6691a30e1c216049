"""What copies of a shard in a peer's memory take, part by part, and what that makes for the presets of 1 B and 70 B.

    python benchmarks/recovery/bench_copies.py [--gib 1] [--repeats 5] [--device cuda] [--save]

One shard (parameters and AdamW's moments, fp32) and one process beside this one. Medians, in GB/s:

  take      until the training thread goes on: on a GPU the copy is only queued then
  copy      into kept host memory (on a GPU pinned, on a stream of its own)
  seal      the digest of the snapshot
  send      over loopback into the other process's memory, its digest verified there as it arrives
  xor       into a parity

`slows` (GPU) is how much longer matrix products take while the copy is under way. The table below the figures divides
the bytes of a rank by these rates; 50 GB/s is the rate of one 400 Gb/s network adapter and not measured.
"""

from __future__ import annotations

import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from benchmarks.checkpoint.bench_checkpoint import shard_of
from benchmarks.harness import results
from benchmarks.harness.arguments import at_least_one, bench_parser
from elastic_ring.cli.settings import PRESETS
from elastic_ring.forecast.sizing.memory import SNAPSHOT_BYTES
from elastic_ring.model.config import num_parameters
from elastic_ring.state import sealed
from elastic_ring.state.snapshot import Buffers, Snapshot, take

NETWORK_GB_PER_S = 50.0
PRODUCT_SIZE, NUM_PRODUCTS = 8192, 200
LIMIT_S = 300.0


def group(rank: int, port: int) -> Any:
    """This process's end of a link between two, as workers have them."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=LIMIT_S)
    return ProcessGroupGloo(store, rank, 2, options)


def hold(port: int, num_rounds: int) -> None:
    """The other process: receive and verify each snapshot, then say so."""
    link, buffers = group(1, port), Buffers()
    for _ in range(num_rounds):
        data = sealed.receive(link, 0, buffers.take, "the copy")
        buffers.give_back(data)
        link.send([torch.ones(1, dtype=torch.uint8)], 0, 0).wait()


def timed(work: Callable[..., Any], *given: Any) -> float:
    begun = time.monotonic()
    work(*given)
    return time.monotonic() - begun


def products(while_waiting: Callable[[], Any] = lambda: None) -> float:
    """Seconds of matrix products on the GPU, queued before `while_waiting` is called."""
    left = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(left)
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    while_waiting()
    begun.record()
    for _ in range(NUM_PRODUCTS):
        torch.mm(left, left, out=out)
    ended.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(ended) / 1e3


def measure(num_bytes: int, repeats: int, device: str) -> dict[str, Any]:
    """Seconds of each part, by repeat, the first (which takes memory) left out."""
    on_gpu = device == "cuda"
    shard, buffers = shard_of(num_bytes, device), Buffers(is_pinned=on_gpu)
    stream = torch.cuda.Stream() if on_gpu else None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    peer = multiprocessing.get_context("spawn").Process(target=hold, args=(port, repeats + 1), daemon=True)
    peer.start()
    link = group(0, port)
    seconds: dict[str, list[float]] = {name: [] for name in ("take", "copy", "seal", "send", "xor")}
    size = 0
    for _ in range(repeats + 1):
        if on_gpu:
            torch.cuda.synchronize()
        begun = time.monotonic()
        taken = take(shard, (1, 1), buffers, stream)
        seconds["take"].append(time.monotonic() - begun)
        taken.wait()
        seconds["copy"].append(time.monotonic() - begun)
        seconds["seal"].append(timed(taken.finish))
        seconds["send"].append(timed(_sent, link, taken))
        seconds["xor"].append(timed(sealed.xor, torch.zeros_like(taken.data), taken.data))
        size = taken.data.numel()
        buffers.give_back(taken.data)
    peer.join(timeout=LIMIT_S)
    del store
    figures: dict[str, Any] = {"bytes": size, "seconds": {name: each[1:] for name, each in seconds.items()}}
    if on_gpu:
        products()
        alone, beside = [], []
        for _ in range(repeats):
            alone.append(products())
            taken = take(shard, (1, 1), buffers, stream)
            copying = threading.Thread(target=taken.wait)
            beside.append(products(copying.start))
            copying.join()
            buffers.give_back(taken.data)
        figures |= {"products_s": alone, "products_beside_s": beside}
    return figures


def _sent(link: Any, snapshot: Snapshot) -> None:
    for work in sealed.send(link, snapshot.data, 1):
        work.wait()
    link.recv([torch.empty(1, dtype=torch.uint8)], 1, 0).wait()


def report(figures: dict[str, Any], device: str) -> str:
    rates = {name: figures["bytes"] / median(each) / 1e9 for name, each in figures["seconds"].items()}
    rows: list[list[object]] = [[name, 1e3 * median(each), rates[name]] for name, each in figures["seconds"].items()]
    text = f"a snapshot of {figures['bytes'] / 1e9:.2f} GB on {device}\n" + results.table(["part", "ms", "GB/s"], rows)
    if "products_s" in figures:
        slows = median(figures["products_beside_s"]) / median(figures["products_s"]) - 1
        text += f"\nthe copy slows {1e3 * median(figures['products_s']):.0f} ms of products beside it by {slows:.2%}"
    head = ["preset", "GB a rank", "copy s", "seal s", "loopback s", "at 50 GB/s s"]
    table: list[list[object]] = []
    for name in ("1b", "70b"):
        preset = PRESETS[name]()
        gb = SNAPSHOT_BYTES * num_parameters(preset["model"]) / preset["scaling"].cp / 1e9
        parts = [gb / rates[part] for part in ("copy", "seal", "send")]
        table.append([f"{name}, cp={preset['scaling'].cp}", gb, *parts, gb / NETWORK_GB_PER_S])
    return f"{text}\n\n{results.table(head, table)}"


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the shard")
    parser.add_argument("--repeats", type=at_least_one, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--save", action="store_true", help="write the table and a JSON into benchmarks/results/checkpoint/"
    )
    arguments = parser.parse_args()
    figures = measure(int(arguments.gib * 2**30), arguments.repeats, arguments.device)
    text = report(figures, arguments.device)
    results.show(text)
    if arguments.save:
        results.save("checkpoint", f"bench_copies-{arguments.device}", text, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
