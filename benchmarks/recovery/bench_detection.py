"""How soon a frozen worker is detected, and whether a healthy one ever raises a false alarm.

    python benchmarks/recovery/bench_detection.py --freezes 10              on a quiet machine: at most 3 s, each time
    python benchmarks/recovery/bench_detection.py --healthy-minutes 10      every core loaded: no alarm
    python benchmarks/recovery/bench_detection.py --cold --preset 100m --dp 2 --cp 1 --spares 2 --steps 24 \\
        --context 8192                                                      empty compile caches: no alarm

A worker is frozen from outside by SIGSTOP on its PID; the victim's rank rotates. `killed` is the moment its
node agent has killed it (a pidfd becomes readable), `noticed` the coordinator's first event.
In the healthy run one busy loop per core competes with the four workers and the spare; every event with
which the coordinator learns of a loss, an error or a failed build counts as an alarm, and so do a second
generation and a second coordinator.

The cold run is `jobs/train_1t.py` with the options that follow (default: --preset laptop, which compiles nothing on
CPUs) and with the caches of all compilers in an empty folder. It must finish, lose no worker, and compile nothing after
step 0.

Exits 1 where a bound is missed.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import results, runs
from benchmarks.harness.arguments import bench_parser
from benchmarks.peers import common
from elastic_ring.cli import train
from elastic_ring.errors import ElasticRingError

LIMIT_S = 3.0
NEVER = 1_000_000
ALARMS = ("WorkerLost", "MemberFailed", "BuildFailed", "NodeLost", "NodeDraining")


def freeze_repeatedly(num_freezes: int, run: runs.Watcher) -> list[dict[str, float]]:
    return [_freeze_once(run, number) for number in range(num_freezes)]


def _freeze_once(run: runs.Watcher, number: int) -> dict[str, float]:
    run.whole(1)
    run.more_steps(common.STEPS_BETWEEN_KILLS)
    status = run.whole(1)
    rank = number % common.NUM_WORKERS
    pid = next(member["pid"] for member in status["members"] if member["global_rank"] == rank)
    pidfd = os.pidfd_open(pid)
    try:
        injected_s = runs.inject(pid, signal.SIGSTOP)
        gone, _, _ = select.select([pidfd], [], [], 60.0)
        killed_s = time.monotonic() - injected_s
    finally:
        os.close(pidfd)
    if not gone:
        os.kill(pid, signal.SIGCONT)
        raise runs.WatchFailed(f"rank {rank} (pid {pid}) was stopped for 60 s and nothing noticed")
    step = runs.first_step_of(run, status["generation"])
    ahead_s = run.ahead_s()
    losses_s = [line["now"] - ahead_s - injected_s for line in run.events("WorkerLost", "MemberFailed")]
    noticed_s = min(lost_s for lost_s in losses_s if lost_s > 0)
    row = {
        "freeze": number,
        "rank": rank,
        "killed_s": killed_s,
        "noticed_s": noticed_s,
        "next_step_s": step["committed_monotonic_s"] - injected_s,
    }
    results.show(f"  rank {rank} frozen: noticed after {noticed_s:.2f} s, next step after {row['next_step_s']:.2f} s")
    return {name: round(value, 4) for name, value in row.items()}


def freezes(num_freezes: int) -> tuple[str, list[str], dict[str, object]]:
    results.show(f"{num_freezes} freezes")
    with runs.scratch() as folder, runs.local_ray():
        trainer = runs.small_trainer(folder, "bench-detection", steps=NEVER)
        rows = runs.train_while(trainer, partial(freeze_repeatedly, num_freezes))
    names = list(rows[0])
    worst = max(row["noticed_s"] for row in rows)
    text = results.table(names, [[row[name] for name in names] for row in rows])
    text += f"\nnoticed: median {median(row['noticed_s'] for row in rows):.3f} s, max {worst:.3f} s (limit {LIMIT_S} s)"
    missed = [f"a frozen worker was noticed after {worst:.2f} s"] if worst > LIMIT_S else []
    return text, missed, {"freezes": rows}


@contextmanager
def busy_cores(num_loops: int) -> Iterator[None]:
    """Processes that do nothing but compute."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def watch_healthy(minutes: float, run: runs.Watcher) -> dict[str, object]:
    """Load every core for that long and count what the coordinator took for a failure."""
    run.whole(1)
    run.more_steps(common.STEPS_BETWEEN_KILLS)
    first, before = len(run.steps()), len(run.events(*ALARMS))
    num_cores = len(os.sched_getaffinity(0))
    with busy_cores(num_cores):
        end_s = time.monotonic() + 60.0 * minutes
        run.until(
            "the end of the healthy run",
            lambda: True if time.monotonic() > end_s else None,
            60.0 * minutes + 60.0,
            poll_s=1.0,
        )
    alarms = run.events(*ALARMS)
    for line in alarms:
        event = line["event"]
        results.show(f"  ALARM {event['type']} {event.get('worker', '')}: {event.get('detail', line['reason'])[:200]}")
    status = run.whole(0)
    return {
        "minutes": minutes,
        "busy_loops": num_cores,
        "steps": len(run.steps()) - first,
        "alarms": len(alarms),
        "alarms_before_the_load": before,
        "generations": status["generation"],
        "terms": status["term"],
    }


def healthy(minutes: float) -> tuple[str, list[str], dict[str, object]]:
    results.show(f"{minutes} healthy minutes under load")
    with runs.scratch() as folder, runs.local_ray():
        trainer = runs.small_trainer(folder, "bench-healthy", steps=NEVER)
        row = runs.train_while(trainer, partial(watch_healthy, minutes))
    missed = []
    if (row["alarms"], row["generations"], row["terms"]) != (0, 1, 1):
        counts = ", ".join(f"{row[name]} {name}" for name in ("alarms", "generations", "terms"))
        missed.append(f"{counts} in a healthy run")
    return results.table(list(row), [list(row.values())]), missed, {"healthy": row}


CACHES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "CUTE_DSL_CACHE_DIR",
    "CUDA_CACHE_PATH",
)
COLD = ["--preset", "laptop", "--steps", "8", "--context", "512", "--global-batch", "4"]


@contextmanager
def empty_caches(folder: Path) -> Iterator[None]:
    """The compilers' caches in new folders, for this process and for a Ray that it starts."""
    before = {name: os.environ.get(name) for name in CACHES}
    for name in CACHES:
        (folder / name.lower()).mkdir()
        os.environ[name] = str(folder / name.lower())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def compilations(run: runs.Watcher) -> list[dict[str, Any]]:
    """Per worker that trained: kernels and functions compiled before and after step 0, and the names of the latter."""
    found: dict[str, dict[str, Any]] = {}
    for line in run.journal():
        if line.get("note") == "compiled":
            row = found.setdefault(line["worker"], {"worker": line["worker"], "before": 0, "after": 0, "names": []})
            row["before"] += line["before"]
            row["after"] += len(line["compiled"])
            row["names"] += [f"step {line['step']}: {name}" for name in line["compiled"]]
    return list(found.values())


def cold(options: list[str], start_s: float | None) -> tuple[str, list[str], dict[str, object]]:
    """Train to the end with empty caches, and count what was lost and compiled."""
    options = [*(options or COLD), "--faults", "none"]
    results.show(f"a run with empty compile caches: {' '.join(options)}")
    with runs.scratch() as folder, empty_caches(folder), runs.local_ray(num_cpus=max(8, os.cpu_count() or 8)):
        args = train.parse([*options, "--run-name", "bench-cold", "--run-dir", str(folder / "bench-cold")])
        trainer = train.build(args)
        if start_s is not None:
            timeouts = replace(trainer.run_config.timeouts, start_s=start_s)
            trainer.run_config = replace(trainer.run_config, timeouts=timeouts)
        begun, problem = time.monotonic(), ""
        try:
            trainer.fit()
        except ElasticRingError as error:
            problem = f"{type(error).__name__}: {error}"
        run = runs.Watcher(trainer.run_config.folder, threading.Event(), trainer.scaling_config.mesh.size)
        alarms, steps, rows = run.events(*ALARMS), run.steps(), compilations(run)
    for line in alarms:
        event = line["event"]
        results.show(f"  ALARM {event['type']} {event.get('worker', '')}: {event.get('detail', line['reason'])[:200]}")
    for row in rows:
        results.show("\n".join(f"  {row['worker']} compiled in {name}" for name in row["names"]))
    slowest = max(steps, key=lambda step: step["step_s"], default={"step": -1, "step_s": 0.0})
    later = max(steps[1:], key=lambda step: step["step_s"], default={"step": -1, "step_s": 0.0})
    row = {
        "finished": not problem,
        "steps": len(steps),
        "workers_killed": len(run.events("WorkerLost")),
        "alarms": len(alarms),
        "compiled_before": sum(each["before"] for each in rows),
        "compiled_after": sum(each["after"] for each in rows),
        "slowest_step": slowest["step"],
        "slowest_step_s": slowest["step_s"],
        "slowest_later_step": later["step"],
        "slowest_later_step_s": later["step_s"],
        "all_s": time.monotonic() - begun,
    }
    told = ["finished", "workers_killed", "alarms", "compiled_after"]
    missed = [problem] if problem else []
    if [row[name] for name in told[1:]] != [0, 0, 0]:
        missed.append(", ".join(f"{row[name]} {name}" for name in told[1:]) + " in a cold run")
    if len(rows) < trainer.scaling_config.mesh.size:
        missed.append(f"{len(rows)} workers told what they compiled, of {trainer.scaling_config.mesh.size} members")
    text = "\n".join(f"{name:22} {_rounded(value)}" for name, value in row.items())
    names = ["worker", "before", "after"]
    text += "\n\n" + results.table(names, [[each[name] for name in names] for each in rows])
    return text, missed, {"cold": {**row, "workers": rows, "options": options}}


def _rounded(value: object) -> object:
    return f"{value:.2f}" if isinstance(value, float) else value


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--freezes", type=int, help="how many (default 10 unless --healthy-minutes is given)")
    parser.add_argument("--healthy-minutes", type=float, default=0.0)
    parser.add_argument(
        "--save", action="store_true", help="write the tables and a JSON into benchmarks/results/detection/"
    )
    parser.add_argument("--cold", action="store_true", help="train with empty compile caches; other options are its")
    parser.add_argument("--start-s", type=float, help="a worker's time to start in the cold run (the run's default)")
    arguments, others = parser.parse_known_args()
    if others and not arguments.cold:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    only_freezes = not (arguments.healthy_minutes or arguments.cold)
    num_freezes = arguments.freezes if arguments.freezes is not None else 10 if only_freezes else 0
    parts: list[tuple[str, list[str], dict[str, object]]] = []
    if num_freezes:
        parts.append(freezes(num_freezes))
    if arguments.healthy_minutes:
        parts.append(healthy(arguments.healthy_minutes))
    if arguments.cold:
        parts.append(cold(others, arguments.start_s))
    missed = [line for _, lines, _ in parts for line in lines]
    verdict = results.verdict(missed)
    text = "\n\n".join([*(part for part, _, _ in parts), verdict])
    results.show("\n" + text)
    if arguments.save:
        figures = {key: value for _, _, part in parts for key, value in part.items()}
        results.save("detection", f"bench_detection_{'_'.join(figures)}", text, {**figures, "missed": missed})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
