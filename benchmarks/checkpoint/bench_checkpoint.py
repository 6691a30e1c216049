"""What saving a shard costs beside other ways to save the same tensors: how long training waits, and how long it takes.

    python benchmarks/checkpoint/bench_checkpoint.py [--gib 1] [--repeats 5] [--folder DIR] [--device cuda] [--save]

One process, one folder, parameters and AdamW's two moments in fp32, in host memory or on a GPU. All systems save the
same tensors, in an order that turns with each repeat; after each the disk is synchronised and the files are removed.
`waits` is how long the caller cannot go on, `ends` when everything is on disk (fsync in each of them); both are
medians, and `x plain` is the median ratio of `ends` to the plain write of the same repeat: the same bytes, from host
memory, with `write`, and fsync. Ours digests every byte with SHA-256; none of the others does. `first` is the first
wait, before buffers exist. DCP's `async_save` has pinned buffers on a GPU (`cache_staged_state_dict`).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from secrets import token_hex
from statistics import median
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from benchmarks.harness import results
from benchmarks.harness.arguments import at_least_one, bench_parser
from elastic_ring.state.checkpoints import checkpoint
from elastic_ring.state.checkpoints.checkpoint import ShardPart
from elastic_ring.state.checkpoints.manifest import Manifest, attempt_folder
from elastic_ring.state.safetensors import safetensors_chunks
from elastic_ring.state.shard import Shard
from elastic_ring.state.storage.folder import Storage

TENSOR_BYTES = 16 << 20
CHUNK_BYTES = 16 << 20
Saved = tuple[float, float]
"""Seconds from the beginning until the caller goes on, and until all is on disk."""


def shard_of(num_bytes: int, device: str = "cpu") -> Shard:
    """Parameters and AdamW's state of about `num_bytes` together, with torch's fused AdamW on a GPU."""
    torch.manual_seed(0)
    num_params = max(1, num_bytes // 3 // TENSOR_BYTES)
    rows = num_bytes // 3 // num_params // 4 // 1024
    params = {f"layer.{index}.weight": torch.randn(rows, 1024, device=device) for index in range(num_params)}
    shard = Shard(0, params, torch.optim.AdamW(params.values(), lr=1e-3, foreach=False, fused=device == "cuda"))
    shard.apply({name: param.sign() for name, param in params.items()}, 1e-3)
    return shard


class Bench:
    """The systems by name. Each saves `tensors` in an empty folder."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.tensors = shard, shard.tensors()
        shapes = {name: tuple(param.shape) for name, param in shard.params.items()}
        self.described = checkpoint.describe(shard, shapes, 1)
        self.last: ShardPart | None = None
        self.on_gpu = any(tensor.is_cuda for tensor in self.tensors.values())
        self.host = {name: tensor.cpu() for name, tensor in self.tensors.items()}
        self.stream = torch.cuda.Stream() if self.on_gpu else None
        self.stager = dcp.staging.DefaultStager(dcp.staging.StagingOptions(False, False, False, False))
        self.pinned = dcp.FileSystemWriter("", cache_staged_state_dict=True)
        self.systems: dict[str, Callable[[Path], Saved]] = {
            "plain write": self.plain,
            "ours": self.ours,
            "safetensors": self.safetensors,
            "torch.save": self.torch_save,
            "DCP save": lambda folder: self.dcp_save(folder, 1),
            "DCP save, 2 threads": lambda folder: self.dcp_save(folder, 2),
            "DCP async_save": self.dcp_async,
        }

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def settle(self) -> None:
        """What the GPU still does counts for nobody."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def plain(self, folder: Path) -> Saved:
        begun = time.monotonic()
        with open(folder / "data", "wb", buffering=0) as file:
            for chunk in safetensors_chunks(self.host):
                for start in range(0, len(chunk), CHUNK_BYTES):
                    file.write(memoryview(chunk)[start : start + CHUNK_BYTES])
            os.fsync(file.fileno())
        ended = time.monotonic() - begun
        return ended, ended

    def ours(self, folder: Path) -> Saved:
        storage = Storage(str(folder)).open(write=False)
        begun = time.monotonic()
        self.last = checkpoint.take(self.shard, self.described, 0, self.last, self.stream)
        waited = time.monotonic() - begun
        self.last.wait()  # in the thread that writes
        attempt = attempt_folder(1, 1, token_hex(8))
        file = checkpoint.write_part(storage, attempt, self.last)
        manifest = Manifest(1, 1, 1, "bench", attempt, 1, 1, (file,), self.described, self.last.meta)
        assert checkpoint.commit(storage, manifest)
        return waited, time.monotonic() - begun

    def safetensors(self, folder: Path) -> Saved:
        begun = time.monotonic()
        save_file(self.tensors, folder / "data")
        return synchronised(folder / "data", begun)

    def torch_save(self, folder: Path) -> Saved:
        begun = time.monotonic()
        torch.save(self.tensors, folder / "data")
        return synchronised(folder / "data", begun)

    def dcp_save(self, folder: Path, num_threads: int) -> Saved:
        begun = time.monotonic()
        writer = dcp.FileSystemWriter(folder, thread_count=num_threads, single_file_per_rank=num_threads == 1)
        dcp.save(dict(self.tensors), storage_writer=writer, no_dist=True)
        ended = time.monotonic() - begun
        return ended, ended

    def dcp_async(self, folder: Path) -> Saved:
        begun = time.monotonic()
        given: dict[str, Any] = {"storage_writer": dcp.FileSystemWriter(folder), "async_stager": self.stager}
        if self.on_gpu:
            given = {"storage_writer": self.pinned, "checkpoint_id": folder}
        saving = dcp.async_save(dict(self.tensors), **given, no_dist=True)
        if isinstance(saving, Future):
            waited = time.monotonic() - begun
            saving.result()
        else:  # the state may change once it is staged
            saving.staging_completion.result()
            waited = time.monotonic() - begun
            saving.upload_completion.result()
        return waited, time.monotonic() - begun


def synchronised(file: Path, begun: float) -> Saved:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    ended = time.monotonic() - begun
    return ended, ended


def measure(bench: Bench, repeats: int, folder: Path) -> dict[str, list[Saved]]:
    """One round more than `repeats`: its waits are the first ones."""
    found: dict[str, list[Saved]] = {name: [] for name in bench.systems}
    names = list(bench.systems)
    for repeat in range(repeats + 1):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            target = folder / "files"
            target.mkdir()
            bench.settle()
            found[name].append(bench.systems[name](target))
            shutil.rmtree(target)
            os.sync()
    return found


def report(found: dict[str, list[Saved]], num_bytes: int, folder: Path) -> tuple[str, dict[str, Any]]:
    plain = [ends for _, ends in found["plain write"][1:]]
    rows: list[list[object]] = []
    for name, saved in found.items():
        ratios = [ends / base for (_, ends), base in zip(saved[1:], plain, strict=True)]
        waits, ends = median(wait for wait, _ in saved[1:]), median(end for _, end in saved[1:])
        rows.append([name, saved[0][0], waits, ends, num_bytes / ends / 1e9, median(ratios)])
    gb = num_bytes / 1e9
    text = f"{gb:.2f} GB on {folder}, medians of {len(plain)}\n"
    text += results.table(["", "first s", "waits s", "ends s", "GB/s", "x plain"], rows)
    names = ("first_wait_s", "waits_s", "ends_s", "gb_per_s", "ratio_to_plain")
    return text, {str(name): dict(zip(names, figures, strict=True)) for name, *figures in rows}


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state (1)")
    parser.add_argument("--repeats", type=at_least_one, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (the system's folder for temporary files)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the state is (cpu)")
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help="ours and others of the table (all); plain write too"
    )
    parser.add_argument(
        "--save", action="store_true", help="write the table and a JSON into benchmarks/results/checkpoint/"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    bench = Bench(shard_of(int(options.gib * 2**30), options.device))
    wanted = {"plain write", *(options.systems or bench.systems)}
    bench.systems = {name: save for name, save in bench.systems.items() if name in wanted}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        found = measure(bench, options.repeats, Path(name))
        text, figures = report(found, bench.num_bytes, Path(name).parent)
    bench.stager.close()
    results.show(text)
    if options.save:
        record = {"bytes": bench.num_bytes, "systems": figures, "repeats": found}
        results.save("checkpoint", f"bench_checkpoint-{options.device}", text, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
