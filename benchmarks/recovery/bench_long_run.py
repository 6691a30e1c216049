"""What the records of a long run cost: a coordinator's memory, its restart, going back, `status`, and the summary.

    python benchmarks/recovery/bench_long_run.py [--steps 1000000] [--back 1000] [--no-bounds] [--save]

Each part is a process of its own, with the product's own code and no Ray: one records `--steps` steps as a coordinator
does, with a validation every thousand; a coordinator that starts anew reads them, and goes back by `--back` steps;
`elastic-ring status` shows the run; the summary and the plot are written. The files are in the page cache, as on the
node of a live run. `rss` is what the process held at the end, `peak` the most it held.

Exits 1 when status, restart or going back takes more than 1 s, or a coordinator that trains holds more than 500 MB.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from benchmarks.harness import results
from benchmarks.harness.arguments import at_least_one, bench_parser
from benchmarks.harness.own_process import in_own_process

LIMIT_S, LIMIT_MB = 1.0, 500.0
BATCH = 100
VALIDATION_EVERY = 1000
NAME = "long"
BOUNDS = {"restart": LIMIT_S, "go back": LIMIT_S, "status": LIMIT_S, "whole command": None, "summary": None}
"""Seconds of each part, None without a bound."""
Figures = dict[str, Any]


def memory_mb() -> dict[str, float]:
    """Of this process: now, and at most so far."""
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"rss_mb": psutil.Process().memory_info().rss / 1e6, "peak_mb": peak_mb}


def recorder_of(folder: Path) -> Any:
    from elastic_ring.config import RunConfig
    from elastic_ring.runtime.coordinator import actor  # noqa: F401  what a coordinator's process holds
    from elastic_ring.runtime.coordinator.recorder import Begin, RunRecorder
    from elastic_ring.runtime.coordinator.run_spec import Clock

    recorder = RunRecorder(RunConfig(NAME, run_dir=str(folder)), lambda fact: None, Clock())
    recorder.open(Begin(time.time(), 0, "an identity"))
    return recorder


def train(folder: Path, num_steps: int) -> Figures:
    """Record steps as the coordinator does when rank 0 publishes them."""
    from elastic_ring.mesh import Mesh
    from elastic_ring.monitor.metrics import StepMetrics
    from elastic_ring.runtime.notices import Notice, StepRecord, Validated
    from elastic_ring.train.vote import Outcome, Tally, Vote

    recorder, membership_id = recorder_of(folder), (1, 1)
    recorder.steps.begun(0, membership_id)
    vote, before_mb, begun = Tally().numbers(), memory_mb()["rss_mb"], time.perf_counter()
    for first in range(0, num_steps, BATCH):
        records: list[Notice] = []
        for step in range(first, min(first + BATCH, num_steps)):
            loss, samples = 2.0 + 1.0 / (step + 1), f"{step:064x}"
            metrics = StepMetrics(
                step, loss, 1.25, 3e-4, 8192, 9000.0, 0.9, False, 1, Mesh(4, 8), 32, 4096, 1024, samples=samples
            )
            records.append(StepRecord(metrics, Outcome(Vote(step, vote, membership_id)), 100.0))
            if step % VALIDATION_EVERY == VALIDATION_EVERY - 1:
                records.append(Validated(step, {"val_loss": loss, "val_perplexity": 2 * loss}, 1.0, membership_id))
        recorder.publish(records)
    seconds, memory = time.perf_counter() - begun, memory_mb()
    num_bytes = recorder.metrics.path.stat().st_size
    return {
        **memory,
        "step_bytes": (memory["rss_mb"] - before_mb) * 1e6 / num_steps,
        "record_us": 1e6 * seconds / num_steps,
        "file_mb": num_bytes / 1e6,
    }


def restart(folder: Path, num_steps: int, num_back: int) -> Figures:
    """A coordinator that starts anew, and then goes back by `num_back` steps."""
    from elastic_ring.control.messages import Build, Checkpoint
    from elastic_ring.mesh import Mesh

    recorder_of(folder / "no run")  # what it imports at first use is no part of the figures
    begun = time.perf_counter()
    recorder = recorder_of(folder)
    opened_s = time.perf_counter() - begun
    start = Checkpoint(num_steps - num_back, "a folder", Mesh(4, 8))
    build = Build("b", "w-0", 2, 2, Mesh(4, 8), (), start.step, None, (), fresh=True, restore=start)
    begun = time.perf_counter()
    recorder.begin_build([build])
    took_s = time.perf_counter() - begun
    assert recorder.recoveries.lines == [f"back to step {start.step}: {num_back} recorded step(s) run again"]
    return {**memory_mb(), "restart_s": opened_s, "go back_s": took_s}


def status(folder: Path) -> Figures:
    """The text itself, and the command with its imports."""
    from elastic_ring.cli import status as command
    from elastic_ring.monitor import metrics_log  # noqa: F401  imported at first use, as numpy is
    from elastic_ring.monitor.report import render_status

    begun = time.perf_counter()
    render_status(folder)
    took_s = time.perf_counter() - begun
    with contextlib.redirect_stdout(io.StringIO()):
        assert command.main([str(folder)]) == 0
    return {**memory_mb(), "status_s": took_s, "whole command_s": time.time() - psutil.Process().create_time() - took_s}


def summarise(folder: Path) -> Figures:
    """The end of the run, which the coordinator writes beside its deciding thread."""
    from elastic_ring.config import RunConfig
    from elastic_ring.runtime.coordinator.run_files import RunFiles

    recorder = recorder_of(folder)
    begun = time.perf_counter()
    summary = RunFiles(RunConfig(NAME, run_dir=str(folder)), recorder).write_summary("", exact=True)
    return {**memory_mb(), "summary_s": time.perf_counter() - begun, "losses": len(summary["losses"])}


PARTS = {"train": train, "restart": restart, "status": status, "summary": summarise}


def run_parts(num_steps: int, num_back: int, folder: Path) -> dict[str, Figures]:
    """Each part in a process of its own. Going back comes last: it leaves a run whose last steps are to run again."""
    arguments = {"train": [num_steps], "status": [], "summary": [], "restart": [num_steps, num_back]}
    return {
        part: in_own_process(__file__, [part, str(folder), *map(str, numbers)]) for part, numbers in arguments.items()
    }


def report(figures: dict[str, Figures]) -> tuple[str, list[str]]:
    """The text, and the bounds that are missed."""
    trained, missed = figures["train"], list[str]()
    rows = []
    for part, limit_s in BOUNDS.items():
        found = next(values for values in figures.values() if f"{part}_s" in values)
        took_s = found[f"{part}_s"]
        rows.append((part, f"{took_s:.2f} s", f"{found['rss_mb']:.0f} MB", f"{found['peak_mb']:.0f} MB"))
        if limit_s is not None and took_s > limit_s:
            missed.append(f"{part}: {took_s:.2f} s, more than {limit_s:g} s")
    rows.append(("training", "", f"{trained['rss_mb']:.0f} MB", f"{trained['peak_mb']:.0f} MB"))
    if trained["peak_mb"] > LIMIT_MB:
        missed.append(f"training: {trained['peak_mb']:.0f} MB, more than {LIMIT_MB:g} MB")
    text = results.table(("part", "time", "rss", "peak"), rows)
    text += (
        f"\nmetrics.jsonl: {trained['file_mb']:.0f} MB; a step is recorded in {trained['record_us']:.0f} us and leaves "
        f"{trained['step_bytes']:.0f} B in memory"
    )
    return text, missed


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in PARTS:
        part, folder, *numbers = sys.argv[1:]
        call: Any = PARTS[part]
        print(json.dumps(call(Path(folder), *map(int, numbers))))
        return 0
    parser = bench_parser(__doc__)
    parser.add_argument("--steps", type=at_least_one, default=1_000_000)
    parser.add_argument("--back", type=at_least_one, default=1000, help="steps to go back")
    parser.add_argument("--no-bounds", action="store_true", help="print, and do not exit with 1")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = run_parts(options.steps, options.back, Path(folder))
    table, missed = report(figures)
    ending = "" if options.no_bounds else "\n" + results.verdict(missed)
    text = f"{options.steps} steps\n{table}{ending}"
    results.show(text)
    if options.save:
        results.save("steps", "long_run", text, {"steps": options.steps, **figures})
    return 1 if missed and not options.no_bounds else 0


if __name__ == "__main__":
    sys.exit(main())
