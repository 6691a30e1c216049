"""Train the same small decoder for the same time under each family, with kernels that skip blocks.

    python benchmarks/quality/quality_clock.py --out runs/clock.jsonl [--seconds 60] [--seeds 0,1,2] [--device cuda]

A sparse family makes more steps in the same time. The table shows the gap to dense with the same seed, in loss on the
last quarter of held-out text; with `--parts clock,tokens` also the gap after as many steps as dense made, for the same
number of tokens. "rest" is the time of a step without attention in ms, "x text" the number of passes over the training
text: where the training loss falls and the tail's does not, the text is too short for the time (`--text`).

Each run is a separate process without state of earlier runs; compiled kernels are shared on disk. Only training steps
are timed, by CPU time of that process (one thread) or a GPU's wall-clock; compiling, planning and evaluation are not.
"median" is the median step, "ms/step" the mean. A "!" marks a gap of a run whose steps without attention took over 15 %
more or less than dense's of the same seed: something besides the pattern differed.

Every finished (part, family, seed) is one line of `--out`; run the same command again to continue it, with
more seeds or families to add them. Processes with different seeds may share the file, one to a GPU (`--device cuda:1`).
Give each GPU whole seeds: gaps are to dense of the same seed, and GPUs differ. `--table` only prints what is there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.harness.arguments import bench_parser
from benchmarks.quality.apart import Train, train_apart
from benchmarks.quality.clock import ClockSettings
from benchmarks.quality.families import block_families
from benchmarks.quality.long_range import long_range_bits
from benchmarks.quality.records import Records, append, finished, locked, write
from benchmarks.quality.small.families import Family
from benchmarks.quality.small.text import Corpus, corpus
from elastic_ring.data.source import TextFiles

PARTS = ("clock", "tokens")
NUM_HELD = 32
HOURS = 24 * 3600.0
REST_SHARE = 0.15
PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "flash-attn")
"""Packages whose kernels a run may use."""


def run(
    options: argparse.Namespace,
    settings: ClockSettings,
    known: dict[str, Family],
    texts: Corpus,
    train: Train = train_apart,
) -> None:
    """Run what is missing, seed by seed, so that an interrupted run leaves complete seeds.

    Raises: ValueError for a file with other settings, and for what the device cannot run.
    """
    device = torch.device(options.device)
    value = {**asdict(settings), "device": device.type, "text": options.text, "text_digest": _digest(texts)}
    check_settings(options.out, {**value, **_surroundings(device, known)})
    if ("signal", "", 0) not in finished(options.out):
        bits = long_range_bits(texts.held, settings.seq_len // 8, int(settings.seq_len * settings.tail_share))
        append(
            options.out,
            {
                "part": "signal",
                "family": "",
                "seed": 0,
                "value": bits,
                "training": len(texts.training),
                "held": texts.num_held,
            },
        )
    begun, longest = time.monotonic(), 0.0
    for seed in options.seeds:
        for part in options.parts:
            for name in options.families:
                records = finished(options.out)
                if (part, name, seed) in records or (part, name) == ("tokens", "dense"):
                    continue
                now = time.monotonic()
                if now - begun + longest > options.stop_after:
                    return
                steps = None if part == "clock" else _dense(records, seed)["steps"]
                value = train(known[name], seed, settings, texts, device, steps=steps)
                append(
                    options.out,
                    {
                        "part": part,
                        "family": name,
                        "seed": seed,
                        "value": value,
                        "pattern": known[name].text,
                        "device": _name(device),
                    },
                )
                longest = max(longest, time.monotonic() - now)
                print(f"{part:<6} {name:<16} seed {seed}  {_describe(value)}", flush=True)


def check_settings(path: Path, value: dict[str, Any]) -> None:
    """Write the settings as the file's first line; raises ValueError with those that differ if it has one.

    Safe with several processes: one writes the line, the others compare.
    """
    with locked(path) as file:
        begun = finished(path).get(("settings", "", 0))
        if begun is None:
            write(path, file, {"part": "settings", "family": "", "seed": 0, "value": value})
            return
    other = [
        f"{name} {begun['value'].get(name)!r} (now {value[name]!r})"
        for name in value
        if begun["value"].get(name) != value[name]
    ]
    if other:
        raise ValueError(f"--out {path} was begun with {', '.join(other)}; name another file, or give the same")


def _surroundings(device: torch.device, known: dict[str, Family]) -> dict[str, Any]:
    """What times and gaps depend on besides the options: device, kernel versions, and families."""
    found: dict[str, Any] = {"device_name": _name(device)}
    for package in PACKAGES:
        try:
            found[f"{package} version"] = version(package)
        except PackageNotFoundError:
            found[f"{package} version"] = None
    return {**found, **{f"pattern of {name!r}": family.text for name, family in known.items()}}


def _dense(records: Records, seed: int) -> dict[str, Any]:
    record = records.get(("clock", "dense", seed))
    if record is None:
        raise ValueError(
            f"--parts tokens: seed {seed} has no dense run by the clock, whose steps it would repeat; add dense to"
            " --families, and clock to --parts"
        )
    value: dict[str, Any] = record["value"]
    return value


def _digest(texts: Corpus) -> str:
    return hashlib.sha256(texts.sequences.astype("<i4").tobytes()).hexdigest()[:16]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _describe(value: dict[str, Any]) -> str:
    return (
        f"tail {value['tail_loss']:.4f} nats, training {value['train_loss']:.4f}, {value['steps']} steps of"
        f" {value['ms_per_step']:.1f} ms in {value['seconds']:.1f} s, {value['epochs']:.1f} times through the text"
    )


def table(records: Records) -> list[str]:
    """The lines of the table: density, time and steps by family, and gaps to dense of the same seed."""
    lines = []
    if ("signal", "", 0) in records:
        signal = records["signal", "", 0]
        bits = signal["value"]
        lines.append(
            f"{signal['training']} sequences to train on, {signal['held']} held out. Long-range signal, bits a byte of"
            f" the tail by a compressor: {bits['near']:.3f} given the near bytes, {bits['other']:.3f} with another"
            f" document's far bytes, {bits['far']:.3f} with its own"
        )
    for part, what in zip(PARTS, ("the same time", "as many steps as dense made in its time"), strict=True):
        names = list(dict.fromkeys(name for own, name, _ in records if own == part))
        seeds = sorted({seed for own, _, seed in records if own == part})
        if not names:
            continue
        lines.append("")
        lines.append(f"{what}; gap to dense of the same seed, nats a byte of the tail")
        head = f"{'family':<16} {'density':>7} {'ms/step':>8} {'median':>8} {'rest':>6} {'steps':>7} {'x text':>7}"
        head += f" {'training':>8} {'tail':>7}"
        lines.append(head + "".join(f"{f'seed {seed}':>9} " for seed in seeds) + f"{'mean':>8}")
        rows = [_row(part, name, records, seeds) for name in names]
        lines += rows
        if any("!" in row for row in rows):
            lines.append(f"! steps without attention took over {REST_SHARE:.0%} more or less than dense's of that seed")
    return lines


def _row(part: str, name: str, records: Records, seeds: list[int]) -> str:
    found = {seed: records[part, name, seed]["value"] for seed in seeds if (part, name, seed) in records}
    gaps, marks = {}, {}
    for seed, value in found.items():
        dense = records.get(("clock", "dense", seed))
        if dense is not None:
            gaps[seed] = value["tail_loss"] - dense["value"]["tail_loss"]
            rest = dense["value"]["rest_ms"]
            marks[seed] = "!" if abs(value["rest_ms"] - rest) > REST_SHARE * rest else " "

    def middle(key: str) -> float:
        return mean(value[key] for value in found.values())

    # Older files have no median.
    median = f"{middle('median_ms'):.2f}" if all("median_ms" in value for value in found.values()) else "-"
    return (
        f"{name:<16} {middle('density'):>7.3f} {middle('ms_per_step'):>8.2f} {median:>8} {middle('rest_ms'):>6.2f}"
        f" {middle('steps'):>7.0f} {middle('epochs'):>7.1f} {middle('train_loss'):>8.4f} {middle('tail_loss'):>7.4f}"
        + "".join(f"{gaps[seed]:>+9.4f}{marks[seed]}" if seed in gaps else f"{'-':>9} " for seed in seeds)
        + (f"{mean(gaps.values()):>+8.4f}" if gaps else f"{'-':>8}")
    )


def _texts(options: argparse.Namespace) -> Corpus:
    """The corpus. Raises: ValueError where too few sequences lie within one document."""
    if options.text == "stdlib":
        return corpus(options.seq_len, NUM_HELD)
    paths = tuple(options.text.split(","))
    if options.text == "torch":
        paths = (str(Path(torch.__file__).parent / "**" / "*.py"),)
    return corpus(options.seq_len, NUM_HELD, source=TextFiles(options.seq_len, paths))


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one for each finished run")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training steps, for each run (60)")
    parser.add_argument("--seeds", default="0,1,2", help="(0,1,2)")
    parser.add_argument("--families", help="comma-separated; default: all")
    parser.add_argument("--parts", default="clock", help="clock: the same time; tokens: as many steps as dense (clock)")
    parser.add_argument("--seq-len", type=int, default=16384, help="tokens of a sequence (16384)")
    parser.add_argument("--block", type=int, help="tokens of a block; default: 128 on a GPU, seq-len / 32 on a CPU")
    parser.add_argument("--batch", type=int, default=2, help="sequences a step (2)")
    parser.add_argument("--width", type=int, default=256, help="of the model (256)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (8)")
    parser.add_argument("--heads", type=int, default=4, help="of the model; on a GPU width / heads is 64 or 128 (4)")
    parser.add_argument("--peak-lr", type=float, default=2e-3, help="learning rate after the warm-up (2e-3)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (cpu)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of matrices; default: bfloat16 on a GPU")
    parser.add_argument("--kernel", help="dense backend, and on a GPU its sparse form; default there: flash-attn-4")
    parser.add_argument("--compile", action="store_true", help="compile everything but attention: shorter dense steps")
    parser.add_argument(
        "--text",
        default="stdlib",
        help="stdlib; torch: that package's sources, about five times as"
        " many; or comma-separated paths and patterns of your own (stdlib)",
    )
    parser.add_argument("--stop-after", type=float, default=HOURS, help="begin no run that would end after so many s")
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    return parser


def _settings(options: argparse.Namespace) -> ClockSettings:
    """The settings. Raises: ValueError for sizes that do not fit together or the device."""
    gpu = options.device.split(":")[0] == "cuda"
    if not gpu and options.device != "cpu":
        raise ValueError(f"--device {options.device}: give cpu, cuda, or one GPU of several as cuda:1")
    if gpu and options.width / options.heads not in (64, 128):
        raise ValueError(f"--width {options.width} --heads {options.heads}: on a GPU take heads of 64 or 128 channels")
    if options.seconds <= 0 or options.width % options.heads:
        raise ValueError("--seconds must be positive, and --width a multiple of --heads")
    return ClockSettings(
        options.seconds,
        options.seq_len,
        options.block or (128 if gpu else options.seq_len // 32),
        options.batch,
        options.width,
        options.layers,
        options.heads,
        options.peak_lr,
        dtype=options.dtype or ("bfloat16" if gpu else "float32"),
        kernel=options.kernel or ("flash-attn-4" if gpu else None),
        compiled=options.compile,
    )


def _asked(given: str | None, known: Sequence[str], option: str) -> list[str]:
    asked = given.split(",") if given else list(known)
    for name in asked:
        if name not in known:
            raise ValueError(f"{option}: {name!r} is none of {', '.join(known)}")
    return asked


def main(arguments: Sequence[str] | None = None, train: Train = train_apart) -> int:
    """`train` makes each run."""
    options = _parser().parse_args(arguments)
    try:
        settings = _settings(options)
        known = block_families(settings.seq_len, settings.block, settings.num_layers)
        options.families = _asked(options.families, list(known), "--families")
        options.parts = _asked(options.parts, PARTS, "--parts")
        options.seeds = [int(seed) for seed in options.seeds.split(",")]
        if not options.table:
            device = torch.device(options.device)
            if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
                raise ValueError(f"--device {device}: {torch.cuda.device_count()} GPUs are here; name one, or cpu")
            run(options, settings, known, _texts(options), train)
        print("\n".join(table(finished(options.out))))
    except ValueError as error:
        print(f"quality_clock: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # reuse kernels that earlier runs compiled
    sys.exit(main())
