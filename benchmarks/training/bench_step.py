"""An ordinary step, 8 K tokens a GPU, beside the plain loops that people write: seconds, tokens a second, utilisation.

    python benchmarks/training/bench_step.py --ranks 2 --save           every row, on two GPUs
    python benchmarks/training/bench_step.py --rows hf,plain --profile  with a table of kernels, host waits and all

Rows of one table are measured one after the other on the same GPUs. Ours has default settings (deterministic kernels)
where a row's name says nothing else. `plain`, `titan`: of `benchmarks/peers/`. All count a step as complete when
its weights have changed. Utilisation counts a sequence as one document, also where it is packed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import results
from benchmarks.harness.arguments import bench_parser, list_of
from benchmarks.harness.gpu_runs import HF, PEAK_FLOPS, GpuRun, model_flops
from benchmarks.peers import plain_llama, spawned, titan_llama
from benchmarks.probes import probe_steps_gpu

PACKED_TOKENS = 1024
OURS = GpuRun(HF, dp=1, cp=1, batch=1)
LAYERS_8B = replace(OURS, preset="8b", num_layers=14, vocab_size=32_000)
"""As many layers of the preset as fit on one GPU of 80 GB."""
PLAIN = plain_llama.PlainRun()
TITAN = titan_llama.TitanRun()
ROWS: dict[str, GpuRun | plain_llama.PlainRun | titan_llama.TitanRun] = {
    "hf": OURS,
    "hf-fast": replace(OURS, deterministic=False),
    "hf-packed": replace(OURS, document_tokens=PACKED_TOKENS),
    "hf-packed-fast": replace(OURS, document_tokens=PACKED_TOKENS, deterministic=False),
    "hf-keep": replace(OURS, checkpoint=False),
    "1b": replace(OURS, preset="1b"),
    "1b-keep": replace(OURS, preset="1b", checkpoint=False),
    "1b-fast": replace(OURS, preset="1b", deterministic=False),
    "1b-keep-fast": replace(OURS, preset="1b", checkpoint=False, deterministic=False),
    "1b-packed": replace(OURS, preset="1b", document_tokens=PACKED_TOKENS),
    "8b": LAYERS_8B,
    "8b-keep": replace(LAYERS_8B, checkpoint=False),
    "8b-fp8": replace(LAYERS_8B, linears="fp8"),
    "8b-keep-fp8": replace(LAYERS_8B, checkpoint=False, linears="fp8"),
    "8b-long": replace(LAYERS_8B, num_layers=6, context=131_072),
    "8b-long-fp8": replace(LAYERS_8B, num_layers=6, context=131_072, linears="fp8"),
    "plain": PLAIN,
    "plain-compile": replace(PLAIN, compile=True),
    "plain-liger": replace(PLAIN, liger=True),
    "plain-liger-keep": replace(PLAIN, liger=True, checkpoint=False),
    "plain-fsdp": replace(PLAIN, parallel="fsdp"),
    "plain-packed": replace(PLAIN, document_tokens=PACKED_TOKENS),
    "plain-packed-liger": replace(PLAIN, document_tokens=PACKED_TOKENS, liger=True),
    "titan": TITAN,
    "titan-keep": replace(TITAN, checkpoint=False),
}


def ours(run: GpuRun, options: argparse.Namespace) -> dict[str, Any]:
    context = run.context if run.context != OURS.context else options.context
    run = replace(run, dp=options.ranks, batch=options.ranks, context=context)
    asked = argparse.Namespace(
        what="speed",
        steps=options.steps,
        profile="yes" if options.profile else "",
        env=[],
        cpu=False,
        warm_all=False,
        timeout=options.limit_s,
    )
    return slowest(probe_steps_gpu.measure(run, asked))


def peer(run: plain_llama.PlainRun | titan_llama.TitanRun, options: argparse.Namespace) -> dict[str, Any]:
    run = replace(
        run, num_ranks=options.ranks, context=options.context, steps=options.steps + 2, profile=options.profile
    )
    measure: Any = titan_llama.measure if isinstance(run, titan_llama.TitanRun) else plain_llama.measure
    return slowest(spawned.measured(measure, run, run.num_ranks, options.limit_s))


def slowest(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's figures with the longest step of all."""
    failed = [answer["error"] for answer in answers if "error" in answer]
    if failed:
        return {"error": failed[0]}
    return answers[0] | {"step_s": max(answer["step_s"] for answer in answers)}


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--rows", type=list_of(str), default=list(ROWS), help=f"some of {','.join(ROWS)}")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, each with a ring and a sequence of its own")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=150.0, help="of one row")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    rows = []
    for name in options.rows:
        run = ROWS[name]
        found = ours(run, options) if isinstance(run, GpuRun) else peer(run, options)
        row: dict[str, Any] = {"row": name, **found}
        if "error" not in row:
            sizes, context = (run if isinstance(run, GpuRun) else OURS).model, options.context
            if isinstance(run, GpuRun) and run.context != OURS.context:  # a row that has its own
                context = run.context
            flops = model_flops(sizes, context) / row["step_s"]
            row |= {"tokens_a_s": options.ranks * context / row["step_s"], "mfu": round(flops / PEAK_FLOPS, 3)}
        rows.append(row)
        results.show(json.dumps(row))
    names = ("row", "step_s", "tokens_a_s", "mfu", "peak_gib", "first_s", "warm_s", "spread", "loss", "host_ms")
    text = results.table(names, [[row.get(name) for name in names] for row in rows])
    kinds = sorted({kind for row in rows for kind in row.get("profile", {}) if kind not in ("longest", "gaps")})
    if kinds:
        text += "\n\n" + results.table(
            ("ms a step", *kinds),
            [[row["row"], *(row["profile"].get(k) for k in kinds)] for row in rows if "profile" in row],
        )
    for row in rows:
        for before, after, spent_ms, number in row.get("profile", {}).get("gaps", ()):
            text += f"\n{row['row']}: idle {spent_ms} ms in {number} gaps after {before} before {after}"
    results.show(text)
    results.write_json(options.out, {"rows": rows})
    if options.save:
        results.save("steps", f"bench_step-{options.ranks}-ranks", text, {"rows": rows})
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
