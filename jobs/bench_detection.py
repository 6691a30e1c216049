"""How soon a frozen worker is found out, and whether a healthy one is ever taken for frozen.

    python jobs/bench_detection.py --freezes 10              on a quiet machine: at most 3 s, each time
    python jobs/bench_detection.py --healthy-minutes 10      every core loaded by something else: no alarm

A worker is frozen from outside by SIGSTOP on its PID; the victim's rank rotates. `killed` is the moment its
node agent has put it out of its misery (a pidfd becomes readable), `noticed` the coordinator's first event.
In the healthy run one busy loop per core competes with the four workers and the spare; every event with
which the coordinator learns of a loss, a trouble or a failed build counts as an alarm, and so do a second
generation and a second coordinator.

Exits 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

if __name__ == "__main__":  # run from a checkout, where jobs is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jobs import drills
from jobs.peers import common

LIMIT_S = 3.0
NEVER = 1_000_000
ALARMS = ("WorkerLost", "Trouble", "BuildFailed", "NodeLost", "NodeDraining")


def freeze_repeatedly(num_freezes: int, run: drills.Watcher) -> list[dict[str, float]]:
    return [_freeze_once(run, number) for number in range(num_freezes)]


def _freeze_once(run: drills.Watcher, number: int) -> dict[str, float]:
    run.whole(1)
    run.more_steps(common.STEPS_BETWEEN_KILLS)
    status = run.whole(1)
    rank = number % common.NUM_WORKERS
    pid = next(member["pid"] for member in status["members"] if member["global_rank"] == rank)
    pidfd = os.pidfd_open(pid)
    try:
        wall_s = time.time()
        struck_s = drills.strike(pid, signal.SIGSTOP)
        gone, _, _ = select.select([pidfd], [], [], 60.0)
        killed_s = time.monotonic() - struck_s
    finally:
        os.close(pidfd)
    if not gone:
        os.kill(pid, signal.SIGCONT)
        raise drills.DrillFailed(f"rank {rank} (pid {pid}) stood still for 60 s and nobody noticed")
    step = run.first_step_of(status["generation"])
    noticed_s = min(line["now"] for line in run.events("WorkerLost", "Trouble") if line["now"] > wall_s) - wall_s
    row = {
        "freeze": number, "rank": rank, "killed_s": killed_s, "noticed_s": noticed_s,
        "next_step_s": step["committed_monotonic_s"] - struck_s,
    }  # fmt: skip
    drills.show(f"  rank {rank} frozen: noticed after {noticed_s:.2f} s, next step after {row['next_step_s']:.2f} s")
    return {name: round(value, 4) for name, value in row.items()}


def freezes(num_freezes: int) -> tuple[str, list[str], dict[str, object]]:
    drills.show(f"{num_freezes} freezes")
    with drills.scratch() as folder, drills.local_ray():
        trainer = drills.small_trainer(folder, "bench-detection", steps=NEVER)
        rows = drills.train_while(trainer, partial(freeze_repeatedly, num_freezes))
    names = list(rows[0])
    worst = max(row["noticed_s"] for row in rows)
    text = drills.table(names, [[row[name] for name in names] for row in rows])
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


def watch_healthy(minutes: float, run: drills.Watcher) -> dict[str, object]:
    """Load every core for that long and count what the coordinator took for a failure."""
    run.whole(1)
    run.more_steps(common.STEPS_BETWEEN_KILLS)
    first, before = len(run.steps()), len(run.events(*ALARMS))
    num_cores = len(os.sched_getaffinity(0))
    with busy_cores(num_cores):
        end_s = time.monotonic() + 60.0 * minutes
        run.until(
            "the end of the healthy run", lambda: True if time.monotonic() > end_s else None, 60.0 * minutes + 60.0,
            poll_s=1.0,
        )  # fmt: skip
    alarms = run.events(*ALARMS)
    for line in alarms:
        event = line["event"]
        drills.show(f"  ALARM {event['type']} {event.get('worker', '')}: {event.get('detail', line['reason'])[:200]}")
    status = run.whole(0)
    return {
        "minutes": minutes, "busy_loops": num_cores, "steps": len(run.steps()) - first,
        "alarms": len(alarms), "alarms_before_the_load": before, "generations": status["generation"],
        "terms": status["term"],
    }  # fmt: skip


def healthy(minutes: float) -> tuple[str, list[str], dict[str, object]]:
    drills.show(f"{minutes} healthy minutes under load")
    with drills.scratch() as folder, drills.local_ray():
        trainer = drills.small_trainer(folder, "bench-healthy", steps=NEVER)
        row = drills.train_while(trainer, partial(watch_healthy, minutes))
    missed = []
    if (row["alarms"], row["generations"], row["terms"]) != (0, 1, 1):
        counts = ", ".join(f"{row[name]} {name}" for name in ("alarms", "generations", "terms"))
        missed.append(f"{counts} in a healthy run")
    return drills.table(list(row), [list(row.values())]), missed, {"healthy": row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--freezes", type=int, help="how many (default 10 unless --healthy-minutes is given)")
    parser.add_argument("--healthy-minutes", type=float, default=0.0)
    parser.add_argument("--save", action="store_true", help="write the tables and a JSON into benchmarks/")
    arguments = parser.parse_args()
    num_freezes = arguments.freezes if arguments.freezes is not None else 0 if arguments.healthy_minutes else 10
    parts: list[tuple[str, list[str], dict[str, object]]] = []
    if num_freezes:
        parts.append(freezes(num_freezes))
    if arguments.healthy_minutes:
        parts.append(healthy(arguments.healthy_minutes))
    missed = [line for _, lines, _ in parts for line in lines]
    verdict = "\n".join(f"MISSED: {line}" for line in missed) or "all bounds hold"
    text = "\n\n".join([*(part for part, _, _ in parts), verdict])
    drills.show("\n" + text)
    if arguments.save:
        figures = {key: value for _, _, part in parts for key, value in part.items()}
        what = "both" if num_freezes and arguments.healthy_minutes else "freezes" if num_freezes else "healthy"
        drills.save(f"bench_detection_{what}", text, {**figures, "missed": missed})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
