"""How long a read of four bytes from a GPU waits while another stream copies 3 GiB to the host, by how that is queued.

    python benchmarks/probes/probe_copy_engine.py

Whole; in pieces, all queued; with one or two always queued; and one piece once the last is done.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.arguments import bench_parser
from benchmarks.harness.results import show, table

SIZE_BYTES = 3 << 30
MIB = 1 << 20
WAYS = ((3 << 30, None), (32 * MIB, None), (32 * MIB, 2), (32 * MIB, 1), (8 * MIB, 2), (32 * MIB, 0), (8 * MIB, 0))
"""(bytes of a piece, pieces that stay queued when the next is; None: all)."""


def copy(there: torch.Tensor, here: torch.Tensor, stream: Any, piece_bytes: int, num_queued: int | None) -> None:
    queued: deque[Any] = deque()
    with torch.cuda.stream(stream):
        for to, piece in zip(there.split(piece_bytes), here.split(piece_bytes), strict=True):
            to.copy_(piece, non_blocking=True)
            queued.append(stream.record_event())
            if num_queued is not None and len(queued) > num_queued:
                queued.popleft().synchronize()
    stream.synchronize()


def main() -> int:
    bench_parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("probe_copy_engine needs a CUDA device")
    here = torch.empty(SIZE_BYTES, dtype=torch.uint8, device="cuda")
    there, stream = torch.empty(SIZE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Stream()
    number = torch.zeros(1, device="cuda")
    number.item()
    rows: list[list[object]] = []
    for piece_bytes, num_queued in WAYS:
        copying = threading.Thread(target=copy, args=(there, here, stream, piece_bytes, num_queued))
        begun, reads_s = time.perf_counter(), list[float]()
        copying.start()
        while copying.is_alive():
            asked = time.perf_counter()
            number.item()
            reads_s.append(time.perf_counter() - asked)
        total_s = time.perf_counter() - begun
        queued = "all" if num_queued is None else num_queued
        rows.append([piece_bytes // MIB, queued, f"{1e3 * total_s:.1f}", len(reads_s), f"{1e3 * max(reads_s):.2f}"])
    show(table(["MiB a piece", "stay queued", "ms in all", "reads", "longest read ms"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
