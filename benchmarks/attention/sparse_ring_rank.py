"""What each rank of `bench_sparse_ring` does: plan, time and compare the patterns, and print their rows."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.footprint import Footprint, footprint
from benchmarks.attention.pattern_speed_gpu import pattern_of
from benchmarks.harness.gpu_ranks import interleaved, maximum, timed_s
from benchmarks.harness.results import show, write_json
from benchmarks.peers.attention_systems import Tensors
from elastic_ring.attention.comm.exchange import HopBuffers
from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS
from elastic_ring.attention.kernels.registry import select
from elastic_ring.attention.layouts.layout import make_layout, work_max_over_mean
from elastic_ring.attention.options import STAGE_LIMIT_BYTES, RingOptions
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from experiments.block_sparse import BlockSparseAttention
from experiments.head_rules import longnet

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SINGLE, DENSE = "one GPU", "dense ring"


@dataclass
class Row:
    """One system on one length and pattern. Times in seconds, bytes the mean over ranks of one forward and backward."""

    tokens: int
    pattern: str
    density: float
    system: str
    refusal: str | None = None
    times_s: list[float] = field(default_factory=list)
    median_s: float = 0.0
    efficiency: float | None = None
    work_max_over_mean: float | None = None
    of_ideal: float | None = None
    sent_bytes: float = 0.0
    of_dense_bytes: float | None = None
    exposed_s: float | None = None
    peak_bytes: int = 0
    driver_bytes: int = 0
    planned_s: float = 0.0
    num_stages: int = 0
    buffer_bytes: int = 0
    kept_bytes: int = 0
    table_bytes: int = 0


@dataclass
class System:
    """One way to compute a pattern on this rank: what it attends with, its tensors, and its ledger if it moves any."""

    row: Row
    attend: Attend
    tensors: Tensors
    ledger: HopLedger | None = None
    buffers: HopBuffers = field(default_factory=HopBuffers)

    def both_passes(self) -> None:
        leaves = [x.detach().requires_grad_() for x in self.tensors[:3]]
        out = self.attend(leaves[0], leaves[1], leaves[2])
        torch.autograd.grad(out, leaves, self.tensors[3])


def patterns(options: argparse.Namespace, tokens: int) -> dict[str, SparsePattern]:
    """By name. Raises `ValueError` for an unknown one."""
    found = {}
    for text in options.patterns:
        family, _, density = text.partition("@")
        if family == "mixed":
            found[text] = pattern_of(float(density), tokens)
        elif family == "window":
            # A window of w of n blocks keeps w / n of the square, about 2 w / n of the triangle.
            window = max(2, round(float(density) * tokens / BLOCK_TOKENS / 2))
            found[text] = SparsePattern((BigBird(window, 0, 0),))
        elif family == "longnet":
            found[text] = SparsePattern(_longnet(options.heads, tokens))
        else:
            raise ValueError(f"--patterns {text}: unknown; use mixed@DENSITY, window@DENSITY or longnet")
    return found


def _longnet(heads: tuple[int, int], tokens: int) -> tuple[Any, ...]:
    segments = [2048 * 4**i for i in range(8) if 2048 * 4**i < 4 * tokens]
    rules = longnet(
        heads[0],
        segments,
        [4**i for i in range(len(segments))],
        heads_per_offset=heads[0] // heads[1],
        unit_tokens=BLOCK_TOKENS,
    )
    return tuple(rule | BigBird(2, 0, 0) for rule in rules)


class Bench:
    """The measurements of one rank. All ranks make the same calls."""

    def __init__(self, cp_rank: int, cp: int, options: argparse.Namespace) -> None:
        self.cp_rank, self.cp, self.options = cp_rank, cp, options
        self.device = torch.device("cuda", cp_rank)
        self.group = dist.group.WORLD if cp > 1 else None

    def tensors(self, length: int, seed: int) -> Tensors:
        generator = torch.Generator(self.device).manual_seed(seed)
        heads, kv_heads = self.options.heads
        shapes = [(1, length, n, self.options.head_dim) for n in (heads, kv_heads, kv_heads, heads)]
        made = [torch.randn(s, generator=generator, device=self.device, dtype=torch.bfloat16) for s in shapes]
        return made[0], made[1], made[2], made[3]

    def dense(self, tokens: int) -> Row:
        ledger, buffers = HopLedger(), HopBuffers()
        schedule = plan(Pattern(), make_layout("zigzag", tokens, self.cp))
        ring = RingAttention(
            schedule,
            self.cp_rank,
            self.group,
            RingOptions(ledger=ledger, buffers=buffers, deterministic=self.options.deterministic),
        )
        row = Row(tokens, "dense", 1.0, DENSE)
        system = System(row, ring, self.tensors(tokens // self.cp, self.cp_rank), ledger, buffers)
        self.measure([system], self.options.dense_repeats)
        return row

    def sparse(self, name: str, pattern: SparsePattern, tokens: int, dense: Row | None) -> list[Row]:
        density = pattern.density(tokens)
        kernel = select(
            "cuda",
            torch.bfloat16,
            self.options.head_dim,
            self.options.deterministic,
            self.options.kernel,
            cover="tables",
            head_ratio=self.options.heads[0] // self.options.heads[1],
        ).name
        systems = []
        if self.options.single:
            attention = BlockSparseAttention(pattern, kernel=kernel, deterministic=self.options.deterministic)
            systems.append(System(Row(tokens, name, density, SINGLE), attention, self.tensors(tokens, 0)))
        for layout_name in self.options.layouts:
            layout, began_s = make_layout(layout_name, tokens, self.cp), time.monotonic()
            schedule = plan_sparse(pattern, layout, *self.options.heads)
            ledger, buffers = HopLedger(), HopBuffers()
            ring = RingAttention(
                schedule,
                self.cp_rank,
                self.group,
                RingOptions(
                    ledger=ledger,
                    buffers=buffers,
                    kernel=kernel,
                    deterministic=self.options.deterministic,
                    partials=torch.float32 if self.options.partials else None,
                    stage_bytes=self.options.stage_bytes or STAGE_LIMIT_BYTES,
                    keep_keys=self.options.keep_keys,
                ),
            )
            tensors = self.tensors(tokens // self.cp, self.cp_rank)
            ring.check_call(*tensors[:3])
            row = Row(tokens, name, density, f"ring, {layout_name}", planned_s=time.monotonic() - began_s)
            row.work_max_over_mean = work_max_over_mean(layout, pattern.row_pairs(tokens))
            systems.append(System(row, ring, tensors, ledger, buffers))
        self.measure(systems, self.options.repeats)
        for system in systems:
            if isinstance(system.attend, RingAttention) and system.row.refusal is None:
                self._footprint(system.row, footprint(system.attend, *system.tensors[:2]))
        rows = [system.row for system in systems]
        single = next((row.median_s for row in rows if row.system == SINGLE), 0.0)
        for row in rows:
            if row.system != SINGLE and row.median_s:
                row.efficiency = single / self.cp / row.median_s if single else None
                if dense is not None and dense.median_s:
                    row.of_ideal = dense.median_s / row.median_s * density
                    row.of_dense_bytes = row.sent_bytes / dense.sent_bytes if dense.sent_bytes else None
        return rows

    def measure(self, systems: list[System], repeats: int) -> None:
        for system in systems:
            system.row.refusal = self._warm(system)
        able = [system for system in systems if system.row.refusal is None]
        for system in interleaved(able, repeats):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            system.row.times_s.append(timed_s(system.both_passes, self.options.in_a_row))
            own = torch.cuda.max_memory_allocated() - before + sum(x.nbytes for x in system.tensors)
            system.row.peak_bytes = max(system.row.peak_bytes, own + system.buffers.num_bytes)
            free, total = torch.cuda.mem_get_info()
            system.row.driver_bytes = max(system.row.driver_bytes, total - free)
        for system in able:
            row = system.row
            row.median_s = statistics.median(row.times_s)
            self._moved(system)
            row.peak_bytes, row.driver_bytes = (int(maximum(float(n))) for n in (row.peak_bytes, row.driver_bytes))

    def _warm(self, system: System) -> str | None:
        """Kernels are compiled, connections made, tables and memory taken. An error on any rank is a refusal."""
        error = None
        try:
            for _ in range(self.options.warm_ups):
                system.both_passes()
            torch.cuda.synchronize()
        except (RuntimeError, ImportError, TypeError, ValueError, AssertionError) as caught:
            error = f"{type(caught).__name__}: {caught}"[:300]
        return "another rank failed" if maximum(float(error is not None)) and error is None else error

    def _moved(self, system: System) -> None:
        """Bytes of one pass, and how long the kernels waited for them: apart from the timed repeats."""
        if system.ledger is None or self.cp == 1:
            return
        system.ledger.clear()
        system.ledger.keep_events = True
        for _ in range(self.options.watched):
            timed_s(system.both_passes)
        system.ledger.keep_events = False
        if self.options.watched:
            exposed = sum(event.exposed_s() for event in system.ledger.events) / self.options.watched
            system.row.exposed_s = maximum(exposed)
            total = torch.tensor([float(sum(system.ledger.sent_bytes.values()))], device=self.device)
            dist.all_reduce(total)
            system.row.sent_bytes = total.item() / self.options.watched / self.cp

    def _footprint(self, row: Row, found: Footprint) -> None:
        row.num_stages = found.num_stages
        row.buffer_bytes, row.kept_bytes, row.table_bytes = (
            int(maximum(float(n))) for n in (found.buffer_bytes, found.kept_bytes, found.table_bytes)
        )


def run_rank(cp_rank: int, cp: int, options: argparse.Namespace) -> None:
    bench, done = Bench(cp_rank, cp, options), list[Row]()
    if cp_rank == 0:
        show(
            f"{cp} x {torch.cuda.get_device_name()}, {options.heads[0]}:{options.heads[1]} heads of"
            f" {options.head_dim}, bf16, both passes\n{_HEAD}"
        )
    for tokens in options.tokens:
        dense = bench.dense(tokens) if options.dense_repeats else None
        done += [dense] if dense is not None else []
        if cp_rank == 0 and dense is not None:
            show(_line(dense))
        for name, pattern in patterns(options, tokens).items():
            began_s = time.monotonic()
            rows = bench.sparse(name, pattern, tokens, dense)
            torch.cuda.empty_cache()
            done += rows
            if cp_rank == 0:
                show("\n".join(_line(row) for row in rows) + f"   ({time.monotonic() - began_s:.0f} s)")
                write_json(options.out, _record(done, options))


_HEAD = (
    f"{'tokens':>9} {'pattern':<14} {'density':>8} {'system':<17} {'ms':>9} {'effic.':>7} {'max/mean':>8} {'ideal':>6}"
    f" {'sent MiB':>9} {'of dense':>8} {'exposed':>8} {'peak GiB':>8} {'driver':>7} {'plan s':>6} {'stages':>6}"
    f" {'buffers GiB':>11} {'kept MiB':>8} {'tables MiB':>10}"
)


def _line(row: Row) -> str:
    begin = f"{row.tokens:>9,} {row.pattern:<14} {row.density:>8.4f} {row.system:<17}"
    if row.refusal is not None:
        return f"{begin} not run: {row.refusal}"
    return (
        f"{begin} {1e3 * row.median_s:>9.3f} {_figure(row.efficiency, '.3f'):>7}"
        f" {_figure(row.work_max_over_mean, '.3f'):>8} {_figure(row.of_ideal, '.1%'):>6}"
        f" {row.sent_bytes / 2**20:>9.1f} {_figure(row.of_dense_bytes, '.1%'):>8}"
        f" {_figure(None if row.exposed_s is None else 1e3 * row.exposed_s, '.2f'):>8}"
        f" {row.peak_bytes / 2**30:>8.2f} {row.driver_bytes / 2**30:>7.1f} {row.planned_s:>6.1f} {row.num_stages:>6}"
        f" {row.buffer_bytes / 2**30:>11.2f} {_figure(row.kept_bytes / 2**20 if row.kept_bytes else None, '.1f'):>8}"
        f" {row.table_bytes / 2**20:>10.1f}"
    )


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _record(rows: list[Row], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "heads": options.heads,
        "head_dim": options.head_dim,
        "kernel": options.kernel,
        "in_a_row": options.in_a_row,
        "deterministic": options.deterministic,
        "partials": str(options.partials or "the kernel's type"),
        "stage_bytes": options.stage_bytes or STAGE_LIMIT_BYTES,
        "keep_keys": options.keep_keys,
        "rows": [asdict(row) for row in rows],
    }
