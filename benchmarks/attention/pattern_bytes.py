"""Print what each sparse pattern keeps, sends and costs in balance, beside the dense ring.

    python benchmarks/attention/pattern_bytes.py [--tokens N] [--cp N] [--heads N] [--kv-heads N] [--json FILE]

Bytes are K and V received in the forward pass of one attention call in bf16, the mean over the ranks. The
dense ring is causal and zigzag and fetches only what causality leaves: the classic ring moves twice that.
Plans only: no GPU, no process group, nothing is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.arguments import bench_parser
from benchmarks.harness.results import write_json
from elastic_ring.attention.autolayout import Sizes
from elastic_ring.attention.layouts.layout import Layout, contiguous, zigzag
from elastic_ring.attention.patterns.families import BigBird, Dilated, Hierarchical, Profile
from elastic_ring.attention.patterns.rules import Dense, Rule, Sinks, Strided, Window
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from experiments.block_function import BlockFunction
from experiments.head_rules import longnet, mixed
from experiments.pattern_choice import Choice, choose

BF16_BYTES = 2


def families(seq_len: int, sizes: Sizes) -> dict[str, tuple[Rule, ...]]:
    """One pattern of each family, scaled to the sequence where the family asks for it."""
    heads, shared = sizes.num_heads, sizes.num_heads // sizes.num_kv_heads
    segments = [2048, 8192, 32768, 131072, 524288, 2097152]
    segments = [segment for segment in segments if segment < 4 * seq_len]
    rates = [4**i for i in range(len(segments))]
    return {
        "dense": (Dense(),),
        "window": (Window(min(4096, seq_len)),),
        "sinks + window": (Sinks(128) | Window(4096),),
        "strided": (Strided(32, 4),),
        "longnet, blocks": longnet(heads, segments, rates, heads_per_offset=shared, unit_tokens=128),
        "longnet, one offset": (Dilated(tuple(segments), tuple(rates), 0, 128),),
        "bigbird": (BigBird(3, 1, 3),),
        "hierarchical": (Hierarchical(4),),
        "profile": (Profile((0, 1, 2, 4, 8, 16, 32, 64)),),
        "own function": (BlockFunction(every_square),),
        "mix: 3/4 local, 1/4 dense": mixed((heads - heads // 4, Window(4096)), (heads // 4, Dense())),
    }


def every_square(row: Any, column: Any) -> Any:
    """A user's own pattern: the own block, and blocks whose index is a multiple of 16."""
    return (row == column) | ((column % 16 == 0) & (column <= row))


def row(name: str, rules: tuple[Rule, ...], seq_len: int, cp: int, sizes: Sizes) -> dict[str, Any]:
    pattern = SparsePattern(rules)
    chosen = choose(pattern, seq_len, cp, sizes)
    dense = mean_dense_bytes(seq_len, cp, sizes)
    fetched = mean_bytes(pattern, chosen.schedule.layout, sizes)
    return {
        "pattern": name,
        "density": pattern.density(seq_len),
        "contiguous_bytes": mean_bytes(pattern, contiguous(seq_len, cp), sizes),
        "zigzag_bytes": mean_bytes(pattern, zigzag(seq_len, cp), sizes),
        "chosen_bytes": fetched,
        "chosen": f"{chosen.schedule.layout.name}/{chosen.exchange}",
        "share_of_dense": fetched / dense,
        "sources": mean_sources(chosen),
        "work_cp8": choose(pattern, seq_len, 8, sizes).best.work_max_over_mean,
        "work_cp16": choose(pattern, seq_len, 16, sizes).best.work_max_over_mean,
        "why": chosen.why,
    }


def mean_bytes(pattern: SparsePattern, layout: Layout, sizes: Sizes) -> float:
    schedule = plan_sparse(pattern, layout, sizes.num_heads, sizes.num_kv_heads)
    return sum(schedule.received_bytes(rank, sizes.head_dim, BF16_BYTES) for rank in range(layout.cp)) / layout.cp


def mean_dense_bytes(seq_len: int, cp: int, sizes: Sizes) -> float:
    """The dense ring's, by its own schedule."""
    schedule = plan(Pattern(), zigzag(seq_len, cp))
    kv_heads = sizes.num_kv_heads
    return sum(schedule.received_bytes(rank, sizes.head_dim, BF16_BYTES, kv_heads=kv_heads) for rank in range(cp)) / cp


def mean_sources(chosen: Choice) -> float:
    """From how many ranks a rank reads."""
    return chosen.best.num_messages / chosen.schedule.cp


def halo_bytes(window: int, seq_len: int, cp: int, sizes: Sizes) -> float:
    """What a window needs at least: the window - 1 keys before each rank's first query, in contiguous chunks."""
    starts = [start for ((start, _),) in contiguous(seq_len, cp).segments]
    return sum(min(window - 1, start) for start in starts) * 2 * sizes.num_kv_heads * sizes.head_dim * BF16_BYTES / cp


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=131072, help="length of the sequence (131072)")
    parser.add_argument("--cp", type=int, default=8, help="ranks of the ring (8)")
    parser.add_argument("--heads", type=int, default=16, help="query heads (16)")
    parser.add_argument("--kv-heads", type=int, default=4, help="K/V heads (4)")
    parser.add_argument("--head-dim", type=int, default=128, help="(128)")
    parser.add_argument("--why", action="store_true", help="add why each layout and exchange was chosen")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args(arguments)
    sizes = Sizes(options.heads, options.kv_heads, options.head_dim, BF16_BYTES)
    dense = mean_dense_bytes(options.tokens, options.cp, sizes)
    print(
        f"{options.tokens:,} tokens, cp {options.cp}, {options.heads}:{options.kv_heads} heads of"
        f" {options.head_dim}, bf16; the dense ring receives {dense / 2**20:,.1f} MiB a rank"
    )
    print(
        f"{'pattern':<26} {'density':>8} {'contig.':>9} {'zigzag':>9} {'chosen':>9} MiB  {'of dense':>8}"
        f" {'ranks':>5} {'cp 8':>6} {'cp 16':>6}  layout/exchange"
    )
    rows = []
    for name, rules in families(options.tokens, sizes).items():
        found = row(name, rules, options.tokens, options.cp, sizes)
        rows.append(found)
        in_mib = [found[key] / 2**20 for key in ("contiguous_bytes", "zigzag_bytes", "chosen_bytes")]
        print(
            f"{name:<26} {found['density']:>8.4f} {in_mib[0]:>9.2f} {in_mib[1]:>9.2f} {in_mib[2]:>9.2f}     "
            f" {found['share_of_dense']:>8.2%} {found['sources']:>5.1f} {found['work_cp8']:>6.3f}"
            f" {found['work_cp16']:>6.3f}  {found['chosen']}",
            flush=True,
        )
        if options.why:
            print(f"    {found['why']}")
        if name == "window":
            least = halo_bytes(min(4096, options.tokens), options.tokens, options.cp, sizes)
            print(f"    its halo is {least / 2**20:.2f} MiB a rank; chosen / halo {found['chosen_bytes'] / least:.4f}")
    write_json(options.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
