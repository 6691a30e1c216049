"""The attention of two versions of this package side by side in one process: bits on CPUs, time on GPUs.

    python benchmarks/attention/old_and_new.py --before REF --prepare      # once: writes build/before from git
    python benchmarks/attention/old_and_new.py                             # CPU: bits and bytes of every case
    python benchmarks/attention/old_and_new.py --time --tokens 32K,128K    # GPUs: forward + backward, and host time

Bits: out, dq, dk, dv of every rank, and the bytes of every hop, of both versions are compared over gloo groups of
threads. Time: both versions take turns in one NCCL group; the ratio is of medians, new over old. Host time is that of
one pass's launches, on the slowest rank.
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from benchmarks.harness.arguments import bench_parser, list_of, num_heads, num_tokens
from benchmarks.harness.results import show, table, write_json

BEFORE = Path(__file__).resolve().parents[2] / "build" / "before"
OLD, NEW = "elastic_ring_before", "elastic_ring"


class Version:
    """The classes and functions of one version that the cases use."""

    def __init__(self, package: str) -> None:
        def module(name: str) -> Any:
            return importlib.import_module(f"{package}.attention.{name}")

        self.name = package
        try:
            self.with_options: Any = module("options").RingOptions
        except ModuleNotFoundError:  # took them as arguments of its own
            self.with_options = None
        self.ring: Any = module("ring").RingAttention
        try:
            self.sparse: Any = module("sparse_ring").SparseRingAttention
        except ModuleNotFoundError:
            self.sparse = self.ring
        self.patterned: Any = module("layers").PatternedAttention
        self.parse: Any = module("patterns.parse").parse_pattern
        self.pattern: Any = module("patterns.pattern").Pattern
        self.plan: Any = module("plan.schedule").plan
        self.sparse_pattern: Any = module("patterns.sparse").SparsePattern
        self.plan_sparse: Any = module("plan.sparse_schedule").plan_sparse
        self.make_layout: Any = module("layouts.layout").make_layout
        self.ledger: Any = module("comm.ledger").HopLedger


_OF_RINGS = ("stage_bytes", "keep_keys", "ahead")
"""Options that only rings take."""


@dataclass(frozen=True)
class Case:
    """One configuration. `options` are the keyword arguments of the ring, or of the patterned attention."""

    pattern: str
    cp: int
    seq_len: int
    layout: str
    documents: tuple[int, ...] = (0,)
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 8
    batch: int = 2
    dtype: torch.dtype = torch.float32
    causal: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    def attention(self, version: Version, cp_rank: int, group: Any, ledger: Any) -> Callable[..., torch.Tensor]:
        layout, options = version.make_layout(self.layout, self.seq_len, self.cp), dict(self.options)

        def given(**options: Any) -> dict[str, Any]:
            if version.with_options is None:
                return options
            if "sparse_kernel" in options:
                options["kernel"] = options.pop("sparse_kernel")
            return {"options": version.with_options(**options)}

        if self.pattern == "dense":
            schedule = version.plan(version.pattern(self.causal, self.documents), layout)
            ring: Any = version.ring(schedule, cp_rank, group, **given(ledger=ledger, **options))
            return ring
        if any(name in _OF_RINGS for name in options):
            group_of_layers = version.parse(self.pattern).groups[0]
            pattern = version.sparse_pattern(group_of_layers.heads(*self.heads), document_starts=self.documents)
            options["kernel"] = options.pop("sparse_kernel", None)
            schedule = version.plan_sparse(pattern, layout, *self.heads)
            return version.sparse(schedule, cp_rank, group, **given(ledger=ledger, **options))
        patterned: Any = version.patterned(
            version.parse(self.pattern),
            layout,
            cp_rank,
            group,
            document_starts=self.documents,
            **given(ledger=ledger, **options),
        )
        return patterned

    def tensors(self, version: Version, cp_rank: int, device: str = "cpu") -> list[torch.Tensor]:
        """q, k, v and the gradient of out, of this rank."""
        generator = torch.Generator().manual_seed(0)
        numbers = (self.heads[0], self.heads[1], self.heads[1], self.heads[0])
        shapes = [(self.batch, self.seq_len, num, self.head_dim) for num in numbers]
        whole = [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]
        layout = version.make_layout(self.layout, self.seq_len, self.cp)
        return [layout.scatter(x, cp_rank, 1).contiguous().to(device) for x in whole]


def cases() -> Iterator[Case]:
    """Dense rings and every family over layouts, ring sizes, documents and types: in tiles, then in whole blocks."""
    layouts = ("contiguous", "zigzag")
    for cp, layout, starts, causal in itertools.product((1, 2, 3, 4, 8), layouts, ((0,), (0, 7, 30)), (True, False)):
        yield Case("dense", cp, 16 * max(cp, 3), layout, starts, causal=causal)
    for hops, starts in itertools.product((1, 2, 3), ((0,), (0, 7, 30))):
        yield Case("dense", 4, 64, "zigzag", starts, options=(("hops_per_stage", hops),))
    for dtype in (torch.float64, torch.bfloat16):
        yield Case("dense", 3, 48, "zigzag", dtype=dtype)
    for text, cp, layout in itertools.product(TILES, (1, 2, 3, 4), layouts):
        yield Case(text, cp, 64 * cp, layout, batch=1)
        yield Case(text, cp, 56 * cp, layout, (0, 8, 40), batch=1, dtype=torch.float64)
    on_blocks = (("sparse_kernel", "reference-sparse"),)
    for text, cp, layout in itertools.product(BLOCKS, (1, 2, 3, 4), layouts):
        tokens = 512 * cp
        yield Case(text, cp, tokens, layout, batch=1, dtype=torch.bfloat16, options=on_blocks)
        starts = (0, 256, 640) if layout == "contiguous" and cp > 1 else (0,)
        yield Case(text, cp, tokens, layout, starts, batch=1, options=on_blocks)
    for text, cp in itertools.product(BLOCKS[:3], (2, 6)):  # more stages than inbox slots where each is small
        yield Case(text, cp, 256 * cp, "zigzag", batch=1, options=(*on_blocks, ("stage_bytes", 1)))
        yield Case(text, cp, 256 * cp, "zigzag", batch=1, options=(*on_blocks, ("keep_keys", True)))
        yield Case(text, cp, 256 * cp, "zigzag", batch=1, options=(*on_blocks, ("stage_bytes", 40000)))


TILES = (
    "window:7",
    "sinks:3+window:5",
    "strided:3,2,4",
    "longnet:16/1,48/2,unit=1",
    "bigbird:2,1,2,5,4",
    "hierarchical:2,4",
    "profile:0,1,5,unit=4",
    "topk:2,1,8",
)
BLOCKS = (
    "bigbird:2,0,0",
    "sinks:128+bigbird:2,0,0",
    "longnet:256/1,1024/2,unit=128",
    "bigbird:1,1,1",
    "strided:3",
    "topk:2",
    "hierarchical:1",
)


def able(version: Version, case: Case) -> bool:
    if case.pattern == "dense":
        return True
    try:
        version.parse(case.pattern)
    except ValueError:
        return False
    return True


def _of_hops(counts: Mapping[Any, int]) -> dict[Any, int]:
    """Without what later versions count as routing."""
    return {key: num for key, num in counts.items() if key[0] != "routing"}


def compare(old: Version, new: Version, case: Case, groups: Sequence[Any]) -> str | None:
    """What differs, or None."""

    def outcome(version: Version) -> list[tuple[list[torch.Tensor], dict[Any, int], dict[Any, int]]]:
        def work(cp_rank: int) -> tuple[list[torch.Tensor], dict[Any, int], dict[Any, int]]:
            ledger = version.ledger()
            attention = case.attention(version, cp_rank, groups[cp_rank] if case.cp > 1 else None, ledger)
            q, k, v, dout = case.tensors(version, cp_rank)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = attention(*leaves)
            out.backward(dout)
            grads = [x.grad for x in leaves if x.grad is not None]
            return [out.detach(), *grads], _of_hops(ledger.sent_bytes), _of_hops(ledger.received_bytes)

        with ThreadPoolExecutor(case.cp) as threads:
            return list(threads.map(work, range(case.cp)))

    for cp_rank, (before, after) in enumerate(zip(outcome(old), outcome(new), strict=True)):
        for name, x, y in zip(("out", "dq", "dk", "dv"), before[0], after[0], strict=True):
            if not torch.equal(x, y) or x.dtype != y.dtype:
                return f"{name} of cp_rank {cp_rank} differs by {(x.double() - y.double()).abs().max():.1e}"
        if {**before[1]} != {**after[1]} or before[2] != after[2]:
            return f"bytes of cp_rank {cp_rank} differ: {before[1:]} and {after[1:]}"
    return None


def connected(store: dist.Store, cp: int) -> list[dist.ProcessGroupGloo]:
    """Gloo groups of `cp` ranks of this process, one for each thread."""
    with ThreadPoolExecutor(cp) as threads:
        prefixed, timeout = dist.PrefixStore(f"ring of {cp}", store), timedelta(seconds=60)
        return list(threads.map(lambda rank: dist.ProcessGroupGloo(prefixed, rank, cp, timeout), range(cp)))


def compare_all(only: str | None) -> int:
    torch.set_num_threads(1)
    old, new, store = Version(OLD), Version(NEW), dist.HashStore()
    groups: dict[int, Sequence[Any]] = {}
    num, failed, refused = 0, 0, set[str]()
    for case in cases():
        if only is not None and only not in case.pattern:
            continue
        if not able(old, case):
            refused.add(case.pattern)
            continue
        num += 1
        if case.cp not in groups:
            groups[case.cp] = connected(store, case.cp)
        difference = compare(old, new, case, groups[case.cp])
        if difference is not None:
            failed += 1
            show(f"{case}: {difference}")
    show(f"{num} cases, {failed} differ; not read by the old version: {sorted(refused)}")
    return failed


# ------------------------------------------------------------ time


@dataclass
class Timed:
    case: str
    old_s: float
    new_s: float
    host_old_s: float
    host_new_s: float


def timed_cases(options: argparse.Namespace, cp: int) -> Iterator[Case]:
    dense: tuple[tuple[str, Any], ...] = (("deterministic", False),)
    for tokens in options.tokens:
        for heads in options.heads:
            yield Case("dense", cp, tokens, "zigzag", (0,), heads, 128, 1, torch.bfloat16, options=dense)
        for text in options.patterns:
            yield Case(text, cp, tokens, "contiguous", (0,), (8, 8), 128, 1, torch.bfloat16, options=dense)


def time_rank(cp_rank: int, cp: int, options: argparse.Namespace) -> None:
    from benchmarks.harness.gpu_ranks import interleaved, maximum, timed_s

    sys.path.insert(0, str(options.folder))
    versions = [Version(OLD), Version(NEW)]
    found: list[Timed] = []
    for case in timed_cases(options, cp):
        runs: dict[str, Callable[[], object]] = {}
        for version in versions:
            attention = case.attention(version, cp_rank, dist.group.WORLD, version.ledger())
            q, k, v, dout = (x.cuda() for x in _draw(case, cp_rank))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            runs[version.name] = _pass(attention, leaves, dout)
        for run in [*runs.values()] * options.warm_ups:
            run()
        times: dict[str, list[float]] = {name: [] for name in runs}
        hosts: dict[str, list[float]] = {name: [] for name in runs}
        for name in interleaved(list(runs), options.repeats):
            times[name].append(timed_s(runs[name], options.in_a_row))
        for name in interleaved(list(runs), options.repeats):
            torch.cuda.synchronize()
            begun_s = time.perf_counter()
            runs[name]()
            hosts[name].append(maximum(time.perf_counter() - begun_s))
        medians = [statistics.median(each[name]) for each in (times, hosts) for name in (OLD, NEW)]
        found.append(Timed(f"{case.pattern} {case.seq_len // 1024}K {case.heads[0]}:{case.heads[1]}", *medians))
        del runs
        torch.cuda.empty_cache()
        if cp_rank == 0:
            last = found[-1]
            show(
                f"{last.case:36s} old {last.old_s * 1e3:8.2f} ms, new over old {last.new_s / last.old_s:.3f}, host"
                f" {last.host_old_s * 1e3:.2f} ms, {last.host_new_s / last.host_old_s:.3f}"
            )
    if cp_rank == 0:
        rows: list[list[object]] = [
            [
                x.case,
                f"{1e3 * x.old_s:.2f}",
                f"{1e3 * x.new_s:.2f}",
                f"{x.new_s / x.old_s:.3f}",
                f"{1e3 * x.host_old_s:.2f}",
                f"{x.host_new_s / x.host_old_s:.3f}",
            ]
            for x in found
        ]
        show("\n" + table(["case", "old ms", "new ms", "new / old", "host old ms", "host new / old"], rows))
        write_json(options.out, {"cases": [vars(x) for x in found]})


def _draw(case: Case, cp_rank: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(cp_rank)
    numbers = (case.heads[0], case.heads[1], case.heads[1], case.heads[0])
    shape = (case.batch, case.seq_len // case.cp)
    return [
        torch.randn((*shape, num, case.head_dim), generator=generator, device="cuda", dtype=case.dtype)
        for num in numbers
    ]


def _pass(
    attention: Callable[..., torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor
) -> Callable[[], object]:
    return lambda: torch.autograd.grad(attention(*leaves), leaves, dout)


def prepare(ref: str, folder: Path) -> None:
    """The package as of `ref`, under another name."""
    packed = subprocess.run(["git", "archive", ref, "elastic_ring"], check=True, capture_output=True).stdout
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive.getmembers():
            source = archive.extractfile(member) if member.isfile() else None
            if source is not None:
                target = folder / member.name.replace("elastic_ring", OLD, 1)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read().replace(b"elastic_ring", OLD.encode()))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--before", default="HEAD", metavar="REF", help="the old version (HEAD)")
    parser.add_argument("--prepare", action="store_true", help="write the old version from git, and end")
    parser.add_argument("--folder", default=BEFORE, type=Path, help="where the old version lies (build/before)")
    parser.add_argument("--only", help="compare bits of patterns that contain this text")
    parser.add_argument("--time", action="store_true", help="time both on this host's GPUs")
    parser.add_argument("--tokens", default="32K,64K,128K,256K", type=list_of(num_tokens))
    parser.add_argument(
        "--patterns",
        default="bigbird:64,0,0;bigbird:4,0,8;longnet:2048/1,16384/4,unit=128",
        type=lambda text: text.split(";"),
    )
    parser.add_argument("--heads", default="8:8,28:4", type=lambda text: [num_heads(x) for x in text.split(",") if x])
    parser.add_argument("--repeats", default=7, type=int)
    parser.add_argument("--in-a-row", default=2, type=int)
    parser.add_argument("--warm-ups", default=3, type=int)
    parser.add_argument("--ranks", default=0, type=int, help="GPUs to use; 0: all of this host")
    parser.add_argument("--out", default=None, type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.prepare:
        prepare(options.before, options.folder)
        return
    sys.path.insert(0, str(options.folder))
    if options.time:
        from benchmarks.harness.gpu_ranks import run_ranks

        run_ranks("old_and_new", time_rank, options)
        return
    raise SystemExit(1 if compare_all(options.only) else 0)


if __name__ == "__main__":
    main()
