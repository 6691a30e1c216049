"""A step of a model with experts on a ring: weights gathered, tokens sent, and a dense model of equal active FLOP.

    python benchmarks/training/bench_experts.py --save                                8 layers of 30b-a3b, two GPUs
    python benchmarks/training/bench_experts.py --layers 12 --contexts 128K           for larger ones
    python benchmarks/training/bench_experts.py --cpu --preset moe-laptop --contexts 2K

One sequence on one ring. `auto` says which of the two the setting's default takes. `fast`: kernels that need not repeat
their bits, with what `auto` takes. `transformers`, `autoep`: `benchmarks/peers/plain_moe.py`, where each rank has a
sequence of its own. Ratios are of medians, of rows that were measured one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import results
from benchmarks.harness.arguments import bench_parser, list_of, num_tokens
from benchmarks.harness.gpu_runs import GpuRun
from benchmarks.peers import plain_moe, spawned
from benchmarks.probes import probe_steps_gpu
from benchmarks.training.bench_step import slowest
from elastic_ring.experts.exchange import sends
from elastic_ring.model.config import num_parameters
from elastic_ring.model.feed_forward import Experts
from elastic_ring.model.memory import StepMemory

OURS = GpuRun("30b-a3b", dp=1, batch=1)
ROWS: dict[str, GpuRun] = {
    "send": replace(OURS, experts="send"),
    "gather": replace(OURS, experts="gather"),
    "dense": replace(OURS, dense=True),
    "fast": replace(OURS, deterministic=False),
}
PEERS: tuple[Literal["transformers"], Literal["autoep"]] = ("transformers", "autoep")


def chosen(run: GpuRun) -> str:
    """What "auto" takes."""
    import torch

    with torch.device("meta"):
        layer = Experts(run.model)
    return "send" if sends("auto", layer, run.cp, -(-run.context // run.cp), 2) else "gather"


def planned(run: GpuRun) -> float:
    """The plan's peak of a rank, GiB of tensors."""
    sizes, tokens = run.model, -(-run.context // run.cp)
    memory = StepMemory(sizes, num_parameters(sizes), run.cp, tokens, 2, run.cpu_offload, experts=run.experts)
    return round(memory.device_bytes / 2**30, 1)


def measured(run: GpuRun, options: argparse.Namespace) -> dict[str, Any]:
    asked = argparse.Namespace(
        what="speed",
        steps=options.steps,
        profile="yes" if options.profile else "",
        env=[],
        cpu=options.cpu,
        warm_all=False,
        timeout=options.limit_s,
    )
    return slowest(probe_steps_gpu.measure(run, asked))


def peer(system: Literal["transformers", "autoep"], run: GpuRun, options: argparse.Namespace) -> dict[str, Any]:
    asked = plain_moe.MoeRun(system, run.model, run.context // run.cp, run.cp, options.steps + 3, options.cpu)
    return slowest(spawned.measured(plain_moe.measure, asked, run.cp, options.limit_s))


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--rows", type=list_of(str), default=list(ROWS), help=f"some of {','.join([*ROWS, *PEERS])}")
    parser.add_argument("--contexts", type=list_of(num_tokens), default=[16 << 10, 128 << 10])
    parser.add_argument("--preset", default="30b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--cpu-offload", choices=["none", "optimizer"], default="none")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=150.0, help="of one row")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    rows: list[dict[str, Any]] = []
    for context in options.contexts:
        for name in options.rows:
            run = replace(
                ROWS.get(name, OURS),
                preset=options.preset,
                num_layers=options.layers,
                context=context,
                cp=options.cp,
                cpu_offload=options.cpu_offload,
            )
            found: dict[str, Any] = {"row": name, "context": context}
            if name in PEERS:
                rows.append(found | peer(name, run, options))
            else:
                auto = chosen(replace(run, dense=False))
                rows.append(found | {"auto": auto, **measured(run, options), "plan_gib": planned(run)})
            results.show(json.dumps(rows[-1]))
    by_place = {(row["row"], row["context"]): row.get("step_s") for row in rows}
    for row in rows:
        against = by_place.get(("dense", row["context"]))
        row["of_dense"] = round(row["step_s"] / against, 3) if against and "step_s" in row else None
    names = (
        "row",
        "context",
        "auto",
        "step_s",
        "of_dense",
        "mfu",
        "peak_gib",
        "plan_gib",
        "reserved_gib",
        "spread",
        "loss",
    )
    text = results.table(names, [[row.get(name) for name in names] for row in rows])
    results.show(text)
    results.write_json(options.out, {"rows": rows})
    if options.save:
        results.save("experts", f"bench_experts-{options.layers}-layers", text, {"rows": rows})
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
