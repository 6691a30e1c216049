"""Train a small model under each family of patterns and print what it costs in quality, time and bytes.

    python benchmarks/quality/quality_table.py --out runs/quality.jsonl [--steps N] [--text-steps N] [--seeds 0,1,2]

Every finished (family, seed, part) is one line of `--out`; run the same command again to go on where it broke
off, with more seeds or families to add them. Two copies with different seeds may share the work and the file.
Lengths, steps and sizes must be the ones that the file began with. `--table` only prints what is there.

Tasks and text are trained with the same number of tokens for every family. Quality is trained at `--seq-len`
(tasks) and `--text-len` (text); time is CPU seconds of one attention call, both passes, of the family scaled to
`--cost-len`, on one thread; bytes are those of a ring of 8 over the dense ring's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.harness.arguments import bench_parser
from benchmarks.quality.content import ContentFamily
from benchmarks.quality.families import families
from benchmarks.quality.long_range import long_range_bits
from benchmarks.quality.records import Records, append, finished
from benchmarks.quality.small.attention_error import fidelity
from benchmarks.quality.small.cost import BF16_BYTES, NUM_HEADS, dense_bytes, timer
from benchmarks.quality.small.families import Family
from benchmarks.quality.small.text import Corpus, corpus
from benchmarks.quality.small.train import Settings, train_text
from benchmarks.quality.tasks import CHANCE, TASKS, train_tasks
from elastic_ring.attention.autolayout import Sizes
from elastic_ring.attention.patterns.sparse import SparsePattern
from experiments.pattern_choice import choose

CP = 8


def run(options: argparse.Namespace, tasks: Settings, text: Settings) -> None:
    """Run what is missing, seed by seed, so that an interrupted run leaves complete seeds."""
    settings = {"tasks": asdict(tasks), "text": asdict(text), "cost_len": options.cost_len}
    begun = finished(options.out).get(("settings", "", 0))
    if begun is None:
        append(options.out, {"part": "settings", "family": "", "seed": 0, "value": settings})
    elif begun["value"] != settings:
        raise ValueError(f"--out {options.out} was begun with other settings; name another file, or give the same")
    texts = corpus(text.seq_len, num_held=48)
    if ("signal", "", 0) not in finished(options.out):
        near = text.seq_len // 8
        bits = long_range_bits(texts.held, near, int(text.seq_len * text.tail_share))
        append(options.out, {"part": "signal", "family": "", "seed": 0, "value": bits})
    for seed in options.seeds:
        for name in options.families:
            for part in options.parts.split(","):
                if (part, name, 0 if part == "cost" else seed) in finished(options.out):
                    continue
                value = measure(part, name, seed, options, tasks, text, texts)
                append(options.out, {"part": part, "family": name, "seed": 0 if part == "cost" else seed, **value})
                print(f"{part:<6} {name:<20} seed {seed}  {_describe(part, value['value'])}", flush=True)


def measure(
    part: str, name: str, seed: int, options: argparse.Namespace, tasks: Settings, text: Settings, texts: Corpus
) -> dict[str, Any]:
    of_text = families(text.seq_len, text.block, text.num_layers)
    if part == "cost":
        scaled = families(options.cost_len, 128, text.num_layers)[name]
        # First-query routing costs the same as mean-query routing.
        timed = not (isinstance(scaled, ContentFamily) and scaled.first_query)
        value = {
            "density": of_text[name].density(text.seq_len, text.num_layers, NUM_HEADS),
            "cost_density": scaled.density(options.cost_len, text.num_layers, NUM_HEADS),
            "step_s": step_s(scaled, options.cost_len, text.num_layers) if timed else float("nan"),
            "bytes": ring_bytes(scaled, options.cost_len, CP, text.num_layers),
        }
        return {"value": value}
    if part == "tasks":
        return {"value": train_tasks(families(tasks.seq_len, tasks.block)[name], seed, tasks)}
    family = of_text[name]
    model, value = train_text(family, seed, text, texts)
    if name != "dense":
        return {"value": value}
    tokens = torch.from_numpy(texts.held[:8, :-1]).to(text.device)
    return {"value": value, "fidelity": fidelity(model, tokens, list(of_text.values()), text)}


def step_s(family: Family, seq_len: int, num_layers: int, *, head_dim: int = 64, repeats: int = 2) -> float:
    """CPU seconds per layer of attention, forward and backward over `num_layers` layers; the least of `repeats`.

    Includes routing by content; excludes the one-off planning of static patterns.
    """
    call = timer(family, seq_len, num_layers, head_dim)
    call()
    return min(call() for _ in range(repeats))


def ring_bytes(family: Family, seq_len: int, cp: int, num_layers: int, *, head_dim: int = 64) -> float:
    """K and V that a rank receives in one forward call, relative to the dense ring; mean over ranks and layers.

    Each layer uses the layout that `choose` picks. Nan for content, whose choices random keys do not represent.
    """
    if isinstance(family, ContentFamily):
        return float("nan")
    pattern = family.pattern()
    sizes = Sizes(NUM_HEADS, NUM_HEADS, head_dim, BF16_BYTES)
    received: dict[SparsePattern, int] = {}
    layers = [
        SparsePattern(pattern.of_layer(layer).heads(NUM_HEADS, NUM_HEADS), pattern.block) for layer in range(num_layers)
    ]
    for one in dict.fromkeys(layers):
        schedule = choose(one, seq_len, cp, sizes).schedule
        received[one] = sum(schedule.received_bytes(rank, head_dim, BF16_BYTES) for rank in range(cp))
    return sum(received[one] for one in layers) / num_layers / dense_bytes(seq_len, cp, head_dim)


def _describe(part: str, value: dict[str, Any]) -> str:
    if part == "cost":
        return f"density {value['cost_density']:.3f}, {value['step_s']:.2f} CPU s, bytes {value['bytes']:.3f} of dense"
    if part == "tasks":
        return ", ".join(f"{task} {share:.0%}" for task, share in value["accuracy"].items())
    return f"tail {value['tail_loss']:.4f} nats, {value['train_s']:.0f} CPU s"


def table(records: Records) -> list[str]:
    """The lines of the table: gaps to dense by seed, then mean and worst."""
    names = list(dict.fromkeys(name for part, name, _ in records if part in ("tasks", "text")))
    signal = records.get(("signal", "", 0))
    lines = []
    if signal is not None:
        bits = signal["value"]
        lines.append(
            f"long-range signal of the text, bits a byte of the tail by a compressor: {bits['near']:.3f} given the near"
            f" bytes, {bits['other']:.3f} with another document's far bytes, {bits['far']:.3f} with its own"
        )
    head = f"{'family':<20} {'density':>7} {'tail gap':>24} {'worst task':>22}"
    head += f" {'CPU s':>6} {'bytes':>6} {'mass':>5} {'error':>5}"
    lines.append(head + "  " + " ".join(f"{task[:9]:>9}" for task in TASKS))
    seeds = sorted({seed for part, _, seed in records if part in ("tasks", "text")})
    kept = [records[key]["fidelity"] for key in records if "fidelity" in records[key]]
    for name in names:
        lines.append(_row(name, records, seeds, kept))
    lines.append("chance" + " " * 89 + " ".join(f"{CHANCE[task]:>9.1%}" for task in TASKS))
    return lines


def _row(name: str, records: Records, seeds: list[int], kept: list[dict[str, Any]]) -> str:
    def of(part: str, seed: int, family: str = name) -> Any:
        record = records.get((part, family, seed))
        return None if record is None else record["value"]

    cost = of("cost", 0) or {}
    gaps = [
        of("text", s)["tail_loss"] - of("text", s, "dense")["tail_loss"]
        for s in seeds
        if of("text", s) and of("text", s, "dense")
    ]
    shares = {task: [of("tasks", s)["accuracy"][task] for s in seeds if of("tasks", s)] for task in TASKS}
    means = {task: mean(values) for task, values in shares.items() if values}
    lost = {
        task: mean(
            of("tasks", s, "dense")["accuracy"][task] - of("tasks", s)["accuracy"][task]
            for s in seeds
            if of("tasks", s) and of("tasks", s, "dense")
        )
        for task in means
    }
    worst = max(lost, key=lambda task: lost[task], default="")
    gap = f"{mean(gaps):+.4f} [{min(gaps):+.3f} {max(gaps):+.3f}]"[:24] if gaps else "-"
    fidelities = [f[name] for f in kept if name in f]
    mass = f"{mean(f['mass'] for f in fidelities):.2f}" if fidelities else "-"
    error = f"{mean(f['error'] for f in fidelities):.2f}" if fidelities else "-"
    return (
        f"{name:<20} {cost.get('density', float('nan')):>7.3f} {gap:>24} {worst:>14} {-lost.get(worst, 0):>+7.0%}"
        f" {cost.get('step_s', float('nan')):>6.2f} {cost.get('bytes', float('nan')):>6.3f} {mass:>5} {error:>5}  "
        + " ".join(f"{means[task]:>9.1%}" if task in means else f"{'-':>9}" for task in TASKS)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one for each finished measurement")
    parser.add_argument("--steps", type=int, default=300, help="training steps on the tasks (300)")
    parser.add_argument("--text-steps", type=int, default=150, help="training steps on text (150)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of a task (128)")
    parser.add_argument("--text-len", type=int, default=1024, help="tokens of a sequence of text (1024)")
    parser.add_argument("--text-batch", type=int, default=4, help="sequences of text a step (4)")
    parser.add_argument("--text-width", type=int, default=64, help="width of the model of text (64)")
    parser.add_argument("--text-layers", type=int, default=2, help="layers of the model of text (2)")
    parser.add_argument("--text-device", default="cpu", choices=["cpu", "cuda"], help="where text is trained (cpu)")
    parser.add_argument("--parts", default="cost,tasks,text", help="(cost,tasks,text)")
    parser.add_argument("--cost-len", type=int, default=8192, help="tokens of the calls that are timed (8192)")
    parser.add_argument("--seeds", default="0,1,2", help="(0,1,2)")
    parser.add_argument("--families", help="comma-separated; default: all")
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    options = parser.parse_args(arguments)
    known = families(options.text_len, options.text_len // 32)
    options.families = options.families.split(",") if options.families else list(known)
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    unknown = [name for name in options.families if name not in known]
    try:
        if unknown:
            raise ValueError(f"--families: {unknown[0]!r} is none of {', '.join(known)}")
        torch.set_num_threads(1)
        tasks = Settings(steps=options.steps, seq_len=options.seq_len, block=options.seq_len // 16)
        text = replace(
            tasks,
            steps=options.text_steps,
            seq_len=options.text_len,
            block=options.text_len // 32,
            batch=options.text_batch,
            width=options.text_width,
            num_layers=options.text_layers,
            device=options.text_device,
        )
        if not options.table:
            run(options, tasks, text)
        print("\n".join(table(finished(options.out))))
    except ValueError as error:
        print(f"quality_table: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
